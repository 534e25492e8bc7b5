"""The client's answers: each says all that its protobuf message says, and none is a protobuf message."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as Wire
from typing_extensions import TypeAliasType

import tickwheel.client
from scripts.docs_site.python_api import PAGES
from tickwheel.client import (
    bulk,
    cold,
    copies,
    dead,
    disk_use,
    nodes,
    notes,
    pulling,
    retrying,
    rights,
    snapshot,
    staging,
    topics,
)
from tickwheel.client import settings as settings_module
from tickwheel.client.answers import enum_of, reader
from tickwheel.client.async_client import _message
from tickwheel.client.schedules import run_of, schedule_of
from tickwheel.client.sweeps import _sweep
from tickwheel.proto import (
    access_pb2,
    admin_pb2,
    bulk_pb2,
    cold_pb2,
    consumer_pb2,
    dead_pb2,
    scheduler_pb2,
    schedules_pb2,
    snapshot_pb2,
    staging_pb2,
)


class Answer(NamedTuple):
    """How a message becomes an answer."""

    kind: type[Wire]
    read: Callable[[Any], object]
    base: Mapping[str, object] = {}
    """Fields that must be set for others to be carried over."""
    left_out: Mapping[str, str] = {}
    """Fields that are not carried over, and why."""
    values: Mapping[str, object] = {}
    """Values of fields that are not free."""


PAGED = "the client asks for the pages by itself"
ANSWERS = [
    Answer(admin_pb2.NodeStatus, nodes.node_status_of, {"clock_state": admin_pb2.CLOCK_AGREED}),
    Answer(admin_pb2.PeerStatus, reader(nodes.PeerStatus, admin_pb2.PeerStatus)),
    Answer(admin_pb2.TopicStatus, reader(nodes.TopicStatus, admin_pb2.TopicStatus)),
    Answer(admin_pb2.ColdStatus, reader(nodes.ColdStatus, admin_pb2.ColdStatus)),
    Answer(admin_pb2.BulkStatus, reader(nodes.BulkStatus, admin_pb2.BulkStatus)),
    Answer(admin_pb2.ServerInfo, nodes.server_info_of),
    Answer(admin_pb2.TransferMasterResponse, nodes.handover_of),
    Answer(admin_pb2.Member, nodes.member_of),
    Answer(admin_pb2.StateDigest, nodes.digest_of),
    Answer(admin_pb2.Topic, topics.topic_of),
    Answer(admin_pb2.Group, topics.group_of),
    Answer(admin_pb2.DeleteTopicResponse, topics.topic_deletion_of),
    Answer(admin_pb2.DeleteGroupResponse, topics.group_deletion_of),
    Answer(admin_pb2.RetryPolicy, retrying.policy_of),
    Answer(admin_pb2.ExponentialBackoff, lambda wire: retrying.policy_of(admin_pb2.RetryPolicy(exponential=wire))),
    Answer(admin_pb2.Settings, settings_module.settings_of),
    Answer(admin_pb2.DiskUse, lambda wire: disk_use.disk_use_of([wire]), left_out={"next_hour": PAGED}),
    Answer(admin_pb2.DiskUse.Part, lambda wire: disk_use.disk_use_of([admin_pb2.DiskUse(parts=[wire])])),
    Answer(admin_pb2.DiskUse.Hour, lambda wire: disk_use.disk_use_of([admin_pb2.DiskUse(hours=[wire])])),
    Answer(admin_pb2.DiskUse.Topic, lambda wire: disk_use.disk_use_of([admin_pb2.DiskUse(topics=[wire])])),
    Answer(admin_pb2.BackupChunk, copies.chunk_of),
    Answer(admin_pb2.BackupOrigin, reader(copies.BackupOrigin, admin_pb2.BackupOrigin)),
    Answer(admin_pb2.TraceResponse, notes.trace_of),
    Answer(admin_pb2.TraceEvent, notes._event_of),
    Answer(access_pb2.Caller, rights.caller_of, values={"by": "token"}),
    Answer(access_pb2.Grant, reader(rights.Grant, access_pb2.Grant)),
    Answer(access_pb2.AccessRole, rights.role_of),
    Answer(access_pb2.UserQuotas, reader(rights.Quotas, access_pb2.UserQuotas)),
    Answer(access_pb2.Token, reader(rights.Token, access_pb2.Token)),
    Answer(access_pb2.CreateTokenResponse, rights.new_token_of),
    Answer(access_pb2.User, rights.user_of),
    Answer(access_pb2.AuditRecord, rights.audit_record_of, values={"by": "token"}),
    Answer(cold_pb2.ColdJob, cold.job_of),
    Answer(cold_pb2.ColdPart, cold.part_of),
    Answer(cold_pb2.ColdMoved, cold.moved_of),
    Answer(bulk_pb2.LoadState, bulk.progress_of),
    Answer(staging_pb2.StagedJob, staging.staged_job_of),
    Answer(snapshot_pb2.PinnedPage, snapshot.pinned_page_of, left_out={"next_due_ms": PAGED, "next_index": PAGED}),
    Answer(snapshot_pb2.SettledPage, snapshot.settled_page_of),
    Answer(snapshot_pb2.SettledTopic, snapshot.settled_topic_of),
    Answer(
        dead_pb2.ListDeadResponse,
        dead.page_of,
        left_out={"queue": "the caller knows the group"},
    ),
    Answer(dead_pb2.DeadLetter, lambda wire: dead.letter_of(wire, None if wire.payload_missing else wire.payload)),
    Answer(
        consumer_pb2.DeliverBatch,
        pulling.pulled_of,
        left_out={
            "positions": "a handle leaves them out, to be short",
            "filter": "is applied before",
            **dict.fromkeys(("topics", "topic_counts", "epochs"), "a pull brings one topic"),
        },
    ),
    Answer(scheduler_pb2.PendingMessage, lambda wire: _message(wire, content=True), {"group": "g"}),
    Answer(
        scheduler_pb2.Sweep,
        _sweep,
        left_out={
            "cancel": "what has no other action cancels",
            **dict.fromkeys(("next_due_ms", "next_index", "steps", "pass_found", "target_id"), "how nodes go on"),
            "stamped_ms_max": "begun_ms says it",
            "with_dead": "only nodes of earlier versions leave dead letters",
        },
    ),
    Answer(scheduler_pb2.Selection, lambda wire: _sweep(scheduler_pb2.Sweep(selection=wire))),
    Answer(schedules_pb2.Schedule, schedule_of),
    Answer(schedules_pb2.ScheduleRun, run_of),
]
INNER = {
    "MessageId": "a text",
    "MessageMeta": "the fields of a message",
    "ScheduleDefinition": "the fields of a schedule",
    "ScheduleSpec": "the fields of a schedule",
}
"""Messages that are part of a converted one and have no answer of their own, and what they become."""


def sample(field: Any, number: int = 1) -> object:
    """A value of a field that is not its default."""
    if field.message_type is not None:
        message = field.message_type._concrete_class()
        for inner in field.message_type.fields:
            put(message, inner, number)
        return message
    if field.enum_type is not None:
        return field.enum_type.values[number].number
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return np.arange(number, number + 2, dtype="<i8").tobytes() if field.type == field.TYPE_BYTES else f"s{number}"
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return True
    return number + 6


def put(message: Any, field: Any, number: int = 1) -> None:
    """Set a field to a value that is not its default."""
    if is_map(field):
        key, value = (sample(part, number) for part in field.message_type.fields)
        getattr(message, field.name)[key] = value
    elif field.is_repeated:
        getattr(message, field.name).append(sample(field, number))
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(sample(field, number))
    else:
        setattr(message, field.name, sample(field, number))


def is_map(field: Any) -> bool:
    """Whether it is a map of the protobuf message."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def said(answer: object) -> object:
    """An answer as values that compare: columns of numpy do not."""
    if dataclasses.is_dataclass(answer):
        return [said(getattr(answer, field.name)) for field in dataclasses.fields(answer)]
    return answer.tolist() if isinstance(answer, np.ndarray) else answer


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.kind.DESCRIPTOR.name)
def test_each_field_is_carried_over(answer: Answer) -> None:
    """A message that has one field more gives another answer; fields that are left out are there, and give none."""
    fields = answer.kind.DESCRIPTOR.fields_by_name
    assert set(answer.left_out) <= set(fields)
    for name, field in fields.items():
        before, after = answer.kind(**answer.base), answer.kind(**answer.base)
        if name in answer.values:
            setattr(after, name, answer.values[name])
        else:
            put(after, field, 2 if name in answer.base and field.enum_type is not None else 1)
        same = said(answer.read(before)) == said(answer.read(after))
        assert same == (name in answer.left_out), f"{name} is {'not' if same else ''} carried over"


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.kind.DESCRIPTOR.name)
def test_what_is_in_an_answer_is_an_answer(answer: Answer) -> None:
    """Messages within messages are among those above; so none of their fields is lost either."""
    known = {other.kind.DESCRIPTOR for other in ANSWERS}
    for field in answer.kind.DESCRIPTOR.fields:
        inner = field.message_type
        if inner is not None and not is_map(field) and field.name not in answer.left_out:
            assert inner in known or inner.name in INNER, f"{field.full_name}: {inner.name}"


