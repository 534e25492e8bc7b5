"""Figures of the cases, the tables that show them, and deliveries over time for the plots."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

COLUMNS = {
    "rate": "rate /s",
    "lateness_p50": "late p50 ms",
    "lateness_p99": "p99 ms",
    "lateness_p99_9": "p99.9 ms",
    "early": "early",
    "repeats": "repeats",
    "lost": "lost",
    "elections": "elections",
    "nodes_cpu": "CPU s per 1,000: nodes",
    "load_cpu": "load",
}
"""Figures that every load on a cluster has: the columns of a table with a row for each load."""
SLOTS_PER_S = 4
TITLE_CHARACTERS_AN_INCH = 9
NEW_MASTER = "a new master's first batch"
"""The mark of an election; all other marks are failures."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    target: str = ""
    load: str = ""
    """Which load of the case it belongs to; empty: the case has one load, or none."""


def medians(runs: list[list[Figure]]) -> list[Figure]:
    """The figures of several runs of one case, each with the median of its values."""
    return [
        replace(figure, value=statistics.median(run[place].value for run in runs))
        for place, figure in enumerate(runs[0])
    ]


def number_text(value: float) -> str:
    """A figure as people read it: fractions only where they matter."""
    return f"{value:,.3f}" if abs(value) < 10 and value != int(value) else f"{value:,.0f}"


def loads_table(cases: Iterable[tuple[str, list[Figure]]]) -> Table:
    """Medians: a row for each load, each figure followed by its target in brackets."""
    table = Table("case", "load", *COLUMNS.values())
    for case, figures in cases:
        loads: dict[str, dict[str, str]] = {}
        for figure in figures:
            if figure.name in COLUMNS:
                text = number_text(figure.value) + (f" ({figure.target})" if figure.target else "")
                loads.setdefault(figure.load, {})[figure.name] = text
        for load, texts in loads.items():
            table.add_row(case, load, *(texts.get(name, "") for name in COLUMNS))
    return table


def others_table(cases: Iterable[tuple[str, list[list[Figure]]]], *, everything: bool = False) -> Table:
    """All other figures, with the values of every run. `everything`: those of `loads_table` too."""
    table = Table("case", "load", "figure", "median", "runs", "unit", "target")
    for case, runs in cases:
        for place, figure in enumerate(medians(runs)):
            if everything or figure.name not in COLUMNS:
                values = ", ".join(number_text(run[place].value) for run in runs)
                median = number_text(figure.value)
                table.add_row(case, figure.load, figure.name, median, values, figure.unit, figure.target)
    return table


@dataclass(slots=True)
class Timeline:
    """Deliveries in each quarter of a second since the first. Where none came, lateness is nan and the rate 0."""

    load: str
    seconds: list[float] = field(default_factory=list)
    late_p50_ms: list[float] = field(default_factory=list)
    late_p99_ms: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Failures and elections: when, and what."""


def timeline(
    load: str,
    late_ms: Sequence[NDArray[np.int64]],
    arrivals_s: Sequence[float],
    marks: Iterable[tuple[float, str]] = (),
) -> Timeline:
    """The timeline of batches. `arrivals_s` rises; `marks` are on the same clock."""
    if not arrivals_s:
        return Timeline(load)
    began_s = arrivals_s[0]
    slots = ((np.array(arrivals_s) - began_s) * SLOTS_PER_S).astype(int)
    found = Timeline(load, marks=[(at_s - began_s, what) for at_s, what in marks])
    for slot in range(int(slots[-1]) + 1):
        first, last = np.searchsorted(slots, (slot, slot + 1))
        late = np.concatenate(late_ms[first:last]) if last > first else np.zeros(0, np.int64)
        p50, p99 = np.percentile(late, (50, 99)) if len(late) else (np.nan, np.nan)
        found.seconds.append(slot / SLOTS_PER_S)
        found.late_p50_ms.append(float(p50))
        found.late_p99_ms.append(float(p99))
        found.rate.append(float(SLOTS_PER_S * len(late)))
    return found


def plot(title: str, timelines: Sequence[Timeline], file: Path) -> None:
    """Lateness above rate, side by side for each load. A line has a gap where nothing came; failures are marked."""
    from matplotlib import pyplot

    figure = drawn(title, timelines)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def drawn(title: str, timelines: Sequence[Timeline]) -> Any:
    """The matplotlib figure of `plot`; close it with pyplot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = max(9.0, 6.0 * len(timelines))
    figure, panels = pyplot.subplots(
        2, len(timelines), sharex="col", sharey="row", figsize=(width, 5.2), squeeze=False, layout="constrained"
    )
    for column, one in enumerate(timelines):
        late, rate = panels[:, column]
        late.plot(one.seconds, one.late_p99_ms, ".-", markersize=2.5, linewidth=1, color="tab:orange", label="p99")
        late.plot(one.seconds, one.late_p50_ms, ".-", markersize=2.5, linewidth=1, color="tab:blue", label="p50")
        edges = [*one.seconds, len(one.seconds) / SLOTS_PER_S]
        rate.stairs(one.rate, edges, color="tab:blue")
        for panel in (late, rate):
            for at_s, what in one.marks:
                color = "tab:green" if what == NEW_MASTER else "tab:red"
                panel.axvline(at_s, color=color, linewidth=0.8, linestyle="--", label=what)
            panel.grid(alpha=0.3)
        late.set_title(one.load, fontsize="medium")
        rate.set_xlabel("seconds since the first delivery")
    figure.suptitle(textwrap.fill(title, int(TITLE_CHARACTERS_AN_INCH * width)))
    shown = {label: line for panel in panels[0] for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside lower right", ncols=len(shown), fontsize="small")
    panels[0, 0].set_ylabel("lateness, ms")
    panels[1, 0].set_ylabel("deliveries/s")
    for panel in panels[:, 0]:  # after all lines: setting one end of a shared axis keeps the other where it is
        panel.set_ylim(bottom=0)
    return figure
