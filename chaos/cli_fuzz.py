"""`tickwheel chaos fuzz`: everything the wire can carry, against real nodes.

Owns options, what is printed and the exit codes: 0 all held, 1 something did not, 3 the run could not be carried out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tickwheel.chaos.fuzz.run import FuzzConfig, Fuzzer, FuzzReport
from tickwheel.chaos.printing import EXIT_BROKEN, EXIT_VOID, empty_directory, headed, open_console, teller
from tickwheel.node.local_cluster import LocalCluster, run_to_end
from tickwheel.node.made_files import LocalClusterError


def fuzz(
    seed: Annotated[int, typer.Option(help="Seed of the calls.", min=0)] = 0,
    calls: Annotated[int, typer.Option(help="How many in all.", min=1)] = 10_000,
    batch: Annotated[int, typer.Option(help="Calls between two looks at the nodes.", min=1)] = 500,
    first: Annotated[int, typer.Option("--from", help="The first batch: to play one again.", min=0)] = 0,
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster.", min=1, max=7)] = 3,
    idle: Annotated[int, typer.Option(help="Streams a node that are opened and left alone.", min=0)] = 1_000,
    port: Annotated[int, typer.Option(help="First client port; 0: any.", min=0)] = 0,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Directory for data and logs of the nodes. Default: a new one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Call every method of every service with all that bytes can be; after each batch all must be as it was."""
    console = open_console(stderr=as_json)
    where = empty_directory(directory, "fuzz")
    config = FuzzConfig(seed=seed, batches=-(-calls // batch), batch_calls=batch, first=first, idle_streams=idle)
    try:
        report = run_to_end(_play(where, nodes, port, config, teller(console)))
    except LocalClusterError as error:
        console.print(headed("void", "bold red", f": {error}"), highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_VOID) from None
    if as_json:
        print(json.dumps(asdict(report), indent=1))
    else:
        _print(report, console)
    if not report.findings:
        if directory is None:
            shutil.rmtree(where)
        console.print(headed("clean", "green", f": seed {seed}, {report.calls:,} calls"), highlight=False)
        return
    for finding in report.findings:
        console.print(headed("found", "bold red", f" {finding}"), highlight=False, soft_wrap=True)
    again = replace(config, first=first + report.batches - 1)
    console.print(
        f"play it again: tickwheel chaos fuzz --seed {seed} --from {again.first} --calls {batch} --batch {batch} "
        f"--nodes {nodes} --idle {idle}\nlogs and data: {where}",
        highlight=False,
        soft_wrap=True,
    )
    raise typer.Exit(EXIT_BROKEN)


async def _play(where: Path, nodes: int, port: int, config: FuzzConfig, told: Callable[[str], None]) -> FuzzReport:
    async with LocalCluster(where, nodes, client_port=port) as cluster:
        return await Fuzzer(cluster, config, told).run()


def _print(report: FuzzReport, console: Console) -> None:
    table = Table(title="Answers", title_justify="left")
    table.add_column("status")
    table.add_column("calls", justify="right")
    for name, count in report.codes.most_common():
        table.add_row(name, f"{count:,}")
    console.print(table)
    console.print(
        f"{report.calls:,} calls in {report.batches:,} batches, {report.seconds:,.0f} s; the canary took "
        f"{report.canary_ms_max:,} ms at most; nodes grew by {report.grown_bytes_max >> 20:,} MiB at most; "
        f"a node's own work kept its loop for {report.own_ms_max:,} ms at most",
        highlight=False,
        soft_wrap=True,
    )
    for change in report.changes:
        console.print("[yellow]changed[/yellow]", end=" ")
        console.print(change, highlight=False, markup=False, soft_wrap=True)
