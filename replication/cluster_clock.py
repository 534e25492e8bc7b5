"""The cluster's time as one node sees it: what a majority of the nodes' clocks agrees on, and nothing else.

Every node asks every other twice a second what its wall clock shows, beside the log; a master also learns it from
the answers to its 50 ms sync. What comes back, and the
node's own wall clock, are intervals (cluster_clock_samples.py); what a majority agrees on (cluster_clock_interval.py)
is where the cluster's time is steered to (cluster_clock_slew.py), at a rate that is measured (cluster_clock_drift.py).
In between, and while nobody agrees (cluster_clock_state.py), it is carried on by the monotonic clock, so a step of a
wall clock moves nothing. Used by the core on its one thread; nothing else in a node reads a wall clock.

Invariants:
- The time that a master has acted by never goes back, and never goes on faster than `slew_ppm_max` allows. It is set,
  not steered, at the first agreement, and when a node becomes master and is ahead of all that it has heard masters
  say: a jump of the cluster's time is refused, and made good at that rate.
- While a majority of the members' clocks is right, it is off by `error_ns` at most.
- What a peer says can only move the peer's own interval.
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
"""A slower answer says too little."""
ASKS_MAX = 8
"""Questions to one peer that may still be answered."""
FIRST_PERIOD_NS = 50 * NS_PER_MS
"""Between questions until the nodes agree for the first time."""
FIRST_WAIT_NS = 200 * NS_PER_MS
"""The first agreement waits so long for the answers of all who were asked: the closest majority may not be the
quickest."""
CALM_NS = 2_000_000_000
"""A correction within what the clocks agree on is spread over this: it may be noise."""
QUICK_NS = 200_000_000
"""A correction to it is spread over this, if the limit allows."""
SYNC_PAUSE_NS = 40 * NS_PER_MS
"""Answers to the 50 ms sync are samples too, since the master's time matters most; the two or four of one sync make
one agreement."""
PATIENCE_NS = 200 * NS_PER_MS
"""Beyond the period of questions: who has not answered by then does not count until it does."""
REIGNING_PATIENCE_NS = 250 * NS_PER_MS
"""The same for a master, which hears of its slaves every 50 ms."""
YOUNG_NS = 100 * NS_PER_MS
"""An agreement on older answers tells nothing of drift: they were carried on at the rate that is to be measured."""
FOREVER_NS = 1 << 62

Send = Callable[[str, PeerFrame], bool]


@dataclass(frozen=True, slots=True)
class ClockSettings:
    """See the section `clock` of the configuration."""

    tolerance_ms: int = 500
    holdover_ms_max: int = 600_000
    drift_ppm_max: int = 200
    slew_ppm_max: int = 100_000
    sample_period_ms: int = 500
    skew_warn_ms: int = 100
    own_until_agreed: bool = False


@dataclass(frozen=True, slots=True)
class Skew:
    """A node's wall clock against the cluster's time, as last heard of."""

    offset_ms: float
    error_ms: float
    time_offset_ms: float = 0.0
    """Its idea of the cluster's time against this node's; 0 if either has none."""


@dataclass(frozen=True, slots=True)
class ClockView:
    """What status and metrics show."""

    state: TimeState
    error_ms: float
    """Bound of the error of the cluster's time; 0 before the first agreement, when it may be off by anything."""
    slew_ms: float
    """What is still to be corrected."""
    rate_ppm: float
    """How much faster than this node's oscillator time goes, as far as it is certain."""
    agreed_age_ms: int
    """Since a majority agreed last; 0 if it never did."""
    skews: dict[str, Skew]
    """By member, this one included; only those heard of lately."""


@dataclass(slots=True)
class _Member:
    samples: ClockSamples = field(default_factory=ClockSamples)
    asks: deque[int] = field(default_factory=lambda: deque(maxlen=ASKS_MAX))
    time_offset_ns: int = 0


