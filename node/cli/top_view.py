"""The picture of `tickwheel top`: the state of a cluster, drawn as lines that fit a terminal.

Pure: a `Heard` and the terminal's size in, text out; no clock, no network. Readable without colour and over a pipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from rich.text import Text

from tickwheel.client import ClockState, Group, NodeRole, NodeState, NodeStatus
from tickwheel.client.errors import Fault
from tickwheel.client.moments import MILLISECOND
from tickwheel.node.cli.charts import columns, fitting, short
from tickwheel.node.cli.output import ms_text

HOUR_MS = 3_600_000
MINUTE_MS = 60_000
HOURS_AHEAD = 24
WIDTH_MIN, HEIGHT_MIN = 40, 8
MARGIN = 9
SECOND = timedelta(seconds=1)
LAG = timedelta(milliseconds=100)
"""A loop that lags by more is marked."""
CELL_WIDTH = 7
"""Least width of a column of numbers."""
PASSED = "·"
HAND = "┃"


@dataclass(slots=True)
class Heard:
    """The state of a cluster; each part is as old as its last answer."""

    answers: dict[str, NodeStatus | Fault] = field(default_factory=dict)
    """Status by address; a Fault for a node without an answer."""
    last: dict[str, NodeStatus] = field(default_factory=dict)
    """The last status of each address, also when it does not answer now."""
    groups: Sequence[Group] = ()
    hours: dict[int, int] = field(default_factory=dict)
    """Pending messages by start of the hour."""
    seconds: dict[int, int] = field(default_factory=dict)
    """Pending messages of this hour by start of the second."""
    sweeps: int = 0
    """Number of running sweeps."""
    trouble: str = ""
    """Why the parts that need a master are out of date; empty if they are not."""

    @property
    def statuses(self) -> list[NodeStatus]:
        """The status of each node that answers, sorted by id."""
        found = [answer for answer in self.answers.values() if isinstance(answer, NodeStatus)]
        return sorted(found, key=lambda status: status.node_id)

    @property
    def master(self) -> NodeStatus | None:
        """The node that claims mastership and holds its lease, in the highest term; else any that claims it."""
        masters = [status for status in self.statuses if status.role is NodeRole.MASTER]
        return max(masters, key=lambda status: (status.term, status.lease_held), default=None)


def draw(heard: Heard, now_ms: int, width: int, height: int) -> Text:
    """Draw header, wheel and nodes, then as many topics and groups as fit."""
    width = max(width, WIDTH_MIN)
    lines = _header(heard, now_ms, width)
    blocks = [_nodes(heard, width), _wheel(heard, now_ms, width), _topics(heard, width), _groups(heard, width)]
    room = max(height, HEIGHT_MIN) - len(lines)
    for number, block in enumerate(blocks):
        if not block or room < 3:
            continue
        later = sum(1 for other in blocks[number + 1 :] if other)
        # Topics and groups share the remaining lines; nodes and wheel are whole or cut at the end.
        most = room - 1 if number < 2 else max(3, (room - 1) // (1 + later) if later else room - 1)
        shown = block[:most]
        if len(shown) < len(block) and number >= 2:
            shown[-1] = Text(f"  {len(block) - len(shown) + 1:,} more", style="dim")
        lines += [Text(), *shown]
        room -= len(shown) + 1
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


# -- header


def _header(heard: Heard, now_ms: int, width: int) -> list[Text]:
    master, statuses = heard.master, heard.statuses
    any_status = master or next(iter(statuses), None) or next(iter(heard.last.values()), None)
    name = any_status.cluster_id if any_status is not None else "?"
    first = Text.assemble(("tickwheel ", "bold"), (name, "bold cyan"), f"  {_clock(now_ms)} UTC")
    second = Text()
    if not statuses:
        second.append("no node answers", "bold red")
    elif master is None:
        second.append("no master", "bold red")
        second.append(f": {len(statuses)} of {len(heard.answers)} nodes answer; the highest term is ")
        second.append(str(max(status.term for status in statuses)))
    else:
        error = f" ± {master.clock_error / MILLISECOND:.1f} ms" if master.clock_error else ""
        first.append(error, "dim")
        first.append(f"  master {master.node_id} in term {master.term}")
        late = _late(master)
        parts = [
            f"{short(master.pending)} pending",
            f"{short(master.ready)} ready",
            f"{short(master.in_flight)} out",
            late,
        ]
        if master.redeliver_rate >= 0.05:
            parts.append(f"{_rate(master.redeliver_rate)} redelivered/s")
        dead = sum(group.dead for group in heard.groups)
        if dead:
            parts.append(f"{short(dead)} dead letters")
        if heard.sweeps:
            parts.append(f"{heard.sweeps} sweeps run")
        if master.state is not NodeState.SERVING:
            parts.append(master.state_reason)
        return [first, *_flowing(parts, width), *([Text(heard.trouble, "yellow")] if heard.trouble else [])]
    return [first, second]


def _flowing(parts: Sequence[str], width: int) -> list[Text]:
    """The parts with dots between them, on as many lines as needed."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return [Text(line) for line in lines]


