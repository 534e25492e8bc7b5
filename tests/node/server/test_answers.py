"""No answer is larger than a client takes: whatever lists something is bounded, or comes in pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default

from tickwheel.node.core.delivery.consumers import CONSUMER_NAME_LENGTH_MAX
from tickwheel.node.core.delivery.settlements import SETTLE_TOPICS_MAX
from tickwheel.node.core.membership import ADDRESS_LENGTH_MAX
from tickwheel.node.core.metas import ANSWER_BYTES_MAX, FIELD_BYTES, LIST_BYTES_MAX, fitting
from tickwheel.node.core.schedule.pending import BUCKETS_MAX, TEXT_LENGTH_MAX
from tickwheel.node.core.schedule.recurring import BACKFILL_RUNS_MAX, PREVIEW_MAX, UPCOMING
from tickwheel.node.core.watch.events import FOUND_MAX
from tickwheel.node.core.watch.status import STATUS_TOPICS_MAX
from tickwheel.node.server import handlers
from tickwheel.node.server.endpoints import SERVICES
from tickwheel.node.server.handlers import ROWS_MAX
from tickwheel.node.state.membership import MEMBERS_MAX
from tickwheel.node.state.names import TOPIC_NAME_LENGTH_MAX
from tickwheel.node.state.publishing import META_BYTES_MAX
from tickwheel.node.state.rights import (
    GRANTS_MAX,
    LABEL_LENGTH_MAX,
    PATTERNS_MAX,
    ROLES_OF_USER_MAX,
    TOKENS_OF_USER_MAX,
)
from tickwheel.node.state.schedules import PAYLOAD_BYTES_MAX, RUNS_KEPT
from tickwheel.node.state.settings import BOUNDS
from tickwheel.node.state.sweeps import SWEEPS_MAX
from tickwheel.proto import admin_pb2
from tickwheel.replication.copied_file import CHUNK_BYTES

CLIENT_TAKES_BYTES = 4 << 20
"""What gRPC libraries receive unless they are told more."""

PAGES = {
    "Access.ListAudit records": "full, before_ms",
    "Access.ListRoles roles": "more, after",
    "Access.ListUsers users": "more, after",
    "Access.WhoAmI grants": "grants_left_out",
    "Admin.GetDiskUse hours": "hours_left_out",
    "Admin.GetDiskUse topics": "topics_left_out",
    "Admin.ListGroups groups": "more, after_id",
    "Admin.ListTopics topics": "more, after_id",
    **dict.fromkeys(
        [f"Admin.{name} topics" for name in ("CreateGroup", "ResetGroup", "SetGroupFilter", "SetGroupPaused")]
        + ["Admin.UpdateGroup topics"],
        "topics_left_out",
    ),
    "Cold.ListColdMoved due_ms": "more, MOVED_MAX",
    "Cold.ListColdMoved ids": "more, MOVED_MAX",
    "Cold.ListColdParts parts": "more, after; PAGE_PARTS of a few hundred bytes",
    "Consumer.Consume deliver": "batches of BATCH_BYTES_MAX, one message at least",
    "Consumer.Pull": "batches of BATCH_BYTES_MAX, one message at least",
    "DeadLetters.ListDead letters": "DECODED_BYTES_MAX, next_page_token",
    "Scheduler.Get retries": "retries_left_out",
    "Scheduler.ListPending messages": "ANSWER_BYTES_MAX, next_page_token",
    "Schedules.List schedules": "ANSWER_BYTES_MAX, next_page_token",
    "Snapshot.Pin topics": "topics_to",
    "Snapshot.PinSettled topics": "topics_to",
    "Snapshot.ReadPinned": "ANSWER_BYTES_MAX, next_due_ms",
    "Snapshot.ReadSettled": "ANSWER_BYTES_MAX, next",
}
"""What is cut to fit by bytes, and what tells whoever asked. A method alone: all of its columns."""

NAME = TOPIC_NAME_LENGTH_MAX + FIELD_BYTES
ROLE = GRANTS_MAX * (2 * PATTERNS_MAX * NAME + 64)
USER = ROLES_OF_USER_MAX * NAME + TOKENS_OF_USER_MAX * (LABEL_LENGTH_MAX * 4 + 128)
MEMBERS = MEMBERS_MAX * (2 * ADDRESS_LENGTH_MAX + 512)
STATUS_TOPICS = STATUS_TOPICS_MAX * (NAME + 256)
META = 2 * META_BYTES_MAX
HOURS = (BOUNDS["delay_ms_max"][1] + BOUNDS["retention_ms"][1]) // 3_600_000
ROWS = BOUNDS["batch_messages_max"][1]
ERROR = 64 << 10
REFUSAL = 10 * NAME
"""Of one row: the refusal of a cancel names its topic or its time, in text and metadata."""
SCHEDULE = {
    "definition.payload": PAYLOAD_BYTES_MAX,
    "definition.meta.headers": META,
    "definition.meta.tags": META,
    "runs": RUNS_KEPT * 128,
}
SMALL = {
    "Access.RevokeToken roles": USER,
    "Access.RevokeToken tokens": USER,
    "Access.SetRole grants": ROLE,
    "Access.SetUser roles": USER,
    "Access.SetUser tokens": USER,
    "Admin.AddMember members": MEMBERS,
    "Admin.Backup data": CHUNK_BYTES,
    "Admin.GetDigest digest": 64,
    "Admin.GetDigest parts": 100 * 256,  # the parts of a state
    "Admin.GetDiskUse parts": 100 * 256,  # the directories of a node
    "Admin.GetServerInfo services": 100 * 256,
    "Admin.GetStatus peers": MEMBERS,
    "Admin.GetStatus topics": STATUS_TOPICS,
    "Admin.RemoveMember members": MEMBERS,
    "Admin.Trace events": FOUND_MAX * (4 * CONSUMER_NAME_LENGTH_MAX + 2 * NAME + 512),
    "Admin.WatchStatus peers": MEMBERS,
    "Admin.WatchStatus topics": STATUS_TOPICS,
    "Consumer.Consume extended.error": ERROR,
    "Consumer.Consume settled.error": ERROR,
    "Consumer.Consume settled.parts": SETTLE_TOPICS_MAX * 12,
    "Consumer.Extend error": ERROR,
    "Consumer.Settle error": ERROR,
    "Consumer.Settle parts": SETTLE_TOPICS_MAX * 12,
    "DeadLetters.GetDead meta.headers": META,
    "DeadLetters.GetDead meta.tags": META,
    "Scheduler.CancelMany results": ROWS_MAX * REFUSAL,
    "Scheduler.CountPending buckets": BUCKETS_MAX * 32,
    "Scheduler.Get message.meta.headers": META,
    "Scheduler.Get message.meta.tags": META,
    "Scheduler.ListSweeps sweeps": SWEEPS_MAX * 3 * 4 * TEXT_LENGTH_MAX,
    "Scheduler.RescheduleMany results": ROWS_MAX * REFUSAL,
    **{f"Scheduler.ScheduleMany {column}": ROWS * 8 for column in ("delay_ms", "due_ms", "ids")},
    "Scheduler.ScheduleMany delay_levels": ROWS * 4,
    "Scheduler.ScheduleMany error": ERROR,
    "Scheduler.ScheduleMany key_outcomes": ROWS,
    "Scheduler.ScheduleStream delay_levels": ROWS * 4,
    "Scheduler.ScheduleStream delay_ms": ROWS * 8,
    "Scheduler.ScheduleStream due_ms": ROWS * 8,
    "Scheduler.ScheduleStream error": ERROR,
    "Scheduler.ScheduleStream ids": ROWS * 8,
    "Scheduler.ScheduleStream key_outcomes": ROWS,
    "Schedules.Backfill ids": BACKFILL_RUNS_MAX * 8,
    "Schedules.Backfill planned_ms": BACKFILL_RUNS_MAX * 8,
    "Schedules.Get upcoming_ms": UPCOMING * 8,
    "Schedules.Preview planned_ms": PREVIEW_MAX * 8,
    **{
        f"Schedules.{method}{path}": size
        for method in ("Get schedule.", "Pause ", "Put schedule.", "Resume ")
        for path, size in SCHEDULE.items()
    },
    "Snapshot.Pin hours": HOURS * 4,
    "Snapshot.Pin units": HOURS * 4,
}
"""What cannot outgrow an answer whatever the settings are: its greatest size in bytes, with room to spare."""

ONE_PAYLOAD = {"DeadLetters.GetDead payload", "Scheduler.Get message.payload"}
"""A message of the largest payload comes whole: see ANSWER_BYTES_MAX."""


def grows(message: Descriptor, seen: tuple[str, ...] = ()) -> Iterator[str]:
    """Paths of repeated fields and columns that are not within another one."""
    for field in message.fields:
        if field.is_repeated or field.type == FieldDescriptor.TYPE_BYTES:
            yield field.name
        elif field.message_type is not None and field.message_type.full_name not in seen:
            yield from (f"{field.name}.{path}" for path in grows(field.message_type, (*seen, message.full_name)))


def answers() -> Iterator[tuple[str, Descriptor]]:
    """(Service.Method, its answer) of every row of the table of endpoints."""
    for service in SERVICES:
        for name, method in Default().FindServiceByName(service).methods_by_name.items():
            yield f"{service.rpartition('.')[2]}.{name}", method.output_type


def test_every_list_in_an_answer_was_thought_of() -> None:
    """A new one belongs to PAGES, with what tells that there is more, or to SMALL, with the bytes that bound it."""
    found = {f"{method} {path}" for method, answer in answers() for path in grows(answer)}
    columns = {
        name for name in found for paged in PAGES if name.startswith((f"{paged} ", f"{paged}.")) and name not in PAGES
    }
    assert found - columns == {name for name in PAGES if name in found} | SMALL.keys() | ONE_PAYLOAD
    assert all(name in found or any(column.startswith(name) for column in columns) for name in PAGES)


def test_what_is_bounded_fits_together() -> None:
    """All that one answer has of it, at the highest limits that an operator can set."""
    methods: Counter[str] = Counter()
    for name, size in SMALL.items():
        methods[name.partition(" ")[0]] += size
    for method, size in methods.items():
        assert size <= ANSWER_BYTES_MAX, (method, size)
        # A list that is cut has its room beside what is not.
        if any(name.partition(" ")[0] == method for name in PAGES):
            assert size + LIST_BYTES_MAX < CLIENT_TAKES_BYTES - (512 << 10), (method, size)


def test_a_list_is_cut_by_bytes() -> None:
    """The first ones that fit, and one at least."""
    names = ["a" * 10, "b" * 20, "c" * 30]
    assert fitting(names, len) == names
    assert fitting(names, len, 10 + 20 + 2 * FIELD_BYTES) == names[:2]
    assert fitting(names, len, 10 + 20 + 2 * FIELD_BYTES - 1) == names[:1]
    assert fitting(names, len, 1) == names[:1] and fitting([], len, 1) == []


def test_what_one_answer_has_fits_a_client() -> None:
    """With room for the envelope."""
    assert ANSWER_BYTES_MAX + (512 << 10) < CLIENT_TAKES_BYTES


async def collected(monkeypatch: pytest.MonkeyPatch, topics: list[admin_pb2.Topic]) -> list[list[admin_pb2.Topic]]:
    """Page after page, as a client asks."""
    monkeypatch.setattr(handlers, "ANSWER_BYTES_MAX", 1_000)
    pages: list[list[Any]] = []
    while True:
        after = pages[-1][-1].topic_id if pages else 0
        listed = (t for t in topics if t.topic_id > after)
        found, more = await handlers.page(listed, lambda topic: topic.topic_id % 3 > 0)
        pages.append(found)
        if not more:
            return pages


async def test_pages_have_everything_once_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not wanted counts for nothing; one that is larger than a page comes alone."""
    topics = [admin_pb2.Topic(topic_id=number, name="n" * (number % 90)) for number in range(1, 400)]
    topics[100].name = "n" * 3_000
    pages = await collected(monkeypatch, topics)
    assert [t for page in pages for t in page] == [t for t in topics if t.topic_id % 3]
    for page in pages:
        size = sum(topic.ByteSize() + FIELD_BYTES for topic in page)
        assert size <= 1_000 or len(page) == 1
        assert len(admin_pb2.ListTopicsResponse(topics=page).SerializeToString()) <= size + 4


async def test_an_empty_listing_is_one_page() -> None:
    """Nothing follows."""
    assert await handlers.page(iter(())) == ([], False)