def test_an_answer_holds_no_protobuf() -> None:
    """Neither a message nor one of its containers, however deep; all values are of Python's or numpy's own types."""
    plain = (str, int, float, bool, bytes, datetime, date, timedelta, np.ndarray, type(None))

    def check(value: object, where: str) -> None:
        if dataclasses.is_dataclass(value):
            assert type(value).__module__.startswith("tickwheel.client."), where
            for field in dataclasses.fields(value):
                check(getattr(value, field.name), f"{where}.{field.name}")
        elif isinstance(value, tuple):
            for item in value:
                check(item, f"{where}[]")
        elif type(value) is dict:
            for key, item in value.items():
                check(key, f"{where} key")
                check(item, f"{where}[]")
        else:
            assert isinstance(value, plain), f"{where}: {type(value)}"

    for answer in ANSWERS:
        wire = answer.kind(**answer.base)
        for field in answer.kind.DESCRIPTOR.fields:
            put(wire, field)
        check(answer.read(wire), answer.kind.DESCRIPTOR.name)


NUMBERS = [
    (nodes.NodeRole, admin_pb2.Role.DESCRIPTOR, ""),
    (nodes.NodeState, admin_pb2.NodeState.DESCRIPTOR, "NODE_"),
    (nodes.ClockState, admin_pb2.ClockState.DESCRIPTOR, "CLOCK_"),
    (nodes.ColdState, admin_pb2.ColdState.DESCRIPTOR, "COLD_"),
    (notes.EventKind, admin_pb2.TraceEvent.Kind.DESCRIPTOR, ""),
    (rights.Right, access_pb2.Right.DESCRIPTOR, "RIGHT_"),
    (staging.StagedState, staging_pb2.StagedState.DESCRIPTOR, "STAGED_"),
]


