"""Readers of what a group has settled, at a node of three: of one applied index, bounded, typed errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.node.core.delivery.test_retries import ACK, Picky, settlement
from tests.node.core.trio import Client, Node, World, digests
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.watch import pin_table, settled_pins
from tickwheel.node.failure import Failure
from tickwheel.proto import consumer_pb2
from tickwheel.proto.consumer_pb2 import SettleBatch
from tickwheel.proto.snapshot_pb2 import PinSettledRequest, PinSettledResponse, ReadSettledRequest, SettledPage
from tickwheel.wheel.units import HOUR_MS


def pin(node: Node, **asked: Any) -> PinSettledResponse | Failure:
    """Pin at a node."""
    answers: list[PinSettledResponse | Failure] = []
    assert node.host is not None
    node.host.core.serving.start(node.host.core.parts.settled_pins.pin(PinSettledRequest(**asked)), answers.append)
    return answers[0]


def read(world: World, node: Node, **asked: Any) -> SettledPage | Failure:
    """One page."""
    answers: list[SettledPage | Failure] = []
    assert node.host is not None
    node.host.core.serving.start(node.host.core.parts.settled_pins.read(ReadSettledRequest(**asked)), answers.append)
    world.run_until(lambda: bool(answers))
    return answers[0]


def pages(world: World, node: Node, found: PinSettledResponse, **asked: Any) -> list[SettledPage]:
    """All of the only topic; between two pages messages come and are settled."""
    [topic] = found.topics
    first, pages = topic.first, []
    while True:
        page = read(
            world, node, pin_id=found.pin_id, topic_id=topic.topic_id, first=first, end=topic.end, content=True, **asked
        )
        assert isinstance(page, SettledPage), page
        pages.append(page)
        if not page.HasField("next"):
            return pages
        first = page.next
        world.run(300)


def slave_of(world: World) -> Node:
    """Any."""
    master = world.elect()
    return next(node for node in world.nodes.values() if node is not master)


def judged(record: bytes, attempt: int) -> SettleBatch | None:
    """By number: left with the consumer, for later, for later and then done, or done."""
    kind = int(record[1:]) % 5
    if kind == 0:
        return None
    if kind == 1:
        return settlement(consumer_pb2.RETRY, delay_ms=1_500)
    if kind == 2 and attempt == 1:
        return settlement(consumer_pb2.RETRY, delay_ms=1)
    return ACK


def test_pages_of_a_slave_hold_what_was_settled_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pages by positions and by bytes. What waits for a retry is not done, not even once it was delivered and
    nacked again while somebody reads; a message that came again stands at the last of its positions."""
    monkeypatch.setattr(settled_pins, "PAGE_POSITIONS", 7)
    monkeypatch.setattr(settled_pins, "PAGE_RETRIES", 11)
    monkeypatch.setattr(settled_pins, "ANSWER_BYTES_MAX", 9)
    world = World()
    client = Picky(world, judged)
    world.elect()
    client.consume(lease_ms=600_000)
    client.schedule([100 + number for number in range(60)])
    world.run(700)
    slave = slave_of(world)
    found = pin(slave, group="g")
    assert isinstance(found, PinSettledResponse) and slave.host is not None
    assert (found.node_id, found.applied_index) == (slave.name, slave.host.core.applied.index)
    client.schedule([20] * 12)
    retries: dict[int, int] = {}
    for page in pages(world, slave, found, retries=True):
        columns = (np.frombuffer(column, "<u8").tolist() for column in (page.ids, page.positions))
        retries.update(zip(*columns, strict=True))
    names = {next(iter(ids)): record for record, ids in client.ids.items()}
    assert {names[id] for id in retries} == {b"m%d" % number for number in range(2, 60, 5)}
    done: list[bytes] = []
    for page in pages(world, slave, found):
        at = 0
        ids, positions, dues = (np.frombuffer(c, "<u8").tolist() for c in (page.ids, page.positions, page.due_ms))
        for row, size in enumerate(np.frombuffer(page.sizes, "<u4").tolist()):
            record, at = page.records[at : at + size], at + size
            assert record == names[ids[row]]
            assert dues[row] == client.acked[record]
            if retries.get(ids[row], positions[row]) == positions[row]:
                done.append(record)
    assert sorted(done) == sorted(b"m%d" % number for number in range(60) if number % 5 > 1)