def _late(master: NodeStatus) -> str:
    if master.late_p50 is None or master.late_p99 is None:
        return "no deliveries"

    def said(late: timedelta) -> str:
        return ms_text(late) if late < SECOND else f"{late / SECOND:,.0f} s"

    return f"half ≤ {said(master.late_p50)} late, 99 % ≤ {said(master.late_p99)}"


def _clock(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S")


# -- the wheel


def _wheel(heard: Heard, now_ms: int, width: int) -> list[Text]:
    if not heard.hours and not heard.seconds:
        return []
    room = width - MARGIN
    lines: list[Text] = []
    hour_ms = now_ms // HOUR_MS * HOUR_MS
    shown = min(HOURS_AHEAD, room // 3)
    loads = [heard.hours.get(hour_ms + number * HOUR_MS, 0) for number in range(shown)]
    heights = _heights(loads)
    labels = [f"{(hour_ms // HOUR_MS + number) % 24:02} " for number in range(shown)]
    lines.append(_row("hours", [(character * 2 + " ", "cyan") for character in heights]))
    lines.append(_row("", [("".join(labels), "dim")]))
    later = sum(heard.hours.values()) - sum(loads)
    lines[0].append(f" {short(sum(loads))}" + (f", {short(later)} later" if later > 0 else ""))
    if room < 60:
        return lines
    lines.append(_hand_row(heard, "minutes", hour_ms, MINUTE_MS, now_ms))
    lines.append(_hand_row(heard, "seconds", now_ms // MINUTE_MS * MINUTE_MS, 1_000, now_ms))
    return lines


def _hand_row(heard: Heard, name: str, start_ms: int, step_ms: int, now_ms: int) -> Text:
    """Sixty columns: dots for the past, the hand at the current time."""
    loads = [0] * 60
    for at_ms, count in heard.seconds.items():
        place = (at_ms - start_ms) // step_ms
        if 0 <= place < 60 and at_ms >= now_ms // 1_000 * 1_000:
            loads[place] += count
    hand = (now_ms - start_ms) // step_ms
    heights = _heights(loads)
    cells = [(PASSED * hand, "dim"), (HAND, "bold yellow"), (heights[hand + 1 :], "green")]
    row = _row(f"{name}", cells)
    row.append(f" {short(sum(loads))}")
    return row


def _heights(loads: Sequence[int]) -> str:
    return columns([load**0.5 for load in loads])


def _row(name: str, cells: Sequence[tuple[str, str]]) -> Text:
    text = Text(f"{name:{MARGIN}}", style="")
    for content, style in cells:
        text.append(content, style)
    return text


# -- tables


def _table(heads: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]], width: int, keep: int) -> list[Text]:
    """The lines of a table. Columns are dropped from the right until it fits; the first `keep` stay.

    All columns but the first are aligned to the right.
    """
    # A little wider than needed: columns that jump with every digit are hard to read.
    least = [0, *(CELL_WIDTH if head else 0 for head in heads[1:])]
    widths = [
        max(len(head), least[number], *(len(row[number][0]) for row in rows)) if rows else len(head)
        for number, head in enumerate(heads)
    ]
    count = len(heads)
    while count > keep and sum(widths[:count]) + 2 * (count - 1) > width:
        count -= 1
    lines = [Text()]
    for number in range(count):
        head = f"{heads[number]:<{widths[number]}}" if number == 0 else f"{heads[number]:>{widths[number]}}"
        lines[0].append(head + "  ", "bold")
    for row in rows:
        line = Text()
        for number in range(count):
            content, style = row[number]
            line.append(f"{content:<{widths[number]}}" if number == 0 else f"{content:>{widths[number]}}", style)
            line.append("  ")
        lines.append(line)
    return lines


def _rate(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 9.95 else short(value)


def _nodes(heard: Heard, width: int) -> list[Text]:
    heads = ("NODE", "role", "state", "term", "lag", "sync", "clock", "loop", "disk free")
    lags = {peer.node_id: peer.applied_lag for peer in heard.master.peers} if heard.master is not None else {}
    names = {peer.client_address: peer.node_id for status in heard.last.values() for peer in status.peers}
    rows: list[list[tuple[str, str]]] = []
    faults: list[list[tuple[str, str]]] = []
    for address, answer in heard.answers.items():
        if isinstance(answer, Fault):
            before = heard.last.get(address)
            name = before.node_id if before is not None else names.get(address, address)
            faults.append([(name, "red"), ("away", "bold red"), *[("", "")] * (len(heads) - 2)])
            continue
        master = answer.role is NodeRole.MASTER
        role = answer.role + ("*" if answer.lease_held and master else "")
        agreed = answer.clock_state is ClockState.AGREED
        clock = f"{answer.clock_offset / MILLISECOND:+.1f} ms" if agreed else answer.clock_state
        lag = "-" if master else short(lags.get(answer.node_id, max(0, answer.commit_index - answer.applied_index)))
        rows.append(
            [
                (answer.node_id, "bold" if master else ""),
                (role, "bold green" if master else ""),
                (answer.state, "" if answer.state is NodeState.SERVING else "yellow"),
                (str(answer.term), ""),
                (lag, ""),
                ("-" if master else ms_text(answer.sync_age), ""),
                (clock, "" if agreed else "yellow"),
                (ms_text(answer.loop_lag), "yellow" if answer.loop_lag > LAG else ""),
                (f"{answer.disk_bytes_free / (1 << 30):,.0f} GiB", ""),
            ]
        )
    rows.sort(key=lambda row: row[0][0])
    return _table(heads, rows + sorted(faults), width, 3)


def _topics(heard: Heard, width: int) -> list[Text]:
    master = heard.master
    if master is None or not master.topics:
        return []
    heads = ("TOPIC", "in/s", "due/s", "out/s", "done/s", "backlog", "")
    rows = [
        [
            (fitting(topic.name, max(12, width - 52)), ""),
            (_rate(topic.schedule_rate), ""),
            (_rate(topic.dispatch_rate), ""),
            (_rate(topic.deliver_rate), ""),
            (_rate(topic.settle_rate), ""),
            (short(topic.backlog), "yellow" if topic.backlog > 10_000 else ""),
            ("paused" if topic.paused else "", "yellow"),
        ]
        for topic in master.topics
    ]
    sums = [
        (_rate(v), "bold")
        for v in (master.schedule_rate, master.dispatch_rate, master.deliver_rate, master.settle_rate)
    ]
    total = [("all", "bold"), *sums, (short(master.ready), "bold"), ("", "")]
    return _table(heads, [total, *rows] if len(rows) > 1 else rows, width, 3)


def _groups(heard: Heard, width: int) -> list[Text]:
    if not heard.groups:
        return []
    heads = ("GROUP", "backlog", "out", "consumers", "dead", "")
    ordered = sorted(heard.groups, key=lambda group: (-group.backlog, -group.dead, group.name))
    rows = [
        [
            (fitting(group.name, max(12, width - 44)), ""),
            (short(group.backlog), "yellow" if group.backlog and not group.consumers else ""),
            (short(group.in_flight), ""),
            (str(group.consumers), "red" if group.backlog and not group.consumers else ""),
            (short(group.dead), "red" if group.dead else ""),
            ("paused" if group.paused else "", "yellow"),
        ]
        for group in ordered
    ]
    return _table(heads, rows, width, 3)
