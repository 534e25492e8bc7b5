"""One case of the clock from its first process to its verdict, and the table of several.

A case breaks like any run, by the verdict over its history; and also if a node did not report what it must, if
messages stood still or flowed where they must not, or if a serving master's time was ahead of true time by more than
its reported error and BEYOND_MS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tickwheel.chaos.live.clock_cases import Case
from tickwheel.chaos.live.clock_stage import ClockStage, Stretch
from tickwheel.chaos.live.history import Record, read_history
from tickwheel.chaos.live.supervisor import RunOptions, Scene, Supervisor
from tickwheel.chaos.live.verdict import Broken, Verdict
from tickwheel.chaos.printing import bare_table

WARM_S = 1.6
"""Load before anything is done. If it is too small, the run proves nothing."""
BEYOND_MS = 5.0
"""P3's slack beside the error that a node shows."""
AHEAD_MS = 100.0
"""Messages due within this time after dispatch stopped were dispatched before and held until due: not judged."""
GRACE_MS = 3_000.0
"""A message of a stretch may come this long after its end: a node may have waited for a processor."""
PART_MS = 5_000.0
"""Something must flow in each part of this length of a stretch."""
DUE_AHEAD_MS = 1_500


@dataclass(frozen=True, slots=True)
class _Flow:
    """Acceptances and deliveries of a workload, in the order of time."""

    accepted_ms: list[float]
    came_ms: list[tuple[float, float]]
    """(time of first delivery to a group, due time). Moved messages are left out."""


def flow_of(history: Iterable[Record]) -> _Flow:
    """Read it from the workload's records."""
    asked_ms: dict[int, float] = {}
    moved: set[int] = set()
    seen: set[tuple[str, int]] = set()
    flow = _Flow([], [])
    for record in history:
        match record["k"]:
            case "send":
                asked_ms.update(zip(record["uids"], record["asked"], strict=True))
            case "ack":
                flow.accepted_ms.append(record["t"])
            case "move":
                moved.add(record["uid"])
            case "got":
                for uid in record["uids"]:
                    if (record["group"], uid) not in seen and uid not in moved:
                        seen.add((record["group"], uid))
                        flow.came_ms.append((record["t"], asked_ms[uid]))
    return flow


def judge_stretch(stretch: Stretch, flow: _Flow) -> tuple[bool, str]:
    """(whether messages flowed in the stretch as they had to, a description)."""

    from_ms, until_ms = stretch.from_ms, stretch.until_ms
    last_ms = until_ms + (GRACE_MS if stretch.delivers else 0.0)
    due_ms = [due for came, due in flow.came_ms if from_ms + AHEAD_MS <= due < until_ms and came < last_ms]
    accepted_ms = [at_ms for at_ms in flow.accepted_ms if from_ms <= at_ms < until_ms]
    told = f"{len(accepted_ms):,} requests accepted, {len(due_ms):,} messages that became due came"
    parts = max(1, round((until_ms - from_ms) / PART_MS))

    def steady(times: Sequence[float]) -> bool:
        return len({min(parts - 1, int((at_ms - from_ms) // PART_MS)) for at_ms in times}) == parts

    return steady(accepted_ms) and (steady(due_ms) if stretch.delivers else not due_ms), told


def add_checks(verdict: Verdict, stage: ClockStage, flow: _Flow, load_ms: float) -> None:
    """Make what a case expects part of its verdict."""
    told: list[tuple[float, str, bool, str]] = [(one.at_ms, one.what, one.passed, one.seen) for one in stage.checks]
    for stretch in stage.stretches:
        passed, seen = judge_stretch(stretch, flow)
        words = "messages come" if stretch.delivers else "messages are accepted, none comes"
        told.append((stretch.until_ms, f"{words}: {stretch.what}", passed, seen))
    text = f"a serving master's time is never ahead by more than it says and {BEYOND_MS:g} ms"
    seen = f"{verdict.time_beyond_ms:,.0f} ms"
    told.append((load_ms + 1_000 * verdict.marks.get("heal", 0.0), text, verdict.time_beyond_ms <= BEYOND_MS, seen))
    for at_ms, what, passed, seen in sorted(told):
        at_s = round((at_ms - load_ms) / 1_000, 3)
        verdict.checks.append({"at_s": at_s, "what": what, "passed": passed, "seen": seen})
        if not passed:
            verdict.broken.append(Broken("clock", at_s, f"{what}; seen: {seen}"))
            verdict.broken_counts["clock"] = verdict.broken_counts.get("clock", 0) + 1


async def play(case: Case, directory: Path, rate: float, told: Callable[[str], None] = lambda line: None) -> Verdict:
    """Play the whole case. Raises RunFailed."""
    stages: list[ClockStage] = []

    async def script(scene: Scene) -> None:
        stages.append(ClockStage(scene))
        await asyncio.sleep(WARM_S)
        await case.play(stages[0])

    options = RunOptions(
        directory,
        1,
        0.0,
        ("skew",),
        case.nodes,
        rate,
        ahead_ms=DUE_AHEAD_MS,
        config=case.config,
        wrong_ms=case.wrong_ms,
        case=case.name,
    )
    verdict = await Supervisor(options, told).run(script=script)
    load_ms = verdict.run["began_ms"] - 1_000 * verdict.marks["run"]
    add_checks(verdict, stages[0], flow_of(read_history([directory / "workload.jsonl"])), load_ms)
    verdict.run["seconds"] = round(verdict.marks.get("heal", 0.0), 1)
    return verdict


def row_of(case: Case, verdict: Verdict) -> dict[str, Any]:
    """The row of a case in the report."""
    return {
        "case": case.name,
        "what": case.what,
        "void": verdict.void,
        "holds": verdict.holds,
        "broken": verdict.broken_counts,
        "earliest_ms": verdict.earliest_ms,
        "error_ms": verdict.clock_error_ms,
        "ahead_ms": verdict.time_ahead_ms,
        "beyond_ms": verdict.time_beyond_ms,
        "late_worst_ms": max(verdict.outside.worst, verdict.inside.worst),
        "expected": len(verdict.checks),
        "seen": sum(check["passed"] for check in verdict.checks),
        "failovers": len(verdict.failovers),
        "acknowledged": verdict.counts.get("acknowledged", 0),
        "seconds": round(verdict.marks.get("heal", 0.0), 1),
        "starved_share": verdict.starved_share,
    }


def print_rows(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """The table."""
    numbers = ("s", "messages", "early", "ahead", "unsaid", "error", "failovers", "waited", "as expected")
    table = bare_table(("case", *numbers, "verdict"), range(1, 10))
    for row in rows:
        verdict, style = ("held", "") if row["holds"] else (", ".join(row["broken"]) + " broken", "bold red")
        if row["void"]:
            verdict, style = "void", "yellow"
        table.add_row(
            row["case"],
            f"{row['seconds']:,.0f}",
            f"{row['acknowledged']:,}",
            *(f"{row[name]:,.0f}" for name in ("earliest_ms", "ahead_ms", "beyond_ms", "error_ms")),
            f"{row['failovers']}",
            f"{row['starved_share']:.0%}",
            f"{row['seen']} of {row['expected']}",
            verdict,
            style=style,
        )
    console.print(table)
    console.print(
        "ms: early, the earliest message before its time; ahead, a serving master's time before the true one; unsaid, "
        "that without the error it showed; error, the most it showed; waited: nodes, for a processor",
        style="dim",
        highlight=False,
    )
