"""What one request may cost: its size is bounded by its method, its lists by their fields, and no code of ours runs for
each element of what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from random import Random
from time import process_time
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.internal.encoder import _VarintBytes as varint  # type: ignore[attr-defined]  # the wire, by hand
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from tests.counting import calls_of
from tests.node.server.test_door import CASES, METHODS, REQUESTS
from tickwheel.node.core.delivery.settlements import SETTLE_TOPICS_MAX
from tickwheel.node.core.schedule.creations import SUBSCRIPTIONS_MAX, TOPICS_PER_GROUP_MAX
from tickwheel.node.core.watch.pins import TOPICS_MAX as PIN_TOPICS_MAX
from tickwheel.node.failure import Failure
from tickwheel.node.server import bounds, checks
from tickwheel.node.server.callers import EVERYBODY, Caller
from tickwheel.node.server.door import TOO_LARGE, UNDECODABLE, Door, read_request
from tickwheel.node.server.gate import shown
from tickwheel.node.server.services import serve_endpoints
from tickwheel.node.state.rights import (
    ADMINISTRATOR,
    GRANTS_MAX,
    PATTERNS_MAX,
    ROLES_OF_USER_MAX,
    AccessControl,
)
from tickwheel.node.state.settings import QUOTAS_MAX, RATE_MAX, normalised_quotas
from tickwheel.proto import (
    access_pb2,
    admin_pb2,
    common_pb2,
    consumer_pb2,
    dead_pb2,
    scheduler_pb2,
    schedules_pb2,
    snapshot_pb2,
    staging_pb2,
)
from tickwheel.proto.access_pb2 import Right
from tickwheel.transport.server import DirectHandler, Server

FEW = 100
"""Calls of functions in Python, whatever the request holds."""
NAME = "n" * 127


def field(number: int, data: bytes) -> bytes:
    """A field of bytes on the wire."""
    return bytes(varint(number << 3 | 2) + varint(len(data)) + data)


def row_bytes(row: bytes, count: int) -> bytes:
    """A batch of equal rows on the wire."""
    rows = scheduler_pb2.ScheduleBatch.DESCRIPTOR.fields_by_name["rows"].number
    return field(rows, field(1, row) * count)


def refusal(kind: type[Message], data: bytes, bytes_max: int | None = None) -> Mapping[str, str]:
    """Field, value and limit of a refusal."""
    refused = read_request(kind, data, bytes_max)
    assert not isinstance(refused, Message)
    assert refused.failure.grpc_code_name == "INVALID_ARGUMENT"
    return refused.failure.metadata


def grants(count: int, **lists: Any) -> access_pb2.SetRoleRequest:
    """A role with so many equal grants."""
    return access_pb2.SetRoleRequest(role=access_pb2.AccessRole(name="r", grants=[access_pb2.Grant(**lists)] * count))


HEADERS = {f"h{number}": "" for number in range(20_000)}
TOO_LONG: list[tuple[type[Message], bytes, str, int, int]] = [
    (scheduler_pb2.ScheduleBatch, row_bytes(b"", 200_000), "rows.messages", 200_000, 100_000),
    (
        scheduler_pb2.ScheduleRequest,
        scheduler_pb2.ScheduleRequest(message={"meta": {"headers": HEADERS}}).SerializeToString(),  # type: ignore[arg-type]
        "message.meta.headers", 20_000, 13_107,
    ),
    (
        scheduler_pb2.ScheduleRequest,
        scheduler_pb2.ScheduleRequest(message={"meta": {"tags": [""] * 40_000}}).SerializeToString(),  # type: ignore[arg-type]
        "message.meta.tags", 40_000, 32_767,
    ),
    (access_pb2.SetRoleRequest, grants(40_000).SerializeToString(), "role.grants", 40_000, GRANTS_MAX),
    (
        access_pb2.SetRoleRequest,
        grants(2, rights=[1] * 40_000).SerializeToString(),
        "role.grants[0].rights", 40_000, len(Right.values()),
    ),
    (
        access_pb2.SetRoleRequest,
        grants(1, topics=["a"] * 40_000).SerializeToString(),
        "role.grants[0].topics", 40_000, PATTERNS_MAX,
    ),
    (
        access_pb2.SetRoleRequest,
        grants(1, groups=["a"] * 65).SerializeToString(),
        "role.grants[0].groups", 65, PATTERNS_MAX,
    ),
    (
        access_pb2.SetUserRequest,
        access_pb2.SetUserRequest(roles=["a"] * 40_000).SerializeToString(),
        "roles", 40_000, ROLES_OF_USER_MAX,
    ),
    (
        admin_pb2.ResetGroupRequest,
        admin_pb2.ResetGroupRequest(topics=[""] * 200_500).SerializeToString(),
        "topics", 200_500, SUBSCRIPTIONS_MAX,
    ),
    (
        consumer_pb2.SettleBatch,
        consumer_pb2.SettleBatch(topics=[""] * 100_001).SerializeToString(),
        "topics", 100_001, 100_000,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "data", "path", "count", "limit"), TOO_LONG, ids=[case[2] for case in TOO_LONG])
def test_a_list_that_is_too_long_is_refused_by_its_length(
    kind: type[Message], data: bytes, path: str, count: int, limit: int
) -> None:
    """The refusal names field, count and limit. Nothing walks through the elements."""
    assert refusal(kind, data) == {"field": path, "value": str(count), "limit": f"at most {limit}"}
    assert calls_of(partial(read_request, kind, data)) < FEW


def test_bounds_name_fields_of_requests() -> None:
    """A field that is renamed keeps its bound."""
    seen: set[str] = set()

    def look(descriptor: Descriptor) -> None:
        for part in descriptor.fields:
            seen.update([part.full_name] if part.is_repeated else [])
            if part.message_type is not None:
                look(part.message_type)

    for request in REQUESTS:
        look(request)
    assert set(bounds.ELEMENTS_MAX_BY_FIELD) <= seen


def test_maps_of_requests_hold_texts() -> None:
    """The door does not look into maps for enums and unknown fields."""
    for request, path in CASES:
        owner = path[-1].message_type if path else request
        assert owner is not None
        for part in owner.fields:
            if part.message_type is not None and part.message_type.GetOptions().map_entry:
                assert part.message_type.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING, part.full_name


def test_no_code_runs_for_each_row_of_a_batch() -> None:
    """Of one that may pass, and of one with an unknown value or field in its last row."""
    row = common_pb2.Message(topic="t", due_ms=1, payload=b"x", on_key_conflict=common_pb2.KEY_CONFLICT_REFUSE)
    row.meta.tags.append("a")
    plain = row.SerializeToString()
    last = "rows.messages[20000]"
    row.on_key_conflict = 77  # type: ignore[assignment]
    rows = row_bytes(plain, 20_000)
    wrong = rows + row_bytes(row.SerializeToString(), 1)
    unknown = rows + row_bytes(plain + varint(900 << 3) + b"\x01", 1)
    assert isinstance(read_request(scheduler_pb2.ScheduleBatch, rows), scheduler_pb2.ScheduleBatch)
    assert refusal(scheduler_pb2.ScheduleBatch, wrong)["field"] == f"{last}.on_key_conflict"
    assert refusal(scheduler_pb2.ScheduleBatch, unknown)["field"] == f"{last}.900"
    for data in (rows, wrong, unknown):
        assert calls_of(partial(read_request, scheduler_pb2.ScheduleBatch, data)) < FEW


# -- the same refusals as a plain walk


def values(message: Message, part: FieldDescriptor, path: str) -> list[tuple[str, Any]]:
    """(path, value) of each value in a field."""
    value = getattr(message, part.name)
    if part.is_repeated:
        return [(f"{path}{part.name}[{number}]", item) for number, item in enumerate(value)]
    if part.message_type is not None and not message.HasField(part.name):
        return []
    return [(path + part.name, value)]


def messages_in(descriptor: Descriptor) -> list[FieldDescriptor]:
    """The fields with messages."""
    return [
        part
        for part in descriptor.fields
        if part.message_type is not None and not part.message_type.GetOptions().map_entry
    ]


def first_value(message: Message, path: str = "") -> tuple[str, int, str] | None:
    """(path, value, allowed values) of the first unknown value of an enum."""
    for part in cast(Descriptor, message.DESCRIPTOR).fields:
        if part.enum_type is not None:
            known = part.enum_type.values_by_number
            for place, value in values(message, part, path):
                if value not in known:
                    return place, value, ", ".join(f"{item.name} ({item.number})" for item in known.values())
    for part in messages_in(cast(Descriptor, message.DESCRIPTOR)):
        for place, value in values(message, part, path):
            found = first_value(value, place + ".")
            if found is not None:
                return found
    return None


def first_field(message: Message, path: str = "") -> tuple[str, str] | None:
    """(path, type) of the first unknown field."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return f"{path}{unknown[0].field_number}", message.DESCRIPTOR.name
    for part in sorted(messages_in(cast(Descriptor, message.DESCRIPTOR)), key=lambda part: part.number):
        for place, value in values(message, part, path):
            found = first_field(value, place + ".")
            if found is not None:
                return found
    return None


