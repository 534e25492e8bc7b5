"""What is proposed to the log, in which order and which entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis.strategies import booleans, integers, lists, tuples

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.pacing import COMMIT_MS, WINDOW_BYTES_MIN
from tickwheel.node.core.promise import UNHEARD, Reply
from tickwheel.node.core.proposer import ENTRY_TOPICS_MAX, NO_CHANGE, Proposer
from tickwheel.node.core.schedule.fair_queue import Waiting
from tickwheel.node.core.world import ClusterMs, Now, SteadyMs
from tickwheel.proto.log_pb2 import Command, Dispatch, Ingest, LogEntry, Publish, Settle
from tickwheel.replication.log import ProposalOutcome, ProposalResult, ReplicatedLog


class Log:
    """Takes entries; `answer` says that the oldest was applied."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.voters: list[Sequence[str] | None] = []
        self._waiting: list[tuple[int, Callable[[ProposalResult], None]]] = []

    def propose(self, entry: bytes, settled: Callable[[ProposalResult], None], voters: Sequence[str] | None) -> None:
        """See ReplicatedLog."""
        self.entries.append(LogEntry.FromString(entry))
        self.voters.append(voters)
        self._waiting.append((len(self.entries[-1].commands), settled))

    def answer(self) -> None:
        """Committed, and applied without a result worth telling."""
        count, settled = self._waiting.pop(0)
        settled(ProposalResult(ProposalOutcome.COMMITTED, value=[None] * count))


def proposer_with(log: Log, in_flight: int) -> Proposer:
    """Of a master in term 1, without schedules."""
    proposer = Proposer(CoreConfig(propose_in_flight_max=in_flight, gather_ms=0), 0, lambda: 1_000)
    proposer.attach(cast(ReplicatedLog, log), Calls())
    proposer.term = 1
    return proposer


def dispatch(due_ms: int) -> Command:
    """Changes nothing that is pending."""
    return Command(dispatch=Dispatch(due_ms=due_ms))


def ingest(sequence: int) -> Command:
    """May bring messages that are due already."""
    return Command(ingest=Ingest(sequence=sequence))


@pytest.mark.parametrize("in_flight", [1, 8])
def test_what_goes_alone_overtakes_nothing(in_flight: int) -> None:
    """Dispatches that wait come first, though the log is full; what comes later comes after it; nothing joins it."""
    log = Log()
    proposer = proposer_with(log, in_flight)
    proposer.submit(dispatch(1), UNHEARD)
    proposer.flush()
    proposer.submit(dispatch(2), UNHEARD)
    proposer.submit_alone(ingest(3), UNHEARD, ["n1"])
    proposer.submit(dispatch(4), UNHEARD)
    while proposer.waiting:
        proposer.flush()
        log.answer()
    told = [[c.dispatch.due_ms or c.ingest.sequence for c in entry.commands] for entry in log.entries]
    assert told == [[1], [2], [3], [4]]
    assert log.voters == [None, None, ["n1"], None]


def test_what_waits_alone_is_known_to_change_what_is_pending() -> None:
    """From when it is queued until it was applied: a dispatch that is proposed behind it is not delivered ahead."""
    log = Log()
    proposer = proposer_with(log, 1)
    proposer.submit(dispatch(1), UNHEARD)
    proposer.flush()
    assert proposer.may_change_from_ms() == NO_CHANGE
    proposer.submit_alone(ingest(2), UNHEARD)
    assert proposer.may_change_from_ms() == 0
    log.answer()
    proposer.flush()
    assert proposer.waiting == 0 and proposer.may_change_from_ms() == 0
    log.answer()
    assert proposer.may_change_from_ms() == NO_CHANGE


def test_what_waits_alone_is_answered_when_mastership_is_lost() -> None:
    """And what comes after that is refused at once."""
    log = Log()
    proposer = proposer_with(log, 1)
    answers: list[object] = []
    proposer.submit(dispatch(1), Reply.either(answers.append))
    proposer.flush()
    proposer.submit_alone(ingest(2), Reply.either(answers.append))
    assert not answers
    proposer.end(failure := cast(Any, object()))
    proposer.submit_alone(ingest(3), Reply.either(answers.append))
    assert answers[0] is failure and len(answers) == 2


