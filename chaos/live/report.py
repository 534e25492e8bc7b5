"""A verdict as people read it: headline, key figures, and tables for the terminal.

Owns the words; the page (`page.py`) shows the same ones.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tickwheel.chaos.live.plan import FAMILIES
from tickwheel.chaos.live.verdict import PROMISES, Lateness, Verdict
from tickwheel.chaos.printing import bare_table, headed

TOLD_MAX = 10
"""Broken promises printed in words."""
FAILOVERS_MAX = 12
STARVED_SHARE = 0.2
"""Above it the report says that times are the machine's more than the nodes'."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the figures that matter most. `kind`: bad, warn or nothing."""

    name: str
    value: str
    kind: str = ""


@dataclass(slots=True)
class FaultRow:
    """All faults of one kind."""

    kind: str
    family: str
    injected: int = 0
    effective: int = 0
    evidence: int = 0
    unit: str = ""


def headline(verdict: Verdict) -> tuple[str, str, str]:
    """In short, of what kind (good, bad, warn), and what else must be said."""
    if verdict.void:
        broken = f" What was seen nevertheless broke {_broken_words(verdict)}." if not verdict.holds else ""
        return "void", "warn", f"This run proves nothing: {verdict.void}.{broken}"
    if not verdict.holds:
        return f"{_broken_words(verdict)} broken", "bad", _doubts(verdict)
    return "all promises held", "good", _doubts(verdict)


def _broken_words(verdict: Verdict) -> str:
    return ", ".join(
        f"{promise} ({PROMISES[promise]})" if promise.startswith("P") else PROMISES[promise]
        for promise in PROMISES
        if promise in verdict.broken_counts
    )


def _doubts(verdict: Verdict) -> str:
    doubts = []
    if verdict.without_effect:
        doubts.append(f"{_many(len(verdict.without_effect), 'fault')} had no effect that was seen.")
    if verdict.elections_without_fault:
        doubts.append(f"{_many(verdict.elections_without_fault, 'election')} had no fault to explain it.")
    if verdict.starved_share > STARVED_SHARE:
        doubts.append(f"The machine was busy: nodes waited for a processor {verdict.starved_share:.0%} of the time.")
    if verdict.unjudged_ms:
        times = ", ".join(_ms(ms) for ms in verdict.unjudged_ms[:TOLD_MAX])
        doubts.append(f"P10 could not be judged while they waited for most of the time: {times} without a master.")
    if verdict.dead_letters:
        doubts.append(f"{_many(verdict.dead_letters, 'message')} went to dead letters.")
    return " ".join(doubts)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value < 10_000 else f"{value / 1_000:,.1f} s"


def key_figures(verdict: Verdict) -> list[Figure]:
    """The figures to look at first."""
    counts = verdict.counts
    gaps = [failover["without_ms"] for failover in verdict.failovers]
    early = verdict.broken_counts.get("P3", 0)
    lost = counts.get("lost", 0)
    return [
        Figure("acknowledged", f"{counts.get('acknowledged', 0):,}"),
        Figure("delivered", f"{counts.get('delivered', 0):,}"),
        Figure("lost", f"{lost:,}", "bad" if lost else ""),
        Figure("early", f"{early:,}", "bad" if early else ""),
        Figure("delivered again", f"{sum(verdict.duplicates.values()):,}"),
        Figure("of these by failover", f"{verdict.duplicates.get('failover', 0):,}"),
        Figure("failovers", f"{len(gaps)}"),
        Figure("without master, median", _ms(statistics.median(gaps)) if gaps else "-"),
        Figure("at the longest", _ms(max(gaps)) if gaps else "-"),
        Figure("late p99 without faults", _ms(verdict.outside.p99)),
    ]


def fault_rows(verdict: Verdict) -> list[FaultRow]:
    """The faults of a run by kind, in the order of the families."""
    rows = {kind: FaultRow(kind, family) for family, kinds in FAMILIES.items() for kind in kinds}
    for fault in verdict.faults:
        row = rows[fault["kind"]]
        row.injected += 1
        row.effective += fault["count"] > 0
        row.evidence += fault["count"]
        row.unit = fault["unit"] or row.unit
    return [row for row in rows.values() if row.injected]


