"""The cold tier on three nodes: cancels and moves by cold id before, during and after parts are loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.node.core import trio
from tests.node.core.loading import Loader, admin, begin, bundle_of, settle_down, start
from tests.node.core.trio import EPOCH_MS, MS, Client, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.promise import UNHEARD, Promise
from tickwheel.node.core.schedule.intake import KIND_DUE
from tickwheel.node.core.watch.status import node_status
from tickwheel.node.failure import Failure
from tickwheel.node.state import cold
from tickwheel.node.state.cold_parts import cold_id
from tickwheel.node.state.results import RescheduleResult
from tickwheel.proto import admin_pb2, bulk_pb2, cold_pb2, common_pb2, scheduler_pb2
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.storage import bundle
from tickwheel.storage.unit import UNIT
from tickwheel.wheel.units import HOUR_MS

DAY_MS = 86_400_000


@pytest.fixture
def world() -> Iterator[World]:
    """Three nodes with the topic and a group; cold messages may be moved to any time."""
    made = World()
    ready(made)
    yield made
    assert not any(node.fatal for node in made.nodes.values())


def ready(world: World) -> None:
    begin(world)
    admin(world, AdminCommand(settings=admin_pb2.Settings(cold_lead_ms=0)))


Call = Callable[[NodeCore], Coroutine[Promise[Any], None, Any]]
"""Makes a request of a core."""


def ask(world: World, call: Call) -> Any:
    """The master's answer."""
    answers: list[Any] = []
    master = world.elect()
    assert master.host is not None
    master.host.core.serving.start(call(master.host.core), answers.append)
    master.wake()
    world.run_until(lambda: bool(answers))
    return answers[0]


def insist(world: World, call: Call) -> Any:
    """As a client does: repeated while the answer is that it should be."""
    for _ in range(400):
        answer = ask(world, call)
        if not isinstance(answer, Failure):
            return answer
        assert answer.reason in (common_pb2.OUTCOME_UNKNOWN, common_pb2.NO_MASTER, common_pb2.NOT_MASTER), answer
        world.run(50)
    raise AssertionError(answer)


class Part:
    """One part: its bundle, and its messages by record."""

    def __init__(self, due_ms: list[int], tag: str) -> None:
        self.data, self.due = bundle_of(due_ms, tag)
        self.records = list(self.due)
        self.number = 0

    def id(self, row: int) -> int:
        return cold_id(self.number, row)