def fill(random: Random, message: Message, wrong: float, unknown: float) -> None:
    """Put anything into a message, unknown values and fields with these probabilities."""
    for part in message.DESCRIPTOR.fields:
        if random.random() < 0.3:
            continue
        if part.enum_type is not None:
            numbers = list(part.enum_type.values_by_number)
            drawn = [77 if random.random() < wrong else random.choice(numbers) for _ in range(3)]
            setattr(message, part.name, drawn[0]) if not part.is_repeated else getattr(message, part.name).extend(drawn)
        elif part in messages_in(cast(Descriptor, message.DESCRIPTOR)):
            value = getattr(message, part.name)
            for _ in range(random.randint(1, 3) if part.is_repeated else 1):
                inner = value.add() if part.is_repeated else value
                inner.SetInParent()
                fill(random, inner, wrong, unknown)
    if random.random() < unknown:
        message.MergeFromString(varint(random.randint(900, 905) << 3) + b"\x01")


@pytest.mark.parametrize("seed", range(4))
def test_refusals_are_those_of_a_plain_walk(seed: int) -> None:
    """Whatever stands where: the same field, value and text."""
    random, refused = Random(seed), Counter[str]()
    for descriptor in REQUESTS * 30:
        kind = GetMessageClass(descriptor)
        message = kind()
        fill(random, message, random.choice([0, 0.1, 0.5]), random.choice([0, 0, 0.1]))
        data = message.SerializeToString()
        message = kind.FromString(data)
        field_found, value_found = first_field(message), first_value(message)
        read = read_request(kind, data)
        if field_found is not None:
            path, owner = field_found
            allowed = f"only fields of {owner} that this version knows"
            expected = {"field": path, "value": "unknown field", "limit": allowed}
        elif value_found is not None:
            path, number, names = value_found
            allowed = f"a value that this version knows: {names}"
            expected = {"field": path, "value": str(number), "limit": allowed}
        else:
            assert isinstance(read, kind) and read == message
            refused["nothing"] += 1
            continue
        assert not isinstance(read, Message) and read.failure.metadata == expected, descriptor.full_name
        refused["field" if field_found is not None else "value"] += 1
    assert min(refused[what] for what in ("nothing", "field", "value")) > 10, refused


