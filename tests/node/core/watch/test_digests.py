"""Digests take time in proportion to the state: they are made in turns, shared, and leave the log its time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.node.core.test_serving import contain
from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.promise import UNHEARD
from tickwheel.node.core.watch.digests import PAUSE_FACTOR, PAUSE_MS_MAX
from tickwheel.node.failure import Failure
from tickwheel.node.state import digest, groups
from tickwheel.node.state.groups import WAITING, WaitingRetries
from tickwheel.proto import common_pb2
from tickwheel.proto.admin_pb2 import CreateGroupRequest, StateDigest
from tickwheel.proto.log_pb2 import AdminCommand, Command
from tickwheel.wheel import engine


def ask(node: Node, answers: list[Any]) -> None:
    """GetDigest at a node."""
    assert node.host is not None
    core = node.host.core
    core.serving.run(answers.append, lambda: core.serving.start(core.parts.digests.get(), answers.append))
    node.wake()


def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small state takes many."""
    for name in ("TURN_TOPICS", "TURN_GROUPS", "TURN_SUBSCRIPTIONS"):
        monkeypatch.setattr(digest, name, 1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Some topics and groups."""
    small_turns(monkeypatch)
    world = World(17)
    master = world.elect()
    assert master.host is not None
    names = [f"t{number}" for number in range(10)]
    for number in range(5):
        command = AdminCommand(create_group=CreateGroupRequest(name=f"g{number}", topics=names))
        master.host.core.proposer.submit(Command(admin=command), UNHEARD)
    master.wake()
    world.run(200)
    assert len(master.host.core.state.topics) >= len(names)
    return world


def slowly(world: World, node: Node, monkeypatch: pytest.MonkeyPatch, turn_ms: int = 5) -> list[int]:
    """Each turn of this node's digests is a tick's distance from the one before. The list gets the turns of each."""
    assert node.host is not None
    state, made = node.host.core.state, list[int]()
    in_turns = state.digest_in_turns

    def counted() -> Any:
        made.append(0)
        turns = in_turns()
        until_ns = 0
        while True:
            if world.now_ns < until_ns:
                yield
                continue
            try:
                next(turns)
            except StopIteration as complete:
                return complete.value
            made[-1] += 1
            until_ns = world.now_ns + turn_ms * 1_000_000
            yield

    monkeypatch.setattr(state, "digest_in_turns", counted)
    return made


def test_a_digest_is_of_one_entry_while_the_log_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in dozens of turns with messages scheduled, delivered and settled all the time, it is the one that the state
    had at its entry; heartbeats go on, so the master stays, and nothing is applied in between."""
    client = Client(world)
    client.consume()
    master = world.elect()
    assert master.host is not None
    core = master.host.core
    made, term = slowly(world, master, monkeypatch), core.term
    whole = {core.state.applied_index: core.state.digest().digest}
    apply = core.state.apply

    def noted(*entry: Any) -> Any:
        result = apply(*entry)
        whole[core.state.applied_index] = core.state.digest().digest
        return result

    monkeypatch.setattr(core.state, "apply", noted)
    answers: list[StateDigest] = []
    for _ in range(120):
        if len(made) < 2 and not core.parts.digests.making:
            ask(master, answers)
        client.schedule([100, 300])
        world.run(20)
    world.run_until(lambda: len(answers) >= 2)
    assert len(made) >= 2 and min(made) > 50
    assert [answer.digest for answer in answers] == [whole[answer.applied_index] for answer in answers]
    assert world.master() is master and core.term == term
    world.run(1_000)
    assert len(client.acked) >= 240 and not client.lost() and not client.repeated()


def test_callers_share_one_that_is_not_older_than_their_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks while one is made gets the next one."""
    client, node = Client(world), world.elect()
    made = slowly(world, node, monkeypatch)
    first: list[StateDigest] = []
    for _ in range(50):
        ask(node, first)
    world.run(20)
    assert node.host is not None and node.host.core.parts.digests.making
    client.schedule([100])
    later: list[StateDigest] = []
    ask(node, later)
    world.run_until(lambda: bool(later))
    assert len(first) == 50 and len(made) == 2
    assert {answer.applied_index for answer in first} == {first[0].applied_index}
    assert later[0].applied_index > first[0].applied_index and client.acked


def test_there_is_a_pause_after_each(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has 19 times as long for itself as a digest held it up, up to a bound."""
    node = world.elect()
    for turn_ms in (0, 1, 20):
        with monkeypatch.context() as patch:
            slowly(world, node, patch, turn_ms)
            world.run(PAUSE_MS_MAX)
            answers: list[StateDigest] = []
            ask(node, answers)
            begun_ms = world.now_ms
            world.run_until(lambda: bool(answers), 60_000)  # noqa: B023  # called within the round
            took_ms = world.now_ms - begun_ms
            ask(node, answers)
            begun_ms = world.now_ms
            digests = node.host.core.parts.digests  # type: ignore[union-attr]
            world.run_until(lambda: digests.making or len(answers) == 2, 60_000)  # noqa: B023
            paused_ms = world.now_ms - begun_ms
            assert abs(paused_ms - min(PAUSE_FACTOR * took_ms, PAUSE_MS_MAX)) <= 6 * PAUSE_FACTOR
            world.run_until(lambda: len(answers) == 2, 60_000)  # noqa: B023


def test_a_mistake_fails_those_who_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a fault of its own; the log goes on, and the next digest is made."""
    contain(world)
    node, client = world.elect(), Client(world)
    assert node.host is not None

    def broken() -> Any:
        yield
        raise RuntimeError("on purpose")

    answers: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(node.host.core.state, "digest_in_turns", broken)
        ask(node, answers)
        ask(node, answers)
        world.run_until(lambda: len(answers) == 2)
    assert [answer.reason for answer in answers] == [common_pb2.NODE_FAULT] * 2
    ask(node, answers)
    client.schedule([100])
    world.run_until(lambda: len(answers) == 3 and bool(client.acked))
    assert isinstance(answers[2], StateDigest)


def test_a_stopped_node_answers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is told so."""
    node = world.elect()
    assert node.host is not None
    slowly(world, node, monkeypatch)
    answers: list[Any] = []
    ask(node, answers)
    world.run(20)
    ask(node, answers)
    node.host.core.stop()
    assert [type(answer) for answer in answers] == [Failure] * 2


def test_a_core_that_has_stopped_refuses(world: World) -> None:
    """A stopped core still takes requests while a peer's checkpoint waits to be installed. Nothing makes its digests
    any more."""
    node = world.elect()
    assert node.host is not None
    node.host.core.stop()
    answers: list[Any] = []
    ask(node, answers)
    assert [answer.reason for answer in answers] == [common_pb2.RECOVERING]


def longest_turn(turns: Any, monkeypatch: pytest.MonkeyPatch, module: Any) -> int:
    """Most bytes that any turn hashed."""
    most = now = 0
    sha256 = module.hashlib.sha256

    class Counting:
        def __init__(self, data: bytes = b"") -> None:
            self._sha = sha256()
            self.update(data)

        def update(self, data: bytes) -> None:
            nonlocal now
            now += len(data)
            self._sha.update(data)

        def digest(self) -> bytes:
            return bytes(self._sha.digest())

    monkeypatch.setattr(module, "hashlib", SimpleNamespace(sha256=Counting))
    for _ in turns:
        most, now = max(most, now), 0
    return max(most, now)


def test_a_turn_hashes_little_however_many_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks of cancelled messages lie in one array for each hour."""
    wheel = World(3).elect().host.core.wheel  # type: ignore[union-attr]
    for hour in range(20):
        wheel.marks._sorted[1_000_000 + hour] = np.arange(100_000, dtype=np.uint32)
    wheel.marks.count = 2_000_000
    assert longest_turn(wheel.digest_in_turns(), monkeypatch, engine) < 3 * engine.DIGEST_TURN_BYTES


def test_a_turn_hashes_little_however_many_retries_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows in few groups."""
    rows = digest.TURN_BYTES // WAITING.itemsize
    content = bytes(rows * WAITING.itemsize)
    few = [
        SimpleNamespace(
            group_id=number,
            name="g",
            filter="",
            broadcasting=False,
            paused=False,
            retry=None,
            dead=SimpleNamespace(digest=lambda: b""),
            waiting=WaitingRetries(content),
        )
        for number in range(10)
    ]
    state: Any = SimpleNamespace(groups=_Groups(few))
    assert longest_turn(digest._groups(state), monkeypatch, groups) < 2 * digest.TURN_BYTES


class _Groups(list[Any]):
    last_id = 10
