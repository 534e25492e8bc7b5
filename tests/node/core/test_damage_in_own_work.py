"""Damage that a master meets in its own work, wherever that is: another node leads first, then it stops and says why.

Each way into the core is cut off by an error of the disk. `apply` and requests have tests of their own
(test_damage_met.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.node.core.loading import Loader, bundle_of, check, name_of
from tests.node.core.repair import test_index_repair as index_repair
from tests.node.core.test_serving import contain
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.checkpoint import JOURNAL_DIRECTORY
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import UNHEARD, Reply
from tickwheel.node.core.schedule.intake import KIND_DUE, Row
from tickwheel.node.core.schedule.joining import RowCaller
from tickwheel.node.failure import Failure
from tickwheel.node.server.calls import Calls
from tickwheel.node.state.snapshot import StateCheckpoint
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.log_pb2 import LogEntry
from tickwheel.replication.journal import Journal
from tickwheel.replication.log import LogListener
from tickwheel.storage import bundle
from tickwheel.storage.disk import DiskError, DiskFullError, FsyncFailedError
from tickwheel.storage.errors import ADVICE, CorruptFileError
from tickwheel.wheel.jobs import Job
from tickwheel.wheel.units import HOUR_MS

Patch = pytest.MonkeyPatch
PARTS = ("Dispatcher", "BulkLoad", "Delivery", "Deleter", "Events")
"""Ticks that are cut off: early, late and in the middle; the way out is the same for all parts."""
CALLS_OF_THE_LOG = ("sync_out", "beside_in", "sync_reply_in")
"""Calls of the log to a master that any of its files could concern; see `test_every_call_of_the_log_is_attempted`."""


def damage(*_: Any, **__: Any) -> Any:
    raise CorruptFileError("state/some.file", 4_096, "a block does not match its checksum", ADVICE)


def running(seed: int = 41, **named: Any) -> tuple[World, Client, Node, NodeCore]:
    """Three nodes, messages that were delivered and some that are to come, the master and its core."""
    world = World(seed, **named)
    client = Client(world)
    master = world.elect()
    client.consume()
    client.schedule([200, 300, 1_500, 2_500])
    world.run_until(lambda: len(client.got) == 2)
    world.run(100)
    assert master.host is not None
    contain(world)
    return world, client, master, master.host.core


def lets_another_lead(world: World, client: Client, master: Node, why: str, within_ms: int = 2_000) -> None:
    """The master stops for this reason within the time; when it does, another one has been elected by a handover, with
    the next term. All is delivered, nothing twice."""
    assert master.host is not None
    term = master.host.core.term
    led: list[bool] = []

    def stopped(reason: str) -> None:
        others = [node.host for node in world.nodes.values() if node is not master]
        led.append(any(host is not None and host.core.parts.mastership.elected for host in others))
        Node._on_fatal(master, reason)

    master.host._on_fatal = stopped
    world.run_until(lambda: bool(master.fatal), within_ms)
    assert led == [True], f"nobody led when it stopped: {master.fatal}"
    assert why in master.fatal
    following = world.elect()
    assert following.host is not None and following.host.core.term == term + 1
    record = b"m%d" % client.count
    client.schedule([100])
    world.run_until(lambda: record in client.acked and not client.lost(), 20_000)
    assert not client.repeated()


@pytest.mark.parametrize("name", PARTS)
def test_a_tick_of_a_part(name: str, monkeypatch: Patch) -> None:
    """Nothing follows in that tick or in later ones but the log's own work; operators are told with the traceback."""
    world, client, master, core = running()
    part = next(part for part in core.parts.ordered if type(part).__name__ == name)
    monkeypatch.setattr(part, "tick", damage)
    lets_another_lead(world, client, master, "state/some.file")
    assert any(isinstance(line.fields.get("exc_info"), CorruptFileError) for line in master.reported)


@pytest.mark.parametrize("name", ["pump", "upkeep", "end_of_work", "checkpoint"])
def test_the_rest_of_a_tick(name: str, monkeypatch: Patch) -> None:
    """What the core itself does in a tick, and what a worker's answer brings."""
    world, client, master, core = running()
    if name == "pump":
        monkeypatch.setattr(core.wheel, "jobs", damage)
    elif name == "upkeep":
        monkeypatch.setattr(core.parts, "upkeep", damage)
    elif name == "end_of_work":
        monkeypatch.setattr(core.wheel, "finish", damage)
        client.schedule([11_000])
    else:
        monkeypatch.setattr(core.state, "capture_checkpoint", damage)
        core.checkpointer.request(UNHEARD)
    lets_another_lead(world, client, master, "state/some.file", 15_000)


