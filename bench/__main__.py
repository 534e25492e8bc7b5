"""`python -m tickwheel.bench [--case T3] [--quick]`: measure, print a table, write the results and their document.

A missed target is shown beside its figure and does not change the exit code. A case that cannot run does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import signal
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from tickwheel.bench.bulk import t14
from tickwheel.bench.cases import t1, t2, t3, t4, t5, t6, t7, t8, t9, t16
from tickwheel.bench.console import t22
from tickwheel.bench.document import results_table, with_table
from tickwheel.bench.figures import Figure, loads_table, medians, others_table, plot
from tickwheel.bench.groups import t11, t12, t13
from tickwheel.bench.keyed import t21
from tickwheel.bench.many import t17, t18, t19, t20
from tickwheel.bench.served import TIMELINES
from tickwheel.bench.sink import t15
from tickwheel.bench.wheel_alone import t10

RESULTS = Path("bench/results/latest.json")
DOCUMENT = Path("docs/BENCHMARK.md")
"""Its table is written anew with the results, where there is such a document."""
_CASES = (t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15, t16, t17, t18, t19, t20, t21, t22)
ALL = {case.__name__.upper(): case for case in _CASES}
"""By number."""
ONCE = {"T6", "T7", "T8", "T14", "T16", "T22"}
WIDEST = 1_000
"""Columns of a terminal on which every table fits."""


def settings(quick: bool, load_before: float) -> dict[str, object]:
    """When and under which conditions it was measured. `load_before`: the machine's load average as the case began."""
    return {
        "day": datetime.now(UTC).date().isoformat(),
        "load_before": round(load_before, 1),
        "nodes": 3,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "payload_bytes": 256,
        "fdatasync": True,
        "quick": quick,
    }


def title(case: str) -> str:
    """What the case does: the first line of its function's docstring."""
    said = (ALL[case].__doc__ or "").partition("\n")[0]
    return f"{case}. {said.removesuffix('.')}"


def write(case: str, runs: list[list[Figure]], measured: Mapping[str, object]) -> None:
    """Replace the older figures of one case, in the results and in the document's table."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    kept = [record for record in kept if record["case"] != case]
    kept += [
        {
            "case": case,
            "load": figure.load,
            "figure": figure.name,
            "value": rounded(figure.value),
            "unit": figure.unit,
            "target": figure.target,
            "runs": [rounded(run[place].value) for run in runs],
            "settings": measured,
        }
        for place, figure in enumerate(medians(runs))
    ]
    kept.sort(key=lambda record: int(record["case"][1:]))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if DOCUMENT.exists():
        table = results_table(kept, {name: title(name) for name in ALL})
        DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8"), table), encoding="utf-8")


def rounded(value: float) -> float | None:
    """For JSON, which has no nan; a lateness is nan if nothing came."""
    return None if math.isnan(value) else round(value, 3)


def main() -> int:
    """Run what was asked for; the exit code is 1 if a case could not run."""
    parser = argparse.ArgumentParser(prog="tickwheel.bench", description=__doc__)
    parser.add_argument("--case", choices=list(ALL), help="only this one")
    parser.add_argument("--quick", action="store_true", help="each in seconds, once; figures are not written")
    parser.add_argument("--runs", type=int, default=3, help="how often each is run (T6 to T8, T14, T16, T22: once)")
    arguments = parser.parse_args()
    # SIGTERM ends it as Ctrl-C does: the case stops its cluster, so no node is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(markup=False)
    measured: list[tuple[str, list[list[Figure]]]] = []
    failed = []
    for case in [arguments.case] if arguments.case else list(ALL):
        runs: list[list[Figure]] = []
        measured_on = settings(arguments.quick, os.getloadavg()[0])
        for number in range(1 if arguments.quick or case in ONCE else max(1, arguments.runs)):
            console.print(f"{case}, run {number + 1} ...")
            TIMELINES.clear()
            try:
                runs.append(asyncio.run(ALL[case](arguments.quick)))
            except Exception as error:  # the other cases still run; the exit code tells
                console.print_exception()
                failed.append(f"{case}: {error!r}")
                break
        if not runs:
            continue
        measured.append((case, runs))
        if not arguments.quick:
            write(case, runs, measured_on)
            if TIMELINES:
                plot(title(case), TIMELINES, RESULTS.parent / f"{case}.png")
    loads = loads_table((case, medians(runs)) for case, runs in measured)
    wide = console.measure(loads, options=console.options.update(width=WIDEST)).maximum <= console.width
    if wide:  # cut to the terminal it would say nothing
        console.print(loads)
    console.print(others_table(measured, everything=not wide))
    for text in failed:
        console.print(f"could not run: {text}", style="red")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
