"""Answers of a node to probes over HTTP: is it alive, does it serve, and if not, why not.

- `/livez`: the loop turns and the core's tick comes in time. Says nothing about the cluster: a node without a majority
  is alive, and to restart it would not help.
- `/readyz`: the node takes part, knows the master (a master has answers of a majority), has applied its log, and is not
  stopping.
- `/healthz`: the same answer, with every part of it in a line, and with warnings that do not make a node unready.

Ready is what the health service calls serving, for a node that has caught up. Pure: what was seen comes in, text comes
out. No answer holds a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tickwheel.node.core.watch.status import BACKUP_LAG_ENTRIES_MAX
from tickwheel.proto import admin_pb2

OVERDUE_S_MAX = 10.0
"""A tick that is this late will not come. The longest work on the loop takes a few hundred ms."""
LAG_ENTRIES_MAX = BACKUP_LAG_ENTRIES_MAX
"""A node that keeps up is some hundred entries behind. A backup is taken from a node up to the same bound."""
TEXT_CHARS_MAX = 500
"""Of a reason: a line, not a page."""

_TAKES_PART = (admin_pb2.NODE_SERVING, admin_pb2.NODE_ALIGNING, admin_pb2.NODE_WITHOUT_TIME)


class Standing(StrEnum):
    """Of a part. Only what fails makes a node unready."""

    OK = "ok"
    WARNS = "warns"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Part:
    """One line of /healthz."""

    name: str
    standing: Standing
    text: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What a node looks like at the moment of a probe."""

    status: admin_pb2.NodeStatus
    lag_entries: int
    """Entries that the master has committed, as far as this node has heard, and this node has not applied."""
    tick_overdue_s: float
    stopping: bool
    certificate_reason: str
    """Empty: nothing to do about certificates."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`well`: 200, otherwise 503. `text` ends with a line break."""

    well: bool
    text: str


def _part(name: str, well: bool, good: str, bad: str, *, otherwise: Standing = Standing.FAILS) -> Part:
    standing, text = (Standing.OK, good) if well else (otherwise, bad)
    return Part(name, standing, " ".join(text.split())[:TEXT_CHARS_MAX])


def _loop(seen: Seen) -> Part:
    overdue = f"its next step has been due for {seen.tick_overdue_s:.0f} s and does not come"
    return _part("loop", seen.tick_overdue_s <= OVERDUE_S_MAX, "it turns", overdue)


def parts_of(seen: Seen) -> list[Part]:
    """The parts of a node's health; those that decide come first."""
    status = seen.status
    state = admin_pb2.NodeState.Name(status.state).removeprefix("NODE_")
    role = admin_pb2.Role.Name(status.role)
    why = f"{state}: {status.state_reason}" if status.state_reason else state
    leads = status.role == admin_pb2.MASTER
    heard = f"this node, in term {status.term}" if leads else f"{status.master_id}, in term {status.term}"
    unheard = "it leads and has no lease from a majority" if leads else "none is known"
    lag = f"{seen.lag_entries:,} entries to apply"
    clock = status.clock_reason or f"agreed to {status.clock_error_ms:.0f} ms"
    room = f"{status.disk_bytes_free >> 20:,} MiB free"
    unreadable = f"{status.unreadable_messages} due messages cannot be read: {status.unreadable_reason}"
    warns = Standing.WARNS
    return [
        _loop(seen),
        _part("running", not seen.stopping, f"for {status.uptime_s:.0f} s", "it was told to stop"),
        _part("takes part", status.state in _TAKES_PART, f"{role}, {why}", why),
        _part("master", status.lease_held if leads else bool(status.master_id), heard, unheard),
        _part("log", seen.lag_entries <= LAG_ENTRIES_MAX, lag, f"{lag}; ready from {LAG_ENTRIES_MAX:,} on"),
        _part("clock", not status.clock_reason, clock, clock, otherwise=warns),
        _part("disk", not status.disk_above_mark, room, f"above its mark, {room}", otherwise=warns),
        _part("records", not status.unreadable_messages, "all can be read", unreadable, otherwise=warns),
        _part("certificates", not seen.certificate_reason, "none to renew", seen.certificate_reason, otherwise=warns),
    ]


def live_page(tick_overdue_s: float) -> Answer:
    """The answer to /livez. Takes no status: a node is alive however bad it looks."""
    return (
        Answer(True, "alive\n")
        if tick_overdue_s <= OVERDUE_S_MAX
        else Answer(False, f"not alive: the loop's next step has been due for {tick_overdue_s:.0f} s\n")
    )


def ready_page(seen: Seen) -> Answer:
    """The answer to /readyz: what fails, and why."""
    fails = [part for part in parts_of(seen) if part.standing is Standing.FAILS]
    if not fails:
        return Answer(True, "ready\n")
    return Answer(False, "not ready\n" + "".join(f"{part.name}: {part.text}\n" for part in fails))


def health_page(seen: Seen) -> Answer:
    """The answer to /healthz: first the answer of /readyz, then every part in a line."""
    parts = parts_of(seen)
    well = all(part.standing is not Standing.FAILS for part in parts)
    lines = [f"{part.standing.value:5} {part.name}: {part.text}\n" for part in parts]
    return Answer(well, "".join(["ready\n" if well else "not ready\n", *lines]))
