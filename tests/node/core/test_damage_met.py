"""Damage that a master meets in its files while it serves: another leads first, then the node stops and says why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.node.core.test_serving import contain
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.dispatcher import Phase
from tickwheel.node.failure import Failure
from tickwheel.storage.blocks import BLOCK_BYTES
from tickwheel.storage.errors import ADVICE, CorruptFileError

COUNT = 2_000
"""Ids of more than one block: the first is read from the file after a restart."""


def restarted_with_ready_messages(names: str) -> tuple[World, Client]:
    """A cluster that has dispatched messages to nobody, has them in a checkpoint, and was started anew."""
    world = World(names=names)
    client = Client(world)
    master = world.elect()
    world.run_until(lambda: master.host is not None and master.host.core.parts.dispatcher.phase is Phase.RUNNING)
    for _ in range(4):
        client.schedule([10] * (COUNT // 4))
    world.run_until(lambda: len(client.acked) == COUNT)
    world.run(500)
    for node in world.nodes.values():
        assert node.host is not None
        taken: list[object] = []
        node.host.core.checkpointer.request(Reply.either(taken.append))
        node.wake()
        world.run_until(lambda: bool(taken))  # noqa: B023  # called within the round
        assert not isinstance(taken[0], str)
    for node in world.nodes.values():
        node.kill()
    for node in world.nodes.values():
        node.start()
    contain(world)
    world.elect()
    return world, client


def spoil(node: Node) -> str:
    """A byte of the first block of the topic's ready ids; the path."""
    path = next(f"state/ready/{name}" for name in node.disk.list("state/ready") if name.endswith(".ids.0"))
    file = node.disk.open(path)
    assert file.size() > BLOCK_BYTES
    byte = file.read_at(100, 1)
    file.write_at(100, bytes([byte[0] ^ 0x10]))
    file.close()
    return path


def test_a_master_hands_over_before_it_stops() -> None:
    """A consumer asks for what is damaged: the next master leads by a handover, and delivers all of it."""
    world, client = restarted_with_ready_messages("abc")
    master = world.elect()
    assert master.host is not None
    term = master.host.core.term
    path = spoil(master)
    led: list[str] = []

    def stopped(reason: str) -> None:
        led.extend(
            n.name for n in world.nodes.values() if n is not master and n.host and n.host.core.parts.mastership.elected
        )
        Node._on_fatal(master, reason)

    master.host._on_fatal = stopped
    client.consume()
    world.run_until(lambda: bool(master.fatal))
    assert led, "nobody led yet when it stopped"
    assert path in master.fatal and "Remove the member and add it anew" in master.fatal
    following = world.elect()
    assert following.host is not None and following.host.core.term == term + 1
    world.run_until(lambda: not client.lost(), 20_000)


def break_apply(monkeypatch: pytest.MonkeyPatch, node: Node) -> list[int]:
    """From now on a dispatch is applied by half: then a file turns out to be damaged. The entries that met it."""
    assert node.host is not None
    core = node.host.core
    dispatch, met = core.state._dispatch, list[int]()
    pump = core.background.pump

    def watched(*now: Any) -> None:
        assert not core.serving.stuck, "a tick goes on with a half applied state"
        pump(*now)

    monkeypatch.setattr(core.background, "pump", watched)

    def broken(*command: Any) -> Any:
        dispatch(*command)
        met.append(core.state.applied_index)
        raise CorruptFileError("state/ready/1.ids.0", 4_096, "a block does not match its checksum", ADVICE)

    monkeypatch.setattr(core.state, "_dispatch", broken)
    return met


def test_damage_met_by_apply_lets_another_lead_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry does not count as applied, nothing reads the half applied state, and nothing comes twice."""
    world = World(31)
    client = Client(world)
    master = world.elect()
    client.consume()
    client.schedule([200, 300])
    world.run_until(lambda: len(client.acked) == 2 and not client.lost())
    assert master.host is not None
    core, term = master.host.core, master.host.core.term
    contain(world)
    others = [node for node in world.nodes.values() if node is not master]
    led: list[bool] = []

    def stopped(reason: str) -> None:
        led.append(any(n.host is not None and n.host.core.parts.mastership.elected for n in others))
        Node._on_fatal(master, reason)

    master.host._on_fatal = stopped
    before = client.count
    met = break_apply(monkeypatch, master)
    client.schedule([100, 110])
    world.run_until(lambda: bool(met))
    assert core.applied.index < met[0] and len(met) == 1
    answers: list[object] = []
    core.serving.run(answers.append, lambda: answers.append("served"))
    assert [type(answer) for answer in answers] == [Failure] and not core.may_act()
    world.run_until(lambda: bool(master.fatal), 2_000)
    assert led == [True] and len(met) == 1 and core.applied.index < met[0]
    assert f"log entry {met[0]} could not be applied" in master.fatal and "Remove the member" in master.fatal
    following = world.elect()
    assert following.host is not None and following.host.core.term == term + 1
    world.run_until(lambda: len(client.acked) == before + 2 and not client.lost(), 20_000)
    assert not client.repeated()


def test_a_tick_that_applies_at_its_end_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master's tick drives its log twice: what follows the second time does not see a half applied state, either."""
    world = World(33)
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    break_apply(monkeypatch, master)
    tick, calls = core.log.tick, list[int]()

    def second_fails(asked_ns: int | None = None) -> int:
        calls.append(1)
        if len(calls) == 2:
            core.serving.stuck = "log entry 9 could not be applied"
        return tick(asked_ns)

    monkeypatch.setattr(core.log, "tick", second_fails)
    core.tick()
    assert len(calls) == 2
    world.run_until(lambda: bool(master.fatal), 2_000)


@pytest.mark.parametrize("leads", [True, False])
def test_damage_met_by_apply_without_a_handover(leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, or as a slave: it stops at once."""
    world = World(32, names="a" if leads else "abc")
    client = Client(world)
    master = world.elect()
    node = master if leads else next(n for n in world.nodes.values() if n is not master)
    contain(world)
    met = break_apply(monkeypatch, node)
    client.consume()
    client.schedule([100])
    world.run_until(lambda: bool(node.fatal), 2_000)
    assert len(met) == 1 and f"log entry {met[0]} could not be applied" in node.fatal
    if not leads:
        world.run_until(lambda: not client.lost(), 20_000)
        assert world.master() is master


def test_alone_it_stops_at_once() -> None:
    """There is nobody to hand over to."""
    world, client = restarted_with_ready_messages("a")
    master = world.elect()
    path = spoil(master)
    client.consume()
    world.run_until(lambda: bool(master.fatal), 2_000)
    assert path in master.fatal


def test_a_slave_that_meets_it_stops_and_the_master_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked the slave is told that this request failed; the cluster has a majority."""
    world, client = restarted_with_ready_messages("abc")
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    assert slave.host is not None
    path = spoil(slave)
    core = slave.host.core
    ready = core.state.ready_log(int(path.rpartition("/")[2].partition(".")[0]))
    assert ready is not None
    failed: list[object] = []

    def asked() -> None:
        ready.read(0, 10)

    core.serving.run(failed.append, asked)
    world.run_until(lambda: bool(slave.fatal), 2_000)
    assert failed and path in slave.fatal
    client.consume()
    world.run_until(lambda: not client.lost(), 20_000)
    assert world.master() is master
