"""`tickwheel chaos mutants`: guards and old bugs, one at a time, and the seeds until the simulation finds each.

Each seed that finds something is also run with everything whole, and must be clean: a run that breaks a promise by
itself finds nothing. Of a directed scenario (mutation_table.py) so are a few seeds more.
Writes its table between two marks of a document, so that what is published is what one command gives.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tickwheel.chaos.printing import open_console
from tickwheel.chaos.sim.mutation_table import FEW_CLIENTS, GUARD_AIMS
from tickwheel.chaos.sim.mutations import MUTATIONS
from tickwheel.chaos.sim.run import simulate
from tickwheel.chaos.sim.setup import Level, SimulationConfig
from tickwheel.replication.guards import Guards

GUARDS = tuple(field.name for field in fields(Guards))
DIRECTED = "test_guard_is_needed_and_enough"
"""In tests/replication/test_gaps.py: walks into the gap of each guard on purpose."""
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
LOG_SECONDS, NODE_SECONDS = 10, 6
AIMS = GUARD_AIMS | {name: bug.aim for name, bug in MUTATIONS.items() if bug.aim is not None}
WHOLE_SEEDS_LEAST, WHOLE_SEEDS_MOST = 5, 10
"""Seeds of a directed scenario run with everything whole, among them the one in which it was found."""


@dataclass(slots=True)
class Found:
    """The state of one hunt: `seeds` were run; `by` is empty if none broke a promise."""

    name: str
    level: str
    faults: str
    seeds: int = 0
    by: str = ""
    how: str = ""
    whole: int = 0
    """Seeds of the scenario that were run with everything whole, the one that found it among them."""
    unclean: str = ""
    """The promise that one of those runs broke; empty: none."""

    @property
    def directed(self) -> bool:
        """Whether a scenario of its own looks for it."""
        return self.name in AIMS

    def over(self, seeds: int) -> bool:
        """Whether nothing is left to run."""
        if self.unclean:
            return True
        if not self.by:
            return self.seeds >= seeds
        return self.whole >= self._whole_wanted

    @property
    def _whole_wanted(self) -> int:
        """Seeds to run with everything whole. The default scenario is run with many others anyway."""
        return min(max(self.seeds, WHOLE_SEEDS_LEAST), WHOLE_SEEDS_MOST) if self.directed else 1

    def next_whole(self, first: int) -> int:
        """The next seed to run with everything whole."""
        return first + max(self.seeds - self._whole_wanted, 0) + self.whole

    @property
    def proven(self) -> bool:
        """Whether the simulation or a test of its own proves it."""
        return not self.unclean and (bool(self.by) or self.name in GUARDS)

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """A row of the table."""
        seeds = str(self.seeds) if self.by else f"not in {self.seeds}" if self.seeds else "-"
        by = self.by or (f"`{DIRECTED}[{self.name}]`" if self.name in GUARDS else "nothing yet")
        whole = f"BROKEN: {self.unclean}" if self.unclean else str(self.whole) if self.whole else ""
        return self.name, self.level, self.faults, seeds, by, whole


def config_of(name: str) -> SimulationConfig:
    """A run with one guard switched off, or one old bug put in."""
    whole = whole_config_of(name)
    if name in GUARDS:
        return replace(whole, guards=Guards(**{name: False}))
    return replace(whole, mutation=name)


def whole_config_of(name: str) -> SimulationConfig:
    """The same run with everything whole, but for what has to be taken away in front of the guard."""
    level = Level.LOG if name in GUARDS else Level(MUTATIONS[name].level)
    config = SimulationConfig(level=level, seconds=LOG_SECONDS if level is Level.LOG else NODE_SECONDS)
    aim = AIMS.get(name)
    if aim is None:
        return config
    shape = (*FEW_CLIENTS, *aim.shape)
    seconds = aim.seconds or config.seconds
    return replace(config, seconds=seconds, faults=aim.faults, nodes=aim.nodes, shape=shape, mutation=aim.without)


def begun(name: str) -> Found:
    """The state of a hunt before its first seed."""
    return Found(name, config_of(name).level.value, AIMS[name].words() if name in AIMS else "default")


@cache
def broken_when_whole(seed: int, config: SimulationConfig) -> str:
    """The promise that a seed breaks though nothing is switched off or broken; empty: none. Many hunts ask the same."""
    return simulate(seed, config).broken


def hunt(found: Found, first: int, seeds: int, until_s: float) -> Found:
    """Continue a hunt: run seeds until one breaks a promise, then these with everything whole, until `until_s`."""
    config, whole = config_of(found.name), whole_config_of(found.name)
    while not found.over(seeds) and time.monotonic() < until_s:
        if found.by:
            found.unclean = broken_when_whole(found.next_whole(first), whole)
            found.whole += 1
            continue
        result = simulate(first + found.seeds, config)
        found.seeds += 1
        if result.failed:
            found.by, found.how = result.promise, result.broken
    return found


def known_rows(path: Path | None, first: int) -> dict[str, Found]:
    """Rows kept by earlier pieces of the hunt. Rows whose scenario has changed since are dropped."""
    if path is None or not path.exists():
        return {}
    kept = json.loads(path.read_text())
    rows = [Found(**row) for row in kept["rows"]] if kept["first"] == first else []
    known = [*GUARDS, *MUTATIONS]
    return {row.name: row for row in rows if row.name in known and row.faults == begun(row.name).faults}


def keep_rows(path: Path, first: int, rows: dict[str, Found]) -> None:
    """Keep the rows for the next piece of the hunt. The file is replaced as a whole."""
    aside = path.with_suffix(".aside")
    aside.write_text(json.dumps({"first": first, "rows": [asdict(row) for row in rows.values()]}, indent=1))
    aside.replace(path)


HEAD = (
    "| switched off or broken | level | scenario | seeds until found | found by | clean seeds when whole |",
    "|---|---|---|---|---|---|",
)


def write_table(path: Path, rows: list[Found]) -> None:
    """Put rows between the marks of a document; rows of others that are known stay."""
    text = path.read_text()
    head, _, rest = text.partition(BEGIN)
    old, mark, tail = rest.partition(END)
    if not mark:
        raise typer.BadParameter(f"{path} has no {BEGIN} ... {END}")
    lines = {line.split(" ")[1]: line for line in old.splitlines() if line.startswith("| ")}
    lines.update({row.name: "| " + " | ".join(row.cells()) + " |" for row in rows})
    table = "\n".join([*HEAD, *(lines[name] for name in (*GUARDS, *MUTATIONS) if name in lines)])
    path.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")


def mutants(
    seeds: Annotated[int, typer.Option(help="Seeds to try for each.", min=1)] = 300,
    first: Annotated[int, typer.Option("--from", help="The first seed.", min=0)] = 0,
    only: Annotated[str, typer.Option(help="Only these guards and bugs, separated by commas.")] = "",
    seconds: Annotated[float, typer.Option(help="Stop after this many seconds; 0: never. See --keep.", min=0)] = 0,
    keep: Annotated[Path | None, typer.Option(help="File from which to go on, and which keeps what was found.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes; 0: one for each CPU.", min=0)] = 1,
    write: Annotated[Path | None, typer.Option(help="Document in whose table the rows go.", exists=True)] = None,
) -> None:
    """Switch each guard off, put each old bug in, and count the seeds until a promise breaks.

    The seed that finds one is also run with everything whole, and must be clean then. Exit code 1 if one of our own
    bugs is missed by the simulation (for a guard the table names the test that walks into its gap) or a whole run is
    not clean; 3 if the time was over before all was run: with --keep the same command goes on.
    """
    known = [*GUARDS, *MUTATIONS]
    wanted = [name.strip() for name in only.split(",")] if only else known
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: known are {', '.join(known)}")
    console = open_console()
    rows = known_rows(keep, first)
    open_rows = [name for name in wanted if name not in rows or not rows[name].over(seeds)]
    until_s = time.monotonic() + (seconds or 1e9)

    def found(row: Found) -> None:
        rows[row.name] = row
        if keep is not None:
            keep_rows(keep, first, rows)
        console.print(" ".join(row.cells()), row.how[:100], highlight=False)

    workers = jobs or os.cpu_count() or 1
    if workers == 1:
        for name in open_rows:
            if time.monotonic() < until_s:
                found(hunt(rows.get(name) or begun(name), first, seeds, until_s))
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            hunts = [pool.submit(hunt, rows.get(name) or begun(name), first, seeds, until_s) for name in open_rows]
            for done in as_completed(hunts):
                found(done.result())
    ordered = [rows[name] for name in wanted if name in rows]
    table = Table("switched off or broken", "level", "scenario", "seeds", "found by", "whole")
    for row in ordered:
        table.add_row(*row.cells(), style="" if row.proven else "red")
    console.print(table)
    ended = [row for row in ordered if row.over(seeds)]
    if write is not None:
        write_table(write, ended)
    if not all(row.proven for row in ended):
        raise typer.Exit(1)
    raise typer.Exit(0 if len(ended) == len(wanted) else 3)
