"""Every command that the parser knows, with nonsense for each of its options and arguments: it ends, with the right
exit code and a line that says what is wrong, never with a traceback. A new command is covered by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tickwheel.node.cli import program as cli
from tickwheel.node.cli.commands import every, load, others

NONSENSE = (
    "",
    "x" * 4_000,
    "a\x1b[2J\nb",
    "\udcff",
    "-1",
    "nan",
    "9" * 400,
    "0001-01-01",
    "/dev/null/x",
    "=",
    "[::1",
)
ADDRESSES = ("--addresses", "--endpoints")
NOBODY = "nobody"
"""Refused once all else was taken, before anybody is asked."""
GIVEN = {
    "-c": "/dev/null",
    "--out": "@/out",
    "--from": "2026-01-01",
    "--until": "2026-01-02",
    "shell": "bash",
    "--to": "earliest",
    "--job-id": "j",
    "number": "1",
    "changes": "retention=7d",
} | {name: f"@/{name}" for name in ("source", "folder", "path", "directory", "file", "out", "directories")}
"""Something sensible for what a command requires; anything else gets `x`."""
BY_THEMSELVES = (
    *(("consume",), ("member", "add"), ("up",), ("demo",), ("bench",), ("console",), ("chaos",)),
    *(("pipeline", "demo"), ("pipeline", "generate")),
)
"""They wait, write much, or start a cluster, a server or a simulation: these get no more than an unknown option."""
CODES = {cli.EXIT_FAILED, cli.EXIT_USAGE, cli.EXIT_UNAVAILABLE, cli.EXIT_UNKNOWN, cli.EXIT_PERMISSION}


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every command of the tree with its words."""
    below = getattr(command, "commands", {})
    if not below:
        return [(path, command)]
    return [leaf for name, child in below.items() for leaf in leaves(child, (*path, name))]


COMMANDS = [leaf for name in [*every(), *others()] for leaf in leaves(load(name), (name,))]


def name_of(parameter: Any) -> str:
    """Of an argument, or the last of an option."""
    return str(parameter.opts[-1])


def words(path: tuple[str, ...], command: Any, wrong: Any, value: str, place: Path) -> list[str]:
    """The command line in which one parameter has that value, and the others what they need."""
    options, arguments = list(path), []
    for parameter in command.params:
        name = name_of(parameter)
        if parameter is wrong:
            given = value
        elif set(ADDRESSES) & set(parameter.opts):
            given = NOBODY
        elif parameter.required:
            given = GIVEN.get(name, "x").replace("@", str(place))
        else:
            continue
        if name.startswith("--"):
            options.append(f"{name}={given}")
        elif name.startswith("-"):
            options += [name, given]
        else:
            arguments.append(given)
    return [*options, "--", *arguments] if arguments else options


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_nonsense_is_refused_in_a_line(
    path: tuple[str, ...],
    command: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is taken ends at the addresses, or at a file that is not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("JAVA_HOME", "/dev/null")
    lines = [[*path, "--no-such-option"]]
    own = [parameter for parameter in command.params if not getattr(parameter, "is_flag", False)]
    own = [parameter for parameter in own if not set(ADDRESSES) & set(parameter.opts)]
    if not any(path[: len(prefix)] == prefix for prefix in BY_THEMSELVES):
        for number, parameter in enumerate(own):
            values = {NONSENSE[(5 * number + step) % len(NONSENSE)] for step in range(2)}
            lines += [words(path, command, parameter, value, tmp_path) for value in values]
    for line in lines:
        code = cli.run(line)
        told = capfd.readouterr()
        assert code in CODES or (code == 0 and not told.err), line
        assert "Traceback" not in told.err and len(told.err) < 10_000, line
        assert code == 0 or told.err.strip(), line
