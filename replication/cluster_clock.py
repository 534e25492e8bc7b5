"""The cluster's time as one node sees it: the time that a majority of the nodes' clocks agrees on.

Every node asks every other for its wall clock twice a second, outside the log. A master also learns it from the answers
to its 50 ms sync. Each answer, and the node's own wall clock, is an interval (cluster_clock_samples.py). The cluster's
time is steered (cluster_clock_slew.py) to the time in which a majority of intervals agrees (cluster_clock_interval.py),
at a measured rate (cluster_clock_drift.py). Between agreements, and without one (cluster_clock_state.py), the monotonic
clock carries the time on, so a step of a wall clock moves nothing. Used by the core on its one thread; nothing else in
a node reads a wall clock.

Invariants:
- The time by which a master has acted never goes back, and never runs faster than `slew_ppm_max` allows. It is set, not
  steered, in two cases only: at the first agreement, and when a new master's time is ahead of everything that it has
  heard masters say. In the second case the time is set back to theirs and catches up at that rate.
- While a majority of the members' clocks is right, the time is wrong by at most `error_ns`.
- A peer's answers can only move that peer's own interval.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tickwheel.proto.peer_pb2 import ClockAnswer, ClockAsk, PeerFrame
from tickwheel.replication.cluster_clock_drift import DriftEstimate
from tickwheel.replication.cluster_clock_heard import HeardTime
from tickwheel.replication.cluster_clock_interval import Interval, agree
from tickwheel.replication.cluster_clock_samples import ClockSamples
from tickwheel.replication.cluster_clock_slew import PPB, SlewedTime
from tickwheel.replication.cluster_clock_state import Holdover, TimeState
from tickwheel.replication.ports import Clock

NS_PER_MS = 1_000_000
NS_PER_US = 1_000
ROUND_TRIP_NS_MAX = 2_000_000_000
"""A slower answer is too uncertain to count."""
ASKS_MAX = 8
"""Open questions to one peer at most; an answer to an older one is ignored."""
FIRST_PERIOD_NS = 50 * NS_PER_MS
"""Pause between questions until the nodes agree for the first time."""
FIRST_WAIT_NS = 200 * NS_PER_MS
"""How long the first agreement waits for the answers of all peers: the majority whose clocks agree best may not be the
one that answers first."""
CALM_NS = 2_000_000_000
"""A correction is spread over this while the time lies within the agreed interval: it may be noise."""
QUICK_NS = 200_000_000
"""A correction is spread over this while the time lies outside the agreed interval, if `slew_ppm_max` allows."""
SYNC_PAUSE_NS = 40 * NS_PER_MS
"""Least pause between agreements on answers to the 50 ms sync: the two or four answers to one sync make one agreement.
These answers are samples too, since the master's time matters most."""
PATIENCE_NS = 200 * NS_PER_MS
"""A member without an answer for the period of questions plus this does not count until its next answer."""
LEADING_PATIENCE_NS = 250 * NS_PER_MS
"""On a master a member without an answer for this does not count: slaves answer it every 50 ms."""
YOUNG_NS = 100 * NS_PER_MS
"""Drift is not measured on older answers: they were carried on at the very rate that is to be measured."""
FOREVER_NS = 1 << 62

Send = Callable[[str, PeerFrame], bool]


@dataclass(frozen=True, slots=True)
class ClockSettings:
    """The section `clock` of the configuration (docs/CONFIG.md)."""

    tolerance_ms: int = 500
    holdover_ms_max: int = 600_000
    drift_ppm_max: int = 200
    slew_ppm_max: int = 100_000
    sample_period_ms: int = 500
    skew_warn_ms: int = 100
    own_until_agreed: bool = False


@dataclass(frozen=True, slots=True)
class Skew:
    """The offset of a member's wall clock from the cluster's time, by its last answers."""

    offset_ms: float
    error_ms: float
    time_offset_ms: float = 0.0
    """The member's cluster time minus this node's; 0 if either has none."""


@dataclass(frozen=True, slots=True)
class ClockView:
    """The state of the clock for status and metrics."""

    state: TimeState
    error_ms: float
    """Bound of the error of the cluster's time; 0 before the first agreement, when there is no bound."""
    slew_ms: float
    """The correction that is still to come; above 0: the time must go forward."""
    rate_ppm: float
    """How much faster the agreed time runs than this node's oscillator, as far as certain."""
    agreed_age_ms: int
    """Time since a majority agreed last; 0 if it never did."""
    skews: dict[str, Skew]
    """By member id, this node included; only members with answers of the last seconds."""


@dataclass(slots=True)
class _Member:
    samples: ClockSamples = field(default_factory=ClockSamples)
    asks: deque[int] = field(default_factory=lambda: deque(maxlen=ASKS_MAX))
    time_offset_ns: int = 0


