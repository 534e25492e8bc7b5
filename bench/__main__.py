"""`python -m tickwheel.bench [--case T3] [--quick]`: measure, print a table, write the results.

A missed target is reported beside its figure and fails nothing; a case that cannot run does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tickwheel.bench.bulk import t14
from tickwheel.bench.cases import CASES, LINES, Figure, Line, t16
from tickwheel.bench.groups import t11, t12, t13
from tickwheel.bench.sink import t15
from tickwheel.bench.wheel_alone import t10

RESULTS = Path("bench/results/latest.json")
ALL = {**CASES, "T10": t10, "T11": t11, "T12": t12, "T13": t13, "T14": t14, "T15": t15, "T16": t16}
"""By number."""
ONCE = {"T6", "T7", "T8", "T14", "T16"}


def settings(quick: bool) -> dict[str, object]:
    """On what it was measured."""
    return {
        "nodes": 3,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "payload_bytes": 256,
        "fdatasync": True,
        "quick": quick,
    }


def write(case: str, runs: list[list[Figure]], quick: bool) -> None:
    """Put the figures of one case in the place of its older ones."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    kept = [record for record in kept if record["case"] != case]
    kept += [
        {
            "case": case,
            "figure": figure.name,
            "value": round(figure.value, 3),
            "unit": figure.unit,
            "target": figure.target,
            "runs": [round(run[place].value, 3) for run in runs],
            "settings": settings(quick),
        }
        for place, figure in enumerate(medians(runs))
    ]
    kept.sort(key=lambda record: int(record["case"][1:]))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def medians(runs: list[list[Figure]]) -> list[Figure]:
    """The figures of several runs of one case, each with the median of its values."""
    return [
        replace(figure, value=statistics.median(run[place].value for run in runs))
        for place, figure in enumerate(runs[0])
    ]


def number_text(value: float) -> str:
    """A figure as people read it: fractions only where they matter."""
    return f"{value:,.3f}" if abs(value) < 10 and value != int(value) else f"{value:,.0f}"


def plot(case: str, lines: dict[str, Line]) -> None:
    """Plot the series of a case over time, one panel a line, beside the results."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(lines), 1, sharex=True, figsize=(9, 2.2 * len(lines)), squeeze=False)
    for panel, (name, (times, values)) in zip(panels[:, 0], lines.items(), strict=True):
        panel.plot(times, values, linewidth=1.2)
        panel.set_ylabel(name)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0, 0].set_title(f"{case}: by quarter seconds")
    panels[-1, 0].set_xlabel("seconds since the first delivery")
    figure.tight_layout()
    figure.savefig(RESULTS.parent / f"{case}.png", dpi=110)
    pyplot.close(figure)


def main() -> int:
    """Run what was asked for; the exit code is 1 if a case could not run."""
    parser = argparse.ArgumentParser(prog="tickwheel.bench", description=__doc__)
    parser.add_argument("--case", choices=list(ALL), help="only this one")
    parser.add_argument("--quick", action="store_true", help="each in seconds, once; figures are not written")
    parser.add_argument("--runs", type=int, default=3, help="how often each is run (T6 to T8, T14, T16: once)")
    arguments = parser.parse_args()
    # Ended like by Ctrl-C: the cluster of the case that runs is stopped, no node is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    table = Table("case", "figure", "median", "runs", "unit", "target")
    failed = []
    for case in [arguments.case] if arguments.case else list(ALL):
        runs: list[list[Figure]] = []
        for number in range(1 if arguments.quick or case in ONCE else max(1, arguments.runs)):
            console.print(f"{case}, run {number + 1} ...")
            LINES.clear()
            try:
                runs.append(asyncio.run(ALL[case](arguments.quick)))
            except Exception as error:  # the other cases are measured all the same; the exit code tells
                console.print_exception()
                failed.append(f"{case}: {error!r}")
                break
        if not runs:
            continue
        for place, figure in enumerate(medians(runs)):
            values = ", ".join(f"{number_text(run[place].value)}" for run in runs)
            table.add_row(case, figure.name, number_text(figure.value), values, figure.unit, figure.target)
        if not arguments.quick:
            write(case, runs, arguments.quick)
            if LINES:
                plot(case, LINES)
    console.print(table)
    for text in failed:
        console.print(f"[red]could not run: {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
