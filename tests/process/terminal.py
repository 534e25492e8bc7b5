"""A reader's terminal: it runs commands that a document shows, on nodes that `tickwheel up` has started."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.process.commands import Commands


class Terminal:
    """Runs what the page shows, in the reader's folder."""

    def __init__(self, folder: Path, commands: Commands) -> None:
        self.folder = folder
        self._commands = commands
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("TICKWHEEL_")}
        self.nodes: dict[str, tuple[str, str, int]] = {}
        """By id: address for clients, URL of the metrics, process."""

    @property
    def addresses(self) -> str:
        """Of all nodes, as TICKWHEEL_ADDRESSES has them."""
        return ",".join(address for address, _, _ in self.nodes.values())

    def process(self, line: str, *more: str) -> subprocess.Popen[str]:
        """What a line starts: tickwheel or Python, as it is here."""
        program, *arguments = shlex.split(line, comments=True)
        words = [sys.executable, *(["-m", "tickwheel.node.cli.main"] if program == "tickwheel" else []), *arguments]
        return subprocess.Popen(
            [*words, *more], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, line: str) -> str:
        """What a command of tickwheel says; it must succeed."""
        program, *words = shlex.split(line, comments=True)
        assert program == "tickwheel"
        done = self._commands.run(words, folder=self.folder, environment=self.environment)
        assert done.returncode == 0, f"{line}: {done}"
        return done.stdout

    @contextmanager
    def up(self, line: str, *more: str) -> Iterator[None]:
        """A terminal in which `tickwheel up` runs, from when it is ready; ended by Ctrl-C."""
        with self.process(line, *more) as process:
            try:
                assert process.stdout is not None
                for said in process.stdout:
                    if row := re.match(r"(n\d)\s+(\S+:\d+)\s+(http\S+)\s+(\d+)", said):
                        self.nodes[row[1]] = row[2], row[3], int(row[4])
                    if said.startswith("Ready"):
                        break
                yield
            finally:
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=60)

    def kill(self, node: str) -> None:
        """By SIGKILL."""
        os.kill(self.nodes[node][2], signal.SIGKILL)

    def roles(self) -> dict[str, str]:
        """Of the nodes that answer, as `tickwheel status` shows them."""
        rows = [row.split() for row in self.run("tickwheel status").splitlines()]
        names = next(row[1:] for row in rows if row[:1] == ["node"])
        roles = next(row[1:] for row in rows if row[:1] == ["role"])
        return dict(zip(names, roles, strict=False))

    def master(self) -> str:
        """The node that leads."""
        return next(node for node, role in self.roles().items() if role == "master*")
