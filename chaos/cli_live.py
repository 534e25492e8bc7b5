"""`tickwheel chaos run` and `tickwheel chaos failover`: real processes under faults.

Owns options, what is printed and the exit codes: 0 all promises held, 1 one was broken, 3 the run is void or could
not be carried out (it proves nothing).
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.text import Text

from tickwheel.chaos.live.losses import Kind, measure
from tickwheel.chaos.live.losses_report import as_json as figures_of
from tickwheel.chaos.live.losses_report import print_losses
from tickwheel.chaos.live.namespaces import NamespacesRefused
from tickwheel.chaos.live.page import write_files
from tickwheel.chaos.live.plan import UnknownFamily, families_of
from tickwheel.chaos.live.report import print_report, replay_command
from tickwheel.chaos.live.second_opinion import AuditFailed, add_opinion, check_extra, export, opinion
from tickwheel.chaos.live.supervisor import RunFailed, RunOptions, Supervisor
from tickwheel.chaos.live.switch import switch_for
from tickwheel.chaos.printing import EXIT_BROKEN, EXIT_VOID, empty_directory, headed, open_console, teller
from tickwheel.node.made_files import LocalClusterError

NetnsOption = Annotated[
    bool,
    typer.Option(
        "--netns", help="Nodes in network namespaces, packets really lost; needs Linux and root (or a user namespace)."
    ),
]


def run(
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster.", min=1, max=7)] = 3,
    minutes: Annotated[float, typer.Option(help="Minutes of load and faults.", min=0.1)] = 5.0,
    faults: Annotated[str, typer.Option(help="Families, separated by commas; or all, none.")] = "all",
    rate: Annotated[float, typer.Option(help="Messages scheduled a second.", min=1)] = 500.0,
    seed: Annotated[int, typer.Option(help="The plan's seed; -1: by chance.", min=-1)] = -1,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Where report, history, data and logs go. Default: a new one; its data go after a good run."
        ),
    ] = None,
    netns: NetnsOption = False,
    audit: Annotated[
        bool, typer.Option("--audit", help="Have the pipeline's audit judge the run as well; needs the extra spark.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run real nodes under faults and judge every promise; exit code 1 if one was broken."""
    console = open_console(stderr=as_json)
    try:
        families = families_of(faults)
    except UnknownFamily as error:
        raise typer.BadParameter(str(error)) from error
    seed = random.randrange(1 << 31) if seed < 0 else seed
    where = empty_directory(directory, "chaos")
    options = RunOptions(where, seed, minutes * 60, families, nodes, rate)
    told = teller(console)
    try:
        if audit:
            check_extra()
        switch = switch_for(nodes, seed) if netns else None
        verdict = uvloop.run(Supervisor(options, told, switch).run())
        exported = export(where)
        if audit and exported is not None:
            told("auditing")
            add_opinion(verdict, opinion(where, exported, verdict))
    except (RunFailed, NamespacesRefused, AuditFailed) as error:
        console.print(headed("the run could not be carried out:", "bold red", f" {error}"), soft_wrap=True)
        raise typer.Exit(EXIT_VOID) from error
    write_files(verdict, where)
    if directory is None and verdict.holds and not verdict.void:
        shutil.rmtree(where / "nodes")  # gigabytes that nobody asks for after a good run
    if as_json:
        print((where / "report.json").read_text(encoding="utf-8"))
    else:
        print_report(verdict, console)
    console.print(f"report: {where / 'report.html'}; again: {replay_command(verdict)}", highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT_VOID if verdict.void else EXIT_BROKEN if not verdict.holds else 0)


def failover(
    losses: Annotated[int, typer.Option(help="How often the master is lost.", min=1)] = 20,
    kind: Annotated[str, typer.Option(help="How: kill (SIGKILL), stop (SIGSTOP), drop (nothing passes).")] = "kill",
    handovers: Annotated[int, typer.Option(help="Planned handovers instead of losses.", min=0)] = 0,
    rate: Annotated[float, typer.Option(help="Messages a second.", min=250)] = 5_000.0,
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster.", min=3, max=7)] = 3,
    netns: NetnsOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Lose the master again and again and measure the way back; exit code 1 if a message was lost or came early."""
    console = open_console(stderr=as_json)
    if kind not in ("kill", "stop", "drop"):
        raise typer.BadParameter(f"{kind}: kill, stop or drop")
    how = Kind.HANDOVER if handovers else Kind(kind)
    with tempfile.TemporaryDirectory(prefix="tickwheel-failover-") as directory, console.status("starting") as status:
        try:
            switch = switch_for(nodes, 1) if netns else None
            measuring = measure(
                Path(directory),
                how,
                handovers or losses,
                rate,
                nodes=nodes,
                switch=switch,
                told=lambda line: status.update(Text(line)),
            )
            result = uvloop.run(measuring)
        except (LocalClusterError, NamespacesRefused) as error:
            console.print(headed("it could not be carried out:", "bold red", f" {error}"), soft_wrap=True)
            raise typer.Exit(EXIT_VOID) from error
    if as_json:
        print(json.dumps(figures_of(result), indent=1))
    else:
        print_losses(result, console)
    raise typer.Exit(EXIT_BROKEN if result.lost or result.early else 0)
