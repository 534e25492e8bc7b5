"""`tickwheel chaos clock`: the cases of the cluster clock on real nodes.

Owns options, what is printed and the exit codes, which are those of `tickwheel chaos run`: 0 all cases held, 1 one
broke, 3 one is void or could not be carried out.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from tickwheel.chaos.live.clock_cases import CASES, Case
from tickwheel.chaos.live.clock_run import play, print_rows, row_of
from tickwheel.chaos.live.page import write_files
from tickwheel.chaos.live.report import TOLD_MAX
from tickwheel.chaos.live.supervisor import RunFailed
from tickwheel.chaos.live.verdict import Verdict
from tickwheel.chaos.printing import EXIT_BROKEN, EXIT_VOID, empty_directory, headed, open_console, teller


def clock(
    case: Annotated[
        list[str] | None, typer.Option("--case", help="Play this one; may be given several times. Default: all.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Messages scheduled a second.", min=1)] = 250.0,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory for reports, histories and logs. Default: a new one.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Only list the cases.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Set the clocks of real nodes wrong under load, judge every promise by true time, and see what the nodes say."""
    console = open_console(stderr=as_json)
    unknown = [name for name in case or () if name not in CASES]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: known are {', '.join(CASES)}")
    if listed:
        _print_cases(console)
        return
    where = empty_directory(directory, "clock")
    rows = [_play(CASES[name], where / name, rate, console) for name in case or CASES]
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_rows(rows, console)
    console.print(f"reports: {where}/*/report.html", highlight=False, soft_wrap=True)
    if any(not row["holds"] for row in rows):
        raise typer.Exit(EXIT_BROKEN)
    raise typer.Exit(EXIT_VOID if any(row["void"] for row in rows) else 0)


def _play(case: Case, directory: Path, rate: float, console: Console) -> dict[str, Any]:
    console.print(headed(case.name, "bold", f": {case.what}"), highlight=False)
    try:
        verdict = uvloop.run(play(case, directory, rate, teller(console)))
    except RunFailed as error:
        console.print(headed("it could not be carried out:", "bold red", f" {error}"), soft_wrap=True)
        return row_of(case, Verdict({}, void=str(error)))
    write_files(verdict, directory)
    if verdict.holds and not verdict.void:
        shutil.rmtree(directory / "nodes")
    for one in verdict.broken[:TOLD_MAX]:
        console.print(headed(one.promise, "bold red", f" at {one.at_s:.3f} s: {one.text}"), highlight=False)
    return row_of(case, verdict)


def _print_cases(console: Console) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for one in CASES.values():
        table.add_row(one.name, one.what)
    console.print(table)
