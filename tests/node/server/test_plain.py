"""Plain requests: what is read from their bytes is what protobuf, the door and intake read from them."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tests.counting import lines_of
from tests.node.core.trio import World
from tickwheel.node.core.promise import UNHEARD
from tickwheel.node.core.schedule.intake import Row, row_of
from tickwheel.node.failure import RequestError
from tickwheel.node.server import plain
from tickwheel.node.server.callers import EVERYBODY
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.checks import by_message
from tickwheel.node.server.door import read_request
from tickwheel.node.server.endpoints import SERVICES
from tickwheel.node.server.handlers import Node, schedule
from tickwheel.node.server.plain import NAMES_KEPT, batch_of, plain_batch, plain_request, request_of
from tickwheel.node.server.schedule_stream import ScheduleStreams
from tickwheel.node.state.settings import Settings
from tickwheel.proto import common_pb2, scheduler_pb2

NOW_MS = 1_795_700_000_000
MAKERS: dict[Any, tuple[Any, Any]] = {
    scheduler_pb2.ScheduleRequest: (plain_request, request_of),
    scheduler_pb2.ScheduleBatch: (plain_batch, batch_of),
}
KINDS = st.sampled_from(sorted(MAKERS, key=str))
WHENS = st.one_of(
    st.tuples(st.just("due_ms"), st.sampled_from([0, 1, NOW_MS, 1 << 42, 1 << 50, (1 << 50) + 1, -1])),
    st.tuples(st.just("due_ms"), st.integers(0, 1 << 51)),
    st.tuples(st.just("delay_ms"), st.integers(-1, 1 << 40)),
    st.tuples(st.just("delay_level"), st.integers(0, (1 << 32) - 1)),
)
NAMES = st.sampled_from(["t", "orders-7", "a" * 126, "a" * 127, "%DLQ%x", ".t", "", "no good", "ö"])
PAYLOADS = st.sampled_from([1, 2, 99, 127, 128, 256, 16_383, 16_384]).map(bytes) | st.binary(max_size=5)
CLIENTS = st.sampled_from(["", "worker-7", "a" * 127, "a" * 128, "ö"])
SEQUENCES = st.sampled_from([0, 1, 127, 128, 1 << 55, (1 << 56) - 1, 1 << 56, (1 << 64) - 1])


def request(
    kind: Any, topic: str, payload: bytes, when: tuple[str, int], client: str, sequence: int
) -> tuple[Message, bool]:
    """A request, and whether this version takes it for plain."""
    name, value = when
    fields: dict[str, Any] = {"topic": topic, "payload": payload, name: value}
    message = common_pb2.Message(**fields)
    if kind is scheduler_pb2.ScheduleRequest:
        made: Message = scheduler_pb2.ScheduleRequest(message=message, client_name=client)
        sequence = 0
    else:
        rows = scheduler_pb2.RowBatch(messages=[message])
        made = scheduler_pb2.ScheduleBatch(rows=rows, client_name=client, sequence=sequence)
    good = topic in ("t", "orders-7", "a" * 126, "a" * 127) and bool(payload)
    short = client not in ("a" * 128, "ö") and sequence < 1 << 56
    small = value < 1 << 31 if name == "delay_level" else 0 <= value <= 1 << 50
    return made, good and short and small


def read_slowly(kind: Any, data: bytes) -> Row | None:
    """As without plain requests; None: it is refused, or no row."""
    read = read_request(kind, data)
    return row_of(read, Settings()) if isinstance(read, kind) else None


@given(KINDS, NAMES, PAYLOADS, WHENS, CLIENTS, SEQUENCES)
def test_a_plain_request_is_read_as_protobuf_reads_it(
    kind: Any, topic: str, payload: bytes, when: tuple[str, int], client: str, sequence: int
) -> None:
    """Whatever is plain and valid is read from its bytes, and all else is left to others."""
    made, is_plain = request(kind, topic, payload, when, client, sequence)
    read, back = MAKERS[kind]
    data = made.SerializeToString(deterministic=True)
    row = read(data)
    assert (row is not None) == is_plain
    if row is not None:
        assert row == read_slowly(kind, data)
        assert back(row) == made


@given(
    KINDS,
    PAYLOADS,
    WHENS,
    CLIENTS,
    SEQUENCES,
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["set", "cut", "add"]), st.integers(0, 255)), max_size=4),
    st.binary(max_size=8),
)
def test_bytes_that_are_nearly_plain_are_read_alike_or_left(
    kind: Any,
    payload: bytes,
    when: tuple[str, int],
    client: str,
    sequence: int,
    changes: list[tuple[int, str, int]],
    behind: bytes,
) -> None:
    """Numbers with surplus bytes, wrong sizes, fields twice, unknown or cut: never another row than protobuf's."""
    data = bytearray(request(kind, "t", payload, when, client, sequence)[0].SerializeToString(deterministic=True))
    for place, what, byte in changes:
        at = min(place, len(data) - 1) if byte % 2 else max(0, len(data) - 1 - place)
        if what == "set" and data:
            data[at] = byte
        elif what == "cut" and data:
            del data[at]
        elif what == "add":
            data.insert(max(at, 0), byte)
    changed = bytes(data) + behind
    row = MAKERS[kind][0](changed)
    assert row is None or row == read_slowly(kind, changed)


