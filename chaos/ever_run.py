"""The file that counts all seeds ever run, in all and by the commit that they ran on.

A seed proves something only about the code that it ran on. So totals are kept by commit, and apart for uncommitted
code. A run locks the file while it counts: several runs may share one file.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

BEFORE = "before commits were noted"


@dataclass(slots=True)
class Counted:
    """Some runs together."""

    seeds: int = 0
    simulated_s: float = 0.0
    failed: int = 0

    def add(self, other: Counted) -> None:
        """These too."""
        self.seeds += other.seeds
        self.simulated_s = round(self.simulated_s + other.simulated_s, 3)
        self.failed += other.failed


@dataclass(slots=True)
class EverRun:
    """The content of the file. `commits` are in the order of their first run."""

    total: Counted
    commits: dict[str, Counted]

    def table(self) -> Table:
        """For people."""
        table = Table(title="Seeds ever run", title_justify="left")
        table.add_column("commit")
        for heading in ("seeds", "simulated s", "failed"):
            table.add_column(heading, justify="right")
        for commit, counted in self.commits.items():
            table.add_row(commit, *_cells(counted))
        table.add_row(f"{len(self.commits)} in all", *_cells(self.total), style="bold")
        return table


def _cells(counted: Counted) -> tuple[str, str, str]:
    return f"{counted.seeds:,}", f"{counted.simulated_s:,.0f}", f"{counted.failed:,}"


def commit_of_code() -> str:
    """The commit of this code, marked if the code was changed since; "not of a repository" without a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        return f"{commit} and changes" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return "not of a repository"


def count(path: Path, commit: str, ran: Counted) -> EverRun:
    """Add a run to the file, which is made if it is missing; what it says now."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        ever = _parse(file.read())
        ever.total.add(ran)
        ever.commits.setdefault(commit, Counted()).add(ran)
        kept = {**asdict(ever.total), "commits": {name: asdict(one) for name, one in ever.commits.items()}}
        file.truncate(0)
        file.write(json.dumps(kept, indent=2) + "\n")
    return ever


def _parse(text: str) -> EverRun:
    known: dict[str, Any] = json.loads(text) if text.strip() else {}
    total = _counted(known)
    commits = {name: _counted(one) for name, one in known.get("commits", {}).items()}
    if total.seeds and not commits:
        commits[BEFORE] = _counted(known)
    return EverRun(total, commits)


def _counted(known: dict[str, Any]) -> Counted:
    return Counted(int(known.get("seeds", 0)), float(known.get("simulated_s", 0)), int(known.get("failed", 0)))
