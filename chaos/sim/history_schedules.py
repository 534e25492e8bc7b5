"""Records of recurring schedules for the history (history.py): what nodes did when they applied a command."""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.chaos.sim.history import Record


@dataclass(slots=True)
class ScheduleChanged(Record):
    """A node applied a change of a schedule: it was put, paused, resumed or deleted."""

    node: str
    index: int
    number: int
    """Place of the command within the entry."""
    name: str
    change: str
    """put, pause, resume or delete."""
    from_ms: int
    revision: int
    """Afterwards; of a deleted one its last."""
    interval_ms: int
    next_ms: int


@dataclass(slots=True)
class RunSeen(Record):
    """A node applied what became of a planned time, or of several passed over at once."""

    node: str
    index: int
    number: int
    """Place within the entry."""
    name: str
    revision: int
    outcome: str
    """A name of RunOutcome."""
    planned_ms: int
    at_ms: int
    id: int
    times: int
    request_id: str = ""
    """Of a trigger or backfill."""
