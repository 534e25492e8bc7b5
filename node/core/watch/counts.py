"""What was counted since the process started, and rates over the last seconds: for status, metrics and `tickwheel top`.

All is of this process: what it applied, and what it delivered as master. Counts by topic are kept a second at a time,
as notes; a rate is the difference of two notes. The sums of the notes by topic change with each note, so that a status
walks over no topics. Nothing is remembered of a topic without events in the last seconds, except of the topics that the
configuration names: those have totals.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.part import Part
from tickwheel.node.core.world import Now
from tickwheel.node.metrics import HistogramValue, MetricValue
from tickwheel.node.state.cold import ColdResult
from tickwheel.node.state.loads import IngestResult
from tickwheel.node.state.machine import AnyResult
from tickwheel.node.state.results import (
    CancelResult,
    DispatchResult,
    PublishResult,
    ScheduleResult,
    SettleResult,
    SweepResult,
)
from tickwheel.node.state.schedules import MESSAGES, no_counts
from tickwheel.node.state.staging import StagingResult
from tickwheel.node.state.subscription import Backlog
from tickwheel.node.state.sweeps import CANCELLING
from tickwheel.node.state.view import StateView
from tickwheel.proto.log_pb2 import Command
from tickwheel.proto.scheduler_pb2 import CANCELLED
from tickwheel.proto.schedules_pb2 import RUN_CANCELLED, RunOutcome

LATE_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000, 600_000)
_LATE_BOUNDS = np.array(LATE_BOUNDS_MS, np.int64)
LATE_ABOVE_MS = 3_600_000
"""Reported for deliveries later than the last bound."""
WINDOW_MS = 5_000
FEW_ROWS = 8
"""Rows of a batch that are counted one by one: arrays of them would cost more."""
SCHEDULED, DISPATCHED, DELIVERED, SETTLED = range(4)
_NO_RATES = (0.0, 0.0, 0.0, 0.0)
_NAMED = {DISPATCHED: "dispatched", DELIVERED: "delivered", SETTLED: "settled"}
"""What named topics have totals of. Messages scheduled are left out: their count by topic is good enough for a rate
only, since it lacks bundles and staged writes and may include repeats."""


@dataclass(slots=True)
class Deliveries:
    """Counts of the master's deliveries."""

    delivered: int = 0
    redelivered: int = 0
    redelivered_by_group: Counter[int] = field(default_factory=Counter)
    """By group id."""
    expired: int = 0
    late_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(LATE_BOUNDS_MS) + 1, np.int64))
    """Deliveries by lateness: for each bound those at most that late and later than the bound before; the last for all
    others."""
    late_sum_ms: int = 0


@dataclass(slots=True)
class Totals:
    """Counts of what was applied."""

    scheduled: int = 0
    dispatched: int = 0
    settled: int = 0
    cancelled: int = 0
    loaded: int = 0
    """Messages that came in bundles; they count as `scheduled` too."""
    loaded_bundles: int = 0
    """Bundles that these messages came in."""
    schedule_runs: list[int] = field(default_factory=lambda: list(no_counts()))
    """Planned times of recurring schedules, by the number of their outcome."""


