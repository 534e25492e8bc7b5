"""What nodes note of messages, and what a trace tells of it: in order, on every node, through a change of master."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.node.core.schedule.test_pending import ask, core_of, schedule
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.watch import events
from tickwheel.node.failure import Failure
from tickwheel.node.server import handlers
from tickwheel.node.server.callers import EVERYBODY
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2, scheduler_pb2
from tickwheel.proto.admin_pb2 import TraceEvent
from tickwheel.storage import events as event_files
from tickwheel.storage.disk import DiskFullError
from tickwheel.wheel.units import HOUR_MS


def noting(bytes_max: int = 1 << 20) -> World:
    """Three nodes that note events, with a master."""
    world = World(config=replace(CoreConfig(), segment_bytes=1 << 20, events_bytes_max=bytes_max))
    world.elect()
    world.run(2_000)
    return world


def asked(world: World, node: Node, *ids: int) -> list[Any]:
    """Holds what one node answers as soon as it does."""
    answers: list[Any] = []
    named = [common_pb2.MessageId(hour=number >> 32, index=number & 0xFFFF_FFFF) for number in ids]
    assert node.host is not None
    node.host.core.serving.start(node.host.core.parts.tracer.trace(admin_pb2.TraceRequest(ids=named)), answers.append)
    node.wake()
    return answers


def traced(world: World, node: Node, *ids: int) -> Any:
    """What one node answers."""
    answers = asked(world, node, *ids)
    world.run_until(lambda: bool(answers))
    return answers[0]


def kinds(answer: Any) -> list[str]:
    """Names of its events."""
    return [TraceEvent.Kind.Name(event.kind) for event in answer.events]


def test_every_node_tells_the_same_story() -> None:
    """Scheduled, dispatched and settled on all, delivered on the master; times in order; nothing of other messages."""
    world = noting()
    ids = schedule(world, [("t", 1_000 + 10 * n, f"k{n}", []) for n in range(5)] + [("u", 1_000, "k", [])])
    client = Client(world)
    client.consume()
    world.run_until(lambda: sum(map(len, client.got.values())) == 5)
    world.run(1_000)
    for node in world.nodes.values():
        answer = traced(world, node, ids[3])
        assert answer.enabled and answer.complete and not answer.lost
        expected = ["SCHEDULED", "DISPATCHED", *(["DELIVERED"] if node is world.master() else []), "SETTLED"]
        assert kinds(answer) == expected
        assert {event.id.index for event in answer.events} == {ids[3] & 0xFFFF_FFFF}
        scheduled, dispatched, settled = answer.events[0], answer.events[1], answer.events[-1]
        assert scheduled.stamped_ms <= scheduled.at_ms <= dispatched.at_ms <= settled.at_ms
        assert {event.topic for event in answer.events} == {"t"}
        assert (settled.settle, settled.group, settled.attempt, settled.term) == ("ACK", "g", 1, scheduled.term)
    other = traced(world, next(iter(world.nodes.values())), ids[5])
    assert kinds(other) == ["SCHEDULED", "DISPATCHED"] and other.events[0].topic == "u"


def test_retries_moves_and_cancels_are_in_it() -> None:
    """A nack and what comes of it under the first id; a move names the new id; a sweep's doings too."""
    world = noting()
    client = Client(world)
    client.outcome = consumer_pb2.RETRY
    ids = schedule(world, [("t", 500, "a", []), ("t", 3_600_000, "b", []), ("t", 3_600_000, "c", [])])
    client.consume()
    world.run_until(lambda: any(len(seen) == 1 for seen in client.got.values()))
    client.outcome = consumer_pb2.ACK
    world.run_until(lambda: any(len(seen) == 2 for seen in client.got.values()), ms=30_000)
    world.run(1_000)
    master = world.master()
    assert master is not None
    first = traced(world, master, ids[0])
    assert kinds(first) == [
        *("SCHEDULED", "DISPATCHED", "DELIVERED", "SETTLED"),
        *("DISPATCHED", "DELIVERED", "SETTLED"),
    ]
    assert [event.settle for event in first.events if event.settle] == ["RETRY", "ACK"]
    assert [event.attempt for event in first.events if event.kind == TraceEvent.DELIVERED] == [1, 2]
    request = scheduler_pb2.RescheduleRequest(id=common_pb2.MessageId(hour=ids[1] >> 32, index=ids[1] & 0xFFFF_FFFF))
    request.delay_ms = 7_200_000
    moved = ask(world, handlers.reschedule(core_of(world), request, EVERYBODY))
    sweep = scheduler_pb2.BeginSweepRequest(
        job_id="job", selection=scheduler_pb2.Selection(key="c"), shift_ms=3_600_000
    )
    ask(world, core_of(world).parts.sweeper.begin_sweep(sweep))
    world.run(1_000)
    second, third = traced(world, master, ids[1]), traced(world, master, ids[2])
    assert kinds(second) == kinds(third) == ["SCHEDULED", "MOVED"]
    assert second.events[1].new_id == moved.id
    swept = third.events[1].new_id
    assert ask(world, core_of(world).parts.requests.cancel(swept.hour << 32 | swept.index)) == 1
    world.run(1_000)
    last = traced(world, master, swept.hour << 32 | swept.index)
    assert kinds(last) == ["MOVED", "CANCELLED"]


