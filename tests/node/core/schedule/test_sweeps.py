"""Cancelling and moving: definite by id, and in bulk through changes of master, each message counted once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.node.core.schedule.test_pending import ask, core_of, counted, schedule
from tests.node.core.trio import Client, World, digests
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule import pending
from tickwheel.node.failure import Failure
from tickwheel.node.state import sweeps
from tickwheel.proto import scheduler_pb2
from tickwheel.proto.scheduler_pb2 import ALREADY_DISPATCHED, CANCELLED, NOT_FOUND, Selection
from tickwheel.wheel.queries import ScanJob

HOUR_MS = 3_600_000


def begun(world: World, job_id: str, **fields: Any) -> Any:
    """Begin a sweep at the master."""
    request = scheduler_pb2.BeginSweepRequest(job_id=job_id, **fields)
    return ask(world, core_of(world).parts.sweeper.begin_sweep(request))


def job(world: World, job_id: str) -> Any:
    """Where it stands, as the master's state has it; None while there is no master."""
    master = world.master()
    if master is None or master.host is None:
        return None
    return master.host.core.state.sweeps.get(job_id)


def has_come_to(world: World, steps: int) -> bool:
    """Whether it has made so many steps."""
    found = job(world, "job")
    return found is not None and found.steps >= steps


def finish(world: World, job_id: str) -> Any:
    """Until it has ended."""
    world.run_until(lambda: (found := job(world, job_id)) is not None and found.state != scheduler_pb2.SWEEP_RUNNING)
    return job(world, job_id)


def trio(seed: int = 1, step_messages: int = 1_000) -> World:
    """Three nodes with a master that knows the time."""
    world = World(seed, config=replace(CoreConfig(), segment_bytes=1 << 20, sweep_step_messages=step_messages))
    world.elect()
    world.run(2_000)
    return world


def came(client: Client) -> int:
    """Deliveries so far."""
    return sum(map(len, client.got.values()))


def cancel(world: World, number: int) -> Any:
    """Outcome of a cancel by id."""
    return ask(world, core_of(world).parts.requests.cancel(number))


def test_a_cancel_by_id_removes_just_that_one() -> None:
    """Four others come, the same key on another topic too; an unknown id removes nothing; too late is said; and a
    second cancel says the same as the first."""
    world = trio()
    ids = schedule(world, [("t", 3_000 + n, "k", []) for n in range(5)] + [("u", 3_000, "k", [])])
    assert cancel(world, ids[2]) == CANCELLED
    assert cancel(world, ids[2]) == CANCELLED
    assert cancel(world, ids[2] + 1_000) == NOT_FOUND
    assert cancel(world, 7 << 32) == NOT_FOUND
    assert counted(world, topic="t") == 4 and counted(world, topic="u") == 1
    client = Client(world)
    client.consume()
    world.run_until(lambda: came(client) == 4)
    world.run(1_000)
    assert came(client) == 4
    assert counted(world) == 0
    assert cancel(world, ids[0]) == ALREADY_DISPATCHED
    assert cancel(world, ids[2]) == CANCELLED


@pytest.mark.parametrize("action", ["cancel", "due_ms", "shift_ms"])
def test_only_what_is_selected_and_was_there_before(action: str) -> None:
    """By tag, key and prefix exactly; a message scheduled after the answer stays, in the very millisecond too; the
    same job begun again does nothing more."""
    world = trio()
    messages = [
        (f"t{n % 2}", HOUR_MS + n * 1_000, f"order-{n % 4}", ["red"] if n % 3 == 0 else ["blue"]) for n in range(40)
    ]
    schedule(world, messages)
    target = {"cancel": True, "due_ms": world.now_ms + 3 * HOUR_MS, "shift_ms": 2 * HOUR_MS}
    selection = Selection(topic="t1", tag="red", key_prefix="order-")
    expected = sum(topic == "t1" and tags == ["red"] for topic, _, _, tags in messages)
    first = begun(world, "job", selection=selection, **{action: target[action]})
    assert first.state == scheduler_pb2.SWEEP_RUNNING, first
    late = schedule(world, [("t1", HOUR_MS, "order-1", ["red"])])
    ended = finish(world, "job")
    assert (ended.done, ended.too_late, ended.gone) == (expected, 0, 0)
    world.run(100)
    totals = [node.host.core.parts.counts.totals for node in world.nodes.values() if node.host is not None]
    assert [one.cancelled for one in totals] == [expected if action == "cancel" else 0] * 3
    moved = counted(world, due_ms_min=world.now_ms + 2 * HOUR_MS)
    assert moved == (0 if action == "cancel" else expected)
    assert counted(world) == 41 - (expected if action == "cancel" else 0)
    assert counted(world, topic="t1", tag="red", due_ms_max=world.now_ms + 2 * HOUR_MS) == len(late)
    again = begun(world, "job", selection=selection, **{action: target[action]})
    assert (again.state, again.done) == (scheduler_pb2.SWEEP_FINISHED, expected)
    assert counted(world, topic="t1", tag="red", due_ms_max=world.now_ms + 2 * HOUR_MS) == len(late)
    world.run_until(lambda: len(digests(world)) == 1)