# -- bytes, by method


class Registry:
    """Takes what is registered."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Of one service."""
        self.handlers.extend(handlers)

    def found(self, method: str) -> Any:
        """The handler of a method."""
        details = cast(grpc.HandlerCallDetails, SimpleNamespace(method=method, invocation_metadata=()))
        return next(made for handler in self.handlers if (made := handler.service(details)) is not None)


def test_each_method_takes_what_its_requests_need() -> None:
    """More is refused before it is decoded, with field, value and limit."""
    registry, paths = Registry(), {path for path, _ in METHODS}
    serve_endpoints(Door(cast(Server, registry), Counter()), cast(Any, None), cast(Any, None))
    assert paths > bounds.FULL_METHODS | bounds.LISTING_METHODS and not bounds.FULL_METHODS & bounds.LISTING_METHODS
    bounded = 0
    for path in paths:
        handler, limit = registry.found(path), bounds.request_bytes_max(path)
        if isinstance(handler, DirectHandler):
            assert limit is None
            continue
        data = b"\xff" * ((limit or bounds.LISTING_BYTES_MAX) + 1)
        refused = handler.request_deserializer(data)
        if limit is None:
            assert refused.kind != TOO_LARGE
            continue
        assert refused.kind == TOO_LARGE, path
        facts = {"field": "request", "value": f"{limit + 1} bytes", "limit": f"at most {limit} bytes"}
        assert refused.failure.metadata == facts
        assert handler.request_deserializer(data[:-1]).kind != TOO_LARGE
        bounded += 1
    assert bounded > 40


