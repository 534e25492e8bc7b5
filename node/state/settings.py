"""The replicated settings: what apply depends on, with defaults, bounds and the reason of each.

They change by admin command only, so every node has the same ones at the same index. `changed` is
the only way to new ones; it refuses a value out of bounds with a failure that names field, value and
limit. A config file only seeds the first ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from tickwheel.node.failure import invalid
from tickwheel.node.state.names import TOPIC_NAME_LENGTH_MAX
from tickwheel.proto import admin_pb2

DAY_MS = 86_400_000
LEVELS_MAX = 64
LEVELS_LENGTH_MAX = LEVELS_MAX * len("123456789d ")
"""Characters of the normalised delay levels at most. Masters refuse longer ones."""
RETENTION_MS = 3 * DAY_MS
"""Retention that a new cluster states in its first command."""
SLOT_MS_ALLOWED = (100, 200, 500, 1000)
"""Allowed slot widths. They divide a second, so an hour has a whole number of slots."""

_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": DAY_MS}
_LEVEL = re.compile(r"([1-9][0-9]{0,8})([smhd])")


@dataclass(frozen=True, slots=True)
class Settings:
    """Fields as in admin.proto. Immutable; a change makes a new object."""

    delay_levels: str = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

    attempts_max: int = 16
    """Deliveries of a message before it is a dead letter; a unit keeps the count in one byte."""

    delay_ms_max: int = 1_100 * DAY_MS
    """Ten years: any hour may have a segment, so far ones cost nothing."""

    payload_bytes_max: int = 4 << 20
    """The message size that gRPC accepts by default."""

    batch_messages_max: int = 10_000
    """A batch is applied in one piece: this many stay well below a slice of the core's thread."""

    retention_ms: int = 7 * DAY_MS
    """How long dispatched messages that a group has not settled are kept. This default holds for clusters whose first
    command does not state it; new clusters do (`first_settings`)."""

    topics_auto_create: bool = True
    groups_auto_create: bool = True

    slot_ms: int = 1_000
    """Fixed when the cluster is created: heads on disk depend on it."""

    window_messages_max: int = 1_000_000
    """Two bytes for each message, per group and topic."""

    producer_window_batches: int = 64
    """More batches than a producer has in flight."""

    producer_window_ids: int = 4 << 20
    """Ids of all producers together: 16 bytes each, 64 MiB."""

    producers_max: int = 10_000
    topics_max: int = 10_000
    groups_max: int = 10_000

    staging_bytes_max: int = 4 << 30
    """Room for a write of ten million messages; on disk, not in memory."""

    staging_jobs_max: int = 10_000
    staging_expiry_ms: int = DAY_MS // 4
    """Longer than a task takes between two blocks, short enough that rows of a dead driver do not hold the room for
    long."""

    staging_memory_ms: int = 30 * DAY_MS
    """How long the repeat of a published job is recognised."""

    tick_messages_max: int = 0
    topic_quotas: str = ""
    client_quotas: str = ""
    pending_max: int = 0
    topic_pending_max: str = ""
    group_in_flight_max: int = 0
    """This and the next fields: flow control (node/core/schedule/flow.py); 0 or empty: no limit."""

    cold_lead_ms: int = DAY_MS
    """A job that runs once a day may fail once before any message is late."""

    cold_warn_ms: int = DAY_MS
    """The warning comes a day before that."""

    rights: bool = False
    """Whether every call needs a user with the right for it (node/state/rights.py)."""

    @property
    def levels_ms(self) -> tuple[int, ...]:
        """The delay levels, level 1 first."""
        return parse_levels(self.delay_levels) or ()

    def message(self) -> admin_pb2.Settings:
        """The settings as a message with every field present."""
        return admin_pb2.Settings(**{name: getattr(self, name) for name in FIELDS})


FIELDS = tuple(Settings.__dataclass_fields__)

BOUNDS: dict[str, tuple[int, int]] = {
    "tick_messages_max": (0, 1 << 31),
    "pending_max": (0, 1 << 48),
    "group_in_flight_max": (0, 1_000_000),
    "attempts_max": (1, 255),
    "delay_ms_max": (1_000, 3_650 * DAY_MS),
    "payload_bytes_max": (1, 4 << 20),
    "batch_messages_max": (1, 100_000),
    "retention_ms": (60_000, 3_650 * DAY_MS),
    "window_messages_max": (1_000, 100_000_000),
    "producer_window_batches": (1, 10_000),
    "producer_window_ids": (1_000, 1 << 28),
    "producers_max": (1, 1_000_000),
    "topics_max": (1, 1_000_000),
    "groups_max": (1, 1_000_000),
    "staging_bytes_max": (1 << 20, 1 << 44),
    "staging_jobs_max": (1, 100_000),
    "staging_expiry_ms": (1_000, 3_650 * DAY_MS),
    "staging_memory_ms": (60_000, 3_650 * DAY_MS),
    "cold_lead_ms": (0, 365 * DAY_MS),
    "cold_warn_ms": (0, 365 * DAY_MS),
}


