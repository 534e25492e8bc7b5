"""`tickwheel chaos mutants`: guards and old bugs, one at a time, and the seeds until the simulation finds each.

Writes its table between two marks of a document, so that what is published is what one command gives.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from multiprocessing import get_context
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
TESTS = {
    "term_ahead_of_disk": "`test_a_full_disk_keeps_a_node_in_the_term_that_it_can_remember`",
    "leases_forgotten_with_checkpoint": "`test_a_checkpoint_from_a_peer_forgets_no_lease`",
}
"""Directed tests of old bugs that default seeds seldom meet (tests/replication/test_bad_days.py, tests/node/core)."""
TEST_ONLY = frozenset({"pickle_refused", "foreign_commands_fatal"})
"""Guards against what no schedule of a node's own brings about: bytes of a stranger."""


@dataclass(frozen=True, slots=True)
class Aim:
    """Where a guard is looked for when the default faults do not lead there."""

    faults: tuple[str, ...]
    nodes: int = 0
    shape: tuple[tuple[str, int], ...] = ()
    without: str = ""
    """A guard in front of it that is taken away too (mutations.LAYERS)."""

    def words(self) -> str:
        """For the table."""
        parts = [", ".join(self.faults)]
        if self.nodes:
            parts.append(f"{self.nodes} nodes")
        parts += [f"{name} {value}" for name, value in self.shape]
        if self.without:
            parts.append(self.without)
        return "; ".join(parts)


AIMS: dict[str, Aim] = {
    "answers_fenced": Aim(("replay", "isolate", "delay", "freeze"), nodes=5, without="repeats_taken"),
    "votes_counted_once": Aim(("replay", "kill"), nodes=5, without="repeats_taken"),
    "starts_silent": Aim(("restart-bridge",), nodes=3, shape=(("log_pause_ms", 2_000),)),
    "apply_errors_fatal": Aim(("failed-apply",)),
    "transfer_marked": Aim(("handover",), nodes=5),
    "input_drained_first": Aim(("freeze",), nodes=3),
    "votes_sticky": Aim(("bridge",), nodes=3, shape=(("log_pause_ms", 2_000),)),
    "lease_from_sending": Aim(("delay",), nodes=3),
    "dumps_refused": Aim(("library-calls",)),
    "proposals_local": Aim(("library-calls",)),
}


@dataclass(frozen=True, slots=True)
class Found:
    """What became of one hunt. `seeds` were run; `by` is empty if none broke a promise."""

    name: str
    level: str
    faults: str
    seeds: int
    by: str
    how: str

    @property
    def proven(self) -> bool:
        """By the simulation, or by a test of its own."""
        return bool(self.by) or self.name in GUARDS or self.name in TESTS

    def cells(self) -> tuple[str, str, str, str, str]:
        """A row of the table."""
        seeds = str(self.seeds) if self.by else f"not in {self.seeds}"
        test = f"`{DIRECTED}[{self.name}]`" if self.name in GUARDS else TESTS.get(self.name, "nothing yet")
        by = self.by or test
        return self.name, self.level, self.faults, seeds, by


def config_of(name: str) -> SimulationConfig:
    """A run with one guard switched off, or one old bug put in."""
    if name in GUARDS:
        guards = Guards(**{name: False})
        if name not in AIMS:
            return SimulationConfig(level=Level.LOG, seconds=LOG_SECONDS, guards=guards)
        aim = AIMS[name]
        return SimulationConfig(
            level=Level.LOG,
            seconds=LOG_SECONDS,
            faults=aim.faults,
            nodes=aim.nodes,
            shape=aim.shape,
            guards=guards,
            mutation=aim.without,
        )
    bug = MUTATIONS[name]
    level = Level(bug.level)
    seconds = LOG_SECONDS if level is Level.LOG else NODE_SECONDS
    if bug.faults:
        return SimulationConfig(level=level, seconds=seconds, faults=bug.faults, mutation=name)
    return SimulationConfig(level=level, seconds=seconds, mutation=name)


def faults_of(name: str) -> str:
    """What is injected while it is looked for, in words."""
    if name in AIMS:
        return AIMS[name].words()
    return ", ".join(MUTATIONS[name].faults) if name in MUTATIONS and MUTATIONS[name].faults else "default"


def hunt(name: str, first: int, seeds: int, minutes: float) -> Found:
    """Run seeds until one breaks a promise, or seeds or time are over."""
    config = config_of(name)
    until_s = time.monotonic() + 60 * minutes
    tried = 0
    for seed in range(first, first + (0 if name in TEST_ONLY else seeds)):
        if minutes and time.monotonic() > until_s:
            break
        result = simulate(seed, config)
        tried += 1
        if result.failed:
            return Found(name, config.level.value, faults_of(name), tried, result.promise, result.broken)
    return Found(name, config.level.value, faults_of(name), tried, "", "")


HEAD = ("| switched off or broken | level | faults | seeds until found | found by |", "|---|---|---|---|---|")


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
    only: Annotated[str, typer.Option(help="Only these guards and bugs, by commas.")] = "",
    minutes: Annotated[float, typer.Option(help="Give each up after so many minutes; 0: never.", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="Processes; 0: one for each CPU.", min=0)] = 1,
    write: Annotated[Path | None, typer.Option(help="Document in whose table the rows go.", exists=True)] = None,
) -> None:
    """Switch each guard off, put each old bug in, and count the seeds until a promise breaks.

    Exit code 1 if one of our own bugs is missed by the simulation; for a guard the table names the test that walks
    into its gap.
    """
    known = [*GUARDS, *MUTATIONS]
    wanted = [name.strip() for name in only.split(",")] if only else known
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: known are {', '.join(known)}")
    console = Console()
    rows: dict[str, Found] = {}

    def found(row: Found) -> None:
        rows[row.name] = row
        console.print(" ".join(row.cells()), row.how[:100], highlight=False, markup=False)

    workers = jobs or os.cpu_count() or 1
    if workers == 1:
        for name in wanted:
            found(hunt(name, first, seeds, minutes))
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for done in as_completed([pool.submit(hunt, name, first, seeds, minutes) for name in wanted]):
                found(done.result())
    ordered = [rows[name] for name in wanted]
    table = Table("switched off or broken", "level", "faults", "seeds", "found by")
    for row in ordered:
        table.add_row(*row.cells(), style="" if row.by else "red")
    console.print(table)
    if write is not None:
        write_table(write, ordered)
    raise typer.Exit(0 if all(row.proven for row in ordered) else 1)
