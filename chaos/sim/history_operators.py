"""What operators asked for and were told: more records of the history (history.py)."""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.chaos.sim.history import Record


@dataclass(slots=True)
class PauseAsked(Record):
    """Somebody begins to ask that a topic or group is paused, or goes on."""

    kind: str  # topic, group
    name: str
    paused: bool


@dataclass(slots=True)
class PauseAnswered(Record):
    """It is so."""

    kind: str
    name: str
    paused: bool