class ClusterClock:
    """One per start of a node."""

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
        """Questions of this round; when all are answered it is time to agree, else with the next round."""
        self._first_ns = 0
        """Since when a majority agrees while others who were asked have not answered yet."""
        self._error_ns = 0
        self._error_at_ns = 0
        self._reigning = False
        self._acted = False
        """This node was master: its time is not set any more but steered."""
        self._heard = HeardTime()
        self._started_ns = clock.monotonic_ns()
        self.jumps_refused = 0
        self.cursors_ahead = 0
        """Dispatches applied that this node's time says came too early."""

    # -- reading

    def now_ms(self) -> int:
        """The time that due times are compared with."""
        return self._time.at(self._monotonic_ns()) // NS_PER_MS

    def at_ms(self, now_ns: int) -> int:
        """The same, by a reading of the monotonic clock."""
        return self._time.at(now_ns) // NS_PER_MS

    @property
    def known(self) -> bool:
        """There is a time to act by: agreed since the start, or the operator lets the own clock do."""
        return self._dispatch_until_ns > 0

    def may_dispatch(self, now_ns: int | None = None) -> bool:
        """Whether a master may move the cursor by this time."""
        return (self._monotonic_ns() if now_ns is None else now_ns) < self._dispatch_until_ns

    def state(self) -> TimeState:
        """Where the agreement stands."""
        return self._holdover.state(self._monotonic_ns())

    def error_ns(self) -> int:
        """How far this time can be off; grows while nobody agrees. 0 before the first agreement: it may be anything."""
        now_ns = self._monotonic_ns()
        if self._holdover.agreed_ns is None:
            return 0
        aged_ns = (now_ns - self._error_at_ns) * self._drift_ppb() // PPB
        return self._error_ns + aged_ns + abs(self._time.left_ns(now_ns))

    def view(self) -> ClockView:
        """For status and metrics."""
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
        """Ask the other members, if it is time to. `send` is false if there is no connection."""
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
        """The monotonic_ns of the next `tick` at the latest."""
        return self._next_ns

    def peer_connected(self, peer_id: str) -> None:
        """It can be asked: with the next tick."""
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
        """This machine's own wall clock, for others to judge."""
        return self._clock.wall_ms()

    def receive(self, peer_id: str, frame: PeerFrame) -> PeerFrame | None:
        """A question, which is answered, or an answer."""
        if frame.HasField("clock_ask"):
            answer = ClockAnswer(echo_sent_ns=frame.clock_ask.sent_ns, wall_ms=self._clock.wall_ms())
            if self._holdover.agreed_ns is not None:
                answer.time_us = self._time.at(self._monotonic_ns()) // NS_PER_US
                answer.acted_by = self._reigning
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
        """As master: a slave answered a sync of this term, and said what its wall clock shows."""
        member = self._members.get(peer_id)
        now_ns = self._monotonic_ns()
        if member is not None:
            self._sampled(member, now_ns, now_ns - echo_sent_ns, wall_ms)
            if now_ns - self._error_at_ns >= SYNC_PAUSE_NS:
                self._agree()

    def _sampled(self, member: _Member, now_ns: int, round_trip_ns: int, wall_ms: int) -> None:
        if not 0 <= round_trip_ns <= ROUND_TRIP_NS_MAX:
            return
        # It was read at some moment of the round trip, and may have been at any point of its millisecond.
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
        """Steer to what a majority agrees on, if one does."""
        members = self._members
        own = members.get(self._node_id)
        if own is not None:
            self._read_own(own)
        now_ns = self._monotonic_ns()
        time_ns = self._time.at(now_ns)
        rate_ppb, drift_ppb = self._drift.rate_ppb, self._drift_ppb()
        # Who has not been heard of just now is carried on by this node's oscillator alone: it would only echo it.
        patience_ns = REIGNING_PATIENCE_NS if self._reigning else self._patience_ns
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
        # As old as the youngest majority of those who agree.
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
        """What the master of this term says the time is, in a frame sent after this start; 0 if it has none."""
        if time_ms:
            now_ns = self._monotonic_ns()
            self._heard.hear(now_ns, time_ms * NS_PER_MS, NS_PER_MS + now_ns - self._started_ns)

    def begin_reign(self) -> None:
        """This node is master and will act by its time: it goes on where the masters before left off.

        Behind is no matter, the cursor then waits. Ahead by more than the errors explain would be a jump, and
        everything in between would be dispatched at once, not to be taken back: so the clock is put back to what was
        heard and carried on from there. Nobody has acted by it since. Among the errors is how long what was heard may
        have been under way.
        """
        self._reigning = self._acted = True
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

    def end_reign(self) -> None:
        """This node is master no longer; its time was the cluster's until now."""
        if self._reigning:
            self._reigning = False
            now_ns = self._monotonic_ns()
            self._heard.hear(now_ns, self._time.at(now_ns), 0)

    def judge_cursor(self, due_ms: int) -> None:
        """A dispatch up to `due_ms` was applied: the same on every node, so all that is left is to say so."""
        if self.state() is not TimeState.AGREED:
            return
        bound_ns = self.error_ns() + self._settings.skew_warn_ms * NS_PER_MS
        if due_ms * NS_PER_MS > self._time.at(self._monotonic_ns()) + bound_ns:
            self.cursors_ahead += 1
