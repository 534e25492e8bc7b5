"""The knobs that the supervisor turns at a running node: its clock, and the room and quality of its disk.

One small file a node; only a node that was begun by `node_start.py` reads it. The node's answer, which is the evidence
that a fault had an effect, goes into a second file beside it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EFFECTS = "effects.json"


@dataclass(frozen=True, slots=True)
class Knobs:
    """`turn` counts the changes, so that the answer can say which one it is about."""

    turn: int = 0
    offset_ms: int = 0
    """Added to the wall clock."""
    rate_ppm: int = 0
    """How much faster than true the clocks run, wall and monotonic alike."""
    disk_full: bool = False
    sync_ms: int = 0
    """Time added to every fdatasync."""
    sync_fails: bool = False
    """Every fdatasync fails, and the writes it would have covered are lost."""


@dataclass(slots=True)
class Effects:
    """A node's counts of its knobs' effects. `readings` of clocks since the turn, others since its process began."""

    turn: int = 0
    readings: int = 0
    refusals: int = 0
    """Writes refused for lack of room."""
    slow_syncs: int = 0
    failed_syncs: int = 0
    pid: int = 0


def replace_json(path: Path, values: object) -> None:
    """Write a file that others read meanwhile: it is replaced as a whole."""
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(values), encoding="utf-8")
    aside.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """What `replace_json` wrote; nothing before it did."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return values


def write_knobs(path: Path, knobs: Knobs) -> None:
    """Turn the knobs."""
    replace_json(path, asdict(knobs))


def read_knobs(path: Path) -> Knobs:
    """The current knobs; neutral if nobody has turned them."""
    return Knobs(**read_json(path))


def write_effects(path: Path, effects: Effects) -> None:
    """Write the answer of a node beside its knobs."""
    replace_json(path.with_name(EFFECTS), asdict(effects))


def read_effects(path: Path) -> Effects:
    """The answer of the node of these knobs; zeros before its first one."""
    return Effects(**read_json(path.with_name(EFFECTS)))


def modified_ns(path: Path) -> int:
    """Time of the last turn of the knobs, by the file's mtime; 0: never."""
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116  # asked many times a second
    except FileNotFoundError:
        return 0
