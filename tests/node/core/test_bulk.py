"""Bulk load into three nodes: bundles come in, are taken over exactly once, and are fetched by who lacks them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.node.core import trio
from tests.node.core.trio import EPOCH_MS, MS, Client, Node, World, digests
from tickwheel.node.core import bundle_store, retention
from tickwheel.node.core.bundle_store import Held
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.failure import Failure
from tickwheel.node.core.status import node_metrics
from tickwheel.node.state.results import AdminResult
from tickwheel.proto import admin_pb2, bulk_pb2, common_pb2
from tickwheel.proto.admin_pb2 import CreateGroupRequest, CreateTopicRequest
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.storage import bundle
from tickwheel.storage.events import EventKind, EventRecord, paths, read_events
from tickwheel.storage.loaded_events import messages_of, rows_of
from tickwheel.storage.unit import UNIT
from tickwheel.wheel.units import HOUR_MS

PIECE_BYTES = 1_000


def bundle_of(due_ms: list[int], tag: str = "x") -> tuple[bytes, dict[bytes, int]]:
    """A bundle for topic `t`, and what it brings: record -> due time."""
    due = sorted(due_ms)
    records = [b"%s%d" % (tag.encode(), number) for number in range(len(due))]
    units = np.zeros(len(due), UNIT)
    units["due_requested_ms"] = due
    units["size"] = [len(record) for record in records]
    pieces = bundle.build(units, b"".join(records), slot_ms=1_000, topics=1)
    return b"".join(pieces), dict(zip(records, due, strict=True))


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Loader:
    """Loads bundles as the command does: to every node that it reaches, then taken over one by one."""

    def __init__(self, world: World, datas: list[bytes], job_id: str = "job") -> None:
        self.world = world
        self.datas = datas
        self.job_id = job_id
        self.sha = hashlib.sha256("".join(map(name_of, datas)).encode()).hexdigest()
        self.failures: list[Failure] = []
        self.taken = 0
        self.units = 0

    def send(self, node: Node, data: bytes) -> None:
        """All pieces of one bundle, each after the answer to the one before."""
        assert node.host is not None
        bulk, name = node.host.face.bulk, name_of(data)
        boot = node.boot

        def go_on(state: Held | Failure) -> None:
            if isinstance(state, Failure):
                self.failures.append(state)
            elif not state.held and boot == node.boot:
                piece = data[state.bytes : state.bytes + PIECE_BYTES]
                bulk.take(name, len(data), state.bytes, piece, google_crc32c.value(piece), go_on)

        go_on(bulk.offer(name, len(data)))

    def send_all(self, names: str = "abc") -> None:
        """To the nodes of these names that are up, and wait."""
        for data in self.datas:
            for name in names:
                if self.world.nodes[name].host is not None:
                    self.send(self.world.nodes[name], data)
            self.world.run(5 + len(data) / PIECE_BYTES * 2)

    def request(self, place: int) -> bulk_pb2.TakeOverRequest:
        return bulk_pb2.TakeOverRequest(
            job_id=self.job_id,
            load_sha256=self.sha,
            sequence=place + 1,
            bundles=len(self.datas),
            name=name_of(self.datas[place]),
            topics=["t"],
        )

    def ask(self, place: int) -> list[bulk_pb2.LoadState | Failure]:
        """Ask the master to take one over; the list gets the answer."""
        answers: list[bulk_pb2.LoadState | Failure] = []
        master = self.world.elect()
        assert master.host is not None
        master.host.face.bulk.take_over(self.request(place), answers.append)
        master.wake()
        return answers

    def take_over(self, place: int) -> bulk_pb2.LoadState:
        """Until it is done, however often the master changes."""
        limit_ns = self.world.now_ns + 60_000 * MS
        while self.world.now_ns < limit_ns:
            answers = self.ask(place)
            self.world.run_until(lambda answers=answers: bool(answers))  # type: ignore[misc]
            if isinstance(answers[0], bulk_pb2.LoadState):
                return answers[0]
            self.failures.append(answers[0])
            self.world.run(100)
        raise AssertionError(f"not taken over: {self.failures[-1]}")

    def load(self, names: str = "abc") -> bulk_pb2.LoadState:
        self.send_all(names)
        for place in range(len(self.datas)):
            state = self.take_over(place)
        return state


def admin(world: World, command: AdminCommand) -> None:
    """Have a command carried out."""
    answers: list[AdminResult | Failure] = []
    master = world.elect()
    assert master.host is not None
    master.host.face.admin(command, answers.append)
    master.wake()
    world.run_until(lambda: bool(answers))
    assert isinstance(answers[0], AdminResult)


@pytest.fixture
def world() -> Iterator[World]:
    """Three nodes with the topic and a group."""
    made = World()
    begin(made)
    yield made
    assert not any(node.fatal for node in made.nodes.values())


def begin(world: World) -> None:
    world.elect()
    admin(world, AdminCommand(create_topic=CreateTopicRequest(name="t")))
    admin(world, AdminCommand(create_group=CreateGroupRequest(name="g", topics=["t"])))


def start(node: Node) -> None:
    """Unless somebody else did."""
    if node.host is None:
        node.start()


def settle_down(world: World) -> None:
    """Until all nodes have applied the same."""
    world.run_until(lambda: len({d[0] for d in digests(world)}) == 1, 20_000)
    assert len(digests(world)) == 1


def check(client: Client, wanted: dict[bytes, int]) -> None:
    """Everything once, nothing early, nothing else."""
    assert client.got.keys() == wanted.keys() | client.acked.keys()
    assert not client.repeated()
    for record, seen in client.got.items():
        due_ms = wanted.get(record, client.acked.get(record, 0))
        assert all(when >= due_ms for when, _, _ in seen)


def test_loaded_messages_are_delivered_like_others(world: World) -> None:
    """Of hours with messages and without, near and far; exactly once though every bundle is taken over twice."""
    client = Client(world)
    client.consume()
    now_ms = world.now_ms
    client.schedule([2_000, 3_000, 3_000, 7_000])
    world.run(50)
    one, wanted = bundle_of([now_ms + d for d in (1_500, 2_000, 3_000, 3_000, 12_000)], "a")
    two, more = bundle_of([now_ms + 2_500 + 10 * n for n in range(100)], "b")
    loader = Loader(world, [one, two])
    assert loader.load().units == len(wanted) + len(more)
    client.schedule([1_000, 3_000])
    assert Loader(world, [one, two]).load().units == len(wanted) + len(more)
    world.run(15_000)
    check(client, wanted | more)
    settle_down(world)
    late = [when - due for record, due in (wanted | more).items() for when, _, _ in client.got[record]]
    assert max(late) < 50


def test_what_is_late_is_delivered_at_once(world: World) -> None:
    """Hours that are over come under the hour of the cursor, in the order of their due times."""
    client = Client(world)
    client.schedule([10])
    world.run(500)
    client.consume()
    data, wanted = bundle_of([EPOCH_MS - 5 * HOUR_MS + n * HOUR_MS // 4 for n in range(20)] + [EPOCH_MS + 20])
    Loader(world, [data]).load()
    world.run(300)
    check(client, wanted)
    assert list(client.got)[1:] == sorted(wanted, key=lambda record: wanted[record])
    settle_down(world)


def test_a_slave_that_was_down_fetches_what_it_lacks(world: World) -> None:
    """It applies nothing beyond the bundle before it has it, says so, and then is equal to the others."""
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    slave.kill()
    data, _ = bundle_of([world.now_ms + 30_000 + n * 7_000 for n in range(3_000)])
    state = Loader(world, [data]).load()
    assert state.units == 3_000
    slave.start()
    assert slave.host is not None
    seen = []
    for _ in range(400):
        world.run(1)
        if slave.host.core.bulk.waiting:
            seen.append(slave.host.face.status().state_reason)
    assert seen and name_of(data) in seen[0]
    assert slave.host.core.bulk.counts.fetched == 1 and not slave.host.core.bulk.waiting
    settle_down(world)
    assert slave.disk.exists(bundle.bundle_path(name_of(data)))


def test_without_a_majority_nothing_is_taken_over(world: World) -> None:
    """The refusal says how many hold it; the same request works once another node does."""
    data, _ = bundle_of([world.now_ms + 60_000])
    loader = Loader(world, [data])
    master = world.elect()
    loader.send_all(master.name)
    answers = loader.ask(0)
    world.run(4_000)
    failure = answers[0]
    assert isinstance(failure, Failure) and failure.metadata["value"] == "1"
    other = next(name for name in world.nodes if name != master.name)
    loader.send_all(other)
    assert loader.take_over(0).units == 1


def _random_loads(seed: int, harm: Callable[[World, Random], None]) -> None:
    rng = Random(seed)
    world = World(seed, config=replace(CoreConfig(), segment_bytes=1 << 20, buffer_bytes_max=40_000))
    begin(world)
    client = Client(world)
    client.consume()
    wanted: dict[bytes, int] = {}
    datas = []
    for number in range(4):
        due = [world.now_ms + rng.choice([500, 2_000, 6_000, 20_000]) + rng.randrange(900) for _ in range(200)]
        data, brings = bundle_of(due, f"l{number}-")
        datas.append(data)
        wanted |= brings
    loader = Loader(world, datas)
    for _ in range(8):
        world.at(world.now_ns + rng.randrange(4_000) * MS, lambda: harm(world, rng))
        world.at(world.now_ns + rng.randrange(9_000) * MS, lambda: client.schedule([rng.randrange(8_000)] * 3))
    for place in range(len(datas)):
        answer: object = None
        while not isinstance(answer, bulk_pb2.LoadState):
            world.run_until(lambda: world.master() is not None, 20_000)
            for name in "abc":
                if world.nodes[name].host is not None:
                    loader.send(world.nodes[name], datas[place])
            answers = loader.ask(place)
            world.run(rng.choice([1, 3, 10, 40, 100]))
            answer = answers[0] if answers else None
    world.run(15_000)
    for node in world.nodes.values():
        if node.host is None:
            node.start()
    world.run(10_000)
    settle_down(world)
    assert client.got.keys() >= wanted.keys() and not client.lost()
    for record, seen in client.got.items():
        due_ms = wanted.get(record) or client.acked.get(record) or 0
        assert all(when >= due_ms for when, _, _ in seen)
    once = [record for record in wanted if len(client.got[record]) == 1]
    assert len(once) >= len(wanted) // 2, "most come once; those out with consumers at a failover may come again"
    for node in world.nodes.values():
        assert node.host is not None
        assert node.host.face.bulk.load("job").units == len(wanted)
        assert node.host.core.wheel.pending == 0


@pytest.mark.parametrize("seed", range(6))
def test_power_is_lost_anywhere(seed: int) -> None:
    """Nodes lose power while bundles come in, while they are taken over and after: each counts once, on every node."""

    def harm(world: World, rng: Random) -> None:
        up = [node for node in world.nodes.values() if node.host is not None]
        if len(up) < 3:
            return
        victim = rng.choice(up)
        victim.kill()
        world.at(world.now_ns + rng.choice([5, 300, 3_000]) * MS, lambda: start(victim))

    _random_loads(seed, harm)


@pytest.mark.parametrize("seed", range(2))
def test_the_master_is_cut_off(seed: int) -> None:
    """A master that cannot reach the others takes nothing over; what its client repeats elsewhere counts once."""

    def harm(world: World, rng: Random) -> None:
        master = world.master()
        if master is not None and not world.cut:
            world.cut_off(master.name)
            world.at(world.now_ns + 2_500 * MS, world.heal)

    _random_loads(seed, harm)


def harmed_by_power_loss(seed: int, without: str) -> bool:
    """All nodes lose power just after a taking over; whether what it brought is gone then."""
    world = World(seed)
    for node in world.nodes.values():
        node.disk.ignore_sync(lambda path: without == "the file" and path.startswith("bulk/"))
        node.disk.ignore_sync_dir(lambda path: without == "its directory" and path in ("bulk", ""))
    begin(world)
    data, wanted = bundle_of([world.now_ms + 3_000 + n for n in range(300)])
    Loader(world, [data]).load()
    for node in world.nodes.values():
        node.kill()
    for node in world.nodes.values():
        node.start()
    client = Client(world)
    client.consume()
    world.run(5_000)
    return any(node.fatal for node in world.nodes.values()) or client.got.keys() != wanted.keys()


def test_what_is_held_outlives_the_power_of_all_nodes() -> None:
    """Before a node says that it holds a bundle, that is so for good."""
    assert not any(harmed_by_power_loss(seed, "") for seed in range(4))


@pytest.mark.parametrize("without", ["the file", "its directory"])
def test_each_sync_of_a_bundle_is_needed(without: str) -> None:
    """Left out, bundles that were taken over are gone from all nodes at once."""
    assert any(harmed_by_power_loss(seed, without) for seed in range(20))


def test_a_checkpoint_carries_bundles(world: World) -> None:
    """A node that copies a checkpoint gets the bundles with it, keeps those it had, and reads them."""
    now_ms = world.now_ms
    one, wanted = bundle_of([now_ms + 20_000 + n for n in range(500)], "a")
    two, more = bundle_of([now_ms + 21_000 + n for n in range(500)], "b")
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    Loader(world, [one], "first").load()
    slave.kill()
    Loader(world, [two], "second").load()
    client = Client(world)
    assert master.host is not None
    checkpointer = master.host.core.checkpointer
    for _ in range(40):
        client.schedule([25_000] * 200)
        world.run(50)
    before = checkpointer.written
    checkpointer.request(lambda _: checkpointer.copied())
    world.run_until(lambda: checkpointer.written > before)
    slave.start()
    world.run(3_000)
    settle_down(world)
    assert slave.host is not None
    if not slave.host.installs:
        slave.host._checkpoint_needed(master.name)
        world.run_until(lambda: slave.host is not None and slave.host.installs > 0)
    for data in (one, two):
        assert slave.host.core.bulk.store.held(name_of(data))
    for name in ("first", "second"):
        assert slave.host.face.bulk.load(name).units == 500
    assert slave.disk.exists(bundle.bundle_path(name_of(one)))
    client.consume()
    world.run(25_000)
    check(client, wanted | more)


def test_bundles_that_nobody_claims_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that failed leaves nothing behind for long; what was taken over stays."""
    monkeypatch.setattr(bundle_store, "UNCLAIMED_MS", 4_000)
    monkeypatch.setattr(bundle_store, "PART_IDLE_MS", 3_000)
    monkeypatch.setattr(bundle_store, "CHECK_PERIOD_MS", 500)
    left, _ = bundle_of([world.now_ms + 10 * HOUR_MS], "left")
    kept, _ = bundle_of([world.now_ms + 10 * HOUR_MS], "kept")
    Loader(world, [kept]).load()
    Loader(world, [left], "other").send_all()
    part = Loader(world, [left + b"more"], "part")
    node = world.elect()
    assert node.host is not None
    store = node.host.core.bulk.store
    part_name = "0" * 64
    node.host.face.bulk.take(part_name, 9_000, 0, left[:100], google_crc32c.value(left[:100]), lambda _: None)
    world.run(100)
    assert part.datas and node.disk.exists(f"bulk/{part_name}.part")
    world.run(40_000)
    for other in world.nodes.values():
        assert other.disk.list("bulk") == [f"{name_of(kept)}.bundle"]
    assert store.counts.removed == 1


