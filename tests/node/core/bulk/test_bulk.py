"""Bulk load into three nodes: bundles come in, are taken over exactly once, and are fetched by who lacks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import google_crc32c
import numpy as np

from tests.node.core.loading import Loader, begin, bundle_of, check, name_of, settle_down
from tests.node.core.trio import EPOCH_MS, Client, Node, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.watch.status import node_metrics, node_status, node_vitals
from tickwheel.node.failure import Failure
from tickwheel.proto import admin_pb2, bulk_pb2, common_pb2
from tickwheel.storage import bundle
from tickwheel.storage.events import EventKind, EventRecord, paths, read_events
from tickwheel.storage.loaded_events import messages_of, rows_of
from tickwheel.storage.unit import UNIT
from tickwheel.wheel.units import HOUR_MS


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
        if slave.host.core.parts.bulk.waiting:
            seen.append(node_status(slave.host.core).state_reason)
    assert seen and name_of(data) in seen[0]
    assert slave.host.core.parts.bulk.counts.fetched == 1 and not slave.host.core.parts.bulk.waiting
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
    bulk = node.host.core.parts.bulk
    answers: list[object] = []
    bulk.take(name_of(good), len(good), 0, good[:50], 1, Reply.either(answers.append))
    wrong_name = "f" * 64
    bulk.take(wrong_name, 50, 0, good[:50], google_crc32c.value(good[:50]), Reply.either(answers.append))
    bulk.take("../../etc", 50, 0, b"x", 0, Reply.either(answers.append))
    bulk.take(wrong_name[:-1] + "e", 1 << 40, 0, b"x", 0, Reply.either(answers.append))
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
        node.host.core.serving.start(bulk.take_over(request), refusal.append)
        world.run_until(lambda refusal=refusal: bool(refusal))  # type: ignore[misc]
        assert isinstance(refusal[0], Failure) and refusal[0].reason == reason, refusal
    assert loader.take_over(0).taken == 1
    reused = Loader(world, [good], "order")
    assert isinstance(reused.ask(0), list)
    world.run(50)
    settle_down(world)


def test_a_slave_with_a_full_disk_takes_the_bundle_later(world: World) -> None:
    """It refuses the bundle and is no reason to wait: the others take it over, and it fetches it when there is room."""
    master = world.elect()
    slave = next(node for node in world.nodes.values() if node is not master)
    data, _ = bundle_of([world.now_ms + 60_000 + n * 7_000 for n in range(3_000)])
    slave.disk.fill(len(data) // 2)
    loader = Loader(world, [data])
    state = loader.load()
    assert state.units == 3_000
    assert [failure.reason for failure in loader.failures] == [common_pb2.DISK_FULL]
    world.run(500)
    assert slave.host is not None and slave.host.core.parts.bulk.waiting
    core = slave.host.core
    assert "has no room" in core.parts.bulk.no_room and node_vitals(core).state_reason == core.parts.bulk.no_room
    slave.kill()
    slave.start()
    core = slave.host.core
    world.run(1_000)
    status = node_vitals(core)
    assert status.state == admin_pb2.NODE_RECOVERING and status.state_reason.endswith(core.parts.bulk.no_room)
    assert core.parts.bulk.no_room, "it replayed, and did not say what it waited for"
    slave.disk.fill(2 * len(data))  # less than what bundles of clients leave free
    world.run_until(lambda: core.parts.bulk.counts.fetched == 1)
    slave.disk.make_room()
    settle_down(world)


def test_nothing_is_handed_over_to_who_waits_for_a_bundle(world: World) -> None:
    """It holds the log like all, and would lead without serving: another is chosen, and by name it is refused."""
    master = world.elect()
    waiting = max((node for node in world.nodes.values() if node is not master), key=lambda node: node.name)
    data, _ = bundle_of([world.now_ms + 60_000 + n * 7_000 for n in range(3_000)])
    waiting.disk.fill(len(data) // 2)
    Loader(world, [data]).load()
    world.run(500)
    assert waiting.host is not None and waiting.host.core.parts.bulk.waiting
    answers: list[Failure | None] = []
    assert master.host is not None
    master.host.core.parts.mastership.start_transfer(waiting.name, answers.append)
    world.run_until(lambda: bool(answers))
    assert answers[0] is not None and "did not catch up" in answers[0].message
    assert world.master() is master
    master.host.core.parts.mastership.start_transfer(None, answers.append)
    world.run_until(lambda: len(answers) == 2)
    assert answers[1] is None
    world.run_until(lambda: world.master() is not None)
    assert world.master() not in (master, waiting)
    waiting.disk.make_room()
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
        lookup = node.host.core.wheel.reads.lookup(ids)
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
    master.host.core.serving.start(
        master.host.core.parts.tracer.trace(admin_pb2.TraceRequest(ids=[named])), answers.append
    )
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
    bulk = node_status(master.host.core).bulk
    assert (bulk.bundles_held, bulk.received_bytes) == (1, len(data))
    assert (bulk.bundles_taken_over, bulk.messages_taken_over, bulk.refused) == (1, len(wanted), 1)
    assert bulk.takeover_ms > 0
    metrics = node_metrics(slave.host.core)
    assert metrics["bulk_bundles_fetched"] == metrics["bulk_bundles_taken_over"] == metrics["bulk_bundles_held"] == 1
    assert metrics["bulk_messages_taken_over"] == len(wanted) and metrics["bulk_received_bytes"] == len(data)
    assert node_metrics(master.host.core)["bulk_refusals"] == {("take_over",): 1.0}