_Column = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Of one kind of event: places of topics, and the number of messages of each."""


class _Sums:
    """Sums by topic of the notes in the window. A topic has a place in the arrays from its first event until no note of
    the window names it."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self._topics = np.zeros(0, np.int64)
        """The topic of each place; 0: it is free."""
        self._sums = np.zeros((0, len(_NO_RATES)), np.int64)

    def add(self, by_topic: Sequence[Mapping[int, int]]) -> list[_Column]:
        """Add a second's counts: of each kind of event, topic id -> messages. Returns them for `remove`."""
        columns: list[_Column] = []
        for what, given in enumerate(by_topic):
            # A topic of which nothing was counted, as by a stale settlement, would lose its place before this goes.
            counts = {topic_id: count for topic_id, count in given.items() if count}
            if new := counts.keys() - self._places.keys():
                self._seat(new)
            places = np.fromiter(map(self._places.__getitem__, counts), np.int64, len(counts))
            numbers = np.fromiter(counts.values(), np.int64, len(counts))
            self._sums[places, what] += numbers
            columns.append((places, numbers))
        return columns

    def _seat(self, topics: Set[int]) -> None:
        """Give these topics places."""
        missing = len(topics) - len(self._free)
        if missing > 0:
            end = len(self._topics)
            more = max(missing, end)
            self._free += range(end, end + more)
            self._topics = np.append(self._topics, np.zeros(more, np.int64))
            self._sums = np.append(self._sums, np.zeros((more, len(_NO_RATES)), np.int64), axis=0)
        for topic_id in topics:
            self._places[topic_id] = place = self._free.pop()
            self._topics[place] = topic_id

    def remove(self, columns: Sequence[_Column]) -> None:
        """Take off what `add` returned."""
        for what, (places, numbers) in enumerate(columns):
            self._sums[places, what] -= numbers
        for places, _ in columns:
            gone = places[(self._topics[places] != 0) & ~self._sums[places].any(axis=1)]
            for topic_id in self._topics[gone].tolist():
                self._free.append(self._places.pop(topic_id))
            self._topics[gone] = 0
        if not self._places:
            self._clear()

    def largest(self, limit: int) -> list[tuple[int, list[int]]]:
        """The topics with most events, most first, by rising id where they have as many; with their sums."""
        totals = self._sums.sum(axis=1)
        rows = np.flatnonzero(totals)
        if len(rows) > limit:
            least = np.partition(totals[rows], -limit)[-limit]
            rows = rows[totals[rows] >= least]
        rows = rows[np.lexsort((self._topics[rows], -totals[rows]))[:limit]]
        return list(zip(self._topics[rows].tolist(), self._sums[rows].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class _Note:
    at_ms: int
    totals: tuple[int, int, int, int]
    """Messages scheduled, dispatched, delivered and settled since the process started."""
    by_topic: Sequence[_Column]
    """The same by topic, since the note before."""
    late_counts: NDArray[np.int64]
    redelivered: int


def _no_counts() -> tuple[dict[int, int], ...]:
    """Topic id -> messages scheduled, dispatched, delivered and settled, each kind by itself."""
    return tuple({} for _ in _NO_RATES)


class Counts(Part):
    def __init__(self, state: StateView, names: Sequence[str] = ()) -> None:
        """`names`: topics whose totals are kept. They never fall, also when a topic is deleted and comes again."""
        self._state = state
        self.totals = Totals()
        self.deliveries = Deliveries()
        self._since = _no_counts()
        """Since the last note."""
        self._sums = _Sums()
        """Of all notes but the first."""
        self._named = {name: dict.fromkeys(_NAMED, 0) for name in names}
        self._notes: deque[_Note] = deque()
        self._busiest: list[tuple[int, tuple[float, ...]]] | None = None
        """Found since the last note; None: not requested yet."""

    # -- counting

    def applied(self, command: Command, result: AnyResult) -> Mapping[int, int]:
        """Count the effect of an applied command. Returns topic id -> messages that a publish scheduled; of several
        topics, its repeats count too. {}: none, or another command."""
        totals = self.totals
        published: Mapping[int, int] = {}
        if isinstance(result, PublishResult):
            totals.scheduled += result.scheduled
            totals.cancelled += len(result.replaced)
            if result.scheduled:
                topics = np.frombuffer(command.publish.topic_ids, "<u4").tolist()  # of each message, or of all
                published = {topics[0]: result.scheduled} if len(topics) == 1 else Counter(topics)
            found = self._since[SCHEDULED]
            for topic_id, count in published.items():
                found[topic_id] = found.get(topic_id, 0) + count
        elif isinstance(result, DispatchResult):
            totals.dispatched += result.dispatched
            found = self._since[DISPATCHED]
            for topic_id, _, _, units in result.ready:
                found[topic_id] = found.get(topic_id, 0) + len(units)
        elif isinstance(result, SettleResult):
            totals.settled += result.settled
            found = self._since[SETTLED]
            for batch, part in zip(command.settle.batches, result.parts, strict=False):
                topic_id = batch.topic_id
                found[topic_id] = found.get(topic_id, 0) + part.settled
        elif isinstance(result, IngestResult):
            totals.scheduled += result.units
            totals.loaded += result.units
            totals.loaded_bundles += result.ingested is not None
        elif isinstance(result, StagingResult):
            totals.scheduled += result.published
        elif isinstance(result, CancelResult):
            totals.cancelled += result.outcome == CANCELLED and not result.repeated
        elif isinstance(result, SweepResult):
            if result.sweep is not None and result.sweep.WhichOneof("action") in CANCELLING:
                totals.cancelled += result.done
        elif isinstance(result, ColdResult):
            totals.cancelled += result.cancelled
        elif isinstance(result, ScheduleResult):
            for note in result.notes:
                totals.schedule_runs[note.run.outcome] += note.run.times
                totals.cancelled += note.run.outcome == RUN_CANCELLED
                if note.run.outcome in MESSAGES:
                    totals.scheduled += 1
                    self.add(note.topic_id, SCHEDULED, 1)
        return published

    def delivered(
        self,
        group_id: int,
        now_ms: int,
        topics: Sequence[tuple[int, str, int]],
        due_ms: NDArray[np.int64],
        attempts: NDArray[np.uint32],
    ) -> None:
        """Count a batch that went to a consumer. The arrays have one element for each message. `topics`: id and name of
        each topic in the batch and its number of messages."""
        counts = self.deliveries
        counts.delivered += len(due_ms)
        if len(due_ms) <= FEW_ROWS:
            again = 0
            for due, attempt in zip(due_ms.tolist(), attempts.tolist(), strict=True):
                again += attempt > 1
                counts.late_counts[bisect_left(LATE_BOUNDS_MS, now_ms - due)] += 1
                counts.late_sum_ms += now_ms - due
        else:
            again = int(np.count_nonzero(attempts > 1))
            late_ms = now_ms - due_ms
            counts.late_counts += np.bincount(np.searchsorted(_LATE_BOUNDS, late_ms), minlength=len(LATE_BOUNDS_MS) + 1)
            counts.late_sum_ms += int(late_ms.sum())
        if again:
            counts.redelivered += again
            counts.redelivered_by_group[group_id] += again
        found = self._since[DELIVERED]
        for topic_id, _, count in topics:
            found[topic_id] = found.get(topic_id, 0) + count

    def add(self, topic_id: int, what: int, count: int) -> None:
        """Count `count` messages of a topic; `what` is DISPATCHED or another of the module's numbers."""
        found = self._since[what]
        found[topic_id] = found.get(topic_id, 0) + count

    def upkeep(self, now: Now) -> None:
        """Keep the counts of the last second as a note, and begin new ones."""
        for name, sums in self._named.items():
            topic_id = self._state.topic_id(name)
            if topic_id is not None:
                for what in _NAMED:
                    sums[what] += self._since[what].get(topic_id, 0)
        totals, deliveries = self.totals, self.deliveries
        in_all = (totals.scheduled, totals.dispatched, deliveries.delivered, totals.settled)
        late_counts, redelivered = deliveries.late_counts.copy(), deliveries.redelivered
        by_topic: Sequence[_Column] = ()
        if any(self._since):
            by_topic = self._sums.add(self._since) if self._notes else ()
            self._since = _no_counts()
        self._notes.append(_Note(now.steady_ms, in_all, by_topic, late_counts, redelivered))
        self._busiest = None
        while self._notes[0].at_ms < now.steady_ms - WINDOW_MS:
            self._notes.popleft()
            self._sums.remove(self._notes[0].by_topic)

    def begin_anew(self) -> None:
        """Forget the window of the rates, after a mistake in it. The totals stay."""
        self._since, self._sums, self._busiest = _no_counts(), _Sums(), None
        self._notes.clear()

    # -- reading

    def _seconds(self) -> float:
        """Between the first and the last note; 0: there are fewer than two."""
        if len(self._notes) < 2:
            return 0.0
        return max(1, self._notes[-1].at_ms - self._notes[0].at_ms) / 1_000

    def in_all_per_second(self) -> tuple[float, ...]:
        """Messages scheduled, dispatched, delivered and settled per second."""
        seconds = self._seconds()
        if not seconds:
            return _NO_RATES
        first, last = self._notes[0].totals, self._notes[-1].totals
        return tuple((after - before) / seconds for before, after in zip(first, last, strict=True))

    def busiest(self, backlog: Backlog, limit: int) -> list[tuple[int, tuple[float, ...]]]:
        """The busiest topics, with their messages scheduled, dispatched, delivered and settled per second; then those
        with most waiting messages.

        The choice is made once after each note, however often it is requested.
        """
        if self._busiest is None:
            seconds, waiting = self._seconds(), backlog.by_topic
            rates = {
                topic_id: tuple(count / seconds for count in sums)
                for topic_id, sums in (self._sums.largest(limit) if seconds else ())
            }
            order = sorted(rates, key=lambda t: (-sum(rates[t]), -waiting.get(t, 0), t))
            if len(order) < limit:
                order += [topic_id for topic_id in backlog.fullest(limit) if topic_id not in rates]
            self._busiest = [(topic_id, rates.get(topic_id, _NO_RATES)) for topic_id in order[:limit]]
        return self._busiest

    def redelivered_per_second(self) -> float:
        """Redeliveries per second."""
        seconds = self._seconds()
        return (self._notes[-1].redelivered - self._notes[0].redelivered) / seconds if seconds else 0.0

    def late_ms(self, share: float) -> int:
        """The lateness in ms that the given share of the last seconds' deliveries did not exceed; -1: there were
        none."""
        if len(self._notes) < 2:
            return -1
        counts = self._notes[-1].late_counts - self._notes[0].late_counts
        total = int(counts.sum())
        if not total:
            return -1
        at = int(np.searchsorted(np.cumsum(counts), share * total))
        return LATE_BOUNDS_MS[at] if at < len(LATE_BOUNDS_MS) else LATE_ABOVE_MS

    def metrics(self) -> Mapping[str, MetricValue]:
        totals, deliveries = self.totals, self.deliveries
        late = HistogramValue(
            bounds=[bound / 1_000 for bound in LATE_BOUNDS_MS],
            counts=deliveries.late_counts.tolist(),
            sum=deliveries.late_sum_ms / 1_000,
        )
        return {
            "scheduled_messages": float(totals.scheduled),
            "dispatched_messages": float(totals.dispatched),
            "settled_messages": float(totals.settled),
            "cancelled_messages": float(totals.cancelled),
            "bulk_bundles_taken_over": float(totals.loaded_bundles),
            "bulk_messages_taken_over": float(totals.loaded),
            "schedule_runs": {
                (RunOutcome.Name(RunOutcome.ValueType(number)).removeprefix("RUN_").lower(),): float(count)
                for number, count in enumerate(totals.schedule_runs)
                if number
            },
            "delivered_messages": float(deliveries.delivered),
            "redelivered_messages": float(deliveries.redelivered),
            "expired_messages": float(deliveries.expired),
            "lateness_seconds": late,
            **self._named_metrics(),
        }

    def _named_metrics(self) -> Mapping[str, MetricValue]:
        """Values of the named topics; a name without a topic has zeros. The page grows with the names, not with the
        topics."""
        if not self._named:
            return {}
        values: dict[str, MetricValue] = {
            f"topic_{word}_messages": {(name,): float(sums[what]) for name, sums in self._named.items()}
            for what, word in _NAMED.items()
        }
        backlog: dict[tuple[str, ...], float] = {}
        for name in self._named:
            topic_id = self._state.topic_id(name)
            backlog[name,] = 0.0 if topic_id is None else float(self._state.backlog.by_topic.get(topic_id, 0))
        return {**values, "topic_backlog_messages": backlog}
