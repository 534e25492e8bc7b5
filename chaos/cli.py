"""`tickwheel chaos`: prove the promises, in simulation.

Registered under the entry point group `tickwheel.commands`. A run depends on its seed and its options alone:
not on the hash seed of the interpreter (a test compares), nor on how many jobs share the seeds.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tickwheel.chaos.cli_clock import clock
from tickwheel.chaos.cli_fuzz import fuzz
from tickwheel.chaos.cli_live import failover, run
from tickwheel.chaos.cli_mutants import mutants
from tickwheel.chaos.ever_run import Counted, commit_of_code, count
from tickwheel.chaos.printing import headed, open_console
from tickwheel.chaos.sim.fault import Tally
from tickwheel.chaos.sim.faults import DEFAULT_KINDS, KINDS
from tickwheel.chaos.sim.run import shrink, simulate
from tickwheel.chaos.sim.setup import Level, RunResult, SimulationConfig
from tickwheel.chaos.sim.world import SECOND

app = typer.Typer(help="Faults against the promises: simulated, seeded, replayable.", no_args_is_help=True)

app.command("mutants")(mutants)
app.command("run")(run)
app.command("failover")(failover)
app.command("clock")(clock)
app.command("fuzz")(fuzz)

FAILURES_SHOWN_MAX = 10


@app.callback()
def _group() -> None:
    """Faults against the promises: simulated, seeded, replayable."""


def _parse_faults(text: str) -> tuple[str, ...]:
    if text == "default":
        return DEFAULT_KINDS
    if text == "all":
        return tuple(KINDS)
    if text in ("", "none"):
        return ()
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: known are {', '.join(KINDS)}, and default, all, none")
    return names


def replay_command(seed: int, config: SimulationConfig) -> str:
    """The command that runs exactly this again."""
    faults = "default" if config.faults == DEFAULT_KINDS else ",".join(config.faults) or "none"
    parts = ["tickwheel chaos sim --seeds 1", f"--from {seed}", f"--level {config.level.value}"]
    parts += [f"--nodes {config.nodes}", f"--seconds {config.seconds}", f"--faults {faults}"]
    if config.only is not None:
        parts.append("--only " + (",".join(map(str, config.only)) or "none"))
    return " ".join([*parts, "--trace"])


@dataclass(slots=True)
class CommandTally:
    """Commands of one name over many runs."""

    times: int = 0
    seeds: int = 0
    seeds_beside_change: int = 0
    """Seeds in which one was applied a moment before or after a change of master."""

    def add(self, times: int, beside: int) -> None:
        """Those of one seed."""
        self.times += times
        self.seeds += 1
        self.seeds_beside_change += beside > 0


class _Summary:
    """Results of many seeds, folded together."""

    def __init__(self) -> None:
        self.seeds = 0
        self.simulated_s = 0.0
        self.cpu_s = 0.0
        self.tallies: dict[str, Tally] = {}
        self.facts: dict[str, float] = {}
        self.commands: dict[str, CommandTally] = {}
        self.failed: list[RunResult] = []

    def add(self, result: RunResult) -> None:
        self.seeds += 1
        self.simulated_s += result.simulated_ns / SECOND
        self.cpu_s += result.cpu_s
        for kind, tally in result.tallies.items():
            self.tallies.setdefault(kind, Tally()).add(tally)
        for name, value in {**result.counts, **result.facts}.items():
            self.facts[name] = self.facts.get(name, 0) + value
        for name, (times, beside) in result.commands.items():
            self.commands.setdefault(name, CommandTally()).add(times, beside)
        if result.failed:
            self.failed.append(result)

    def without_effect(self) -> list[str]:
        return sorted(kind for kind, tally in self.tallies.items() if tally.injected and not tally.effective)

    def as_json(self) -> dict[str, object]:
        return {
            "seeds": self.seeds,
            "simulated_s": round(self.simulated_s, 3),
            "cpu_s": round(self.cpu_s, 3),
            "faults": {
                kind: {"injected": t.injected, "effective": t.effective, "evidence": t.evidence, "unit": t.unit}
                for kind, t in sorted(self.tallies.items())
            },
            "catch_ups": int(self.facts.get("CheckpointTaken", 0)),
            "without_effect": self.without_effect(),
            "facts": {name: round(value, 3) for name, value in sorted(self.facts.items())},
            "commands": {name: asdict(tally) for name, tally in sorted(self.commands.items())},
            "failed": [{"seed": r.seed, "promise": r.promise, "what": r.broken} for r in self.failed],
        }


def _fault_table(tallies: dict[str, Tally], catch_ups: float) -> Table:
    table = Table(title="Faults", title_justify="left")
    table.add_column("fault")
    table.add_column("injected", justify="right")
    table.add_column("with effect", justify="right")
    table.add_column("evidence", justify="right")
    table.add_column("counted")
    for kind in KINDS:
        tally = tallies.get(kind)
        if tally is not None:
            style = "" if tally.effective else "bold red"
            cells = [kind, f"{tally.injected:,}", f"{tally.effective:,}", f"{tally.evidence:,}", tally.unit]
            table.add_row(*cells, style=style)
    table.add_row("catch-up", "", "", f"{catch_ups:,.0f}", "checkpoints taken from a peer", style="dim")
    return table


@app.command()
def sim(
    seeds: Annotated[int, typer.Option(help="How many seeds to run.", min=1)] = 100,
    first: Annotated[int, typer.Option("--from", help="The first seed.", min=0)] = 0,
    faults: Annotated[str, typer.Option(help="Kinds, separated by commas; or default, all, none.")] = "default",
    level: Annotated[Level, typer.Option(help="The whole node, or its replicated log alone.")] = Level.NODE,
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster; 0: by the dice.", min=0, max=7)] = 0,
    seconds: Annotated[int, typer.Option(help="Simulated seconds with load and faults.", min=1)] = 20,
    only: Annotated[str, typer.Option(help="Inject only the planned faults with these numbers.")] = "",
    jobs: Annotated[int, typer.Option(help="Processes; 0: one for each CPU.", min=0)] = 1,
    trace: Annotated[bool, typer.Option("--trace", help="Tell the story of each run.")] = False,
    do_shrink: Annotated[bool, typer.Option("--shrink/--no-shrink", help="Leave faults out while it fails.")] = True,
    tally: Annotated[
        Path | None, typer.Option(help="File that counts all seeds ever run, by commit; made if missing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run seeds; exit code 1 if a promise was broken."""
    kinds = _parse_faults(faults)
    chosen = None if not only else () if only == "none" else tuple(int(number) for number in only.split(","))
    config = SimulationConfig(level=level, nodes=nodes, seconds=seconds, faults=kinds, only=chosen)
    console = open_console(stderr=as_json)
    summary = _Summary()
    commit = commit_of_code()  # now: it may change while seeds run
    if trace:
        for seed in range(first, first + seeds):
            summary.add(simulate(seed, config, lambda at, who, what: print(f"{at / SECOND:12.6f}  {who:<6} {what}")))
    else:
        _run_many(range(first, first + seeds), config, jobs, summary, console)
    if as_json:
        print(json.dumps(summary.as_json(), indent=2))
    else:
        _report(summary, console)
    if tally is not None:
        ran = Counted(summary.seeds, summary.simulated_s, len(summary.failed))
        console.print(count(tally, commit, ran).table())
    for result in summary.failed[:FAILURES_SHOWN_MAX]:
        _report_failure(result, config, do_shrink and chosen is None and not trace, console)
    raise typer.Exit(1 if summary.failed else 0)