def test_what_is_no_bundle_is_refused(world: World) -> None:
    """Wrong bytes, wrong names, wrong claims: a typed error, and the nodes go on."""
    good, _ = bundle_of([world.now_ms + HOUR_MS + n * 1_000 for n in range(50)])
    units = np.zeros(3, UNIT)
    units["due_requested_ms"] = world.now_ms + HOUR_MS
    units["size"] = 1
    raw = bytearray(b"".join(bundle.build(units, b"abc", slot_ms=1_000, topics=1)))
    raw[bundle.HEADER_BYTES + 30 : bundle.HEADER_BYTES + 40] = bytes(10)
    other_slots = b"".join(bundle.build(units, b"abc", slot_ms=500, topics=1))
    node = world.elect()
    assert node.host is not None
    bulk = node.host.face.bulk
    answers: list[object] = []
    bulk.take(name_of(good), len(good), 0, good[:50], 1, answers.append)
    wrong_name = "f" * 64
    bulk.take(wrong_name, 50, 0, good[:50], google_crc32c.value(good[:50]), answers.append)
    bulk.take("../../etc", 50, 0, b"x", 0, answers.append)
    bulk.take(wrong_name[:-1] + "e", 1 << 40, 0, b"x", 0, answers.append)
    world.run(50)
    assert len(answers) == 4
    for answer in answers:
        assert isinstance(answer, Failure) and answer.reason == common_pb2.INVALID_FIELD, answer
    assert not node.disk.list("bulk")
    for number, data in enumerate([bytes(raw), b"no bundle at all", other_slots]):
        loader = Loader(world, [data], f"bad{number}")
        loader.send_all()
        refusal = loader.ask(0)
        world.run_until(lambda refusal=refusal: bool(refusal))  # type: ignore[misc]
        assert isinstance(refusal[0], Failure) and refusal[0].reason == common_pb2.INVALID_FIELD, refusal
    loader = Loader(world, [good, good], "order")
    loader.send_all()
    wrong: list[tuple[int, dict[str, Any], int]] = [
        (1, {}, common_pb2.SEQUENCE_GAP),
        (0, {"topics": ["nobody"]}, common_pb2.UNKNOWN_NAME),
        (0, {"topics": ["t", "t"]}, common_pb2.INVALID_FIELD),
        (0, {"job_id": "a b"}, common_pb2.INVALID_FIELD),
        (0, {"bundles": 0}, common_pb2.INVALID_FIELD),
    ]
    for place, changes, reason in wrong:
        request = loader.request(place)
        for name in changes:
            request.ClearField(name)  # type: ignore[arg-type]
        request.MergeFrom(bulk_pb2.TakeOverRequest(**changes))
        refusal = []
        bulk.take_over(request, refusal.append)
        world.run_until(lambda refusal=refusal: bool(refusal))  # type: ignore[misc]
        assert isinstance(refusal[0], Failure) and refusal[0].reason == reason, refusal
    assert loader.take_over(0).taken == 1
    reused = Loader(world, [good], "order")
    assert isinstance(reused.ask(0), list)
    world.run(50)
    settle_down(world)