class ClusterClock:
    """The cluster's time on one node, from its start to its stop. Units end the names; offsets are signed."""

    def __init__(self, clock: Clock, node_id: str, settings: ClockSettings | None = None) -> None:
        self._settings = settings or ClockSettings()
        self._clock = clock
        self._node_id = node_id
        self._monotonic_ns = clock.monotonic_ns
        self._time = SlewedTime(clock.monotonic_ns(), clock.wall_ms() * NS_PER_MS)
        self._holdover = Holdover(
            self._settings.holdover_ms_max * NS_PER_MS, own_clock_allowed=self._settings.own_until_agreed
        )
        self._dispatch_until_ns = self._until()
        self._drift = DriftEstimate()
        self._members: dict[str, _Member] = {}
        self._patience_ns = self._settings.sample_period_ms * NS_PER_MS + PATIENCE_NS
        self._next_ns = 0
        self._unanswered = 0
        """Open questions of this round. The node agrees when all are answered, or at the next round."""
        self._first_ns = 0
        """Since when a majority agrees for the first time while other peers have not answered yet."""
        self._error_ns = 0
        self._error_at_ns = 0
        self._leading = False
        self._acted = False
        """This node has been master, so the first agreement steers its time instead of setting it."""
        self._heard = HeardTime()
        self._started_ns = clock.monotonic_ns()
        self.jumps_refused = 0
        self.cursors_ahead = 0
        """Count of applied dispatches that were too early by this node's time."""

    # -- reading

    def now_ms(self) -> int:
        """The cluster's time in milliseconds since the Unix epoch; due times are compared with it."""
        return self._time.at(self._monotonic_ns()) // NS_PER_MS

    def next_full_ms(self) -> int:
        """The same, rounded up: the first full millisecond that is not before now."""
        return -(-self._time.at(self._monotonic_ns()) // NS_PER_MS)

    def at_ms(self, now_ns: int) -> int:
        """The cluster's time in milliseconds at a reading of the monotonic clock."""
        return self._time.at(now_ns) // NS_PER_MS

    @property
    def known(self) -> bool:
        """Whether there is a time to act by: one agreed since the start, or this node's own if the operator allows."""
        return self._dispatch_until_ns > 0

    def may_dispatch(self, now_ns: int | None = None) -> bool:
        """Whether a master may dispatch by this time now."""
        return (self._monotonic_ns() if now_ns is None else now_ns) < self._dispatch_until_ns

    def state(self) -> TimeState:
        """The state of the agreement."""
        return self._holdover.state(self._monotonic_ns())

    def error_ns(self) -> int:
        """Bound of the error; grows until the next agreement. 0 before the first one, when there is no bound."""
        now_ns = self._monotonic_ns()
        if self._holdover.agreed_ns is None:
            return 0
        aged_ns = (now_ns - self._error_at_ns) * self._drift_ppb() // PPB
        return self._error_ns + aged_ns + abs(self._time.left_ns(now_ns))

    def view(self) -> ClockView:
        """A snapshot for status and metrics."""
        now_ns = self._monotonic_ns()
        time_ns = self._time.at(now_ns)
        agreed_ns = self._holdover.agreed_ns
        skews: dict[str, Skew] = {}
        for name, member in sorted(self._members.items()):
            shown = member.samples.at(now_ns, self._drift.rate_ppb, self._drift_ppb())
            if shown is not None:
                offset_ns = (shown.low_ns + shown.high_ns) // 2 - time_ns
                error_ns = (shown.high_ns - shown.low_ns) // 2
                skews[name] = Skew(offset_ns / NS_PER_MS, error_ns / NS_PER_MS, member.time_offset_ns / NS_PER_MS)
        return ClockView(
            state=self._holdover.state(now_ns),
            error_ms=self.error_ns() / NS_PER_MS,
            slew_ms=self._time.left_ns(now_ns) / NS_PER_MS,
            rate_ppm=self._drift.rate_ppb / 1_000,
            agreed_age_ms=(now_ns - agreed_ns) // NS_PER_MS if agreed_ns is not None else 0,
            skews=skews,
        )

    # -- the loop

    def tick(self, now_ns: int, members: Callable[[], Sequence[str]], send: Send) -> None:
        """Ask the other members if a question is due. `send` returns False if a frame could not be sent."""
        if now_ns < self._next_ns:
            return
        period_ns = self._settings.sample_period_ms * NS_PER_MS
        self._next_ns = now_ns + (period_ns if self._holdover.agreed_ns is not None else FIRST_PERIOD_NS)
        self._set_members(members())
        if self._unanswered or len(self._members) == 1:
            self._agree()
        elif self._node_id in self._members:
            self._read_own(self._members[self._node_id])
        self._unanswered = 0
        for name, member in sorted(self._members.items()):
            if name != self._node_id and send(name, PeerFrame(clock_ask=ClockAsk(sent_ns=now_ns))):
                member.asks.append(now_ns)
                self._unanswered += 1

    def wanted_ns(self) -> int:
        """The latest monotonic_ns for the next `tick`."""
        return self._next_ns

    def peer_connected(self, peer_id: str) -> None:
        """A new connection to a peer: ask with the next tick. Questions on an earlier connection get no answer."""
        self._next_ns = 0
        member = self._members.get(peer_id)
        if member is not None:
            member.asks.clear()

    def _set_members(self, names: Sequence[str]) -> None:
        if self._members.keys() == set(names):
            return
        self._members = {name: self._members.get(name) or _Member() for name in names}

    # -- peers

    def wall_ms(self) -> int:
        """This machine's own wall clock, for answers to other nodes."""
        return self._clock.wall_ms()

    def receive(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """Take a question or an answer of a peer. Returns the answer to a question, else None."""
        if frame.HasField("clock_ask"):
            answer = ClockAnswer(echo_sent_ns=frame.clock_ask.sent_ns, wall_ms=self._clock.wall_ms())
            if self._holdover.agreed_ns is not None:
                answer.time_us = self._time.at(self._monotonic_ns()) // NS_PER_US
                answer.acted_by = self._leading
            return PeerFrame(clock_answer=answer)
        if frame.HasField("clock_answer"):
            self._answered(peer_id, frame.clock_answer)
        return None

    def _answered(self, peer_id: str, answer: ClockAnswer) -> None:
        now_ns = self._monotonic_ns()
        member = self._members.get(peer_id)
        if member is None or answer.echo_sent_ns not in member.asks:
            return
        member.asks.remove(answer.echo_sent_ns)
        round_trip_ns = now_ns - answer.echo_sent_ns
        self._sampled(member, now_ns, round_trip_ns, answer.wall_ms)
        if answer.acted_by and answer.time_us and 0 <= round_trip_ns <= ROUND_TRIP_NS_MAX:
            self._heard.hear_bound(now_ns, answer.time_us * NS_PER_US + NS_PER_US + round_trip_ns)
        known = answer.time_us and self._holdover.agreed_ns is not None
        time_ns = answer.time_us * NS_PER_US + round_trip_ns // 2
        member.time_offset_ns = time_ns - self._time.at(now_ns) if known else 0
        self._unanswered -= 1
        if self._unanswered <= 0 or self._holdover.agreed_ns is None:
            self._agree()

    def sync_answered(self, peer_id: str, echo_sent_ns: int, wall_ms: int) -> None:
        """Master only: a slave has answered a sync of this term, with its wall clock."""
        member = self._members.get(peer_id)
        now_ns = self._monotonic_ns()
        if member is not None:
            self._sampled(member, now_ns, now_ns - echo_sent_ns, wall_ms)
            if now_ns - self._error_at_ns >= SYNC_PAUSE_NS:
                self._agree()

    def _sampled(self, member: _Member, now_ns: int, round_trip_ns: int, wall_ms: int) -> None:
        if not 0 <= round_trip_ns <= ROUND_TRIP_NS_MAX:
            return
        # The peer read its clock at some moment of the round trip, and at any point within the millisecond.
        low_ns = wall_ms * NS_PER_MS
        shown = Interval(low_ns, low_ns + NS_PER_MS + round_trip_ns)
        member.samples.add(now_ns, shown, self._drift.rate_ppb, self._drift_ppb())

    # -- agreement

    def _drift_ppb(self) -> int:
        return max(self._settings.drift_ppm_max * 1_000, self._drift.doubt_ppb)

    def _until(self) -> int:
        until_ns = self._holdover.dispatch_until_ns()
        return FOREVER_NS if until_ns is None else until_ns

    def _read_own(self, member: _Member) -> None:
        before_ns = self._monotonic_ns()
        low_ns = self._clock.wall_ms() * NS_PER_MS
        now_ns = self._monotonic_ns()
        shown = Interval(low_ns, low_ns + NS_PER_MS + now_ns - before_ns)
        member.samples.add(now_ns, shown, self._drift.rate_ppb, self._drift_ppb())

    def _agree(self) -> None:
        """Steer to the time of a majority, if one agrees."""
        members = self._members
        own = members.get(self._node_id)
        if own is not None:
            self._read_own(own)
        now_ns = self._monotonic_ns()
        time_ns = self._time.at(now_ns)
        rate_ppb, drift_ppb = self._drift.rate_ppb, self._drift_ppb()
        # Without a recent answer a member's interval is carried on by this node's oscillator alone, and would only
        # confirm that.
        patience_ns = LEADING_PATIENCE_NS if self._leading else self._patience_ns
        intervals: list[Interval] = []
        sure: list[Interval] = []
        heard_ns: list[int] = []
        for member in members.values():
            shown = member.samples.at(now_ns, rate_ppb, drift_ppb)
            newest = member.samples.newest(now_ns, rate_ppb, drift_ppb)
            if shown is not None and newest is not None and now_ns - member.samples.newest_ns <= patience_ns:
                intervals.append(Interval(shown.low_ns - time_ns, shown.high_ns - time_ns))
                sure.append(Interval(newest.low_ns - time_ns, newest.high_ns - time_ns))
                heard_ns.append(member.samples.newest_ns)
        quorum = len(members) // 2 + 1
        agreement = agree(intervals, quorum, self._settings.tolerance_ms * NS_PER_MS, sure) if members else None
        if agreement is None:
            return
        first = self._holdover.agreed_ns is None
        if first and any(m.asks and not m.samples.newest_ns for m in members.values()):
            self._first_ns = self._first_ns or now_ns
            if now_ns - self._first_ns < FIRST_WAIT_NS:
                return
        off_ns = agreement.time_ns
        # The agreement is as old as the oldest answer of its newest majority.
        agreed_ns = sorted((heard_ns[n] for n in agreement.agreeing), reverse=True)[quorum - 1]
        if now_ns - agreed_ns <= YOUNG_NS:
            self._drift.add(now_ns, time_ns + off_ns, agreement.error_ns)
        if first and not self._acted:
            self._time.put(now_ns, time_ns + off_ns)
        else:
            self._steer(now_ns, off_ns, CALM_NS if off_ns <= 0 <= agreement.high_ns else QUICK_NS)
        self._error_ns, self._error_at_ns = agreement.error_ns, now_ns
        self._holdover.agreed(agreed_ns)
        self._dispatch_until_ns = self._until()

    def _steer(self, now_ns: int, off_ns: int, over_ns: int) -> None:
        self._time.steer(
            now_ns,
            off_ns,
            over_ns=over_ns,
            slew_ppb_max=self._settings.slew_ppm_max * 1_000,
            rate_ppb=self._drift.rate_ppb,
        )

    # -- jumps

    def heard_master(self, time_ms: int) -> None:
        """The master of this term has sent its time, in a frame sent after this node's start; 0: it has none."""
        if time_ms:
            now_ns = self._monotonic_ns()
            self._heard.hear(now_ns, time_ms * NS_PER_MS, NS_PER_MS + now_ns - self._started_ns)

    def begin_mastership(self) -> None:
        """This node becomes master and will act by its time, which must continue the time of earlier masters.

        A time behind theirs does no harm: the cursor waits. A time ahead by more than the errors explain would be a
        jump. All messages due in between would be dispatched at once, and a dispatch cannot be taken back. So the clock
        is set back to the time heard from masters and carried on from there; nobody has acted by a later one. The
        errors include how long the master's time may have been under way.
        """
        self._leading = self._acted = True
        now_ns = self._monotonic_ns()
        heard_ns = self._heard.furthest_ns(now_ns)
        if heard_ns is None:
            return
        drift_ppb = self._drift_ppb()
        heard_off_ns = self._heard.late_ns(now_ns, drift_ppb) + self._heard.doubt_ns(now_ns, drift_ppb)
        bound_ns = heard_off_ns + self.error_ns()
        time_ns = self._time.at(now_ns)
        if time_ns > heard_ns + bound_ns + self._settings.skew_warn_ms * NS_PER_MS:
            ahead_ns = time_ns + self._time.left_ns(now_ns) - heard_ns
            self._time.put(now_ns, heard_ns)
            self._steer(now_ns, ahead_ns, QUICK_NS)
            self.jumps_refused += 1

    def end_mastership(self) -> None:
        """This node is no longer master. Its time was the cluster's until now, so it counts as heard."""
        if self._leading:
            self._leading = False
            now_ns = self._monotonic_ns()
            self._heard.hear(now_ns, self._time.at(now_ns), 0)

    def judge_cursor(self, due_ms: int) -> None:
        """Count an applied dispatch up to `due_ms` that is too early by this node's time.

        It only counts: apply must have the same result on every node.
        """
        if self.state() is not TimeState.AGREED:
            return
        bound_ns = self.error_ns() + self._settings.skew_warn_ms * NS_PER_MS
        if due_ms * NS_PER_MS > self._time.at(self._monotonic_ns()) + bound_ns:
            self.cursors_ahead += 1