def replay_command(verdict: Verdict) -> str:
    """The same plan of faults and load once more; timing is the machine's own."""
    run = verdict.run
    if run.get("case"):
        return f"tickwheel chaos clock --case {run['case']} --rate {run.get('rate', 0):g}"
    families = ",".join(run.get("families", [])) or "none"
    return (
        f"tickwheel chaos run --nodes {run.get('nodes')} --minutes {run.get('seconds', 0) / 60:g} "
        f"--faults {families} --rate {run.get('rate', 0):g} --seed {run.get('seed')}"
        f"{' --netns' if run.get('netns') else ''}"
    )


def _lateness_table(verdict: Verdict) -> Table:
    table = bare_table(("lateness, ms", "messages", "p50", "p99", "p99.9", "worst"), range(1, 6))

    def add(name: str, late: Lateness) -> None:
        values = (late.p50, late.p99, late.p99_9, late.worst)
        table.add_row(name, f"{late.messages:,}", *(f"{value:,.0f}" for value in values))

    add("outside faults", verdict.outside)
    add("inside", verdict.inside)
    return table


def print_report(verdict: Verdict, console: Console) -> None:
    """The tables."""
    faults = bare_table(("fault", "injected", "with effect", "seen", "of what"), (1, 2, 3))
    for row in fault_rows(verdict):
        style = "" if row.effective == row.injected else "yellow" if row.effective else "bold red"
        cells = (row.kind, f"{row.injected}", f"{row.effective}", f"{row.evidence:,}", row.unit)
        faults.add_row(*cells, style=style)
    console.print(faults)
    console.print()
    titles = ("failover at s", "master", "without master, ms", "no delivery, ms", "faults")
    failovers = bare_table(titles, (0, 2, 3))
    for failover in verdict.failovers[:FAILOVERS_MAX]:
        silence = failover["silence_ms"]
        failovers.add_row(
            f"{failover['at_s']:.1f}",
            f"{failover['old']} to {failover['new']}",
            f"{failover['without_ms']:,}",
            "" if silence is None else f"{silence:,}",
            failover["cause"] or Text("none", "yellow"),
        )
    if verdict.failovers:
        console.print(failovers)
        if len(verdict.failovers) > FAILOVERS_MAX:
            console.print(f"and {len(verdict.failovers) - FAILOVERS_MAX} more", style="dim")
        console.print()
    console.print(_lateness_table(verdict))
    console.print()
    again = ", ".join(f"{reason} {count:,}" for reason, count in sorted(verdict.duplicates.items())) or "none"
    console.print(f"delivered again: {again}", highlight=False)
    early = f"earliest by true time: {verdict.earliest_ms:,.0f} ms before its time"
    error = f"masters said that theirs might be off by {verdict.clock_error_ms:,.0f} ms at most"
    console.print(f"{early}; {error}", highlight=False)
    figures = ", ".join(f"{figure.name} {figure.value}" for figure in key_figures(verdict))
    console.print(figures, highlight=False, style="dim")
    if verdict.audit:
        told = verdict.audit
        console.print(
            f"audit: {told['scheduled']:,} scheduled, lost {told['lost']:,}, early by true time {told['early']:,}, "
            f"twice under one attempt {told['duplicated']:,}, without a master {told['without_master_ms']:,} ms; "
            f"{'the verdict says the same' if not told['differences'] else 'the verdict says otherwise'}",
            highlight=False,
        )
    for one in verdict.broken[:TOLD_MAX]:
        console.print(headed(one.promise, "bold red", f" at {one.at_s:.3f} s: {one.text}"), highlight=False)
    if len(verdict.broken) > TOLD_MAX:
        console.print(f"and more: {verdict.broken_counts}", highlight=False)
    title, kind, words = headline(verdict)
    style = {"good": "bold green", "bad": "bold red", "warn": "bold yellow"}[kind]
    console.print(title, style=style, highlight=False)
    if words:
        console.print(words, style="yellow", highlight=False)