QUOTAS = " ".join(f"{number:0127}={RATE_MAX}" for number in range(QUOTAS_MAX))
LARGEST: dict[str, Message] = {
    "Scheduler/RescheduleMany": scheduler_pb2.RescheduleManyRequest(
        requests=[
            scheduler_pb2.RescheduleRequest(
                key={"topic": NAME, "unique_key": "k" * 255},  # type: ignore[arg-type]
                due_ms=1 << 50, producer_id="p" * 64, sequence=1 << 60, producer_owner="o" * 256,
            )
        ] * 500
    ),
    "Scheduler/CancelMany": scheduler_pb2.CancelManyRequest(
        ids=[common_pb2.MessageId(wheel_group=1 << 31, hour=1 << 31, index=1 << 31)] * 500
    ),
    "Schedules/Put": schedules_pb2.PutScheduleRequest(
        definition={"payload": b"x" * 65_536, "meta": {"headers": {"h": "v" * 65_000}}},  # type: ignore[arg-type]
    ),
    "Consumer/Pull": consumer_pb2.PullRequest(topics=[NAME] * TOPICS_PER_GROUP_MAX, filter="f" * 4 * 8_448),
    "Admin/CreateGroup": admin_pb2.CreateGroupRequest(topics=[NAME] * TOPICS_PER_GROUP_MAX, filter="f" * 4 * 8_448),
    "Admin/SetGroupFilter": admin_pb2.SetGroupFilterRequest(name=NAME, filter="f" * 4 * 8_448),
    "Admin/UpdateSettings": admin_pb2.Settings(
        topic_quotas=QUOTAS, client_quotas=QUOTAS, topic_pending_max=QUOTAS, delay_levels="99999d " * 64
    ),
    "Admin/Trace": admin_pb2.TraceRequest(ids=[common_pb2.MessageId(hour=1 << 31, index=1 << 31)] * 100),
    "DeadLetters/ReplayDead": dead_pb2.ReplayDeadRequest(group=NAME, numbers=[1 << 63] * 1_000),
    "Snapshot/Pin": snapshot_pb2.PinRequest(topics=[NAME] * PIN_TOPICS_MAX),
    "Access/SetUser": access_pb2.SetUserRequest(name=NAME, roles=[NAME] * ROLES_OF_USER_MAX),
    "Access/SetRole": grants(
        GRANTS_MAX, rights=list(Right.values()), topics=[NAME] * PATTERNS_MAX, groups=[NAME] * PATTERNS_MAX
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", LARGEST)
def test_the_largest_request_that_is_served_passes_the_door(method: str) -> None:
    """Bounds refuse nothing that was served before."""
    assert normalised_quotas(QUOTAS) is not None
    request = LARGEST[method]
    limit = bounds.request_bytes_max(f"/tickwheel.v1.{method}")
    assert limit is not None
    assert read_request(type(request), request.SerializeToString(), limit) == request


# -- rights


def restricted() -> Caller:
    """A user with a role for everything, whose rights are looked up."""
    control = AccessControl()
    wanted = access_pb2.StoredUser(name="u", roles=[ADMINISTRATOR])
    assert control.apply(access_pb2.AccessCommand(set_user=wanted), 0, False).failure is None
    return Caller("u", "token", False, control, lambda: True)


class NoGroups:
    """A state without groups."""

    def group_id(self, name: str) -> None:
        """No group has this name."""


NAMED: list[tuple[checks.Check, type[Message], int]] = [
    (checks.settling, consumer_pb2.SettleBatch, SETTLE_TOPICS_MAX),
    (checks.consuming, consumer_pb2.OpenConsumer, TOPICS_PER_GROUP_MAX),
    (checks.consuming, consumer_pb2.PullRequest, TOPICS_PER_GROUP_MAX),
    (checks.creating_group, admin_pb2.CreateGroupRequest, TOPICS_PER_GROUP_MAX),
    (checks.pinning, snapshot_pb2.PinRequest, PIN_TOPICS_MAX),
]


@pytest.mark.parametrize(("check", "kind", "limit"), NAMED, ids=[kind.__name__ for _, kind, _ in NAMED])
def test_rights_are_checked_for_each_topic_once_and_for_as_many_as_are_served(
    check: checks.Check, kind: type[Any], limit: int
) -> None:
    """Too many topics are refused by their number, before rights are looked up."""
    state = cast(Any, NoGroups())
    for caller in (restricted(), EVERYBODY):
        many = kind(topics=[""] * 100_000)
        refused = check(caller, many, state)
        assert isinstance(refused, Failure)
        assert refused.metadata == {"field": "topics", "value": "100000", "limit": f"at most {limit}"}
        assert calls_of(partial(check, caller, many, state)) < FEW
        same = kind(topics=["t"] * limit)
        assert check(caller, same, state) is None
        assert calls_of(partial(check, caller, same, state)) < FEW
        assert check(caller, kind(topics=[f"t{number}" for number in range(limit)]), state) is None


class Free:
    """A caller that may do everything. It has no rights that could be looked up."""

    free = True


@pytest.mark.parametrize(("check", "kind"), [row[:2] for row in NAMED[:3]], ids=[row[1].__name__ for row in NAMED[:3]])
def test_topics_of_a_free_caller_are_not_looked_at(check: checks.Check, kind: type[Any]) -> None:
    """It settles every batch that it gets: to list the topics of one cost up to 50 us."""
    assert check(cast(Any, Free()), kind(group="g", topics=["t", "u"]), cast(Any, None)) is None


# -- the audit log


def test_what_the_audit_log_cannot_show_costs_nothing() -> None:
    """A line keeps 2,000 characters; a request of 64 KB of empty grants took 100 ms to become them."""
    many = grants(30_000)
    assert shown(many) == f"{many.ByteSize()} bytes"
    assert calls_of(partial(shown, many)) < FEW
    assert '"grants"' in shown(grants(3, rights=[1]))


UNKNOWN = varint(900 << 3) + b"\x00"
BAIT = (
    varint(900 << 3 | 3)
    + field(1, varint(3 << 3 | 2) + varint(1 << 40) + varint(99 << 3 | 2) + varint(1 << 30))
    + varint(900 << 3 | 4)
)
"""An unknown group with a field that is a message outside of it. As one it would go on far behind the request's end."""
MANY_FIELDS: list[tuple[type[Message], bytes, str]] = [
    (admin_pb2.BackupRequest, UNKNOWN * 250_000, "900"),
    (
        admin_pb2.BackupRequest,
        field(admin_pb2.BackupRequest.DESCRIPTOR.fields_by_name["held"].number, b"") * 250_000,
        "held",
    ),
    (scheduler_pb2.ScheduleRequest, field(1, b"") * 250_000, "message"),
    (scheduler_pb2.ScheduleRequest, field(1, field(3, UNKNOWN * 250_000)), "message.meta.900"),
    (scheduler_pb2.ScheduleRequest, BAIT + field(1, field(3, UNKNOWN * 250_000)), "message.meta.900"),
    (scheduler_pb2.ScheduleBatch, row_bytes(b"", 250_000), "rows.messages"),
    (consumer_pb2.SettleBatch, consumer_pb2.SettleBatch(topics=[""] * 250_000).SerializeToString(), "topics"),
    (
        staging_pb2.CommitStagedRequest,
        staging_pb2.CommitStagedRequest(attempts=[staging_pb2.StagedAttempt()] * 250_000).SerializeToString(),
        "attempts",
    ),
]


@pytest.mark.parametrize(
    ("kind", "data", "path"), MANY_FIELDS, ids=[f"{kind.__name__}-{path}" for kind, _, path in MANY_FIELDS]
)
def test_fields_are_counted_before_they_are_decoded(kind: type[Message], data: bytes, path: str) -> None:
    """Four million empty elements took up to 0.7 s. Protobuf is not asked to decode more than are allowed."""
    refused = refusal(cast(Any, Undecoded(kind)), data)
    assert refused["field"] == path and refused["value"] == f"more than {bounds.FIELDS_MAX}"


def test_a_number_without_an_end_is_not_read_to_the_end() -> None:
    """Counting fields took 0.4 s for four million bytes of it; protobuf gives up after ten."""
    kind = scheduler_pb2.ScheduleRequest
    for data in (varint(900 << 3) + b"\xff" * 500_000, field(1, varint(900 << 3) + b"\xff" * 500_000)):
        read = Bytes(data)
        with pytest.raises(DecodeError):
            bounds.check_fields(kind, read)
        assert read.reads < FEW
        assert refusal(kind, data)["field"] == "request"


class Bytes(bytes):
    """Counts how often one of them is read."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


class Undecoded:
    """A kind of messages that are not to be decoded."""

    def __init__(self, kind: type[Message]) -> None:
        self.DESCRIPTOR = kind.DESCRIPTOR

    def FromString(self, data: bytes) -> Message:  # protobuf's name
        """Called by the door."""
        pytest.fail(f"{len(data)} bytes are decoded")


def test_the_first_of_many_unknown_fields_is_found_without_a_walk() -> None:
    """An object was made for each: 2.5 s for eight megabytes of them."""
    unknown = UNKNOWN * 120_000
    kind = scheduler_pb2.ScheduleRequest
    for data, path in (
        (unknown, "900"),
        (field(1, unknown), "message.900"),
        (field(1, field(3, unknown)) + UNKNOWN, "900"),
        (field(1, field(3, unknown + field(4, b"x"))), "message.meta.900"),
    ):
        before = process_time()
        assert refusal(kind, data)["field"] == path
        assert process_time() - before < 0.05


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_bytes_that_cannot_be_counted_are_refused_by_decoding(cut: int) -> None:
    """They end within a field, or are no fields at all."""
    data = field(1, field(2, b"x" * 500_000))
    for wrong in (data[:-cut], data + b"\xff" * cut, b"\xff" * 500_000, data + b"\x0a"):
        read = read_request(scheduler_pb2.ScheduleRequest, wrong)
        assert not isinstance(read, Message) and read.kind == UNDECODABLE


def one_message(meta: bytes, payload: bytes = b"x", metas: int = 1) -> bytes:
    """A request to schedule one message, on the wire."""
    return field(1, field(2, payload) + field(3, meta) * metas)


def many_headers() -> Iterable[tuple[type[Message], bytes]]:
    """Requests with a million headers, as clients write them and as none does."""
    meta = common_pb2.MessageMeta(headers={f"{number:x}": "" for number in range(5_000)}).SerializeToString()
    yield scheduler_pb2.ScheduleRequest, one_message(meta * 200)
    yield scheduler_pb2.ScheduleRequest, one_message(b"\x1a\x00" * 1_000_000)
    yield scheduler_pb2.ScheduleRequest, one_message(b"\x9a\x00\x00" * 1_000_000)
    yield scheduler_pb2.ScheduleRequest, one_message(b"\x1a\x00", metas=1_000_000)
    yield scheduler_pb2.ScheduleBatch, row_bytes(field(3, meta), 200)
    rows = scheduler_pb2.ScheduleBatch.DESCRIPTOR.fields_by_name["rows"].number
    yield scheduler_pb2.ScheduleBatch, field(rows, field(1, field(3, meta))) * 200
    columns = scheduler_pb2.ScheduleBatch.DESCRIPTOR.fields_by_name["columns"].number
    hidden = row_bytes(field(3, meta), 200)
    yield scheduler_pb2.ScheduleBatch, hidden + field(rows, b"")
    yield scheduler_pb2.ScheduleBatch, field(columns, b"") + hidden + field(columns, b"")


@pytest.mark.parametrize("place", range(8))
def test_headers_are_counted_before_they_are_decoded(place: int) -> None:
    """Eight megabytes of them took the loop two seconds."""
    kind, data = list(many_headers())[place]
    before = process_time()
    assert refusal(kind, data)["field"] == (
        "message.meta" if place == 3 else "message.meta.headers" if place < 3 else "headers"
    )
    assert process_time() - before < 0.5


def test_what_looks_like_headers_elsewhere_is_served() -> None:
    """Payloads may hold any bytes; many small metas are fine."""
    payload = b"\x1a\x9a" * 500_000
    assert isinstance(read_request(scheduler_pb2.ScheduleRequest, one_message(b"", payload)), Message)
    meta = common_pb2.MessageMeta(headers={f"h{number}": "v" for number in range(19)}).SerializeToString()
    batch = row_bytes(field(2, payload[:100]) + field(3, meta), 10_000)
    assert isinstance(read_request(scheduler_pb2.ScheduleBatch, batch), Message)


def test_columns_are_not_searched_for_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their metas are bytes: to count in a megabyte of payloads what may be headers took up to three milliseconds."""
    searched: list[int] = []

    def search(data: bytes) -> int:
        searched.append(len(data))
        return 0

    monkeypatch.setattr(bounds, "headers_at_most", search)
    columns = scheduler_pb2.ColumnBatch(topic="t", payloads=b"\x1a\x9a" * 500_000)
    batch = scheduler_pb2.ScheduleBatch(columns=columns).SerializeToString()
    assert isinstance(read_request(scheduler_pb2.ScheduleBatch, batch), Message) and not searched


def test_headers_are_counted_and_not_what_looks_like_them() -> None:
    """A length of 26 bytes, as of a ULID, is the byte that a header begins with; so are bytes of many scripts."""
    ulid = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
    meta = common_pb2.MessageMeta(key=ulid, headers=dict.fromkeys(("request", "trace", "\u041a"), ulid))
    batch = row_bytes(field(3, meta.SerializeToString()), 50_000)
    assert batch.count(b"\x1a") + batch.count(b"\x9a") > 6 * 50_000
    assert isinstance(read_request(scheduler_pb2.ScheduleBatch, batch), Message)
    batch = row_bytes(field(3, meta.SerializeToString()), 70_000)
    facts = refusal(scheduler_pb2.ScheduleBatch, batch)
    assert (facts["field"], facts["value"]) == ("headers", "210000")


def test_numbers_of_the_wire_are_read() -> None:
    """As protobuf writes them; one without an end is refused, one that is cut is too short."""
    for number in (0, 1, 127, 128, 300, (1 << 32) - 1, (1 << 63) + 5, (1 << 64) - 1):
        data = b"\x7f" + varint(number) + b"\x05"
        assert bounds.decoded_varint(data, 1) == (number, len(data) - 1)
    assert bounds.decoded_varint(b"\xff" * 9 + b"\x7f", 0) == ((1 << 64) - 1, 10)
    with pytest.raises(DecodeError):
        bounds.decoded_varint(b"\xff" * 10 + b"\x00", 0)
    with pytest.raises(IndexError):
        bounds.decoded_varint(b"\xff\xff", 0)
