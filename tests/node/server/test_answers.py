"""No answer is larger than a client takes: whatever lists something is bounded, or comes in pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from tickwheel.node.core.metas import ANSWER_BYTES_MAX, FIELD_BYTES
from tickwheel.node.server import paging
from tickwheel.proto import (
    access_pb2,
    admin_pb2,
    bulk_pb2,
    cold_pb2,
    consumer_pb2,
    dead_pb2,
    scheduler_pb2,
    snapshot_pb2,
    staging_pb2,
)

CLIENT_TAKES_BYTES = 4 << 20
"""What gRPC libraries receive unless they are told more."""
FILES = (access_pb2, admin_pb2, bulk_pb2, cold_pb2, consumer_pb2, dead_pb2, scheduler_pb2, snapshot_pb2, staging_pb2)

PAGES = {
    "Access.ListRoles roles": "more, after",
    "Access.ListUsers users": "more, after",
    "Admin.ListGroups groups": "more, after_id",
    "Admin.ListTopics topics": "more, after_id",
    "Admin.GetDiskUse topics": "topics_left_out",
    "Cold.ListColdParts parts": "more, after; PAGE_PARTS of a few hundred bytes",
    "DeadLetters.ListDead letters": "ANSWER_BYTES_MAX, next_number",
    "Scheduler.ListPending messages": "ANSWER_BYTES_MAX, page_token",
}
"""What is cut to fit, and by which fields whoever asked knows that."""

SMALL = {
    "Access.ListAudit records": "AUDIT_LIMIT_MAX records, of fields that are bounded",
    "Access.RevokeToken roles": "ROLES_OF_USER_MAX",
    "Access.RevokeToken tokens": "TOKENS_OF_USER_MAX",
    "Access.SetRole grants": "GRANTS_MAX",
    "Access.SetUser roles": "ROLES_OF_USER_MAX",
    "Access.SetUser tokens": "TOKENS_OF_USER_MAX",
    "Access.WhoAmI grants": "GRANTS_MAX of ROLES_OF_USER_MAX",
    "Admin.AddMember members": "MEMBERS_MAX",
    "Admin.CreateGroup topics": "topics_max names",
    "Admin.GetDigest parts": "the parts of a state",
    "Admin.GetDiskUse hours": "20 bytes an hour of delay_ms_max and retention_ms",
    "Admin.GetDiskUse parts": "the directories of a node",
    "Admin.GetServerInfo services": "the services of this version",
    "Admin.GetStatus peers": "MEMBERS_MAX",
    "Admin.GetStatus topics": "the busiest few",
    "Admin.RemoveMember members": "MEMBERS_MAX",
    "Admin.ResetGroup topics": "topics_max names",
    "Admin.SetGroupFilter topics": "topics_max names",
    "Admin.SetGroupPaused topics": "topics_max names",
    "Admin.Trace events": "100 ids, bounded events of each",
    "Admin.UpdateGroup topics": "topics_max names",
    "Admin.WatchStatus peers": "MEMBERS_MAX",
    "Admin.WatchStatus topics": "the busiest few",
    "DeadLetters.GetDead meta.headers": "META_BYTES_MAX",
    "DeadLetters.GetDead meta.tags": "META_BYTES_MAX",
    "Scheduler.CountPending buckets": "BUCKETS_MAX",
    "Scheduler.Get message.meta.headers": "META_BYTES_MAX",
    "Scheduler.Get message.meta.tags": "META_BYTES_MAX",
    "Scheduler.Get retries": "a message's retries that wait, one of each group",
    "Scheduler.ListSweeps sweeps": "SWEEPS_MAX, texts of TEXT_BYTES_MAX",
    "Snapshot.Pin topics": "topics_max names",
    "Snapshot.PinSettled topics": "topics_max names",
}
"""What cannot outgrow an answer, and why."""


def grows(message: Descriptor, seen: tuple[str, ...] = ()) -> Iterator[str]:
    """Paths of repeated fields that are not within another one."""
    for field in message.fields:
        if field.is_repeated:
            yield field.name
        elif field.message_type is not None and field.message_type.full_name not in seen:
            yield from (f"{field.name}.{path}" for path in grows(field.message_type, (*seen, message.full_name)))


def test_every_list_in_an_answer_was_thought_of() -> None:
    """A new one belongs to PAGES, with what tells that there is more, or to SMALL, with the limit that bounds it."""
    found = set()
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                found |= {f"{service.name}.{method.name} {path}" for path in grows(method.output_type)}
    assert found == PAGES.keys() | SMALL.keys()


def test_what_one_answer_has_fits_a_client() -> None:
    """With room for the envelope."""
    assert ANSWER_BYTES_MAX + (512 << 10) < CLIENT_TAKES_BYTES


async def collected(monkeypatch: pytest.MonkeyPatch, topics: list[admin_pb2.Topic]) -> list[list[admin_pb2.Topic]]:
    """Page after page, as a client asks."""
    monkeypatch.setattr(paging, "ANSWER_BYTES_MAX", 1_000)
    pages: list[list[Any]] = []
    while True:
        after = pages[-1][-1].topic_id if pages else 0
        found, more = await paging.page((t for t in topics if t.topic_id > after), lambda topic: topic.topic_id % 3 > 0)
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
    assert await paging.page(iter(())) == ([], False)
