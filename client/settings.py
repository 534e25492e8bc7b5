"""The replicated settings of a cluster, and changes of single ones.

A change names the settings that it replaces, and the node leaves all others as they are: two clients that change
different settings at the same time never undo each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypedDict

from google.protobuf.descriptor import FieldDescriptor

from tickwheel.client.answers import plain, reader
from tickwheel.client.errors import refused
from tickwheel.client.moments import span_ms_of
from tickwheel.proto import admin_pb2


@dataclass(frozen=True, slots=True)
class Settings:
    """The replicated settings, the same on all nodes. None: the answering node is too old to have it."""

    delay_levels: str | None
    """At most 64 delays from level 1 on, each a number and s, m, h or d: `1s 5s 10s`."""
    attempts_max: int | None
    """Deliveries of a message before it is a dead letter, for groups that do not say it themselves."""
    delay_max: timedelta | None
    """How far ahead a due time may lie."""
    payload_bytes_max: int | None
    batch_messages_max: int | None
    """Messages of one batch."""
    retention: timedelta | None
    """How long dispatched messages are kept that a group has not settled."""
    topics_auto_create: bool | None
    """A topic comes into being with its first message."""
    groups_auto_create: bool | None
    """A group comes into being with its first consumer."""
    slot: timedelta | None
    """Width of a tick; fixed when the cluster is created."""
    window_messages_max: int | None
    """Unsettled messages between a group's floor and its newest delivery."""
    producer_window_batches: int | None
    """Batches that are remembered of each producer."""
    producer_window_ids: int | None
    """Message ids that are remembered of all producers together."""
    producers_max: int | None
    topics_max: int | None
    groups_max: int | None
    staging_bytes_max: int | None
    """Bytes of all staged rows that are not published yet; a block counts at least 64 KiB."""
    staging_jobs_max: int | None
    """Jobs of bulk writers that are remembered."""
    staging_expiry: timedelta | None
    """How long staged rows are kept that nobody adds to."""
    staging_memory: timedelta | None
    """How long a published job is recognized."""
    tick_messages_max: int | None
    """Messages due in one tick: below this all are accepted, above twice this none; 0: no limit."""
    topic_quotas: str | None
    """Messages a second by topic, `orders=1000 *=5000`; `*` is every other one, empty: no limit."""
    client_quotas: str | None
    """Messages a second by client, as `topic_quotas`: the name of its certificate, else the name that it gives."""
    pending_max: int | None
    """Messages pending in all; 0: no limit."""
    topic_pending_max: str | None
    """Messages pending by topic, as `topic_quotas`; `*` is every other one, each for itself."""
    group_in_flight_max: int | None
    """Messages of one group out with its consumers; 0: as many as they take."""
    cold_lead: timedelta | None
    """Messages of the cold tier must be loaded this long before they are due."""
    cold_warn: timedelta | None
    """A first warning comes this long before that."""
    rights: bool | None
    """Every call needs a user with the right to it."""


class SettingChanges(TypedDict, total=False):
    """New values by setting, as in `Settings`. Settings that are not named stay as they are."""

    delay_levels: str
    attempts_max: int
    delay_max: timedelta
    payload_bytes_max: int
    batch_messages_max: int
    retention: timedelta
    topics_auto_create: bool
    groups_auto_create: bool
    slot: timedelta
    window_messages_max: int
    producer_window_batches: int
    producer_window_ids: int
    producers_max: int
    topics_max: int
    groups_max: int
    staging_bytes_max: int
    staging_jobs_max: int
    staging_expiry: timedelta
    staging_memory: timedelta
    tick_messages_max: int
    topic_quotas: str
    client_quotas: str
    pending_max: int
    topic_pending_max: str
    group_in_flight_max: int
    cold_lead: timedelta
    cold_warn: timedelta
    rights: bool


_WIRE: Mapping[str, FieldDescriptor] = {plain(field.name): field for field in admin_pb2.Settings.DESCRIPTOR.fields}
"""By setting: its field in the protobuf message."""


def _is_span(field: FieldDescriptor) -> bool:
    return "ms" in field.name.split("_")


settings_of = reader(Settings, admin_pb2.Settings)


def _limit_of(field: FieldDescriptor, error: Exception) -> str:
    """What a setting's field takes, in words."""
    if field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64):
        return f"a whole number from 0 to {2**32 - 1 if field.type == FieldDescriptor.TYPE_UINT32 else 2**64 - 1}"
    if field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64):
        return f"a whole number to {2**31 - 1 if field.type == FieldDescriptor.TYPE_INT32 else 2**63 - 1}"
    return f"a value of another type: {error}"


def changes_message(changes: SettingChanges) -> admin_pb2.Settings:
    """The changes for a node. Raises RequestRefused for an unknown setting or a value of another type."""
    wire = admin_pb2.Settings()
    for name, value in changes.items():
        field = _WIRE.get(name)
        if field is None:
            raise refused("settings", name, f"one of {', '.join(_WIRE)}")
        if _is_span(field):
            value = span_ms_of(name, value)  # type: ignore[arg-type]  # checks it
        try:
            setattr(wire, field.name, value)
        except (TypeError, ValueError) as error:
            raise refused(name, value, _limit_of(field, error)) from None
    return wire