def test_notes_outlive_a_kill_and_are_not_doubled_by_the_replay() -> None:
    """A node that was killed tells what it noted before, once, and goes on noting."""
    world = noting()
    ids = schedule(world, [("t", 3_600_000, "k", [])])
    world.run(2_000)
    master = world.master()
    assert master is not None
    master.disk.open("events/1.events").fsync()
    master.disk.fsync_dir("events")
    master.kill()
    world.elect()
    master.start()
    world.heal()
    world.run(3_000)
    assert kinds(traced(world, master, ids[0])) == ["SCHEDULED"]
    later = schedule(world, [("t", 3_600_000, "k", [])])
    world.run(1_000)
    for node in world.nodes.values():
        assert kinds(traced(world, node, later[0])) == ["SCHEDULED"]


def test_what_a_kill_left_unwritten_is_noted_by_the_replay() -> None:
    """Scheduled, dispatched and settled within the last half second: the journal tells, once; deliveries are lost."""
    world = noting()
    client = Client(world)
    client.consume()
    ids = schedule(world, [("t", 100 + n, "k", []) for n in range(3)])
    world.run_until(lambda: sum(map(len, client.got.values())) == 3)
    world.run(60)
    slave = next(node for node in world.nodes.values() if node is not world.master())
    assert slave.host is not None and slave.host.core.parts.counts.totals.settled == 3
    slave.kill()
    slave.start()
    world.heal()
    world.run(2_000)
    assert kinds(traced(world, slave, ids[1])) == ["SCHEDULED", "DISPATCHED", "SETTLED"]
    for path in slave.disk.paths():
        if path.startswith("events/"):
            slave.disk.open(path).fsync()
    slave.disk.fsync_dir("events")
    slave.kill()
    slave.start()
    world.heal()
    world.run(2_000)
    assert kinds(traced(world, slave, ids[2])) == ["SCHEDULED", "DISPATCHED", "SETTLED"]