@given(KINDS, st.binary(max_size=40))
def test_any_bytes_are_read_alike_or_left(kind: Any, data: bytes) -> None:
    row = MAKERS[kind][0](data)
    assert row is None or row == read_slowly(kind, data)


@pytest.mark.parametrize("kind", MAKERS)
def test_what_protobuf_accepts_though_no_library_writes_it_is_left_or_read_alike(kind: Any) -> None:
    """Every cut, and every byte of the head set to each value."""
    made, _ = request(kind, "t", b"xy", ("due_ms", NOW_MS), "me", 300)
    data = made.SerializeToString(deterministic=True)
    for end in range(len(data)):
        row = MAKERS[kind][0](data[:end])
        assert row is None or row == read_slowly(kind, data[:end])
    for place in range(len(data)):
        for byte in range(256):
            changed = data[:place] + bytes((byte,)) + data[place + 1 :]
            row = MAKERS[kind][0](changed)
            assert row is None or row == read_slowly(kind, changed)


def test_a_row_that_is_too_large_is_refused_as_its_request() -> None:
    """How large a payload may be is a setting, which the bytes do not say."""
    world = World(84)
    core = cast(Any, world.elect().host).core
    calls = Calls(lambda: core, lambda: None, lambda wait_ms: None, lambda error: None)
    nobody: Any = None
    node = Node(calls, nobody, ScheduleStreams(calls, 8), nobody, nobody, nobody, tls=False)
    row = Row("t", 0, world.now_ms, bytes(core.state.settings.payload_bytes_max + 1))
    refusals = []
    for asked in (row, request_of(row)):
        with pytest.raises(RequestError) as raised:
            schedule(node, asked, EVERYBODY, UNHEARD)
        refusals.append(raised.value.failure)
    assert refusals[0] == refusals[1] and refusals[0].metadata["field"] == "payload[0]"


@pytest.mark.parametrize("kind", MAKERS)
def test_numbers_without_an_end_cost_nothing(kind: Any) -> None:
    """At whatever place one stands."""
    data = request(kind, "t", bytes(200), ("due_ms", NOW_MS), "me", 300)[0].SerializeToString(deterministic=True)
    for place in range(len(data)):
        assert lines_of(partial(MAKERS[kind][0], data[:place] + b"\xff" * 40_000)) <= 200


def test_few_names_are_kept() -> None:
    """Whoever sends ever other names does not fill the memory."""
    for number in range(2 * NAMES_KEPT):
        data = request(scheduler_pb2.ScheduleRequest, f"t{number}", b"x", ("due_ms", 1), f"c{number}", 0)[0]
        row = plain_request(data.SerializeToString())
        assert row is not None and (row.topic, row.client_name) == (f"t{number}", f"c{number}")
    assert len(plain._topics) <= NAMES_KEPT and len(plain._names) <= NAMES_KEPT


def test_the_right_to_a_topic_is_asked_for_a_row_as_for_its_request() -> None:
    """Only methods whose handlers take rows are given them."""
    row = Row("t", 0, NOW_MS, b"x")
    assert by_message(row) == by_message(request_of(row)) == "t"
    assert by_message(scheduler_pb2.ScheduleRequest()) == "(none)"
    given_rows = {name for rows in SERVICES.values() for name, row in rows.items() if row.plain is not None}
    assert given_rows == {"Schedule", "ScheduleStream"}
