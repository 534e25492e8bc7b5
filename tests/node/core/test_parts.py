"""The parts of a core: which of them follow mastership, and in which order it begins and ends for them."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace

import pytest

from tests.node.core.schedule.test_pending import schedule
from tests.node.core.test_when import change
from tests.node.core.trio import MS, Client, World
from tickwheel.node import core as package
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.part import Part
from tickwheel.node.core.schedule import sweeper as sweeper_module
from tickwheel.node.core.schedule.deleting import ANSWER_MS_MAX
from tickwheel.node.core.schedule.topic_pending import COUNT_PERIOD_MS
from tickwheel.node.core.watch.events import WRITE_PERIOD_MS
from tickwheel.node.core.world import Now
from tickwheel.node.failure import RequestError, not_master
from tickwheel.proto.admin_pb2 import DeleteTopicRequest
from tickwheel.proto.peer_pb2 import PeerFrame, Ping, RecordAnswer
from tickwheel.proto.scheduler_pb2 import BeginSweepRequest, Selection

PARTS_BY_TIME = ("sweeper", "topic_pending", "events", "deleter")


def a_core(world: World) -> NodeCore:
    host = world.nodes["a"].host
    assert host is not None
    return host.core


def test_no_part_is_forgotten() -> None:
    """Each class that is a part is in the core's list, once: else nobody would tell it that its mastership is over."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    parts = [type(part) for part in a_core(World()).parts.ordered]
    assert len(parts) == len(set(parts)) and set(parts) == set(Part.__subclasses__())


def test_all_end_in_order_and_begin_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves the wheel stops first and starts last, whether or not the parts before it have anything to do."""
    told: list[tuple[str, str]] = []

    def noted(part: Part, method: str) -> None:
        original = getattr(part, method)

        def call(*args: object) -> None:
            told.append((method, type(part).__name__))
            original(*args)

        monkeypatch.setattr(part, method, call)

    world = World(names="a")
    core = a_core(world)
    order = [type(part).__name__ for part in core.parts.ordered]
    for part in core.parts.ordered:
        noted(part, "begin")
        noted(part, "end")
    world.run_until(lambda: core.parts.delivery.active)
    assert told == [("begin", name) for name in reversed(order)]
    told.clear()
    core.stop()
    assert told == [("end", name) for name in order]
    assert order[0] == "Dispatcher"


def test_a_tick_of_the_log_alone_leaves_the_parts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master sends heartbeats all the time. Its parts tick when input has come, when one of them wanted it, and when
    the log or the clock has changed what they act by."""
    world = World()
    master = world.elect()
    assert master.host is not None
    core, ticked = master.host.core, list[Now]()
    world.run(2_000)
    monkeypatch.setattr(core.parts.planner, "tick", ticked.append)

    def ticks(*, woken: bool = False) -> bool:
        ticked.clear()
        core.tick(woken=woken)
        return bool(ticked)

    assert ticks(woken=True) and not ticks()
    core.clock.steers += 1
    assert ticks() and not ticks()
    monkeypatch.setattr(core.log, "lease_held", lambda: False)
    assert ticks() and not ticks()
    core.parts.mastership.handing_over = True
    assert ticks() and not ticks()
    core.parts.index_repair.holds_log = True
    assert ticks() and not ticks()
    core.applied.index += 1
    assert ticks() and not ticks()
    monkeypatch.setattr(core.parts.planner, "wait_ms", lambda now: 20)
    assert ticks(woken=True)
    world.now_ns += 18 * MS
    assert not ticks()
    world.now_ns += 2 * MS
    assert ticks()


def test_a_slave_that_stood_still_reads_its_input_before_it_asks_for_an_election() -> None:
    """The log's own time may have come just now while the parts have wanted a tick for long: then the process stood
    still, and heartbeats may be unread."""
    world = World()
    master = world.elect()
    world.run(2_000)
    slave = next(node for node in world.nodes.values() if node is not master)
    assert slave.host is not None
    core = slave.host.core
    engine, stall_ns = core.log.engine, core.log.config.stall_ms * MS  # type: ignore[attr-defined]
    core.tick()
    while (wanted_ns := core.log.tick()) < engine.election_deadline_ns:
        world.now_ns += wanted_ns - core.monotonic_ns()
    core.parts.rests_until_ns = wanted_ns - stall_ns
    world.now_ns += wanted_ns + MS - core.monotonic_ns()
    core.tick()
    assert engine.election_deadline_ns > core.monotonic_ns()