def _run_many(seeds: range, config: SimulationConfig, jobs: int, summary: _Summary, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("seeds", total=len(seeds))

        def took(result: RunResult) -> None:
            summary.add(result)
            rate = summary.seeds / max(progress.tasks[0].elapsed or 0.0, 1e-3)
            failed = f", [red]{len(summary.failed):,} failed[/red]" if summary.failed else ""
            progress.update(task, advance=1, description=f"{rate:.1f} seeds/s{failed}")

        workers = jobs or os.cpu_count() or 1
        if workers == 1:
            for seed in seeds:
                took(simulate(seed, config))
            return
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            remaining = iter(seeds)
            running: set[Future[RunResult]] = set()
            while True:
                while len(running) < 2 * workers and (following := next(remaining, None)) is not None:
                    running.add(pool.submit(simulate, following, config))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    took(future.result())


def _report(summary: _Summary, console: Console) -> None:
    if summary.tallies:
        console.print(_fault_table(summary.tallies, summary.facts.get("CheckpointTaken", 0)))
    for kind in summary.without_effect():
        console.print(f"{kind} was injected and never had an effect", style="bold red")
    console.print(
        f"{summary.seeds:,} seeds, {summary.simulated_s:,.0f} simulated s in {summary.cpu_s:,.1f} CPU s "
        f"({60 * summary.cpu_s / max(summary.simulated_s, 1e-9):,.1f} CPU s for a simulated minute)"
    )
    facts = ", ".join(f"{name} {value:,.0f}" for name, value in sorted(summary.facts.items()))
    console.print(facts, style="dim", highlight=False)
    _report_commands(summary.commands, console)
    if summary.failed:
        console.print(f"{len(summary.failed)} seeds broke a promise", style="bold red")
    else:
        console.print("clean", style="green")


def _report_commands(commands: dict[str, CommandTally], console: Console) -> None:
    """What the dice made of the commands of the log: a kind that met no change of master proves little."""
    if not commands:  # of the log alone
        return
    # Not at the top: the log alone can be driven without the rest of the node.
    from tickwheel.chaos.sim.rolled import all_names

    ordered = sorted(commands.items(), key=lambda item: (-item[1].seeds_beside_change, item[0]))
    came = ", ".join(f"{name} {tally.times:,} in {tally.seeds_beside_change:,}" for name, tally in ordered)
    console.print(f"commands, and in how many seeds beside a change of master: {came}", style="dim", highlight=False)
    never = ", ".join(name for name in all_names() if name not in commands)
    if never:
        console.print(f"commands that never came: {never}", style="dim", highlight=False)


def _report_failure(result: RunResult, config: SimulationConfig, do_shrink: bool, console: Console) -> None:
    console.print(headed(f"\nseed {result.seed}", "bold red", f" {result.broken}"), highlight=False)
    if result.where:
        console.print(result.where, style="dim", highlight=False)
    if do_shrink and result.planned:
        with console.status("shrinking") as status:
            config, result = shrink(
                result, config, lambda runs, left: status.update(f"shrinking: {runs:,} runs, {left:,} faults left")
            )
        kept = [fault for fault in result.planned if fault.number in (config.only or ())]
        for fault in kept:
            console.print(
                f"  needs #{fault.number} {fault.kind} of {fault.target} at {fault.at_ns / SECOND:.3f} s "
                f"for {fault.length_ns / SECOND:.3f} s",
                highlight=False,
            )
    console.print("  replay: " + replay_command(result.seed, config), highlight=False, soft_wrap=True)