def test_a_full_queue_leaves_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than fits is left out, never waited for, and counted in the files."""
    world = noting()
    monkeypatch.setattr(events, "QUEUE_BYTES_MAX", 2_000)
    ids = schedule(world, [("t", 3_600_000, "k", [])])
    for _ in range(20):
        schedule(world, [("t", 3_600_000, "k", [])])
    world.run(2_000)
    master = world.master()
    assert master is not None and master.host is not None
    answer = traced(world, master, ids[0])
    assert answer.lost > 0
    assert master.host.core.parts.events.lost == answer.lost


def test_a_trace_waits_for_the_write_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes long over one write hides neither what is in it nor what waits behind it."""
    world = noting()
    master = world.master()
    assert master is not None
    held: list[Callable[[], None]] = []
    submit = master.submit

    def slow(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        if work.__qualname__.startswith("Events.") and not held:
            held.append(lambda: submit(work, done))
        else:
            submit(work, done)

    monkeypatch.setattr(master, "submit", slow)
    [in_it] = schedule(world, [("t", HOUR_MS, "k", [])])
    world.run_until(lambda: bool(held))
    [behind_it] = schedule(world, [("t", HOUR_MS, "k", [])])
    answers = [asked(world, master, number) for number in (in_it, behind_it)]
    world.run(1_000)
    assert not any(answers)
    held.pop()()
    held.append(lambda: None)
    world.run_until(lambda: all(answers))
    assert [kinds(answer) for [answer] in answers] == [["SCHEDULED"], ["SCHEDULED"]]


@pytest.mark.parametrize("workers_go_on", [False, True], ids=["process", "core"])
def test_what_waits_behind_a_write_is_written_after_the_stop(
    monkeypatch: pytest.MonkeyPatch, workers_go_on: bool
) -> None:
    """An audit of what stopped nodes have noted missed it: it called messages lost that had been delivered. The
    workers go on if the core makes room for one that begins from a copied checkpoint."""
    world = noting()
    master = world.master()
    assert master is not None and master.host is not None
    works = list[tuple[Callable[[], int], Callable[[Any, BaseException | None], None]]]()
    submit = master.submit

    def held(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        if work.__qualname__.startswith("Events."):
            works.append((work, done))
        else:
            submit(work, done)

    monkeypatch.setattr(master, "submit", held)
    schedule(world, [("t", HOUR_MS, "k", [])])
    world.run_until(lambda: bool(works))
    schedule(world, [("t", HOUR_MS, "k", [])])
    assert len(works) == 1
    if workers_go_on:
        master.host.core.stop()
        for work, done in works:  # the second comes with the end of the first
            done(work(), None)
        assert len(works) == 2
    else:
        master.host.stop()
        assert works[0][0]() == 0, "what no worker had begun is written, too"
    found = [
        row.kind
        for path in event_files.paths(master.disk, "events")
        for row in event_files.read_events(master.disk, path)
    ]
    assert found.count(event_files.EventKind.SCHEDULED) == 2


def test_what_a_failed_write_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the metrics and, with the next write, in the files; what was scheduled after it is found."""
    world = noting()
    master = world.master()
    assert master is not None and master.host is not None
    log = master.host.core.parts.events
    with monkeypatch.context() as broken:
        broken.setattr(event_files.EventWriter, "append", refuse)
        [gone] = schedule(world, [("t", HOUR_MS, "k", [])])
        assert kinds(traced(world, master, gone)) == []
        assert log.failures > 0 and log.lost > 0
    [late] = schedule(world, [("t", HOUR_MS, "k", [])])
    answer = traced(world, master, late)
    assert kinds(answer) == ["SCHEDULED"] and answer.lost == log.lost
    log._left_out = 1 << 40  # after months of a full disk
    [later] = schedule(world, [("t", HOUR_MS, "k", [])])
    assert kinds(traced(world, master, later)) == ["SCHEDULED"]


def refuse(*_: object) -> int:
    raise DiskFullError("no space is left")


def test_a_further_search_decodes_only_what_may_name_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node keeps hundreds of megabytes of notes: what the first search has learnt of them spares the later ones the
    reading. What has been noted since is found."""
    world = noting(16 << 20)
    ids = [number for n in range(40) for number in schedule(world, [("t", HOUR_MS * (1 + n % 5), f"k{n}", [])])]
    master = world.master()
    assert master is not None
    first = traced(world, master, ids[3])
    decoded: list[int] = []
    decode = event_files._records

    def counted(data: bytes, header: event_files._Header, ids: Sequence[int]) -> list[event_files.EventRecord]:
        decoded.append(header.end)
        return decode(data, header, ids)

    monkeypatch.setattr(event_files, "_records", counted)
    assert kinds(traced(world, master, ids[3])) == kinds(first) == ["SCHEDULED"]
    assert len(decoded) == 1
    [late] = schedule(world, [("t", HOUR_MS, "late", [])])
    assert kinds(traced(world, master, late)) == ["SCHEDULED"]


def test_bad_and_many_traces_are_refused() -> None:
    """No id, too many ids, too many at once: each with its field or limit; nothing noted is an empty answer."""
    world = noting(0)
    master = world.master()
    assert master is not None and master.host is not None
    for ids in ((), range(101)):
        answer = traced(world, master, *ids)
        assert isinstance(answer, Failure) and answer.metadata["field"] == "ids"
    answer = traced(world, master, 1)
    assert not answer.enabled and not answer.events and not answer.oldest_ms
    answers: list[Any] = []
    for _ in range(5):
        master.host.core.serving.start(
            master.host.core.parts.tracer.trace(admin_pb2.TraceRequest(ids=[common_pb2.MessageId(hour=1)])),
            answers.append,
        )
    assert isinstance(answers[0], Failure) and answers[0].reason == common_pb2.LIMIT_REACHED