@pytest.mark.parametrize("name", CALLS_OF_THE_LOG)
def test_a_call_of_the_log(name: str, monkeypatch: Patch) -> None:
    """Syncs, their answers, and what peers ask for beside the log."""
    world, client, master, core = running()
    # What is applied after the last sync cannot be confirmed any more, and each second brings a dispatch.
    world.run_until(lambda: 200 <= world.now_ms % 1_000 < 500)
    assert all(core.parts.sync.applied_of(name) == core.applied.index for name in world.nodes if name != master.name)
    part = {"sync_out": core.parts.sync, "sync_reply_in": core.parts.sync, "beside_in": core.clock}[name]
    monkeypatch.setattr(part, {"sync_out": "outgoing", "sync_reply_in": "reply", "beside_in": "receive"}[name], damage)
    lets_another_lead(world, client, master, "state/some.file", 10_000)


def test_every_call_of_the_log_is_attempted() -> None:
    """A call that the log makes to the core, and that this test does not know, needs it, too."""
    world = World(42, names="a")
    core = world.elect()
    assert core.host is not None
    listener = core.host.core.listener
    without = {"apply", "problem_of", "may_vote", "may_apply", "handover_ready", "damaged", "fatal"}  # no files, or own
    for name, _ in inspect.getmembers(LogListener, inspect.isfunction):
        if not name.startswith("_") and name not in without:
            assert hasattr(getattr(type(listener), name), "__wrapped__"), name


@pytest.mark.parametrize("kind", ["job", "checkpoint"])
def test_work_of_a_worker(kind: str, monkeypatch: Patch) -> None:
    """A merge, a load or a checkpoint that cannot read: the node serves on until another leads."""
    world, client, master, core = running()
    if kind == "job":
        start: Callable[[Job], None] = core.background._start

        def spoilt(job: Job) -> None:
            monkeypatch.setattr(job, "run", damage)
            start(job)

        monkeypatch.setattr(core.background, "_start", spoilt)
        client.schedule([11_000])
    else:
        monkeypatch.setattr(StateCheckpoint, "run", damage)
        core.checkpointer.request(UNHEARD)
        master.wake()
    lets_another_lead(world, client, master, "failed: 'state/some.file'", 15_000)


def test_damaged_heads_that_a_load_meets() -> None:
    """Real bytes in real files: nothing can be asked of the others, so the master goes, and they deliver all."""
    world = World(7, config=index_repair.CONFIG)
    client = Client(world)
    client.consume()
    index_repair.loaded(world, client)
    master = world.elect()
    index_repair.spoil([master], [7])
    heads = f"{index_repair.index_of(master).removesuffix('.index')}.heads"
    master.disk.flip(heads, master.disk.size(heads) - 2)
    lets_another_lead(world, client, master, "hours/", 10_000)


@pytest.mark.parametrize("alone", [False, True])
def test_a_damaged_bundle_that_a_read_meets(alone: bool) -> None:
    """It refused every such request, and said nothing in its log, until the messages were due. Now another node leads,
    which can read them. Where there is none, the rest is served on."""
    names = "a" if alone else "abc"
    world = World(11, names=names)
    client = Client(world)
    world.elect()
    client.consume()
    data, wanted = bundle_of([world.now_ms + 20_000 + n for n in range(300)])
    Loader(world, [data]).load(names)
    master = world.elect()
    assert master.host is not None
    contain(world)
    layout = bundle.Layout(1_000, 1, np.frombuffer(data, bundle.TABLE, 1, bundle.HEADER_BYTES))
    for at in range(layout.index_at, layout.heads_at):
        master.disk.flip(bundle.bundle_path(name_of(data)), at)
    answers: list[object] = []
    pending = master.host.core.parts.pending
    request = scheduler_pb2.ListPendingRequest(due_ms_max=world.now_ms + HOUR_MS)
    master.host.core.serving.start(pending.page(request), answers.append)
    master.wake()
    if not alone:
        lets_another_lead(world, client, master, "a read met damage: bulk/")
        world.run_until(lambda: wanted.keys() <= client.got.keys(), 25_000)
        check(client, wanted)
        return
    world.run(1_000)
    assert isinstance(answers[0], Failure) and "bulk/" in answers[0].message
    assert [told.event for told in master.reported if told.level == "error"] == [
        "messages cannot be read, and there is no other member that could serve"
    ]
    client.schedule([100])
    world.run_until(lambda: not client.lost() and bool(client.got))
    assert not master.fatal


