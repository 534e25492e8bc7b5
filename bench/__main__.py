"""`python -m tickwheel.bench [--case T3] [--quick]`: measure, print a table, write the results.

A missed target is reported beside its figure and fails nothing; a case that cannot run does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tickwheel.bench.cases import CASES, Figure
from tickwheel.bench.wheel_alone import t10

RESULTS = Path("bench/results/latest.json")
ALL = {**CASES, "T10": t10}


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


def write(case: str, figures: list[Figure], quick: bool) -> None:
    """Put the figures of one case in the place of its older ones."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    kept = [record for record in kept if record["case"] != case]
    kept += [
        {
            "case": case,
            "figure": figure.name,
            "value": round(figure.value, 3),
            "unit": figure.unit,
            "runs": [round(figure.value, 3)],
            "settings": settings(quick),
        }
        for figure in figures
    ]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> int:
    """Run what was asked for; the exit code."""
    parser = argparse.ArgumentParser(prog="tickwheel.bench", description=__doc__)
    parser.add_argument("--case", choices=list(ALL), help="only this one")
    parser.add_argument("--quick", action="store_true", help="each in seconds; figures are not written")
    arguments = parser.parse_args()
    console = Console()
    table = Table("case", "figure", "measured", "unit", "target")
    for case in [arguments.case] if arguments.case else list(ALL):
        console.print(f"{case} ...")
        figures = asyncio.run(ALL[case](arguments.quick))
        for figure in figures:
            table.add_row(case, figure.name, f"{figure.value:,.1f}", figure.unit, figure.target)
        if not arguments.quick:
            write(case, figures, arguments.quick)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
