"""Readers of what is pending, at a node of three: bounded, typed errors, never older than what the reader knows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.metas import fitting
from tickwheel.node.core.schedule import pending
from tickwheel.node.core.watch import pin_table, pins
from tickwheel.node.failure import Failure
from tickwheel.proto import common_pb2
from tickwheel.proto.admin_pb2 import CreateTopicRequest
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.proto.snapshot_pb2 import (
    AgreePinRequest,
    AgreePinResponse,
    PinnedPage,
    PinRequest,
    PinResponse,
    ReadPinnedRequest,
)
from tickwheel.wheel.units import HOUR_MS


def pin(node: Node, **asked: Any) -> PinResponse | Failure:
    """Pin at a node."""
    answers: list[PinResponse | Failure] = []
    assert node.host is not None
    node.host.core.serving.start(node.host.core.parts.pins.pin(PinRequest(**asked)), answers.append)
    return answers[0]


def read(world: World, node: Node, **asked: Any) -> PinnedPage | Failure:
    """One page."""
    answers: list[PinnedPage | Failure] = []
    assert node.host is not None
    node.host.core.serving.start(node.host.core.parts.pins.read(ReadPinnedRequest(**asked)), answers.append)
    world.run_until(lambda: bool(answers))
    return answers[0]


def filled(count: int) -> tuple[World, Client, Node]:
    """A slave with so many messages ahead."""
    world = World()
    client = Client(world)
    master = world.elect()
    client.schedule([60_000 + n for n in range(count)])
    world.run_until(lambda: len(client.acked) == count)
    slave = next(node for node in world.nodes.values() if node is not master)
    world.run(200)
    return world, client, slave


def test_pages_of_a_slave_hold_what_was_pending_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pages by units and by bytes; what comes and goes between two pages does not show."""
    monkeypatch.setattr(pins, "PAGE_UNITS_MAX", 7)
    monkeypatch.setattr(pending, "ANSWER_BYTES_MAX", 9)
    world, client, slave = filled(30)
    found = pin(slave)
    assert isinstance(found, PinResponse) and slave.host is not None
    assert found.node_id == slave.name and found.applied_index == slave.host.core.applied.index
    records: list[bytes] = []
    for hour in np.frombuffer(found.hours, "<u4").tolist():
        start = (0, 0)
        while True:
            page = read(
                world, slave, pin_id=found.pin_id, hour=hour, start_due_ms=start[0], start_index=start[1], content=True
            )
            assert isinstance(page, PinnedPage)
            at = 0
            for size in np.frombuffer(page.sizes, "<u4").tolist():
                records.append(page.records[at : at + size])
                at += size
            if not page.HasField("next_due_ms"):
                break
            start = (page.next_due_ms, page.next_index)
            client.schedule([60_005] * 3)
            world.run(20)
    assert records == [b"m%d" % n for n in range(30)]


@pytest.mark.parametrize("topics", [[], ["t"], ["t", "u"], ["u"]])
def test_several_hours_come_in_one_page(monkeypatch: pytest.MonkeyPatch, topics: list[str]) -> None:
    """A question for each hour would cost a reader of a topic as much as reading all topics. Pages have their bounds,
    wherever an hour ends; what is wrong is named."""
    world, client, slave = filled(1)
    client.schedule([HOUR_MS * hour + n for hour in range(1, 300, 9) for n in range(3)])
    world.run(500)
    for unit_bytes, most in ((1 << 20, 8_192), (40, 5)):
        monkeypatch.setattr(pending, "ANSWER_BYTES_MAX", unit_bytes)
        monkeypatch.setattr(pins, "PAGE_UNITS_MAX", most)
        found = pin(slave, topics=topics)
        assert isinstance(found, PinResponse) and found.spans
        hours = np.frombuffer(found.hours, "<u4").tolist()
        asked: dict[str, Any] = {"pin_id": found.pin_id, "hour": hours[0], "hour_end": hours[-1] + 1, "content": True}
        pages: list[PinnedPage] = []
        while not pages or pages[-1].HasField("next_due_ms"):
            if pages:
                asked |= {"start_due_ms": pages[-1].next_due_ms, "start_index": pages[-1].next_index}
            page = read(world, slave, **asked)
            assert isinstance(page, PinnedPage) and len(page.ids) // 8 <= most
            pages.append(page)
        wanted = [] if topics == ["u"] else [b"m%d" % n for n in range(client.count)]
        assert b"".join(page.records for page in pages) == b"".join(wanted)
        assert len(pages) == 1 or most == 5
    wrong = read(world, slave, **asked | {"hour": 9, "hour_end": 9})
    assert isinstance(wrong, Failure) and wrong.metadata["field"] == "hour_end"