@pytest.mark.parametrize("action", ["cancel", "move"])
@pytest.mark.parametrize("seed", range(3))
def test_masters_die_in_the_middle(action: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two masters in turn are killed while a sweep runs and messages become due under it: each message was cancelled
    (or moved) or came, none both and none neither; the counts add up; and all nodes agree."""
    monkeypatch.setattr(pending, "MATCHES_MAX", 7)
    world = trio(seed, 7)
    client = Client(world)
    # Half of them become due while the sweep runs and masters change.
    client.schedule([20 + n * 10 for n in range(200)] + [HOUR_MS + n for n in range(200)])
    world.run_until(lambda: len(client.acked) == 400)
    client.consume()
    far_ms = world.now_ms + 5 * HOUR_MS
    what: dict[str, Any] = {"cancel": True} if action == "cancel" else {"due_ms": far_ms}
    begun(world, "job", selection=Selection(topic="t"), **what)
    for steps in (3, 9):
        world.run_until(partial(has_come_to, world, steps))
        master = world.master()
        assert master is not None
        master.kill()
        world.run_until(lambda: world.master() is not None)
        master.start()
        world.heal()
    ended = finish(world, "job")
    assert ended.state == scheduler_pb2.SWEEP_FINISHED
    world.run(12_000)
    assert not client.early()
    assert ended.done + len(client.got) == 400, "each was swept or came"
    assert 0 < len(client.got) <= 200 <= ended.done
    assert ended.gone == 0
    assert counted(world) == (0 if action == "cancel" else ended.done)
    if action == "move":
        assert counted(world, due_ms_min=far_ms, due_ms_max=far_ms + 1) == ended.done
    world.run_until(lambda: len(digests(world)) == 1)


def test_a_sweep_survives_checkpoints_and_a_node_that_gets_one() -> None:
    """Where it stands is part of the checkpoint: a node that starts from it agrees with the others."""
    world = trio()
    schedule(world, [("t", HOUR_MS + n, "k", []) for n in range(50)])
    begun(world, "job", selection=Selection(topic="t"), cancel=True)
    finish(world, "job")
    node = next(node for node in world.nodes.values() if node is not world.master())
    assert node.host is not None
    written: list[Any] = []
    node.host.core.checkpointer.request(Reply.either(written.append))
    node.wake()
    world.run_until(lambda: bool(written))
    node.kill()
    world.run(100)
    node.start()
    world.run_until(lambda: len(digests(world)) == 1)
    assert node.host is not None
    found = node.host.core.state.sweeps.get("job")
    assert found is not None and found.done == 50


def test_stopped_refused_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop keeps what was done; an empty selection, a bad time, another job under the same id, too many at once and
    an unknown id are refused with the field; the oldest that ended is forgotten first."""
    monkeypatch.setattr(sweeps, "SWEEPS_MAX", 4)
    monkeypatch.setattr(sweeps, "RUNNING_MAX", 2)
    world = trio(step_messages=1)
    schedule(world, [("t", HOUR_MS + n, "k", []) for n in range(300)])
    selection = Selection(topic="t")
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("selection", {"cancel": True}),
        ("topic", {"selection": Selection(topic="none"), "cancel": True}),
        ("action", {"selection": selection}),
        ("due_ms", {"selection": selection, "due_ms": world.now_ms + 10_000 * 24 * HOUR_MS}),
        ("shift_ms", {"selection": selection, "shift_ms": -(1 << 60)}),
        ("delay_ms", {"selection": selection, "delay_ms": -1}),
    ]
    for field, fields in wrong:
        answer = begun(world, "x", **fields)
        assert isinstance(answer, Failure) and answer.metadata["field"] == field, answer
    bad_id = begun(world, "not allowed", selection=selection, cancel=True)
    assert isinstance(bad_id, Failure) and bad_id.metadata["field"] == "job_id"
    begun(world, "a", selection=selection, cancel=True)
    begun(world, "b", selection=selection, shift_ms=1_000)
    full = begun(world, "c", selection=selection, cancel=True)
    assert isinstance(full, Failure) and full.metadata["field"] == "sweeps_running"
    other = begun(world, "a", selection=selection, shift_ms=5)
    assert isinstance(other, Failure) and other.metadata["field"] == "job_id"
    elsewhere = begun(world, "b", selection=selection, shift_ms=2_000)
    assert isinstance(elsewhere, Failure) and "another shift_ms: 1000" in elsewhere.message
    assert begun(world, "b", selection=selection, shift_ms=1_000).job_id == "b"
    for job_id in ("a", "b"):
        stopped = ask(world, core_of(world).parts.sweeper.stop(job_id))
        assert stopped.state == scheduler_pb2.SWEEP_STOPPED
    world.run(1_000)
    assert job(world, "a").done == stopped_done(world, "a") < 300
    assert counted(world) == 300 - job(world, "a").done
    for job_id in ("d", "e", "f"):
        begun(world, job_id, selection=Selection(key="none"), cancel=True)
        finish(world, job_id)
    remembered = ask(world, core_of(world).parts.sweeper.list())
    assert [sweep.job_id for sweep in remembered.sweeps] == ["b", "d", "e", "f"]
    unknown = ask(world, core_of(world).parts.sweeper.get("a"))
    assert isinstance(unknown, Failure) and unknown.metadata["field"] == "job_id"