def notes_of(node: Node) -> list[EventRecord]:
    """LOADED records that a node has written."""
    found = [record for path in paths(node.disk, "events") for record in read_events(node.disk, path)]
    return [record for record in found if record.kind is EventKind.LOADED]


def test_loaded_messages_are_noted_by_their_bundle() -> None:
    """One note a bundle, from which every node's reader has each message's id, due time and topic, late ones too."""
    world = World(config=replace(CoreConfig(), segment_bytes=1 << 20, events_bytes_max=1 << 20))
    begin(world)
    client = Client(world)
    client.schedule([5_000, 3_500_000])
    world.run(500)
    early = [EPOCH_MS - HOUR_MS + n for n in range(20)]
    data, wanted = bundle_of([*early, *(world.now_ms + n * 400_000 for n in range(1, 40))])
    Loader(world, [data]).load()
    assert Loader(world, [data]).load().units == len(wanted)
    client.consume()
    world.run(9_000)
    settle_down(world)
    listed: dict[int, int] = {}
    for node in world.nodes.values():
        [note] = notes_of(node)
        everything = messages_of(note, [node.disk])
        ids = everything.columns["id"]
        due = everything.columns["due_ms"].tolist()
        assert everything.count == len(wanted) and set(everything.texts) == {"0=t"}
        listed = dict(zip(ids.tolist(), due, strict=True))
        assert sorted(listed.values())[len(early) :] == sorted(wanted.values())[len(early) :]
        assert node.host is not None
        lookup = node.host.core.wheel.lookup(ids)
        lookup.run()
        assert lookup.found.all() and lookup.units["due_ms"].tolist() == due
        some = np.sort(ids[[3, 30, 50]])
        few = messages_of(note, [node.disk], rows_of(note, np.append(some, some + (1 << 40)).astype(np.uint64)))
        assert few.columns["id"].tolist() == some.tolist()
        assert few.columns["due_ms"].tolist() == [listed[id] for id in some.tolist()]
        blind = messages_of(note, [])
        assert blind.columns["id"].tolist() == ids.tolist()
        assert (blind.columns["due_ms"] // HOUR_MS == everything.columns["due_ms"] // HOUR_MS).all()
        assert (blind.columns["due_ms"] >= everything.columns["due_ms"]).all() and set(blind.texts) == {"0=t"}
    first = min(listed)
    answers: list[Any] = []
    master = world.elect()
    assert master.host is not None
    named = common_pb2.MessageId(hour=first >> 32, index=first & 0xFFFF_FFFF)
    master.host.face.trace(admin_pb2.TraceRequest(ids=[named]), answers.append)
    world.run_until(lambda: bool(answers))
    kinds = [admin_pb2.TraceEvent.Kind.Name(event.kind) for event in answers[0].events]
    assert kinds[:3] == ["SCHEDULED", "DISPATCHED", "DELIVERED"] and answers[0].events[0].topic == "t"
    assert answers[0].events[0].due_ms == listed[first]


def test_a_load_shows_in_status_and_metrics(world: World) -> None:
    """Bytes that came in, bundles and messages taken over, how long that took, what was refused, what was fetched."""
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    slave.kill()
    data, wanted = bundle_of([world.now_ms + 30_000 + n * 7_000 for n in range(3_000)])
    loader = Loader(world, [data])
    assert isinstance(loader.ask(0)[0], Failure)
    loader.load()
    slave.start()
    settle_down(world)
    assert master.host is not None and slave.host is not None
    bulk = master.host.face.status().bulk
    assert (bulk.bundles_held, bulk.received_bytes) == (1, len(data))
    assert (bulk.bundles_taken_over, bulk.messages_taken_over, bulk.refused) == (1, len(wanted), 1)
    assert bulk.takeover_ms > 0
    metrics = node_metrics(slave.host.core)
    assert metrics["bulk_bundles_fetched"] == metrics["bulk_bundles_taken_over"] == metrics["bulk_bundles_held"] == 1
    assert metrics["bulk_messages_taken_over"] == len(wanted) and metrics["bulk_received_bytes"] == len(data)
    assert node_metrics(master.host.core)["bulk_refusals"] == {("take_over",): 1.0}


def gone_by(monkeypatch: pytest.MonkeyPatch, *, checkpoint_period_ms: int) -> tuple[World, Client, Node, Loader, int]:
    """A world whose hour ends soon, a bundle of that hour loaded while one slave is down, delivered and removed."""
    monkeypatch.setattr(trio, "EPOCH_MS", 500_000 * HOUR_MS - 12_000)
    monkeypatch.setattr(retention, "HOURS_KEPT", 0)
    monkeypatch.setattr(bundle_store, "UNCLAIMED_MS", 3_000)
    monkeypatch.setattr(bundle_store, "CHECK_PERIOD_MS", 500)
    config = replace(
        CoreConfig(), segment_bytes=1 << 20, retention_period_ms=500, checkpoint_period_ms=checkpoint_period_ms
    )
    world = World(config=config)
    begin(world)
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    slave.kill()
    client = Client(world)
    client.consume()
    data, wanted = bundle_of([world.now_ms + 1_000 + n for n in range(50)])
    loader = Loader(world, [data])
    loader.load()
    for _ in range(3):
        client.schedule([6_000])
        world.run(8_000)
    check(client, wanted)
    assert master.host is not None and master.host.core.wheel.bundle_chunks == 0
    return world, client, slave, loader, len(wanted)


def test_a_bundle_stays_until_a_checkpoint_covers_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hours are removed, but a replay would take it over again: without it every node would wait for the others."""
    world, _, slave, loader, units = gone_by(monkeypatch, checkpoint_period_ms=10_000_000)
    path = bundle.bundle_path(name_of(loader.datas[0]))
    for node in world.nodes.values():
        assert node is slave or node.disk.exists(path)
        node.kill()
    for node in world.nodes.values():
        node.start()
    world.run(3_000)
    settle_down(world)
    for node in world.nodes.values():
        assert node.host is not None and node.host.face.bulk.load("job").units == units
        assert not node.host.installs
        done: list[object] = []
        node.host.core.checkpointer.request(done.append)
        node.host.core.checkpointer.copied()
        node.wake()
        world.run_until(lambda done=done: bool(done))  # type: ignore[misc]
    world.run(8_000)
    assert not any(node.disk.exists(path) for node in world.nodes.values()), "a checkpoint covers its end"
    assert not any(node.fatal for node in world.nodes.values())


def test_a_slave_copies_a_checkpoint_when_nobody_has_the_bundle_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back after the bundle's hours were removed everywhere, and the log still names it."""
    world, client, slave, loader, units = gone_by(monkeypatch, checkpoint_period_ms=2_000)
    path = bundle.bundle_path(name_of(loader.datas[0]))
    world.run_until(lambda: not any(node.disk.exists(path) for node in world.nodes.values()), 20_000)
    slave.start()
    world.run(6_000)
    settle_down(world)
    assert slave.host is not None and slave.host.installs == 1
    assert slave.host.face.bulk.load("job").units == units and not slave.host.core.bulk.waiting
    client.schedule([500])
    world.run(3_000)
    assert not client.lost()
    assert not any(node.fatal for node in world.nodes.values())


def test_a_slave_with_a_full_disk_takes_the_bundle_later(world: World) -> None:
    """It refuses the bundle and is no reason to wait: the others take it over, and it fetches it when there is room."""
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    data, _ = bundle_of([world.now_ms + 60_000 + n * 7_000 for n in range(3_000)])
    slave.disk.fill(200_000)
    loader = Loader(world, [data])
    state = loader.load()
    assert state.units == 3_000
    assert [failure.reason for failure in loader.failures] == [common_pb2.DISK_FULL]
    world.run(500)
    assert slave.host is not None and slave.host.core.bulk.waiting
    core = slave.host.core
    slave.disk.make_room()
    world.run_until(lambda: core.bulk.counts.fetched == 1)
    settle_down(world)


def test_a_bundle_that_rots_on_a_slave_stops_that_node_alone(world: World) -> None:
    """After it was accepted its bytes change: the node names the file and stops, the others deliver everything."""
    client = Client(world)
    client.consume()
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    data, wanted = bundle_of([world.now_ms + 3_000 + n for n in range(300)])
    loader = Loader(world, [data])
    loader.send_all()
    layout = bundle.Layout(1_000, 1, np.frombuffer(data, bundle.TABLE, 1, bundle.HEADER_BYTES))
    slave.disk.flip(bundle.bundle_path(name_of(data)), layout.index_at + 5)
    loader.take_over(0)
    world.run(6_000)
    check(client, wanted)
    assert slave.host is None and name_of(data) in slave.fatal
    slave.fatal = ""


def test_a_checkpoint_waits_for_what_a_node_lacks(world: World) -> None:
    """While the bundle is being fetched there is nothing whole to write; then the checkpoint is, and names it."""
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    slave.kill()
    data, _ = bundle_of([world.now_ms + 30_000 + n * 7_000 for n in range(3_000)])
    Loader(world, [data]).load()
    slave.start()
    assert slave.host is not None
    core = slave.host.core
    for _ in range(400):
        world.run(1)
        if core.bulk.waiting:
            break
    done: list[Any] = []
    core.checkpointer.request(done.append)
    slave.wake()
    assert core.wheel.absorbing and not done
    world.run_until(lambda: bool(done))
    assert not core.wheel.absorbing and bundle.bundle_path(name_of(data)) in {file.path for file in done[0]}
    core.checkpointer.copied()
    settle_down(world)
