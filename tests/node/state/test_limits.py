"""Whatever can grow in the replicated state has a limit with a name; what is added without one is found here.

The state is walked by the descriptors of its checkpoint: each repeated field, string and run of bytes must stand in
LIMITS, with the constants or settings that bound it; those exist, and docs/PROMISES.md (P11) tells of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib import import_module

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tests.project.imports import ROOT
from tickwheel.node.state.settings import BOUNDS
from tickwheel.proto import state_pb2

NAME = "node.state.names.TOPIC_NAME_LENGTH_MAX"
JOB = "node.state.names.PRODUCER_ID_LENGTH_MAX"
TEXT = "node.core.schedule.pending.TEXT_LENGTH_MAX"
SCHEDULES = "node.state.schedules.SCHEDULES_BYTES_MAX"
META = "node.state.publishing.META_BYTES_MAX"
FIXED = "fixed"
"""One value of a width that does not change, as a checksum or a path that a node makes."""

LIMITS: dict[str, tuple[str, ...]] = {
    # StateSnapshot
    "StateSnapshot.cluster_id": (FIXED,),
    "StateSnapshot.windows_path": (FIXED,),
    "StateSnapshot.members": ("node.state.membership.MEMBERS_MAX",),
    "StateSnapshot.removed_ids": ("node.core.membership.REMOVED_MAX", NAME),
    "StateSnapshot.topics": ("settings.topics_max", "node.core.schedule.creations.ALLOWANCE_A_SECOND"),
    "StateSnapshot.groups": ("settings.groups_max", "node.core.schedule.creations.ALLOWANCE_A_SECOND"),
    "StateSnapshot.sweeps": ("node.state.sweeps.SWEEPS_MAX",),
    "StateSnapshot.loads": ("node.state.loads.LOADS_MAX",),
    "Member.node_id": (NAME,),
    "Member.peer_address": ("node.core.membership.ADDRESS_LENGTH_MAX",),
    "Member.client_address": ("node.core.membership.ADDRESS_LENGTH_MAX",),
    "Member.disk_uuid": ("node.core.membership.ADDRESS_LENGTH_MAX",),
    "Settings.delay_levels": ("node.state.settings.LEVELS_MAX",),
    "Settings.topic_quotas": ("node.state.settings.QUOTAS_MAX",),
    "Settings.client_quotas": ("node.state.settings.QUOTAS_MAX",),
    "Settings.topic_pending_max": ("node.state.settings.QUOTAS_MAX",),
    "TopicSnapshot.name": (NAME,),
    "TopicSnapshot.hours": ("settings.retention_ms",),
    "TopicSnapshot.hours_dispatched": ("settings.retention_ms",),
    "GroupSnapshot.name": (NAME,),
    "GroupSnapshot.filter": ("wheel.filters.TAGS_MAX", "wheel.filters.TAG_LENGTH_MAX"),
    "GroupSnapshot.subscriptions": ("node.core.schedule.creations.SUBSCRIPTIONS_MAX",),
    "GroupSnapshot.dead_gone": ("node.core.delivery.dead.GONE_MAX",),
    "GroupSnapshot.dead_lacking": ("settings.retention_ms",),
    "GroupSnapshot.waiting": ("node.state.groups.WAITING_ROWS_MAX",),
    "SubscriptionSnapshot.pauses": ("settings.window_messages_max",),
    "LoadSnapshot.job_id": (JOB,),
    "LoadSnapshot.load_sha256": (FIXED,),
    "Sweep.job_id": (JOB,),
    "Sweep.delete_topic": (NAME,),
    "Sweep.delete_group": (NAME,),
    "Selection.topic": (NAME,),
    "Selection.tag": (TEXT,),
    "Selection.key": (TEXT,),
    "Selection.key_prefix": (TEXT,),
    "TopicSnapshot.owner": (NAME,),
    "GroupSnapshot.owner": (NAME,),
    "StagedJobSnapshot.owner": (NAME,),
    # StateWindows
    "AccessSnapshot.users": ("node.state.rights.USERS_MAX",),
    "AccessSnapshot.roles": ("node.state.rights.ROLES_MAX",),
    "StoredUser.name": (NAME,),
    "StoredUser.roles": ("node.state.rights.ROLES_OF_USER_MAX", NAME),
    "StoredUser.tokens": ("node.state.rights.TOKENS_OF_USER_MAX",),
    "Token.id": (FIXED,),
    "Token.label": ("node.state.rights.LABEL_LENGTH_MAX",),
    "StoredToken.sha256": (FIXED,),
    "AccessRole.name": (NAME,),
    "AccessRole.grants": ("node.state.rights.GRANTS_MAX",),
    "Grant.rights": (FIXED,),
    "Grant.topics": ("node.state.rights.PATTERNS_MAX", NAME),
    "Grant.groups": ("node.state.rights.PATTERNS_MAX", NAME),
    "StateWindows.subscriptions": ("node.core.schedule.creations.SUBSCRIPTIONS_MAX",),
    "StateWindows.producers": ("settings.producers_max",),
    "StateWindows.batches": ("settings.producers_max", "settings.producer_window_batches"),
    "SubscriptionWindow.values": ("settings.window_messages_max", "node.core.delivery.settlements.WINDOW_VALUES_MAX"),
    "ProducerShares.owners": ("settings.producers_max", "node.core.schedule.intake.CLIENT_NAME_MAX"),
    "ProducerShares.used_ms": ("settings.producers_max",),
    "ProducerSpan.producer_id": (JOB,),
    "ProducerSpan.owner": ("node.core.schedule.intake.CLIENT_NAME_MAX",),
    "ProducerBatch.producer_id": (JOB,),
    "ProducerBatch.ids": ("settings.producer_window_ids",),
    "ProducerBatch.due_ms": ("settings.producer_window_ids",),
    "ProducerBatch.key_outcomes": ("settings.producer_window_ids",),
    "StagingSnapshot.jobs": ("settings.staging_jobs_max",),
    "StagedJobSnapshot.job_id": (JOB,),
    "StagedJobSnapshot.dead_runs": ("node.state.staging.DEAD_RUNS_MAX", JOB),
    "StagedJobSnapshot.plan": ("settings.staging_bytes_max", "node.state.staging.CHARGE_BYTES_MIN"),
    "StagedJobSnapshot.attempts": ("settings.staging_bytes_max", "node.state.staging.CHARGE_BYTES_MIN"),
    "StagedAttemptSnapshot.run_id": (JOB,),
    "StagedAttemptSnapshot.blocks": ("settings.staging_bytes_max", "node.state.staging.CHARGE_BYTES_MIN"),
    "ColdSnapshot.jobs": ("node.state.cold_parts.JOBS_MAX",),
    "ColdSnapshot.parts": ("node.state.cold_parts.PARTS_MAX",),
    "ColdSnapshot.marks": ("node.state.cold_parts.PARTS_MAX",),
    "ColdJobSnapshot.job_id": (JOB,),
    "ColdJobSnapshot.sha256": (FIXED,),
    "ColdPartSnapshot.sha256": (FIXED,),
    "ColdPartSnapshot.chunks": ("node.state.loads.CHUNKS_MAX",),
    "ColdMarksSnapshot.marks": ("node.state.cold.MARKS_MAX",),
    "StateWindows.unique_keys": ("node.state.unique_keys.SHARDS",),
    "KeyShard.rows": ("node.state.unique_keys.UNIQUE_KEYS_MAX",),
    "StateWindows.schedules": ("node.state.schedules.SCHEDULES_MAX", SCHEDULES),
    "ScheduleSnapshot.owner": (NAME,),
    "ScheduleSnapshot.counts": (FIXED,),
    "ScheduleSnapshot.runs": ("node.state.schedules.RUNS_KEPT",),
    "ScheduleSnapshot.ahead": ("node.state.schedules.AHEAD_MAX",),
    "ScheduleSnapshot.requests": ("node.state.schedules.ANSWERS_KEPT",),
    "ScheduleSnapshot.meta": (META, SCHEDULES),
    "Answered.request_id": (JOB,),
    "Answered.run": (FIXED,),
    "ScheduleDefinition.name": ("node.state.schedules.NAME_BYTES_MAX",),
    "ScheduleDefinition.topic": (NAME,),
    "ScheduleDefinition.payload": ("node.state.schedules.PAYLOAD_BYTES_MAX", SCHEDULES),
    "ScheduleSpec.cron": ("node.core.schedule.calendar.CRON_CHARACTERS_MAX",),
    "ScheduleSpec.zone": ("node.core.schedule.calendar.ZONE_CHARACTERS_MAX",),
    # A schedule keeps its meta serialized; the definition's own field for it stays empty.
    "MessageMeta.tags": (META,),
    "MessageMeta.key": (META,),
    "MessageMeta.message_group": (META,),
    "MessageMeta.unique_key": (META,),
    "MessageMeta.headers": (META,),
    "HeadersEntry.key": (META,),
    "HeadersEntry.value": (META,),
}

GROWING = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def growing(message: Descriptor, seen: set[str]) -> Iterator[str]:
    """Fields of a message, and of what it holds, that can have any size."""
    if message.name in seen:
        return
    seen.add(message.name)
    for field in message.fields:
        if field.is_repeated or field.type in GROWING:
            yield f"{message.name}.{field.name}"
        if field.message_type is not None:
            yield from growing(field.message_type, seen)


def test_whatever_can_grow_in_the_replicated_state_has_a_limit() -> None:
    """A new field: say here what bounds its count and its bytes, and in P11 what that costs."""
    seen: set[str] = set()
    found = [*growing(state_pb2.StateSnapshot.DESCRIPTOR, seen), *growing(state_pb2.StateWindows.DESCRIPTOR, seen)]
    assert sorted(found) == sorted(LIMITS)


SOFT_LIMITS = (
    "node.core.delivery.settlements.SETTLE_MESSAGES_MAX",
    "node.core.delivery.settlements.EXTEND_MESSAGES_MAX",
    "node.core.delivery.lease_feed.RANGES_PER_SYNC_MAX",
    "node.core.delivery.lease_feed.SYNC_BYTES_MAX",
    "node.core.delivery.lease_feed.EVENTS_MAX",
    "node.core.delivery.heard_leases.JOIN_MESSAGES_MIN",
    "node.core.delivery.consumers.PULLS_MAX",
)
"""Of what a master keeps beside the replicated state: leases, what slaves are told of them, pulls that wait."""


@pytest.mark.parametrize("name", sorted({*SOFT_LIMITS, *itertools.chain(*LIMITS.values())} - {FIXED}))
def test_each_limit_exists_and_is_told(name: str) -> None:
    place, _, last = name.rpartition(".")
    if place == "settings":
        assert BOUNDS[last][1] > 0
    else:
        assert getattr(import_module(f"tickwheel.{place}"), last) > 0
    assert f"`{last}`" in (ROOT / "docs" / "PROMISES.md").read_text(encoding="utf-8")