@given(steps=lists(tuples(booleans(), booleans()), max_size=30), in_flight=integers(1, 3))
def test_commands_keep_their_order(steps: list[tuple[bool, bool]], in_flight: int) -> None:
    """Whatever goes alone and however full the log is; those alone have their entry to themselves."""
    log = Log()
    proposer = proposer_with(log, in_flight)
    done: list[int] = []
    for number, (alone, flushed) in enumerate(steps, 1):
        if alone:
            proposer.submit_alone(ingest(number), Reply.either(lambda result, number=number: done.append(number)))  # type: ignore[misc]
        else:
            proposer.submit(dispatch(number), Reply.either(lambda result, number=number: done.append(number)))  # type: ignore[misc]
        if flushed:
            proposer.flush()
            assert proposer.entries_in_flight <= in_flight
    while proposer.waiting or proposer.entries_in_flight:
        proposer.flush()
        log.answer()
    assert done == list(range(1, len(steps) + 1))
    for entry in log.entries:
        kinds = [command.WhichOneof("body") for command in entry.commands]
        assert kinds == ["ingest"] or "ingest" not in kinds


def test_an_entry_touches_a_bounded_number_of_topics() -> None:
    """Each node applies an entry in one go, at a cost for each topic. What is left leaves at once, schedules last."""
    log, calls, times = Log(), Calls(), [1_000]
    proposer = called(log, calls, times)
    for number in range(10):
        proposer.submit(Command(settle=Settle()), UNHEARD, may_gather=True, topics=ENTRY_TOPICS_MAX // 4)
        if number == 6:
            proposer.submit(dispatch(7), UNHEARD, topics=ENTRY_TOPICS_MAX)
    calls.sizes = [100]
    proposer.flush()
    kinds = [[command.WhichOneof("body") for command in entry.commands] for entry in log.entries]
    assert kinds == [["settle"] * 4, ["settle"] * 3 + ["dispatch"]]
    times[0] += 100
    proposer.flush()
    kinds = [[command.WhichOneof("body") for command in entry.commands] for entry in log.entries]
    assert kinds[2:] == [["settle"] * 3 + ["publish"]]


def test_schedules_are_taken_while_dispatches_catch_up() -> None:
    """A master with a long backlog over many topics proposes one full dispatch after the other, for minutes perhaps."""
    log, calls, times = Log(), Calls(), [1_000]
    proposer = called(log, calls, times)
    due_ms = 0
    for _ in range(50):
        times[0] += 5
        while not proposer.crowded and proposer.waiting + len(log.entries) - due_ms < 16:
            due_ms += 1
            proposer.submit(dispatch(due_ms), UNHEARD, topics=ENTRY_TOPICS_MAX)
            proposer.flush()
        calls.sizes = calls.sizes or [100]
        log.answer()
        proposer.flush()
    published = [sum(c.HasField("publish") for c in entry.commands) for entry in log.entries]
    dispatched = [sum(c.HasField("dispatch") for c in entry.commands) for entry in log.entries]
    assert sum(published) > 25 and max(dispatched) == 1 and sum(dispatched) > 40
    for _ in range(10):
        proposer.submit(Command(settle=Settle()), UNHEARD, may_gather=True, topics=ENTRY_TOPICS_MAX)
    while proposer.entries_in_flight:
        log.answer()
    proposer.flush()
    assert proposer.waiting and not proposer.crowded, "settlements hold up no dispatch"


class Calls:
    """A publisher with requests of these sizes, all of which leave together."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @property
    def waiting(self) -> Waiting:
        """See PublishSource."""
        return Waiting(sum(self.sizes), len(self.sizes))

    def take(self, bytes_max: int) -> tuple[Command, Any, int] | None:
        """See PublishSource."""
        size = self.waiting.bytes
        self.sizes.clear()
        return (Command(publish=Publish(due_ms=bytes(8))), UNHEARD, size) if size else None


def called(log: Log, calls: Calls, times: list[int]) -> Proposer:
    """Of a master with these calls; `times[0]` is the clock."""
    proposer = Proposer(CoreConfig(), 0, lambda: times[0])
    proposer.attach(cast(ReplicatedLog, log), calls)
    proposer.term = 1
    return proposer


def test_who_calls_alone_is_never_held_up() -> None:
    """Also if each message is smaller than the one before: nobody else is to come, however many bytes are missing."""
    log, calls, times = Log(), Calls(), [1_000]
    proposer = called(log, calls, times)
    for size in (50_000, 20_000, 15_000, 100, 99, 1):
        calls.sizes.append(size)
        proposer.flush()
        assert proposer.entries_in_flight == 1, size
        times[0] += 8
        log.answer()


def test_callers_are_awaited_whatever_their_sizes_are() -> None:
    """The next entry leaves with the last of them, or when the wait is over. Nothing is awaited for ever, and the core
    sleeps meanwhile."""
    log, calls, times = Log(), Calls(), [1_000]
    proposer = called(log, calls, times)
    calls.sizes += [100, 30_000]
    for sizes in ([30_000, 100], [10, 10]):
        proposer.flush()
        times[0] += 8
        log.answer()
        for left, size in enumerate(reversed(sizes)):
            proposer.flush()
            assert proposer.entries_in_flight == 0, left
            calls.sizes.append(size)
    proposer.flush()
    times[0] += 8
    log.answer()
    calls.sizes.append(50_000)
    proposer.flush()
    now = Now(ClusterMs(times[0]), SteadyMs(0), True, True)
    wait_ms = proposer.wait_ms(now)
    assert proposer.entries_in_flight == 0 and wait_ms == 3
    times[0] += wait_ms
    proposer.flush()
    assert proposer.entries_in_flight == 1
    assert proposer.wait_ms(Now(ClusterMs(times[0]), SteadyMs(0), True, True)) is None


class Schedules:
    """A publisher in which requests of one size wait without end."""

    def __init__(self, size: int) -> None:
        self.waiting = Waiting(size, 1)

    def take(self, bytes_max: int) -> tuple[Command, Any, int]:
        """See PublishSource."""
        due = (1 << 50).to_bytes(8, "little")
        return Command(publish=Publish(due_ms=due)), UNHEARD, self.waiting.bytes


def flooded(log: Log, size: int, times: list[int]) -> Proposer:
    """Of a master whose publisher always has more; `times[0]` is the clock."""
    config = CoreConfig(gather_ms=0, gather_busy_ms=0, propose_in_flight_max=64, propose_bytes_max=4 << 20)
    proposer = Proposer(config, 0, lambda: times[0])
    proposer.attach(cast(ReplicatedLog, log), Schedules(size))
    proposer.term = 1
    return proposer


def in_flight_after(rounds: int, took_ms: int, *, dispatches: bool) -> int:
    """Entries of schedules under way after so many round trips of such a duration, of 256 KiB each."""
    log, times = Log(), [1_000]
    proposer = flooded(log, 256 << 10, times)
    for _ in range(rounds):
        if dispatches:
            proposer.submit(dispatch(1), UNHEARD)
        proposer.flush()
        sent = proposer.entries_in_flight
        times[0] += took_ms
        for _ in range(sent):
            log.answer()
    proposer.flush()
    return proposer.entries_in_flight


def test_schedules_leave_room_for_dispatches_where_the_log_is_slow() -> None:
    """A slow log has one entry of schedules under way, a fast one all that it may. Where nothing else is proposed,
    nobody would gain by less."""
    assert in_flight_after(8, 10 * COMMIT_MS, dispatches=True) == 1
    assert in_flight_after(8, COMMIT_MS, dispatches=True) == 16
    assert in_flight_after(8, 10 * COMMIT_MS, dispatches=False) == 16


def test_a_closed_window_holds_up_schedules_only() -> None:
    """A dispatch is proposed at once, without schedules. When the log is fast again, the window opens."""
    log, times = Log(), [1_000]
    proposer = flooded(log, WINDOW_BYTES_MIN, times)
    for _ in range(8):
        proposer.submit(dispatch(1), UNHEARD)
        proposer.flush()
        times[0] += 10 * COMMIT_MS
        while proposer.entries_in_flight:
            log.answer()
    proposer.flush()
    assert proposer.entries_in_flight == 1
    proposer.submit(dispatch(2), UNHEARD)
    proposer.flush()
    assert [command.WhichOneof("body") for command in log.entries[-1].commands] == ["dispatch"]
    assert proposer.wait_ms(cast(Any, None)) is None, "nothing is to be done before an answer comes"
    for _ in range(100):
        log.answer()
        proposer.flush()
    assert proposer.window.bytes == 4 << 20