def test_names_of_topics_come_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit an answer; the pin tells of the others when it is asked again."""
    world, _, slave = filled(1)
    master = world.master()
    assert master is not None and master.host is not None
    core = master.host.core
    for name in ("u", "v", "w"):
        command = AdminCommand(create_topic=CreateTopicRequest(name=name))
        core.serving.start(core.parts.requests.admin(command), lambda _: None)
    world.run(400)
    whole = pin(slave)
    assert isinstance(whole, PinResponse) and len(whole.topics) == 4 and not whole.topics_to
    monkeypatch.setattr(pins, "fitting", functools.partial(fitting, bytes_max=60))
    found = pin(slave)
    assert isinstance(found, PinResponse)
    names = dict(found.topics)
    while found.topics_to:
        assert max(found.topics) == found.topics_to
        following = pin(slave, pin_id=found.pin_id, topics_after=found.topics_to)
        assert isinstance(following, PinResponse) and not names.keys() & following.topics.keys()
        assert following.hours == found.hours
        found = following
        names.update(found.topics)
    assert names == dict(whole.topics) and len(found.topics) < 4


def test_a_node_that_is_behind_the_reader_says_so() -> None:
    """What was acknowledged before the read began must be in it."""
    _, _, slave = filled(1)
    failure = pin(slave, applied_index_min=1 << 40)
    assert isinstance(failure, Failure) and failure.reason == common_pb2.RECOVERING
    assert int(failure.metadata["retry_after_ms"]) > 0


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"due_ms_min": -1}, "due_ms_min"),
        ({"due_ms_max": 1 << 62}, "due_ms_max"),
        ({"topics": ["t"] * 2_000}, "topics"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(asked: dict[str, Any], field: str) -> None:
    """Requests come from outside."""
    _, _, slave = filled(1)
    failure = pin(slave, **asked)
    assert isinstance(failure, Failure) and failure.metadata["field"] == field


def test_pins_are_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that never says that it has ended costs nothing for ever; one that reads keeps its own."""
    monkeypatch.setattr(pins, "PINS_MAX", 3)
    world, _, slave = filled(2)
    first, second = pin(slave), pin(slave)
    assert isinstance(first, PinResponse) and isinstance(second, PinResponse) and slave.host is not None
    hour = int(np.frombuffer(first.hours, "<u4")[0])
    world.run(10)
    assert isinstance(read(world, slave, pin_id=first.pin_id, hour=hour), PinnedPage)
    pin(slave), pin(slave)
    gone = read(world, slave, pin_id=second.pin_id, hour=hour)
    assert isinstance(gone, Failure) and gone.metadata["field"] == "pin_id"
    assert isinstance(read(world, slave, pin_id=first.pin_id, hour=hour), PinnedPage)
    monkeypatch.setattr(pin_table, "PIN_HOLD_MS", 100)
    world.run(200)
    last = pin(slave)
    assert isinstance(last, PinResponse) and slave.host.core.parts.pins.count == 1
    slave.host.core.parts.pins.unpin(last.pin_id)
    assert slave.host.core.parts.pins.count == 0


def test_an_hour_that_holds_nothing_is_an_empty_page() -> None:
    """Also one that was never heard of."""
    world, _, slave = filled(1)
    found = pin(slave)
    assert isinstance(found, PinResponse)
    page = read(world, slave, pin_id=found.pin_id, hour=7)
    assert isinstance(page, PinnedPage) and not page.ids and not page.HasField("next_due_ms")


def agree(world: World, name: str, pin_id: int = 0) -> AgreePinResponse | Failure:
    """What the master answers."""
    answers: list[AgreePinResponse | Failure] = []
    node = world.elect()
    assert node.host is not None
    node.host.core.serving.start(
        node.host.core.parts.pins.agree(AgreePinRequest(name=name, pin_id=pin_id)), answers.append
    )
    node.wake()
    world.run_until(lambda: bool(answers))
    return answers[0]


def test_all_who_read_under_a_name_read_the_first_pin() -> None:
    """Whoever asks, and after the loss of the master; a pin is told again as it was, by the node that holds it."""
    world, _, slave = filled(5)
    assert agree(world, "q") == AgreePinResponse(pin_id=0)
    found = pin(slave)
    assert isinstance(found, PinResponse)
    assert agree(world, "q", found.pin_id) == agree(world, "q", 77) == AgreePinResponse(pin_id=found.pin_id)
    assert agree(world, "other", 77) == AgreePinResponse(pin_id=77)
    master = world.elect()
    master.kill()
    world.elect()
    assert agree(world, "q", 77) == agree(world, "q") == AgreePinResponse(pin_id=found.pin_id)
    assert pin(slave, pin_id=found.pin_id) == found
    unknown = pin(slave, pin_id=77)
    assert isinstance(unknown, Failure) and unknown.reason == common_pb2.WRONG_STATE
    for name in ("", "a b", "x" * 70):
        refused = agree(world, name, 77)
        assert isinstance(refused, Failure) and refused.reason == common_pb2.INVALID_FIELD, name