DELAY_LEVEL_MS_MAX = BOUNDS["delay_ms_max"][1]
"""A level is no longer than the longest delay."""


def refused_levels(text: str) -> str:
    """Why a master refuses these delay levels; empty: it accepts them.

    Apply accepts longer levels, as it did before masters refused them: readers of the levels never go beyond the
    maximum.
    """
    levels = parse_levels(text)
    if levels is None:
        return f"1 to {LEVELS_MAX} of a number and s, m, h or d"
    return "" if max(levels) <= DELAY_LEVEL_MS_MAX else f"levels of at most {DELAY_LEVEL_MS_MAX // DAY_MS}d"


def first_settings(seed: admin_pb2.Settings | None) -> admin_pb2.Settings:
    """Settings for the first command of a new cluster: the requested ones, and this version's defaults for the rest.

    All fields are stated, so that versions with other defaults read the same settings.
    """
    settings = replace(Settings(), retention_ms=RETENTION_MS).message()
    if seed is not None:
        settings.MergeFrom(seed)
    return settings


def parse_levels(text: str) -> tuple[int, ...] | None:
    """Delays in ms from a text like "1s 5s 1m 2h"; None unless it has 1 to 64 numbers, each with s, m, h or d."""
    parts = text.split()
    if not 1 <= len(parts) <= LEVELS_MAX:
        return None
    levels = []
    for part in parts:
        match = _LEVEL.fullmatch(part)
        if match is None:
            return None
        levels.append(int(match[1]) * _UNITS_MS[match[2]])
    return tuple(levels)


def changed(settings: Settings, update: admin_pb2.Settings, *, creating: bool = False) -> Settings:
    """`settings` with the present fields of `update`; slot_ms only if `creating`. Raises RequestError: one
    is not allowed."""
    values: dict[str, object] = {}
    for name in FIELDS:
        if update.HasField(name):  # type: ignore[arg-type]  # the names are those of the message
            values[name] = getattr(update, name)
    for name, (least, most) in BOUNDS.items():
        value = values.get(name)
        if value is not None and not least <= int(str(value)) <= most:
            raise invalid(name, value, f"{least} to {most}")
    levels = values.get("delay_levels")
    if levels is not None:
        if parse_levels(str(levels)) is None:
            raise invalid("delay_levels", levels, f"1 to {LEVELS_MAX} of a number and s, m, h or d")
        values["delay_levels"] = " ".join(str(levels).split())
    for name in ("topic_quotas", "client_quotas", "topic_pending_max"):
        if name in values:
            quotas = normalised_quotas(str(values[name]))
            if quotas is None:
                raise invalid(name, values[name], QUOTA_RULE)
            values[name] = quotas
    slot_ms = values.get("slot_ms")
    if slot_ms is not None:
        if slot_ms not in SLOT_MS_ALLOWED:
            raise invalid("slot_ms", slot_ms, f"one of {', '.join(map(str, SLOT_MS_ALLOWED))}")
        if not creating and slot_ms != settings.slot_ms:
            raise invalid("slot_ms", slot_ms, f"fixed at {settings.slot_ms} when the cluster was created")
    return replace(settings, **values)  # type: ignore[arg-type]  # names and types are those of the message


QUOTAS_MAX = 1_000
"""Numbers in a quota: `orders=1000 *=5000`, one by name, `*` for everybody else. The setting defines what they count
(messages a second, messages pending). Quotas change nothing that apply does; they are replicated so that every master
enforces the same ones."""
RATE_MAX = 1_000_000_000
QUOTAS_LENGTH_MAX = QUOTAS_MAX * len(f"{'n' * TOPIC_NAME_LENGTH_MAX}={RATE_MAX} ")
"""Characters of a normalised text at most. Masters refuse longer ones."""
QUOTA_RULE = f"up to {QUOTAS_MAX} of NAME=NUMBER (1 to {RATE_MAX}) with blanks, * for all other names; or empty"
QUOTA_OTHERS = "*"

_QUOTA = re.compile(r"([A-Za-z0-9_\-.%]{1,127}|\*)=([1-9][0-9]{0,9})")


@lru_cache(maxsize=64)
def parse_quotas(text: str) -> dict[str, int] | None:
    """Name -> number; None if the text is invalid."""
    found: dict[str, int] = {}
    for part in text.split():
        match = _QUOTA.fullmatch(part)
        if match is None or match[1] in found or int(match[2]) > RATE_MAX or len(found) >= QUOTAS_MAX:
            return None
        found[match[1]] = int(match[2])
    return found


def normalised_quotas(text: str) -> str | None:
    """The normalised text of a quota (by name, each once); None if it is invalid."""
    found = parse_quotas(text)
    return None if found is None else " ".join(f"{name}={rate}" for name, rate in sorted(found.items()))
