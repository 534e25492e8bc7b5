"""`tickwheel chaos mutants`: guards and old bugs, one at a time, and the seeds until the simulation finds each.

Writes its table between two marks of a document, so that what is published is what one command gives.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tickwheel.chaos.sim.mutations import MUTATIONS
from tickwheel.chaos.sim.run import simulate
from tickwheel.chaos.sim.setup import Level, SimulationConfig
from tickwheel.replication.guards import Guards

GUARDS = tuple(field.name for field in fields(Guards))
DIRECTED = "test_guard_is_needed_and_enough"
"""In tests/replication/test_gaps.py: walks into the gap of each guard on purpose."""
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
LOG_SECONDS, NODE_SECONDS = 10, 6


@dataclass(frozen=True, slots=True)
class Found:
    """What became of one hunt. `seeds` were run; `by` is empty if none broke a promise."""

    name: str
    level: str
    faults: str
    seeds: int
    by: str
    how: str

    def cells(self) -> tuple[str, str, str, str, str]:
        """A row of the table."""
        seeds = str(self.seeds) if self.by else f"not in {self.seeds}"
        by = self.by or (f"`{DIRECTED}[{self.name}]` only" if self.name in GUARDS else "nothing yet")
        return self.name, self.level, self.faults, seeds, by


def config_of(name: str) -> SimulationConfig:
    """A run with one guard switched off, or one old bug put in."""
    if name in GUARDS:
        return SimulationConfig(level=Level.LOG, seconds=LOG_SECONDS, guards=Guards(**{name: False}))
    bug = MUTATIONS[name]
    level = Level(bug.level)
    seconds = LOG_SECONDS if level is Level.LOG else NODE_SECONDS
    if bug.faults:
        return SimulationConfig(level=level, seconds=seconds, faults=bug.faults, mutation=name)
    return SimulationConfig(level=level, seconds=seconds, mutation=name)


def hunt(name: str, first: int, seeds: int, minutes: float) -> Found:
    """Run seeds until one breaks a promise, or seeds or time are over."""
    config = config_of(name)
    directed = name in MUTATIONS and MUTATIONS[name].faults
    faults = ", ".join(config.faults) if directed else "default"
    until_s = time.monotonic() + 60 * minutes
    tried = 0
    for seed in range(first, first + seeds):
        if minutes and time.monotonic() > until_s:
            break
        result = simulate(seed, config)
        tried += 1
        if result.failed:
            return Found(name, config.level.value, faults, tried, result.promise, result.broken)
    return Found(name, config.level.value, faults, tried, "", "")


def as_markdown(rows: list[Found]) -> str:
    """The table as it stands in the document."""
    lines = ["| switched off or broken | level | faults | seeds until found | found by |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row.cells()) + " |" for row in rows)])


def write_table(path: Path, rows: list[Found]) -> None:
    """Replace what stands between the marks of a document."""
    text = path.read_text()
    head, _, rest = text.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise typer.BadParameter(f"{path} has no {BEGIN} ... {END}")
    path.write_text(f"{head}{BEGIN}\n{as_markdown(rows)}\n{END}{tail}")


def mutants(
    seeds: Annotated[int, typer.Option(help="Seeds to try for each.", min=1)] = 300,
    first: Annotated[int, typer.Option("--from", help="The first seed.", min=0)] = 0,
    only: Annotated[str, typer.Option(help="Only these guards and bugs, by commas.")] = "",
    minutes: Annotated[float, typer.Option(help="Give each up after so many minutes; 0: never.", min=0)] = 0,
    write: Annotated[Path | None, typer.Option(help="Document whose table is replaced.", exists=True)] = None,
) -> None:
    """Switch each guard off, put each old bug in, and count the seeds until a promise breaks.

    Exit code 1 if one is never missed.
    """
    known = [*GUARDS, *MUTATIONS]
    wanted = [name.strip() for name in only.split(",")] if only else known
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: known are {', '.join(known)}")
    console = Console()
    rows: list[Found] = []
    for name in wanted:
        with console.status(name):
            rows.append(hunt(name, first, seeds, minutes))
        console.print(" ".join(rows[-1].cells()), rows[-1].how[:100], highlight=False, markup=False)
    table = Table("switched off or broken", "level", "faults", "seeds", "found by")
    for row in rows:
        table.add_row(*row.cells(), style="" if row.by else "red")
    console.print(table)
    if write is not None:
        write_table(write, rows)
    raise typer.Exit(0 if all(row.by for row in rows) else 1)