def registration(parts: list[Part], job_id: str = "freeze") -> cold_pb2.RegisterColdRequest:
    lists = [sorted(part.due.values()) for part in parts]
    columns = cold_pb2.ColdColumns(
        days=np.array([due[0] // DAY_MS for due in lists], "<u4").tobytes(),
        rows=np.array([len(due) for due in lists], "<u4").tobytes(),
        due_min_ms=np.array([due[0] for due in lists], "<i8").tobytes(),
        due_max_ms=np.array([due[-1] for due in lists], "<i8").tobytes(),
        sha256=b"".join(hashlib.sha256(part.data).digest() for part in parts),
    )
    sha = hashlib.sha256(columns.SerializeToString(deterministic=True)).hexdigest()
    return cold_pb2.RegisterColdRequest(job_id=job_id, sha256=sha, parts=columns)


def register(world: World, parts: list[Part], job_id: str = "freeze") -> None:
    """Make parts known; they get their numbers."""
    job: cold_pb2.ColdJob = insist(world, lambda core: core.parts.cold.register(registration(parts, job_id)))
    for place, part in enumerate(parts):
        part.number = job.first_part + place


class ColdLoader(Loader):
    """Loads one bundle of the cold tier."""

    def __init__(self, world: World, data: bytes, load: cold_pb2.ColdLoad) -> None:
        super().__init__(world, [data], f"cold-{load.part}")
        self.cold = load

    def request(self, place: int) -> bulk_pb2.TakeOverRequest:
        request = super().request(place)
        request.cold.CopyFrom(self.cold)
        return request


def load_part(world: World, part: Part, late: int | None = None) -> bulk_pb2.LoadState:
    return ColdLoader(world, part.data, cold_pb2.ColdLoad(part=part.number, late=late)).load()


def load_moved(world: World, parts: list[Part]) -> bulk_pb2.LoadState | None:
    """All that was moved and waits, as one bundle."""
    page: cold_pb2.ColdMoved = insist(
        world, lambda core: core.parts.cold.moved(cold_pb2.ListColdMovedRequest(due_below_ms=1 << 60))
    )
    ids, due = np.frombuffer(page.ids, "<u8"), np.frombuffer(page.due_ms, "<i8")
    if not len(ids):
        return None
    order = np.argsort(due, kind="stable")
    by_id = {part.id(row): record for part in parts for row, record in enumerate(part.records)}
    data = moved_bundle([by_id[number] for number in ids[order].tolist()], due[order].tolist())
    load = cold_pb2.ColdLoad(ids=ids[order].tobytes(), due_ms=due[order].tobytes())
    return ColdLoader(world, data, load).load()


def moved_bundle(records: list[bytes], due_ms: list[int]) -> bytes:
    units = np.zeros(len(records), UNIT)
    units["due_requested_ms"] = due_ms
    units["size"] = [len(record) for record in records]
    return b"".join(bundle.build(units, b"".join(records), slot_ms=1_000, topics=1))


def cancel(world: World, number: int) -> int:
    outcome: int = insist(world, lambda core: core.parts.requests.cancel(number))
    return outcome


def move(world: World, number: int, due_ms: int) -> RescheduleResult:
    moved: RescheduleResult = insist(world, lambda core: core.parts.requests.reschedule(number, due_ms, KIND_DUE))
    return moved


def test_cancels_and_moves_before_the_load_hold_after_it(world: World) -> None:
    """A cancelled message never comes, a moved one comes at its new time alone, loading again adds nothing."""
    client = Client(world)
    client.consume()
    now_ms = world.now_ms
    part = Part([now_ms + 3_000 + 100 * n for n in range(20)], "p")
    register(world, [part])
    assert cancel(world, part.id(3)) == cancel(world, part.id(3)) == scheduler_pb2.CANCELLED
    nearer = move(world, part.id(4), now_ms + 1_500)
    assert (nearer.outcome, nearer.new_id) == (scheduler_pb2.RESCHEDULED, part.id(4))
    move(world, part.id(5), now_ms + 9_000)
    assert move(world, part.id(3), now_ms + 9_000).outcome == scheduler_pb2.RESCHEDULE_CANCELLED
    assert load_moved(world, [part]) is not None
    assert load_part(world, part).units == 17
    assert load_part(world, part).units == 0
    assert load_moved(world, [part]) is None
    world.run(12_000)
    wanted = dict(part.due)
    del wanted[part.records[3]]
    wanted |= {part.records[4]: now_ms + 1_500, part.records[5]: now_ms + 9_000}
    assert client.got.keys() == wanted.keys() and not client.repeated()
    for record, seen in client.got.items():
        assert 0 <= seen[0][0] - wanted[record] < 60
    assert cancel(world, part.id(4)) == scheduler_pb2.ALREADY_DISPATCHED
    assert cancel(world, part.id(3)) == scheduler_pb2.CANCELLED
    settle_down(world)
    for node in world.nodes.values():
        assert node.host is not None and node.host.core.wheel.pending == 0


def test_after_the_load_a_cold_id_means_the_loaded_message(world: World) -> None:
    """Cancel, move and look-up by it act on that; unknown ids are told from cold ones."""
    client = Client(world)
    now_ms = world.now_ms
    part, far = Part([now_ms + 4_000 + n for n in range(10)], "p"), Part([now_ms + DAY_MS], "f")
    register(world, [part, far])

    def state_of(number: int) -> int:
        response: scheduler_pb2.GetResponse = insist(world, lambda core: core.parts.requests.get(number, True))
        return response.state

    assert state_of(part.id(0)) == scheduler_pb2.COLD
    load_part(world, part)
    assert state_of(part.id(0)) == scheduler_pb2.PENDING
    assert state_of(far.id(0)) == scheduler_pb2.COLD
    assert cancel(world, part.id(2)) == scheduler_pb2.CANCELLED
    assert state_of(part.id(2)) == scheduler_pb2.MESSAGE_CANCELLED
    moved = move(world, part.id(3), now_ms + 6_000)
    assert moved.outcome == scheduler_pb2.RESCHEDULED and moved.new_id != part.id(3)
    assert cancel(world, part.id(10)) == cancel(world, cold_id(77, 0)) == scheduler_pb2.NOT_FOUND
    refusal = Failure(common_pb2.RIGHT_REQUIRED, "not yours")
    asked: list[str] = []

    def only_ours(topic: str) -> Failure | None:
        asked.append(topic)
        return None if topic == "t" else refusal

    assert ask(world, lambda core: core.parts.requests.cancel(far.id(0), only_ours)) is refusal
    assert (
        ask(world, lambda core: core.parts.requests.reschedule(far.id(0), now_ms + DAY_MS, KIND_DUE, only_ours))
        is refusal
    )
    assert ask(world, lambda core: core.parts.requests.get(far.id(0), True, only_ours)) is refusal
    assert asked == [""] * 3, "no topic before the load: the right to every one"
    assert insist(world, lambda core: core.parts.requests.cancel(part.id(4), only_ours)) == scheduler_pb2.CANCELLED
    assert asked[3:] == ["t"]
    failure = ask(world, lambda core: core.parts.requests.get(cold_id(77, 0), True))
    assert isinstance(failure, Failure) and failure.reason == common_pb2.UNKNOWN_NAME
    client.consume()
    world.run(8_000)
    assert client.got.keys() == part.due.keys() - {part.records[2], part.records[4]}
    assert client.got[part.records[3]][0][0] >= now_ms + 6_000
    settle_down(world)


def test_what_is_loaded_late_comes_at_once_in_order_and_is_counted(world: World) -> None:
    """Status warns before, alarms when it is past, and keeps the count; cancels still hold then."""
    client = Client(world)
    client.schedule([10])
    client.consume()
    world.run(200)
    admin(world, AdminCommand(settings=admin_pb2.Settings(cold_lead_ms=DAY_MS)))

    def status() -> admin_pb2.ColdStatus:
        master = world.elect()
        assert master.host is not None
        return node_status(master.host.core).cold

    assert status().state == admin_pb2.COLD_EMPTY
    later = Part([world.now_ms + 3 * DAY_MS], "z")
    register(world, [later], "later")
    assert status().state == admin_pb2.COLD_IN_TIME and status().next_due_ms == later.due[later.records[0]]
    soon = Part([world.now_ms + 60_000], "s")
    register(world, [soon], "soon")
    assert (status().state, status().messages, status().parts) == (admin_pb2.COLD_DUE_SOON, 2, 2)
    admin(world, AdminCommand(settings=admin_pb2.Settings(cold_lead_ms=1_000)))
    assert status().state == admin_pb2.COLD_BEHIND
    admin(world, AdminCommand(settings=admin_pb2.Settings(cold_warn_ms=1_000)))
    assert status().state == admin_pb2.COLD_IN_TIME
    admin(world, AdminCommand(settings=admin_pb2.Settings(cold_lead_ms=DAY_MS)))
    times = [EPOCH_MS - HOUR_MS * (16 - n) // 4 for n in range(16)] + [EPOCH_MS + n for n in range(4)]
    part = Part([*times, EPOCH_MS + HOUR_MS], "p")
    register(world, [part], "late")
    late = status()
    assert late.state == admin_pb2.COLD_LATE and late.late_ms >= 4 * HOUR_MS
    failure = ask(
        world,
        lambda core: core.parts.requests.reschedule(part.id(0), world.now_ms + HOUR_MS, KIND_DUE),
    )
    assert isinstance(failure, Failure) and failure.metadata["field"] == "due_ms"
    cancel(world, part.id(7))
    refused = ColdLoader(world, part.data, cold_pb2.ColdLoad(part=part.number, late=22)).ask(0)
    world.run_until(lambda: bool(refused))
    assert isinstance(refused[0], Failure) and refused[0].metadata["field"] == "cold.late"
    load_part(world, part, late=20)
    world.run(500)
    wanted = [record for record in part.records[:-1] if record != part.records[7]]
    assert [record for record in client.got if record in part.due] == wanted
    after = status()
    assert after.state == admin_pb2.COLD_DUE_SOON and after.loaded_late == len(wanted) == 19
    assert 4 * HOUR_MS <= after.loaded_late_ms_max < world.now_ms - times[0]
    old = Part(times, "o")
    register(world, [old], "of-an-earlier-version")
    load_part(world, old)
    assert status().loaded_late == 19 + 16
    settle_down(world)


def test_a_job_is_registered_once_and_nonsense_never(world: World) -> None:
    """The same job answers the same numbers, other content under its name is refused; wrong columns name the field."""
    part = Part([world.now_ms + DAY_MS], "p")
    register(world, [part])
    again: cold_pb2.ColdJob = insist(world, lambda core: core.parts.cold.register(registration([part])))
    assert again.repeated and again.first_part == part.number
    other = registration([Part([world.now_ms + DAY_MS + 1], "q")])
    failure = ask(world, lambda core: core.parts.cold.register(other))
    assert isinstance(failure, Failure) and failure.reason == common_pb2.NAME_TAKEN
    for name, value in (("rows", b"123"), ("sha256", b""), ("days", bytes(4)), ("rows", bytes(4))):
        wrong = registration([part], "wrong")
        setattr(wrong.parts, name, value)
        failure = ask(world, lambda core, wrong=wrong: core.parts.cold.register(wrong))  # type: ignore[misc]
        assert isinstance(failure, Failure) and failure.reason == common_pb2.INVALID_FIELD, (name, failure)
    for load in (
        cold_pb2.ColdLoad(part=9),
        cold_pb2.ColdLoad(part=0),
        cold_pb2.ColdLoad(ids=bytes(8)),
        cold_pb2.ColdLoad(ids=bytes(16), due_ms=bytes(16)),
    ):
        loader = ColdLoader(world, part.data, load)
        loader.send_all()
        answers = loader.ask(0)
        world.run(200)
        assert answers and (isinstance(answers[0], Failure) or answers[0].units == 0), load
    settle_down(world)


def test_marks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit a cancel is refused and nothing is changed; what has a mark can still be changed."""
    monkeypatch.setattr(cold.ColdTier.__init__, "__defaults__", (3,))
    world = World()
    ready(world)
    part = Part([world.now_ms + 5_000 + n for n in range(9)], "p")
    register(world, [part])
    for row in range(3):
        move(world, part.id(row), world.now_ms + 9_000)
    failure = ask(world, lambda core: core.parts.requests.cancel(part.id(5)))
    assert isinstance(failure, Failure) and failure.reason == common_pb2.LIMIT_REACHED
    assert cancel(world, part.id(0)) == scheduler_pb2.CANCELLED
    load_part(world, part)
    assert cancel(world, part.id(5)) == scheduler_pb2.CANCELLED
    settle_down(world)


def test_a_checkpoint_carries_the_cold_tier(world: World) -> None:
    """Parts, marks and where loaded messages are outlive a restart from checkpoints, on every node alike."""
    now_ms = world.now_ms
    one, two = Part([now_ms + 20_000 + n for n in range(50)], "a"), Part([now_ms + 21_000 + n for n in range(50)], "b")
    register(world, [one, two])
    for row in range(5):
        cancel(world, one.id(row))
        cancel(world, two.id(row))
        move(world, two.id(10 + row), now_ms + 22_000 + row)
    load_part(world, one)
    settle_down(world)
    for node in world.nodes.values():
        assert node.host is not None
        node.host.core.checkpointer.request(UNHEARD)
    world.run(500)
    for node in list(world.nodes.values()):
        node.kill()
    for node in world.nodes.values():
        node.start()
    settle_down(world)
    assert cancel(world, one.id(7)) == scheduler_pb2.CANCELLED
    assert cancel(world, one.id(0)) == scheduler_pb2.CANCELLED
    assert load_part(world, one).units == 0
    assert load_part(world, two).units == 40
    load_moved(world, [one, two])
    client = Client(world)
    client.consume()
    world.run(25_000)
    wanted = {r for n, r in enumerate(one.records) if n not in (0, 1, 2, 3, 4, 7)} | set(two.records[5:])
    assert client.got.keys() == wanted
    settle_down(world)


def test_a_part_is_forgotten_with_its_hours_and_what_was_moved_beyond_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of parts and marks is bounded by what waits; forgotten is not unloaded: a repeat brings nothing again,
    and a message that was moved to a later hour still comes, once. On every node, and from a checkpoint too."""
    monkeypatch.setattr(trio, "EPOCH_MS", 500_000 * HOUR_MS - 14_000)
    config = replace(
        CoreConfig(), segment_bytes=1 << 20, retention_period_ms=500, hours_kept=0, checkpoint_period_ms=2_000
    )
    world = World(config=config)
    ready(world)
    client = Client(world)
    client.consume()
    now_ms = world.now_ms
    gone, stays = Part([now_ms + 5_000 + n for n in range(30)], "g"), Part([now_ms + 3 * DAY_MS], "s")
    register(world, [gone], "one")
    register(world, [stays], "two")
    cancel(world, gone.id(0))
    move(world, gone.id(2), now_ms + 6_000)
    load_moved(world, [gone])
    move(world, gone.id(1), now_ms + 45_000)
    load_part(world, gone)
    assert now_ms + 45_000 > 500_000 * HOUR_MS > world.now_ms
    for _ in range(3):
        client.schedule([6_000])
        world.run(8_000)
    assert client.got.keys() >= set(gone.records[2:])

    def known(core: NodeCore) -> tuple[list[int], int, int]:
        cold = core.state.cold
        return [part.number for part in cold.parts], cold.parts.last, len(cold.marks)

    for again in range(2):
        settle_down(world)
        for node in world.nodes.values():
            assert node.host is not None and known(node.host.core) == ([stays.number], 2, 1), again
            if not again:
                node.kill()
                node.start()
    for row in (0, 2, 3):
        assert cancel(world, gone.id(row)) == scheduler_pb2.NOT_FOUND
    assert load_part(world, gone).units == 0
    world.run(500)
    assert all(len(deliveries) == 1 for deliveries in client.got.values()) and gone.records[1] not in client.got
    assert load_moved(world, [gone]) is not None
    world.run(now_ms + 46_000 - world.now_ms)
    assert [at_ms >= now_ms + 45_000 for at_ms, *_ in client.got[gone.records[1]]] == [True]
    assert not client.got.keys() & {gone.records[0], stays.records[0]}
    settle_down(world)


@pytest.mark.parametrize("seed", range(5))
def test_no_answer_is_overtaken_by_a_load(seed: int) -> None:
    """Cancels and moves race the loading of their parts while nodes lose power: whatever was answered holds."""
    rng = Random(seed)
    world = World(seed)
    ready(world)
    client = Client(world)
    client.consume()
    now_ms = world.now_ms
    parts = [Part([now_ms + 20_000 + rng.randrange(2_000) for _ in range(40)], f"p{n}-") for n in range(3)]
    register(world, parts)
    answers: dict[bytes, list[tuple[str, object]]] = {}

    def act() -> None:
        part, row = rng.choice(parts), rng.randrange(40)
        record = part.records[row]
        master = world.master()
        if master is None or master.host is None:
            return
        core, log = master.host.core, answers.setdefault(record, [])
        if rng.random() < 0.5:
            core.serving.start(core.parts.requests.cancel(part.id(row)), lambda result: log.append(("cancel", result)))
        else:
            due_ms = now_ms + 24_000 + rng.randrange(3_000)
            moving = core.parts.requests.reschedule(part.id(row), due_ms, KIND_DUE)
            core.serving.start(moving, lambda result: log.append(("move", result)))
        master.wake()

    def harm() -> None:
        up = [node for node in world.nodes.values() if node.host is not None]
        if len(up) == 3:
            victim = rng.choice(up)
            victim.kill()
            world.at(world.now_ns + rng.choice([5, 300, 2_000]) * MS, lambda: start(victim))

    for _ in range(150):
        world.at(world.now_ns + rng.randrange(3_000) * MS, act)
    for _ in range(3):
        world.at(world.now_ns + rng.randrange(3_000) * MS, harm)
    bundles = [(part.data, cold_pb2.ColdLoad(part=part.number)) for part in parts]
    for data, load in [*bundles, rng.choice(bundles)]:
        loader = ColdLoader(world, data, load)
        answer: object = None
        while not isinstance(answer, bulk_pb2.LoadState):
            world.run_until(lambda: world.master() is not None, 20_000)
            for name in "abc":
                if world.nodes[name].host is not None:
                    loader.send(world.nodes[name], data)
            given = loader.ask(0)
            world.run(rng.choice([1, 3, 10, 40, 100]))
            answer = given[0] if given else None
        world.run(rng.randrange(600))
    world.run(4_000)
    for node in world.nodes.values():
        start(node)
    world.run(2_000)
    load_moved(world, parts)
    world.run(30_000)
    settle_down(world)
    cancelled = {
        record
        for record, given in answers.items()
        if any(kind == "cancel" and result == scheduler_pb2.CANCELLED for kind, result in given)
    }
    unsure = {record for record, given in answers.items() if any(isinstance(result, Failure) for _, result in given)}
    everything = {record for part in parts for record in part.records}
    assert cancelled and not cancelled & client.got.keys()
    assert everything - cancelled - unsure <= client.got.keys()
    for record in client.got.keys() - unsure:
        moved = [r.due_ms for kind, r in answers.get(record, []) if kind == "move" and isinstance(r, RescheduleResult)]
        due_ms = moved[-1] if moved else next(part.due[record] for part in parts if record in part.due)
        assert client.got[record][0][0] >= due_ms
    for node in world.nodes.values():
        assert node.host is not None and node.host.core.wheel.pending == 0
