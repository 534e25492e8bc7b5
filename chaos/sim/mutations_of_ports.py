"""Bugs of client ports, rights, limits, retention and floods; mutations.py knows them all."""

from __future__ import annotations

from typing import Any

from tickwheel.chaos.sim.mutation_table import aimed, mutation
from tickwheel.node.core.schedule.retention import Retention
from tickwheel.node.server import schedule_stream
from tickwheel.node.server.audit import AuditLog
from tickwheel.node.server.consumer_stream import ConsumerStreams
from tickwheel.node.state.producers import Producers
from tickwheel.node.state.settings import Settings

SMALL = aimed("kill", "isolate", "freeze", "handover", nodes=3, sizes=1)
RIGHTS = aimed("kill", "handover", nodes=3, users=1)
POWER = aimed("power", nodes=3, users=1, seconds=10)
FLOOD = aimed("kill", nodes=3, producers_max=60)
KEPT = aimed("kill", nodes=3, retention_ms=3_000, listeners=0, couriers=0)


@mutation(schedule_stream, "_accepted_before", aim=SMALL)
def repeats_judged_anew(original: Any, core: Any, read: Any, request: Any, caller: Any) -> None:
    """The repeat of an accepted batch is refused once a limit was lowered."""
    return


@mutation(ConsumerStreams, "look", aim=RIGHTS)
async def open_streams_not_judged(original: Any, self: ConsumerStreams) -> None:
    """A consumer keeps its stream when its user loses the right."""


@mutation(AuditLog, "_write", aim=POWER)
def audit_not_synced(original: Any, self: AuditLog, data: bytes) -> None:
    """A change is answered before its line in the audit log is durable."""
    disk = self._disk
    file = disk.open("audit/audit.jsonl", create=True)
    file.append(data)
    file.close()


@mutation(Producers, "_trim_by_owner", aim=FLOOD)
def floods_displace_everybody(original: Any, self: Producers, shares: Any, settings: Settings, now_ms: int) -> None:
    """The least recently used producer is forgotten, whoever has filled the memory."""
    self._trim_oldest(settings)


@mutation(Retention, "hours_below", aim=KEPT)
def retention_counts_from_the_full_hour(original: Any, self: Retention, now_ms: int) -> tuple[int, int]:
    """An hour is removed as soon as it is over, whatever the retention."""
    latest = max(0, self._core.wheel.cursor.due_ms // 3_600_000 - self._core.config.hours_kept)
    return latest, latest
