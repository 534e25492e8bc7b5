"""The command `tickwheel bench`: is this machine fit to run nodes?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tickwheel.node.cli.options import AsJson

app = typer.Typer()

STYLES = {"good": "green", "will do": "yellow", "unfit": "red"}
SAYS = {
    "good": "This machine is fit to run a node.",
    "will do": "This machine will do. What is slower than it should be is marked.",
    "unfit": "This machine is not fit to run a node. What stands in the way is marked.",
}


@app.callback(invoke_without_command=True)
def bench(
    data: Annotated[
        Path,
        typer.Option(exists=True, file_okay=False, writable=True, help="A directory on the disk of the nodes' data."),
    ] = Path(),
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="Seconds for each load on three nodes.")] = 10.0,
    nodes: Annotated[bool, typer.Option(help="Run three nodes. --no-nodes: only disk, timers and clock.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: disk, clock, rates and lateness of three nodes on it. Exit code 1: it is not fit.

    Nothing else should run meanwhile. Three nodes on one machine share its disk and processor, so they are faster on
    hosts of their own. Everything written is removed at the end.
    """
    from tickwheel.bench.fitness import machine, served, verdict_of
    from tickwheel.node.cli.output import err, out, print_json, print_table
    from tickwheel.node.local_cluster import run_to_end

    def told(text: str) -> None:
        if not as_json:
            err.print(f"{text} ...", style="dim")

    told("disk, timers and clock")
    found = list(machine(data, min(2.0, seconds)))
    if nodes:
        found += run_to_end(served(data, seconds, told))
    verdict = verdict_of(found)
    if as_json:
        figures = [
            {"name": one.name, "value": one.value, "unit": one.unit, "verdict": one.verdict.value} for one in found
        ]
        print_json({"verdict": verdict.value, "figures": figures})
    else:
        rows = [
            (
                one.name,
                "none"
                if one.value == float("inf")
                else f"{one.value:,.1f}"
                if one.value < 100
                else f"{one.value:,.0f}",
                one.unit,
                f"[{STYLES[one.verdict]}]{one.verdict}[/]",
                one.why,
            )
            for one in found
        ]
        print_table("", ("", "measured", "", "is", "why it matters"), rows, right=(1,), whole=(0, 2, 3))
        out.print(SAYS[verdict], style=STYLES[verdict])
    if verdict == "unfit":
        raise typer.Exit(1)
