"""docs/TUTORIAL.md, command by command: a cluster of three, messages, the death of the master, its return."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.process.commands import Commands
from tests.process.terminal import Terminal

TEXT = (Path(__file__).parents[2] / "docs" / "TUTORIAL.md").read_text(encoding="utf-8")
BLOCKS = [block.strip().splitlines() for block in re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)]
LINES: list[str] = [line for block in BLOCKS for line in block]
UP = "tickwheel up --quiet"


def shown(*words: str) -> str:
    """The one command of the page that begins with these words."""
    found = [line for line in LINES if line.split()[: len(words)] == list(words)]
    assert len(found) == 1, f"{' '.join(words)}: {found}"
    return found[0]


def first_word(text: str) -> str:
    return text.split()[0]


@pytest.mark.timeout(180)
def test_the_tutorial_from_the_first_message_to_the_return_of_the_node(tmp_path: Path, commands: Commands) -> None:
    terminal = Terminal(tmp_path, commands)
    assert LINES.count(UP) == 1
    with terminal.up(UP, "--port", "0"):
        assert sorted(terminal.nodes) == ["n1", "n2", "n3"]
        addresses = terminal.addresses
        assert shown("export").startswith("export TICKWHEEL_ADDRESSES=")
        terminal.environment["TICKWHEEL_ADDRESSES"] = addresses

        number = first_word(terminal.run(shown("tickwheel", "schedule", "reminders", '"stand')))
        assert number in terminal.run(shown("tickwheel", "list"))
        terminal.run(f"tickwheel reschedule {number} --delay 1s")  # the reader waits for half a minute
        assert terminal.run(shown("tickwheel", "consume")).split()[-2:] == ["stand", "up"]

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
        assert shown("tickwheel", "status") == "tickwheel status"
        master = terminal.master()
        with terminal.process(shown("python", "worker.py")) as worker:
            assert worker.stdout is not None and "reminders" in worker.stdout.readline()
            assert shown("kill", "-9")
            terminal.kill(master)
            said, _ = worker.communicate(timeout=90)
        assert worker.returncode == 0 and said.splitlines()[-1].startswith("200 of 200 came, 0 are missing, "), said

        again = shown("tickwheel", "up", "--quiet", "--node").replace("n1", master)
        with terminal.up(again):
            assert terminal.roles().get(master) == "slave"
            assert " is master in term " in terminal.run("tickwheel transfer")