def test_an_answer_to_a_command_of_its_own(monkeypatch: Patch) -> None:
    """What is called when a command was applied."""
    world, client, master, core = running()
    observed = core.parts.dispatcher.tick
    monkeypatch.setattr(core.parts.dispatcher, "tick", observed)
    pending = core.proposer._propose

    def proposed(items: Any, now_ms: int) -> None:
        for item in items:
            item.reply = Reply.either(damage)
        pending(items, now_ms)

    client.schedule([100])
    world.run(50)
    monkeypatch.setattr(core.proposer, "_propose", proposed)
    lets_another_lead(world, client, master, "state/some.file")


@pytest.mark.parametrize("reader", ["a slave", "apply"])
def test_the_journal(reader: str, monkeypatch: Patch) -> None:
    """Old entries that a slave needs, or that wait to be applied, cannot be read: a slave that has them leads."""
    world, client, master, core = running(43)
    slaves = [node for node in world.nodes.values() if node is not master]
    if reader == "a slave":
        behind = slaves[0]
        behind.kill()
        client.schedule([2_000])
        world.run(300)
        first = core.applied.index
        slice_ = Journal.slice

        def damaged(self: Journal, index: int, *bounds: int) -> Any:
            return damage() if self is journal and index <= first else slice_(self, index, *bounds)

        journal = core.log.journal  # type: ignore[attr-defined]
        monkeypatch.setattr(Journal, "slice", damaged)
        behind.start()
    else:
        engine = core.log.engine  # type: ignore[attr-defined]
        rows = engine.view.rows

        def applied(first: int, count_max: int) -> Any:
            mine = first == engine.applied_index + 1 and first <= engine.commit_index
            return damage() if mine else rows(first, count_max)

        monkeypatch.setattr(engine.view, "rows", applied)
    lets_another_lead(world, client, master, "state/some.file", 5_000)


def test_a_lead_command_that_is_followed_by_damage(monkeypatch: Patch) -> None:
    """The new master begins to work when its command is applied: it stops, and the next one leads."""
    world, client, master, core = running()
    chosen = next(node for node in world.nodes.values() if node is not master)
    assert chosen.host is not None
    monkeypatch.setattr(chosen.host.core.parts.dispatcher, "begin", damage)
    core.parts.mastership.start_transfer(chosen.name, lambda failure: None)
    master.wake()
    world.run_until(lambda: bool(chosen.fatal), 2_000)
    assert "state/some.file" in chosen.fatal
    world.run_until(lambda: not client.lost(), 20_000)


def test_damage_within_a_handover_by_plan(monkeypatch: Patch) -> None:
    """An operator's handover is under way: it comes to its end first, and no second one is begun."""
    world, client, master, core = running()
    ended: list[object] = []
    core.parts.mastership.start_transfer(None, ended.append)
    monkeypatch.setattr(core.parts.delivery, "tick", damage)
    lets_another_lead(world, client, master, "state/some.file")
    assert ended == [None]


def test_damage_that_cuts_off_work_while_the_node_leaves(monkeypatch: Patch) -> None:
    """A load has failed, so the node hands over when it has applied everything. Then apply meets the same damage."""
    world, client, master, core = running()
    begin = core.log.transfer

    def waits_for_apply(target: Any, done: Any, *, applying: bool = True) -> None:
        if applying:
            monkeypatch.setattr(core.state, "apply", damage)
            entry = LogEntry(format_version=1, term=core.term, stamped_ms=1)
            core.log.propose(entry.SerializeToString(), lambda result: None)
        begin(target, done, applying=applying)

    monkeypatch.setattr(core.log, "transfer", waits_for_apply)
    core.fatal("a load failed", CorruptFileError("state/some.file", 0, "it is short", ADVICE))
    master.wake()
    lets_another_lead(world, client, master, "log entry", 10_000)