def test_from_a_due_time_on() -> None:
    """What was due before is not even looked at."""
    world = World()
    client = Client(world)
    world.elect()
    client.consume()
    client.schedule([1_000 * number for number in range(1, 11)])
    world.run(11_500)
    assert not client.lost()
    [page] = pages(world, slave := slave_of(world), found := _pinned(slave, due_ms_min=client.acked[b"m6"]))
    assert found.topics[0].first == 6
    assert page.records == b"m6m7m8m9"
    assert slave.host is not None


def _pinned(node: Node, **asked: Any) -> PinSettledResponse:
    found = pin(node, group="g", **asked)
    assert isinstance(found, PinSettledResponse), found
    return found


def test_hours_that_are_removed_meanwhile_are_passed_over() -> None:
    """And counted; what is kept is read."""
    config = replace(CoreConfig(), retention_period_ms=500, checkpoint_period_ms=700, buffer_bytes_max=1 << 14)
    world = World(31, config=config)
    client = Client(world)
    world.elect()
    client.consume()
    slave = slave_of(world)
    client.schedule([-hours * HOUR_MS + minute for hours in range(6, 0, -1) for minute in range(10)])
    client.schedule([200 + number for number in range(10)])
    world.run_until(lambda: len(client.got) == 70 and len(digests(world)) == 1)
    found = _pinned(slave)
    assert found.topics[0].end == 70
    world.run(6_000)
    whole = pages(world, slave, found)
    ids = sum(len(page.ids) // 8 for page in whole)
    assert whole[0].removed >= 40
    assert ids >= 10
    assert whole[0].removed + ids <= 70


@pytest.mark.parametrize(
    ("asked", "field"),
    [({"group": "nobody"}, "group"), ({"group": "g", "due_ms_min": -1}, "due_ms_min")],
)
def test_what_is_wrong_with_a_request_is_named(asked: dict[str, Any], field: str) -> None:
    """Requests come from outside."""
    world = World()
    client = Client(world)
    world.elect()
    client.consume()
    client.schedule([10])
    world.run(200)
    slave = slave_of(world)
    failure = pin(slave, **asked)
    assert isinstance(failure, Failure) and failure.metadata["field"] == field
    behind = pin(slave, group="g", applied_index_min=1 << 40)
    assert isinstance(behind, Failure) and int(behind.metadata["retry_after_ms"]) > 0
    pinned = _pinned(slave)
    for wrong in ({"pin_id": 5}, {"pin_id": pinned.pin_id, "topic_id": 77}):
        page = read(world, slave, **wrong)
        assert isinstance(page, Failure) and page.metadata["field"] in wrong


def test_pins_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more, that one goes that was read least recently; one that was not read for long goes too."""
    monkeypatch.setattr(settled_pins, "PINS_MAX", 2)
    world = World()
    client = Client(world)
    world.elect()
    client.consume()
    client.schedule([10])
    world.run(200)
    slave = slave_of(world)
    first, second = _pinned(slave), _pinned(slave)
    world.run(10)
    pages(world, slave, first)
    _pinned(slave)
    assert isinstance(read(world, slave, pin_id=second.pin_id), Failure)
    assert pages(world, slave, first)
    monkeypatch.setattr(pin_table, "PIN_HOLD_MS", 100)
    world.run(200)
    last = _pinned(slave)
    assert isinstance(read(world, slave, pin_id=first.pin_id), Failure)
    assert slave.host is not None
    monkeypatch.undo()
    assert pages(world, slave, last)
    slave.host.core.parts.settled_pins.unpin(last.pin_id)
    assert isinstance(read(world, slave, pin_id=last.pin_id), Failure)


@given(st.integers(0, 20), st.lists(st.booleans(), max_size=70), st.integers(0, 100), st.integers(0, 100))
def test_a_window_is_what_was_packed(floor: int, flags: list[bool], first: int, count: int) -> None:
    """Everything below the floor is settled, nothing behind the window."""
    window = settled_pins._Window(floor, np.packbits(np.array(flags, np.bool_), bitorder="little"), len(flags))
    whole = [True] * floor + flags + [False] * 200
    assert window.settled(first, first + count).tolist() == whole[first : first + count]
