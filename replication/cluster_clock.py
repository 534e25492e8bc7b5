"""The cluster's time as one node sees it: the time that a majority of the nodes' clocks agrees on.

Every node asks every other for its wall clock twice a second, outside the log. A master also learns it from the answers
to its 50 ms sync. Each answer, and the node's own wall clock, is an interval. The cluster's
time is steered (`SlewedTime`) to the time in which a majority of intervals agrees, at a measured rate
(clock_intervals.py has both). Between agreements, and without one (`Holdover`), the monotonic clock carries the time
on, so a step of a wall clock moves nothing. A node reads that clock a few times a second at least. A longer gap between
two readings is a pause of the node or a jump of the clock, and only the others can tell which. The time leaves the gap
out until a majority has answered anew. Used by the core on its one thread; nothing else in a node reads a wall
clock.

Invariants:
- The time by which a master has acted never goes back, and never runs faster than `slew_ppm_max` allows. It is set, not
  steered, in three cases only: at the first agreement; forward, when a majority confirms that a gap has passed; and
  when a new master's time is ahead of everything that it has heard masters say. In the last case the time is set back
  to theirs and catches up at that rate.
- While a majority of the members' clocks is right, the time is wrong by at most `error_ns`.
- A peer's answers can only move that peer's own interval.

States of the agreement:

    unagreed -> agreed     a majority of the clocks agrees for the first time since this node's start
    own      -> agreed     the same, where the operator allows dispatch by this node's own clock until then
    agreed   -> holdover   no majority has agreed for 3 s
    holdover -> agreed     a majority agrees again
    holdover -> expired    clock.holdover_ms_max is over
    expired  -> agreed     a majority agrees again

A master dispatches in own, agreed and holdover. In unagreed and expired dispatch waits; schedules are accepted.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tickwheel.proto.peer_pb2 import ClockAnswer, ClockAsk, PeerFrame
from tickwheel.replication.clock_intervals import PPB, Agreement, ClockSamples, DriftEstimate, Interval, agree
from tickwheel.replication.ports import NS_PER_MS, Clock

NS_PER_US = 1_000
ROUND_TRIP_NS_MAX = 2_000_000_000
"""A slower answer is too uncertain to count."""
ASKS_MAX = 8
"""Open questions to one peer at most; an answer to an older one is ignored."""
FIRST_PERIOD_NS = 50 * NS_PER_MS
"""Pause between questions until the nodes agree for the first time."""
FIRST_WAIT_NS = 200 * NS_PER_MS
"""How long the first agreement, and the first after a gap, waits for the answers of all peers: the majority whose
clocks agree best may not be the one that answers first."""
CALM_NS = 2_000_000_000
"""A correction is spread over this while the time lies within the agreed interval: it may be noise."""
QUICK_NS = 200_000_000
"""A correction is spread over this while the time lies outside the agreed interval, if `slew_ppm_max` allows."""
SYNC_PAUSE_NS = 190 * NS_PER_MS
"""Least pause between agreements on answers to the 50 ms sync: those to four syncs make one agreement. All of them are
samples, since the master's time matters most."""
PATIENCE_NS = 200 * NS_PER_MS
"""A member without an answer for the period of questions plus this does not count until its next answer."""
LEADING_PATIENCE_NS = 250 * NS_PER_MS
"""On a master a member without an answer for this does not count: slaves answer it every 50 ms."""
YOUNG_NS = 100 * NS_PER_MS
"""Drift is not measured on older answers: they were carried on at the very rate that is to be measured."""
GAP_NS_MAX = 86_400_000 * NS_PER_MS
"""Of a gap that nobody has confirmed delays count at most this: it may be a clock that has jumped by years."""
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
        """Since when a majority agrees for the first time, or first after a gap, while others have not answered."""
        self._error_ns = 0
        self._error_at_ns = 0
        self._leading = False
        self._acted = False
        """This node has been master, so the first agreement steers its time instead of setting it."""
        self._read_ns = clock.monotonic_ns()
        self._doubted_ns = 0
        """Length of the gaps that no majority has confirmed yet. The time leaves them out."""
        self._fresh_from_ns = 1
        """Answers to earlier questions do not count: the monotonic clock may have jumped since. At least 1: a member
        that has never answered has a `newest_ns` of 0."""
        self._heard = HeardTime()
        self._started_ns = clock.monotonic_ns()
        self.steers = 0
        """Count of times that the time was steered or set."""
        self.jumps_refused = 0
        """Count of new masters' times that were set back, and of gaps in which less time has passed than the monotonic
        clock says."""
        self.cursors_ahead = 0
        """Count of applied dispatches that were too early by this node's time."""

    # -- reading

    def now_ms(self) -> int:
        """The cluster's time in milliseconds since the Unix epoch; due times are compared with it."""
        return self._time.at(self._read()) // NS_PER_MS

    def next_full_ms(self) -> int:
        """From when on delays and pauses count: the first full millisecond that is surely not before now. It includes
        gaps that no majority has confirmed yet: once they are confirmed, the time is set forward by them."""
        return -(-(self._time.at(self._read()) + min(self._doubted_ns, GAP_NS_MAX)) // NS_PER_MS)

    @property
    def unconfirmed_ms(self) -> int:
        """By how much the time may yet be set forward; nearly always 0."""
        return -(-min(self._doubted_ns, GAP_NS_MAX) // NS_PER_MS)

    def at_ms(self, now_ns: int) -> int:
        """The cluster's time in milliseconds at a reading of the monotonic clock."""
        self._seen(now_ns)
        return self._time.at(now_ns) // NS_PER_MS

    @property
    def known(self) -> bool:
        """Whether there is a time to act by: one agreed since the start, or this node's own if the operator allows."""
        return self._dispatch_until_ns > 0

    def may_dispatch(self, now_ns: int | None = None) -> bool:
        """Whether a master may dispatch by this time now."""
        return (self._read() if now_ns is None else now_ns) < self._dispatch_until_ns

    def state(self) -> TimeState:
        """The state of the agreement."""
        return self._holdover.state(self._read())

    def error_ns(self) -> int:
        """Bound of the error; grows until the next agreement. 0 before the first one, when there is no bound."""
        now_ns = self._read()
        if self._holdover.agreed_ns is None:
            return 0
        aged_ns = (now_ns - self._error_at_ns) * self._drift_ppb() // PPB
        return self._error_ns + aged_ns + abs(self._time.left_ns(now_ns)) + self._doubted_ns

    def view(self) -> ClockView:
        """A snapshot for status and metrics."""
        now_ns = self._read()
        time_ns = self._time.at(now_ns)
        agreed_ns = self._holdover.agreed_ns
        skews: dict[str, Skew] = {}
        for name, member in sorted(self._members.items()):
            shown = member.samples.at(now_ns, self._drift.rate_ppb, self._drift_ppb())
            if shown is not None:
                offset_ns = (shown.low_ns + shown.high_ns) // 2 - time_ns
                error_ns = (shown.high_ns - shown.low_ns) // 2 + self._doubted_ns
                skews[name] = Skew(offset_ns / NS_PER_MS, error_ns / NS_PER_MS, member.time_offset_ns / NS_PER_MS)
        return ClockView(
            state=self._holdover.state(now_ns),
            error_ms=self.error_ns() / NS_PER_MS,
            slew_ms=self._time.left_ns(now_ns) / NS_PER_MS,
            rate_ppm=self._drift.rate_ppb / 1_000,
            agreed_age_ms=(now_ns - agreed_ns) // NS_PER_MS if agreed_ns is not None else 0,
            skews=skews,
        )

    def _read(self) -> int:
        now_ns = self._monotonic_ns()
        self._seen(now_ns)
        return now_ns

    def _seen(self, now_ns: int) -> None:
        """Every reading of the monotonic clock comes here, before the time is carried on by it."""
        gap_ns = now_ns - self._read_ns
        if gap_ns > 0:
            if gap_ns > self._patience_ns and self._holdover.agreed_ns is not None:
                self._doubt(now_ns, gap_ns)
            self._read_ns = now_ns

    # -- the loop

    def tick(self, now_ns: int, members: Callable[[], Sequence[str]], send: Send) -> None:
        """Ask the other members if a question is due. `send` returns False if a frame could not be sent."""
        self._seen(now_ns)
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
                answer.time_us = self._time.at(self._read()) // NS_PER_US
                answer.acted_by = self._leading
            return PeerFrame(clock_answer=answer)
        if frame.HasField("clock_answer"):
            self._answered(peer_id, frame.clock_answer)
        return None

    def _answered(self, peer_id: str, answer: ClockAnswer) -> None:
        now_ns = self._read()
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
        now_ns = self._read()
        if member is not None and echo_sent_ns >= self._fresh_from_ns:
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
        before_ns = self._read()
        low_ns = self._clock.wall_ms() * NS_PER_MS
        now_ns = self._read()
        shown = Interval(low_ns, low_ns + NS_PER_MS + now_ns - before_ns)
        member.samples.add(now_ns, shown, self._drift.rate_ppb, self._drift_ppb())

    def _agree(self) -> None:
        """Steer to the time of a majority, if one agrees."""
        members = self._members
        own = members.get(self._node_id)
        if own is not None:
            self._read_own(own)
        now_ns = self._read()
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
            if shown is None or newest is None or member.samples.newest_ns < self._fresh_from_ns:
                continue
            if now_ns - member.samples.newest_ns <= patience_ns:
                intervals.append(Interval(shown.low_ns - time_ns, shown.high_ns - time_ns))
                sure.append(Interval(newest.low_ns - time_ns, newest.high_ns - time_ns))
                heard_ns.append(member.samples.newest_ns)
        quorum = len(members) // 2 + 1
        agreement = agree(intervals, quorum, self._settings.tolerance_ms * NS_PER_MS, sure) if members else None
        if agreement is None:
            return
        first = self._holdover.agreed_ns is None
        unheard = [m for m in members.values() if m.samples.newest_ns < self._fresh_from_ns]
        if unheard and (self._doubted_ns or (first and any(m.asks for m in unheard))):
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
            self.steers += 1
        else:
            passed_ns = self._confirm(now_ns, agreement) if self._doubted_ns else 0
            calm = off_ns <= passed_ns <= agreement.high_ns
            self._steer(now_ns, off_ns - passed_ns, CALM_NS if calm else QUICK_NS)
        self._error_ns, self._error_at_ns = agreement.error_ns, now_ns
        self._holdover.agreed(agreed_ns)
        self._dispatch_until_ns = self._until()

    def _doubt(self, now_ns: int, gap_ns: int) -> None:
        """Leave the gap out of the time, and ask everybody at once."""
        self._time.put(now_ns, self._time.at(self._read_ns))
        self._doubted_ns += gap_ns
        self._fresh_from_ns = now_ns
        self._first_ns = self._next_ns = self._unanswered = 0
        for member in self._members.values():
            member.asks.clear()  # their answers would take the gap for a round trip

    def _confirm(self, now_ns: int, agreement: Agreement) -> int:
        """A majority has answered since the gap. Sets the time forward by what has passed of it, and returns that."""
        doubted_ns, self._doubted_ns = self._doubted_ns, 0
        passed_ns = min(doubted_ns, max(0, agreement.time_ns))
        self._time.put(now_ns, self._time.at(now_ns) + passed_ns)
        jumped_ns = doubted_ns - max(0, agreement.high_ns)
        if jumped_ns > 0:
            self._heard.set_back(self._fresh_from_ns, jumped_ns)
        if jumped_ns > self._settings.skew_warn_ms * NS_PER_MS:
            self.jumps_refused += 1
        return passed_ns

    def _steer(self, now_ns: int, off_ns: int, over_ns: int) -> None:
        self.steers += 1
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
            now_ns = self._read()
            self._heard.hear(now_ns, time_ms * NS_PER_MS, NS_PER_MS + now_ns - self._started_ns)

    def begin_mastership(self) -> None:
        """This node becomes master and will act by its time, which must continue the time of earlier masters.

        A time behind theirs does no harm: the cursor waits. A time ahead by more than the errors explain would be a
        jump. All messages due in between would be dispatched at once, and a dispatch cannot be taken back. So the clock
        is set back to the time heard from masters and carried on from there; nobody has acted by a later one. The
        errors include how long the master's time may have been under way.
        """
        self._leading = self._acted = True
        now_ns = self._read()
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
            now_ns = self._read()
            self._heard.hear(now_ns, self._time.at(now_ns), 0)

    def judge_cursor(self, due_ms: int) -> None:
        """Count an applied dispatch up to `due_ms` that is too early by this node's time.

        It only counts: apply must have the same result on every node.
        """
        now_ns = self._read()
        early_ns = (due_ms - self._settings.skew_warn_ms) * NS_PER_MS - self._time.at(now_ns)
        if early_ns > 0 and self._holdover.state(now_ns) is TimeState.AGREED and early_ns > self.error_ns():
            self.cursors_ahead += 1


class SlewedTime:
    """Nanoseconds since the Unix epoch as a function of monotonic_ns, corrected only by running faster or slower.

    Between two calls of `steer` it is the monotonic clock at a rate, plus a correction that is spread over a while. It
    never goes back, except by `put`. Pure; all readings are of one monotonic clock and never go back.
    """

    __slots__ = ("_rate_ppb", "_since_ns", "_slew_for_ns", "_slew_ppb", "_time_ns")

    def __init__(self, at_ns: int, time_ns: int) -> None:
        self._since_ns = at_ns
        self._time_ns = time_ns
        self._rate_ppb = 0
        self._slew_ppb = 0
        self._slew_for_ns = 0

    def at(self, now_ns: int) -> int:
        """The time at a reading of the monotonic clock, not before the last `steer` or `put`."""
        passed_ns = now_ns - self._since_ns
        slewed_ns = passed_ns if passed_ns < self._slew_for_ns else self._slew_for_ns
        # One division for both terms, so that rounding cannot make the time go back.
        return self._time_ns + passed_ns + (passed_ns * self._rate_ppb + slewed_ns * self._slew_ppb) // PPB

    def left_ns(self, now_ns: int) -> int:
        """The correction that is still to come; above 0 the time is behind."""
        return max(0, self._slew_for_ns - (now_ns - self._since_ns)) * self._slew_ppb // PPB

    def steer(self, now_ns: int, off_ns: int, *, over_ns: int, slew_ppb_max: int, rate_ppb: int) -> None:
        """From now on run at `rate_ppb`, and add `off_ns` spread over `over_ns`, or longer to stay within the limit."""
        self._time_ns = self.at(now_ns)
        self._since_ns = now_ns
        self._rate_ppb = rate_ppb
        wanted_ppb = -(-abs(off_ns) * PPB // over_ns)
        speed_ppb = min(wanted_ppb, slew_ppb_max)
        self._slew_for_ns = abs(off_ns) * PPB // speed_ppb if speed_ppb else 0
        self._slew_ppb = speed_ppb if off_ns > 0 else -speed_ppb

    def put(self, now_ns: int, time_ns: int) -> None:
        """Set the time, backwards too: only for a time by which nobody has acted yet."""
        self._since_ns = now_ns
        self._time_ns = time_ns
        self._slew_for_ns = self._slew_ppb = 0


HEARD_SPAN_NS = 60_000_000_000
"""The furthest reports of the current span and of the one before it count."""
LATE_NS_SHARP = 2_000_000_000
"""A report that may have been under way for longer does not replace an expired bound."""


@dataclass(slots=True)
class _Furthest:
    ahead_ns: int
    """Time minus this node's monotonic clock."""
    at_ns: int


class HeardTime:
    """The masters' time, as heard by this node: its latest possible value now, if no master's time jumps.

    A master's report arrives late. So the report that is furthest ahead counts, of those of the last minutes, carried
    on by the monotonic clock. Older reports do not count: an oscillator that runs fast would carry them further and
    further ahead.

    A report does not say how late it is. A single report may have been under way for a second, and then a time that is
    ahead of it by a second has not jumped. So each report comes with the longest time that it can have been under way.
    A frame sent to this process was sent after the process began. And a master that is asked for its time answers
    within the round trip. The lowest of these bounds is the latest that the time can be.

    Pure. `now_ns` is this node's monotonic clock, `drift_ppb` its assumed drift.
    """

    def __init__(self) -> None:
        self._spans: list[_Furthest] = []
        """The furthest report of the current span, then that of the span before it."""
        self._began_ns = 0
        self._most: _Furthest | None = None

    def hear(self, now_ns: int, time_ns: int, late_ns_max: int) -> None:
        """A master has reported `time_ns`; the report was under way for at most `late_ns_max`."""
        self._bound(now_ns, time_ns + late_ns_max, sharp=late_ns_max <= LATE_NS_SHARP)
        said = _Furthest(time_ns - now_ns, now_ns)
        if not self._spans or now_ns - self._began_ns > HEARD_SPAN_NS:
            self._spans = [said, *self._spans[:1]]
            self._began_ns = now_ns
        elif said.ahead_ns > self._spans[0].ahead_ns:
            self._spans[0] = said

    def hear_bound(self, now_ns: int, most_ns: int) -> None:
        """A master's time is at most `most_ns`."""
        self._bound(now_ns, most_ns, sharp=True)

    def set_back(self, before_ns: int, by_ns: int) -> None:
        """The monotonic clock has jumped ahead by `by_ns` since the reports of before `before_ns`."""
        for said in (*self._spans, self._most):
            if said is not None and said.at_ns < before_ns:
                said.ahead_ns -= by_ns

    def _bound(self, now_ns: int, most_ns: int, *, sharp: bool) -> None:
        bound, most = _Furthest(most_ns - now_ns, now_ns), self._most
        # A bound below the furthest report has no effect: `late_ns` never goes below 0.
        if most is None or bound.ahead_ns <= most.ahead_ns or (sharp and now_ns - most.at_ns > HEARD_SPAN_NS):
            self._most = bound

    def furthest_ns(self, now_ns: int) -> int | None:
        """The time now by the furthest report; None without a report."""
        return max((now_ns + span.ahead_ns for span in self._spans), default=None)

    def late_ns(self, now_ns: int, drift_ppb: int) -> int:
        """By how much the furthest report may be behind because it was under way."""
        furthest_ns, most = self.furthest_ns(now_ns), self._most
        if furthest_ns is None or most is None:
            return 0
        return max(0, now_ns + most.ahead_ns + (now_ns - most.at_ns) * drift_ppb // PPB - furthest_ns)

    def doubt_ns(self, now_ns: int, drift_ppb: int) -> int:
        """By how much the furthest report may be wrong because this node's oscillator drifts."""
        return max(((now_ns - span.at_ns) * drift_ppb // PPB for span in self._spans), default=0)


FRESH_MS = 3_000
FRESH_NS = FRESH_MS * 1_000_000
"""An agreement counts for this long: several rounds of questions may fail before the state changes."""


class TimeState(enum.Enum):
    UNAGREED = "unagreed"
    OWN = "own"
    AGREED = "agreed"
    HOLDOVER = "holdover"
    EXPIRED = "expired"


class Holdover:
    """The newest agreement, and the state that follows from its age."""

    def __init__(self, holdover_ns: int, *, own_clock_allowed: bool) -> None:
        self._holdover_ns = max(holdover_ns, FRESH_NS)
        self._own_clock_allowed = own_clock_allowed
        self.agreed_ns: int | None = None
        """When a majority agreed last, by this node's monotonic clock."""

    def agreed(self, at_ns: int) -> None:
        """A majority agrees, by answers as old as `at_ns`."""
        self.agreed_ns = at_ns if self.agreed_ns is None else max(self.agreed_ns, at_ns)

    def state(self, now_ns: int) -> TimeState:
        """The state of the agreement now."""
        if self.agreed_ns is None:
            return TimeState.OWN if self._own_clock_allowed else TimeState.UNAGREED
        age_ns = now_ns - self.agreed_ns
        if age_ns <= FRESH_NS:
            return TimeState.AGREED
        return TimeState.HOLDOVER if age_ns <= self._holdover_ns else TimeState.EXPIRED

    def dispatch_until_ns(self) -> int | None:
        """Until when a master may dispatch if no further agreement comes. None: for ever; 0: not at all."""
        if self.agreed_ns is None:
            return None if self._own_clock_allowed else 0
        return self.agreed_ns + self._holdover_ns
