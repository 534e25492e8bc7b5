"""docs/TUTORIAL.md, command by command: a cluster of three, messages, the death of the master, its return."""

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

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "TUTORIAL.md").read_text(encoding="utf-8")
BLOCKS = [block.strip().splitlines() for block in re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)]
LINES: list[str] = [line for block in BLOCKS for line in block]
UP = "tickwheel up --quiet"


def shown(*words: str) -> str:
    """The one command of the page that begins with these words."""
    found = [line for line in LINES if line.split()[: len(words)] == list(words)]
    assert len(found) == 1, f"{' '.join(words)}: {found}"
    return found[0]


class Terminal:
    """Runs what the page shows, in the reader's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("TICKWHEEL_")}
        self.nodes: dict[str, tuple[str, int]] = {}
        """By id: address for clients, process."""

    def _process(self, line: str, *more: str) -> subprocess.Popen[str]:
        program, *arguments = shlex.split(line, comments=True)
        words = [sys.executable, *(["-m", "tickwheel.node.cli.main"] if program == "tickwheel" else []), *arguments]
        return subprocess.Popen(
            [*words, *more], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, line: str) -> str:
        """What a command says; it must succeed."""
        with self._process(line) as process:
            said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, f"{line}: {said}"
        return said

    @contextmanager
    def up(self, line: str, *more: str) -> Iterator[None]:
        """A terminal in which `tickwheel up` runs, from when it is ready; ended by Ctrl-C."""
        with self._process(line, *more) as process:
            try:
                assert process.stdout is not None
                for said in process.stdout:
                    if row := re.match(r"(n\d)\s+(\S+:\d+)\s+http\S+\s+(\d+)", said):
                        self.nodes[row[1]] = row[2], int(row[3])
                    if said.startswith("Ready"):
                        break
                yield
            finally:
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=60)

    def role(self, node: str) -> str:
        """Of a node, as `tickwheel status` shows it; empty if it does not answer."""
        rows = [row.split() for row in self.run(shown("tickwheel", "status")).splitlines()]
        names = next(row[1:] for row in rows if row[:1] == ["node"])
        roles = next(row[1:] for row in rows if row[:1] == ["role"])
        return dict(zip(names, roles, strict=False)).get(node, "")


def first_word(text: str) -> str:
    return text.split()[0]


@pytest.mark.timeout(180)
def test_the_tutorial_from_the_first_message_to_the_return_of_the_node(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    assert LINES.count(UP) == 1
    with terminal.up(UP, "--port", "0"):
        assert sorted(terminal.nodes) == ["n1", "n2", "n3"]
        addresses = ",".join(address for address, _ in terminal.nodes.values())
        assert shown("export").startswith("export TICKWHEEL_ADDRESSES=")
        terminal.environment["TICKWHEEL_ADDRESSES"] = addresses

        soon = shown("tickwheel", "schedule", "reminders", '"stand').replace("30s", "1s")
        number = first_word(terminal.run(soon))
        assert number in terminal.run(shown("tickwheel", "list"))
        assert terminal.run(shown("tickwheel", "consume")).split()[-3:] == [number, "stand", "up"]

        number = first_word(terminal.run(shown("tickwheel", "schedule", "reminders", '"call')))
        assert terminal.run(shown("tickwheel", "reschedule").replace("ID", number)).startswith("RESCHEDULED  due ")
        assert terminal.run(shown("tickwheel", "cancel").replace("ID", number)).strip() == "CANCELLED"
        traced = terminal.run(shown("tickwheel", "trace").replace("ID", number))
        assert all(f"  {step}  " in traced for step in ("scheduled", "committed", "moved", "cancelled"))

        [code] = re.findall(r"^```python\n(# worker\.py\n.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
        (tmp_path / "worker.py").write_text(
            code.replace("127.0.0.1:7700,127.0.0.1:7701,127.0.0.1:7702", addresses).replace("1_200", "200"),
            encoding="utf-8",
        )
        master = next(node for node in terminal.nodes if terminal.role(node) == "master*")
        with terminal._process(shown("python", "worker.py")) as worker:
            assert worker.stdout is not None and "reminders" in worker.stdout.readline()
            assert shown("kill", "-9")
            os.kill(terminal.nodes[master][1], signal.SIGKILL)
            said, _ = worker.communicate(timeout=90)
        assert worker.returncode == 0 and said.splitlines()[-1].startswith("200 of 200 came, 0 are missing, "), said

        again = shown("tickwheel", "up", "--quiet", "--node").replace("n1", master)
        with terminal.up(again):
            assert terminal.role(master) == "slave"
            assert " is master in term " in terminal.run("tickwheel transfer")