@pytest.mark.parametrize("failure", ["fsync", "write"])
@pytest.mark.parametrize("what", ["journal", "bundle", "checkpoint"])
def test_files_that_cannot_be_written(what: str, failure: str, monkeypatch: Patch) -> None:
    """Another leads before the node stops. From the failure on it applies nothing, writes no checkpoint, and counts
    nothing more as durable."""
    world, client, master, core = running(45)
    journal = core.log.journal  # type: ignore[attr-defined]
    stick, stood = core.serving.stick, list[tuple[int, int, int]]()

    def stands() -> tuple[int, int, int]:
        return core.applied.index, core.checkpointer.written, journal.durable_index

    def stuck(reason: str, error: DiskError) -> None:
        stick(reason, error)
        stood.append(stands())

    monkeypatch.setattr(core.serving, "stick", stuck)
    fail = master.disk.fail_fsync if failure == "fsync" else master.disk.fail_write
    if what == "journal":
        fail(1, lambda path: path.startswith(JOURNAL_DIRECTORY))
        client.schedule([400, 500])
    elif what == "bundle":
        fail(1, lambda path: path.startswith(bundle.DIRECTORY))
        data, _ = bundle_of([world.now_ms + 60_000], "some")
        core.parts.bulk.take(name_of(data), len(data), 0, data, google_crc32c.value(data), UNHEARD)
    else:
        fail(1, lambda path: path.startswith("state"))
        core.checkpointer.request(UNHEARD)
    master.wake()
    lets_another_lead(world, client, master, "Input/output error")
    assert bool(stood) == (what == "journal" or failure == "fsync")
    for applied, checkpoints, durable in stood[:1]:
        assert applied <= durable and stands()[:2] == (applied, checkpoints)
        assert what != "journal" or journal.durable_index == durable


def test_a_failed_sync_in_a_tick(monkeypatch: Patch) -> None:
    """Like damage: whatever the sync was for, the node leaves and does nothing else any more."""
    world, client, master, core = running()

    def failed(*_: Any) -> None:
        raise FsyncFailedError("fdatasync of 'some.file' failed")

    monkeypatch.setattr(core.parts.delivery, "tick", failed)
    lets_another_lead(world, client, master, "some.file")


@pytest.mark.parametrize("error", [DiskFullError, AssertionError])
def test_other_errors_end_the_node_as_ever(error: type[Exception], monkeypatch: Patch) -> None:
    """A full disk has ways of its own, and a mistake of ours is none of the disk's."""
    world, _, master, core = running()

    def broken(*_: Any) -> None:
        raise error("broken")

    monkeypatch.setattr(core.parts.delivery, "tick", broken)
    with pytest.raises(error):
        world.run(1_000)
    assert not core.serving.stuck and master.host is not None


def test_parts_with_ticks_are_those_named_here() -> None:
    """A name that is gone would test nothing."""
    world = World(44, names="a")
    node = world.elect()
    assert node.host is not None
    ticking = {type(part).__name__ for part in node.host.core.parts.ordered if type(part).tick is not Part.tick}
    assert ticking.issuperset(PARTS)


def test_what_was_proposed_before_the_damage_is_told_as_unknown() -> None:
    """Its entry is with the slaves when the master's journal fails, and the next master commits it. Only a request that
    comes later was certainly not accepted."""
    world, _, master, core = running(45)
    told: list[Any] = []
    caller = RowCaller(lambda *placed: told.append(placed), told.append)
    row = Row("t", KIND_DUE, world.now_ms + HOUR_MS, b"in flight")

    def schedule() -> None:
        core.serving.run(caller.fail, lambda: core.parts.publisher.schedule_row(row, "", "", caller))
        master.wake()

    schedule()
    world.run_until(lambda: bool(told))
    told.clear()
    before = core.wheel.pending
    master.disk.fail_fsync(1, lambda path: path.startswith(JOURNAL_DIRECTORY))
    schedule()
    world.run_until(lambda: core.serving.closed is not None)
    later: list[Any] = []
    calls = Calls(lambda: core, master.wake, lambda wait_ms: master.wake(), later.append)
    calls.serve(later.append, lambda: None)
    world.run_until(lambda: bool(master.fatal), 5_000)
    following = world.elect()
    world.run(500)
    assert following.host is not None and following.host.core.wheel.pending == before + 1
    assert [answer.reason for answer in told] == [common_pb2.OUTCOME_UNKNOWN]
    assert [answer.reason for answer in later] == [common_pb2.RECOVERING]