@pytest.mark.parametrize(("kind", "descriptor", "prefix"), NUMBERS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_number_has_its_member(kind: Any, descriptor: Any, prefix: str) -> None:
    """Of a protobuf enum; only what is not specified is unknown, like a number of a later version."""
    names = {value.name.removeprefix(prefix) for value in descriptor.values if not value.name.endswith("_UNSPECIFIED")}
    assert set(kind.__members__) == names | {"UNKNOWN"}
    for value in descriptor.values:
        expected = value.name.removeprefix(prefix) if not value.name.endswith("_UNSPECIFIED") else "UNKNOWN"
        assert enum_of(kind, descriptor, value.number).name == expected
    assert enum_of(kind, descriptor, 1_000) is kind.UNKNOWN


def test_a_field_that_no_message_has_is_found_at_once() -> None:
    """A field of an answer that was renamed or is new is not left empty."""
    with pytest.raises(KeyError, match="address"):
        reader(nodes.PeerStatus, admin_pb2.Member, connected=lambda wire: True, match_index=lambda wire: 0)


def test_what_a_node_does_not_say_is_none() -> None:
    """Zeros by which nodes say that there is nothing, and clocks that may be off by anything."""
    status = nodes.node_status_of(admin_pb2.NodeStatus(late_p50_ms=-1, late_p99_ms=0, clock_state=admin_pb2.CLOCK_OWN))
    assert (status.late_p50, status.late_p99) == (None, timedelta(0))
    assert (status.cursor_due, status.clock, status.clock_error, status.clock_agreed_age) == (None,) * 4
    assert (status.cold.next_due, nodes.NodeRole.UNKNOWN) == (None, status.role)
    topic = topics.topic_of(admin_pb2.Topic(pending=0))
    assert (topic.pending, topic.pending_max) == (0, None)
    settings = settings_module.settings_of(admin_pb2.Settings(rights=False))
    assert settings.rights is False and settings.retention is None
    assert rights.new_token_of(access_pb2.CreateTokenResponse()).token.expires is None


def test_numbers_that_no_datetime_holds() -> None:
    """A node may say any number: the answer has the last moment or the longest span there is."""
    wire = admin_pb2.NodeStatus(clock_ms=(1 << 63) - 1, clock_slew_ms=-1e300, clock_state=admin_pb2.CLOCK_AGREED)
    status = nodes.node_status_of(wire)
    assert status.clock == datetime.max.replace(tzinfo=UTC) and status.clock_slew == timedelta.min
    assert cold.part_of(cold_pb2.ColdPart(day=(1 << 32) - 1)).day == date.max


# -- public signatures

HANDED = {
    "StagedAttemptWriter.__init__": "made by `staging.attempt`",
    "Consumer.__init__": "made by `AsyncClient.consumer`",
    "Consumer.settle_rows": "called by batches and deliveries",
}
"""Signatures that name protobuf and that no user writes, and why."""
PROTOBUF = re.compile(r"\w+_pb2\b|\bValueType\b|\bgoogle\.protobuf\b")


def public() -> Iterator[type]:
    """Every class that the documents or the package name, and those that blocking classes stand for."""
    for names in PAGES.values():
        for path in names:
            module, _, name = path.rpartition(".")
            if module.startswith("client"):
                yield getattr(importlib.import_module(f"tickwheel.{module}"), name)
    for name in tickwheel.client.__all__:
        yield getattr(tickwheel.client, name)


def signatures(kind: type) -> Iterator[tuple[str, str]]:
    """(name, types) of public methods, properties and fields."""
    for name, member in vars(kind).items():
        if name.startswith("_") and name != "__init__":
            continue
        function = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
        if inspect.isfunction(function):
            yield f"{kind.__name__}.{name}", str(inspect.signature(function))
    for name, hint in vars(kind).get("__annotations__", {}).items():
        if not name.startswith("_"):
            yield f"{kind.__name__}.{name}", str(hint)


Scalar = TypeVar("Scalar", bound=np.generic)
Column = TypeAliasType("Column", np.ndarray[tuple[Any, ...], np.dtype[Scalar]], type_params=(Scalar,))
"""As numpy 2.5 defines its `NDArray`."""


@dataclasses.dataclass
class Columns:
    ids: Column[np.uint64]
    attempts: Column[np.uint32]


def test_a_column_may_be_typed_by_an_alias() -> None:
    """With numpy 2.5 the client could not be imported."""
    ids, attempts = np.array([7, 8], np.uint64), np.array([1, 2], np.uint32)
    wire = consumer_pb2.DeliverBatch(ids=ids.tobytes(), attempts=attempts.tobytes())
    columns = reader(Columns, consumer_pb2.DeliverBatch)(wire)
    assert columns.ids.dtype == np.uint64 and columns.ids.tolist() == [7, 8]
    assert columns.attempts.dtype == np.uint32 and columns.attempts.tolist() == [1, 2]


def test_no_public_signature_names_protobuf() -> None:
    """Neither what a method takes nor what it gives, nor a field."""
    found = {name: types for kind in public() for name, types in signatures(kind) if PROTOBUF.search(types)}
    assert set(found) == set(HANDED), found


def test_settings_and_changes_have_the_same_names() -> None:
    """Each setting can be changed, and has the type that it is shown with."""
    shown = {
        field.name: str(field.type).removesuffix(" | None") for field in dataclasses.fields(tickwheel.client.Settings)
    }
    changes = {name: hint.__forward_arg__ for name, hint in settings_module.SettingChanges.__annotations__.items()}
    assert shown == changes and len(shown) == len(admin_pb2.Settings.DESCRIPTOR.fields)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"retension": timedelta(1)}, "settings"),
        ({"retention_ms": 5}, "settings"),
        ({"retention": 5}, "retention"),
        ({"rights": "yes"}, "rights"),
        ({"attempts_max": None}, "attempts_max"),
        ({"attempts_max": -1}, "attempts_max"),
        ({"topic_quotas": 5}, "topic_quotas"),
    ],
)
def test_a_wrong_change_of_a_setting_is_refused(changes: Any, field: str) -> None:
    """With field, value and what is allowed, before anything is sent."""
    with pytest.raises(tickwheel.client.RequestRefused) as refused:
        settings_module.changes_message(changes)
    assert refused.value.field == field and refused.value.value and refused.value.limit


def test_a_change_names_only_what_it_changes() -> None:
    """So it cannot overwrite what somebody else changes at the same time."""
    wire = settings_module.changes_message({"retention": timedelta(days=1), "rights": False})
    assert {field.name: value for field, value in wire.ListFields()} == {"retention_ms": 86_400_000, "rights": False}