def stopped_done(world: World, job_id: str) -> int:
    """What a stopped job has done, a second later."""
    world.run(1_000)
    return int(job(world, job_id).done)


def test_shifted_too_far_is_left_alone() -> None:
    """What would go beyond the cluster's limit stays where it is, and is counted."""
    world = trio()
    limit_ms = core_of(world).state.settings.delay_ms_max
    schedule(world, [("t", HOUR_MS, "k", []), ("t", limit_ms - HOUR_MS, "k", [])])
    begun(world, "job", selection=Selection(topic="t"), shift_ms=2 * HOUR_MS)
    ended = finish(world, "job")
    assert (ended.done, ended.too_far) == (1, 1)
    assert counted(world, due_ms_min=world.now_ms + 2 * HOUR_MS) == 2


@pytest.mark.parametrize("selection", [Selection(topic="t0"), Selection(topic="t0", key="k")], ids=["units", "text"])
@pytest.mark.parametrize("action", ["cancel", "move"])
def test_a_full_tick_is_read_once_and_its_progress_is_true(
    action: str, selection: Selection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six hundred messages of one millisecond, half of them selected, in steps of ten: the tick is not read again for
    each step, and what was examined at each moment is what lies before the place that was reached."""
    monkeypatch.setattr(pending, "MATCHES_MAX", 10)
    world = trio(step_messages=10)
    schedule(world, [(f"t{n % 2}", HOUR_MS, "k", []) for n in range(600)])
    scans: list[ScanJob] = []
    run = ScanJob.run

    def counted_run(scan: ScanJob) -> None:
        scans.append(scan)
        run(scan)

    monkeypatch.setattr(ScanJob, "run", counted_run)
    what: dict[str, Any] = {"cancel": True} if action == "cancel" else {"due_ms": world.now_ms + 2 * HOUR_MS}
    begun(world, "job", selection=selection, **what)
    seen: list[tuple[int, int]] = []
    while (found := job(world, "job")).state == scheduler_pb2.SWEEP_RUNNING:
        seen.append((found.done, found.examined))
        world.run(1)
    assert (found.done, found.examined) == (300, 600), "a move's successors do not count: they were not there before"
    halfway = [(done, examined) for done, examined in seen if 0 < done < 300]
    assert len(set(halfway)) > 20
    assert all(0 <= examined - 2 * done + 1 <= 1 for done, examined in halfway), halfway
    assert len(scans) <= 3


def test_the_progress_in_a_time_range_is_that_of_the_range() -> None:
    """A sweep over the first hour is half done when half of that hour is, whatever lies behind it; and so says the next
    master."""
    world = trio(step_messages=5)
    schedule(world, [("t", 2 * HOUR_MS + n, "k", []) for n in range(100)] + [("t", 9 * HOUR_MS, "k", [])] * 300)
    begun(world, "job", selection=Selection(topic="t", due_ms_max=world.now_ms + 5 * HOUR_MS), cancel=True)
    shares: list[tuple[int, int]] = []
    for steps in (4, 10):
        world.run_until(partial(has_come_to, world, steps))
        told = ask(world, core_of(world).parts.sweeper.get("job"))
        assert told.state == scheduler_pb2.SWEEP_RUNNING
        shares.append((told.examined, told.pending))
        master = world.master()
        assert master is not None
        master.kill()
        world.run_until(lambda: world.master() is not None)
        master.start()
        world.heal()
    assert all(pending == 100 and 20 <= examined < 100 for examined, pending in shares), shares
    assert finish(world, "job").done == 100
    [ended] = ask(world, core_of(world).parts.sweeper.list()).sweeps
    assert (ended.examined, ended.pending) == (100, 400)