def test_of_an_entry_the_parts_of_a_slave_see_that_it_was_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the frame that brings it, nor its fsync. A frame that concerns parts, or the end of a connection, is for them
    too."""
    world = World()
    master = world.elect()
    assert master.host is not None
    world.run(2_000)
    slave = next(node for node in world.nodes.values() if node is not master)
    assert slave.host is not None
    core, ticks, looks = slave.host.core, list[int](), list[int]()
    tick, monotonic_ns = core.tick, core.monotonic_ns

    def watched_tick(*, woken: bool = True) -> int:
        ticks.append(monotonic_ns())
        return tick(woken=woken)

    monkeypatch.setattr(core, "tick", watched_tick)
    monkeypatch.setattr(core.parts.bulk, "tick", lambda now: looks.append(core.applied.index))
    client = Client(world)
    client.schedule([3_600_000])
    world.run_until(lambda: len(client.acked) == 1)
    world.run(30)
    before = core.applied.index
    ticks.clear()
    looks.clear()
    client.schedule([3_600_000])
    world.run_until(lambda: core.applied.index > before)
    assert looks == [core.applied.index] and len(ticks) >= 3
    looks.clear()
    core.tick(woken=False)
    assert not looks
    core.peer_disconnected("nobody")
    core.tick(woken=False)
    assert looks
    monkeypatch.setattr(core.log, "receive", lambda peer_id, frame: True)
    for frame, seen in ((PeerFrame(ping=Ping()), False), (PeerFrame(record_answer=RecordAnswer()), True)):
        looks.clear()
        assert core.receive(master.name, frame)
        core.tick(woken=False)
        assert bool(looks) is seen


def test_parts_of_a_master_tick_from_its_election_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have nothing to do before, and `end` left them nothing."""
    world = World()
    core, ticked = a_core(world), list[bool]()
    for part in core.parts.ordered:
        if part.of_master:
            monkeypatch.setattr(part, "tick", lambda now: ticked.append(core.parts.mastership.elected))
            monkeypatch.setattr(part, "wait_ms", lambda now: ticked.append(core.parts.mastership.elected))
    world.run_until(lambda: core.parts.mastership.elected or world.master() is not None)
    while not core.parts.mastership.elected:
        other = world.elect()
        other.kill()
        world.run(2_000)
        other.start()
        world.run(100)
    world.run(100)
    assert ticked and all(ticked)


def now_of(core: NodeCore) -> Now:
    """The moment as its parts see it."""
    return core._now(core.monotonic_ns())


def test_what_acts_by_time_says_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts do not rely on ticks that others want: a failed step of a sweep, a count of what is pending, events to be
    written, and callers who wait for a deletion."""

    async def failing(_: object) -> None:
        raise RequestError(not_master(None, None))

    world = World(names="a", config=replace(CoreConfig(), segment_bytes=1 << 20, events_bytes_max=1 << 20))
    master = world.elect()
    core = a_core(world)
    sweeper, counting, events, deleter = (getattr(core.parts, name) for name in PARTS_BY_TIME)
    change(master, topic_pending_max="*=50")
    schedule(world, [("t", 60_000, "k", [])])
    world.run_until(lambda: counting.counted)
    world.run(1_000)
    assert [getattr(core.parts, name).wait_ms(now_of(core)) for name in PARTS_BY_TIME] == [None] * 4

    monkeypatch.setattr(sweeper_module._Step, "run", failing)
    request = BeginSweepRequest(job_id="j", selection=Selection(topic="t"), cancel=True)
    core.serving.start(sweeper.begin_sweep(request), lambda _: None)
    core.serving.start(deleter.topic(DeleteTopicRequest(name="t", cancel_pending=True)), lambda _: None)
    master.wake()
    world.run_until(lambda: sweeper.failures == 2)
    now = now_of(core)
    assert 0 < sweeper.wait_ms(now) <= sweeper_module.RETRY_MS
    assert sweeper_module.RETRY_MS < deleter.wait_ms(now) <= ANSWER_MS_MAX

    world.run(1_000)
    for key in "kl":  # the first is written at once
        schedule(world, [("u", 60_000, key, [])])
    assert 0 < events.wait_ms(now_of(core)) <= WRITE_PERIOD_MS

    counting.spoil()
    master.wake()
    world.run_until(lambda: counting.counted)
    counting.spoil()
    wait_ms = counting.wait_ms(now_of(core))
    assert 0 < wait_ms <= COUNT_PERIOD_MS
    world.run(WRITE_PERIOD_MS + wait_ms)
    assert counting.counted and counting.wait_ms(now_of(core)) is None and events.wait_ms(now_of(core)) is None
