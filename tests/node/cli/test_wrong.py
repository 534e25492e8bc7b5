"""Wrong input, whatever the command: one line that says what is wrong, the right exit code, never a traceback."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import typer

from tickwheel.node.cli import options
from tickwheel.node.cli import program as cli
from tickwheel.node.cli.commands import every, load
from tickwheel.node.made_files import LocalClusterError
from tickwheel.storage.disk import LOCK_NAME

FILE = "/etc/hostname"
"""Where a directory is expected."""


def leaves(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command of the tree, by its words."""
    if not hasattr(command, "commands"):
        return [path]
    return [leaf for name, child in command.commands.items() for leaf in leaves(child, (*path, name))]


@pytest.mark.parametrize("words", [leaf for name in every() for leaf in leaves(load(name), (name,))], ids=" ".join)
def test_an_unknown_option_and_a_bad_number_are_usage_errors(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every command."""
    assert cli.run([*words, "--no-such-option"]) == cli.EXIT_USAGE
    assert cli.run([*words, "--json=maybe", "--count", "x", "--nodes", "x"]) == cli.EXIT_USAGE
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["schedule", "t", "x", "--delay=-5s"], "--delay: '-5s'"),
        (["schedule", "t", "x", "--delay", "1s", "--jitter", "some"], "--jitter: 'some'"),
        (["schedule", "t", "x", "--at", "\u00b2"], "--at: '\u00b2'"),
        (["schedule", "t", "x", "--at", "0001-01-01"], "--at: '0001-01-01'"),
        (["schedule", "t", "x", "--at", "9" * 5_000], "--at: '999"),
        (["schedules", "put", "s", "t", "x", "--every", "soon"], "--every: 'soon'"),
        (["schedules", "put", "s", "t", "x", "--every", "5s", "--late-max", "1x"], "--late-max: '1x'"),
        (["schedules", "backfill", "s", "--from", "--5", "--until", "2026-01-01"], "--from: '--5'"),
        (["pending", "reschedule", "t", "--earlier", "x", "--yes"], "--earlier: 'x'"),
        (["group", "create", "g", "t", "--retry-initial", "x"], "--retry-initial: 'x'"),
    ],
)
def test_wrong_times_name_their_option(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And the value, and what a time or duration is."""
    assert cli.run(arguments) == cli.EXIT_USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert named in said and ("a duration is" in said or "a time is" in said)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["up", "--data", FILE], cli.EXIT_FAILED),
        (["up", "--data", f"{FILE}/below"], cli.EXIT_FAILED),
        (["up", "--fresh", "--data", FILE], cli.EXIT_FAILED),
        (["up", "--port", "70000"], cli.EXIT_USAGE),
        (["up", "--port", "65535"], cli.EXIT_USAGE),
        (["certs", "--out", FILE, "--node", "n1"], cli.EXIT_FAILED),
        (["config", "check", "/nowhere/node.toml"], cli.EXIT_USAGE),
        (["config", "check", "/dev"], cli.EXIT_USAGE),
        (["node", "--config", "/nowhere"], cli.EXIT_USAGE),
        (["recover", "--config", "/nowhere", "--yes"], cli.EXIT_USAGE),
        (["rebuild", "--config", "/nowhere"], cli.EXIT_USAGE),
        (["restore", "/nowhere", "--config", "/nowhere"], cli.EXIT_USAGE),
        (["backup", FILE], cli.EXIT_FAILED),
        (["schedule", "t", "--file", "/nowhere", "--delay", "1s"], cli.EXIT_USAGE),
        (["status", "-a", "nonsense"], cli.EXIT_USAGE),
        (["console", "--bind", "nonsense"], cli.EXIT_USAGE),
        (["cancel", "0-1-1", "-a", "host:port"], cli.EXIT_USAGE),
        (["context", "add", "c", "-a", "nonsense"], cli.EXIT_USAGE),
    ],
)
def test_wrong_places(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A file where a directory should be, a place that is not there, a port that is none."""
    assert cli.run(arguments) == code, capsys.readouterr().err
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    assert said.err.strip()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--nodes", "0"], "'--nodes' / '-n': '0': greater than or equal to 1"),
        (["bench", "--seconds", "x"], "'--seconds': 'x': a valid number"),
        (["completion", "tcsh"], "'shell': 'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        (["schedule", "t", "x", "--delay", "5x"], "--delay: '5x': a duration is numbers with ms, s, m, h, d, w"),
        (["schedule", "t", "x", "--at", "noon"], "--at: 'noon': a time is milliseconds since 1970 or ISO 8601"),
        (["pending", "list", "--until", "noon"], "--until: 'noon': a time is"),
        (["pending", "reschedule", "t", "--earlier", "1y"], "--earlier: '1y': a duration is"),
        (["schedules", "put", "n", "t", "x", "--every", "1y"], "--every: '1y': a duration is"),
        (["schedules", "put", "n", "t", "x", "--cron", "* * * * *", "--zone", ""], "--zone: '': an IANA time zone"),
        (["schedules", "preview", "--cron", "* * * * *", "--zone", ""], "--zone: '': an IANA time zone"),
        (["group", "create", "g", "t", "--retry-initial", "1y"], "--retry-initial: '1y': a duration is"),
        (["group", "create", "g", "t", "--retry-factor", "3"], "--retry-factor and --retry-jitter need --retry-in"),
        (["consume", "t", "--reason", "x"], "--reason goes with --nack or --dead"),
        (["settings", "set", "retention=7x"], "retention=7x: a duration is"),
        (["settings", "set", "pending_max=abc"], "pending_max=abc: a whole number"),
        (["schedule", "t", "x", "--delay", "1s", "--header", "=y"], "--header: '=y': NAME=VALUE"),
        (["schedules", "put", "n", "t", "x", "--every", "1h", "--header", "z"], "--header: 'z': NAME=VALUE"),
        (["pending", "histogram", "--by", "year"], "--by: 'year': second, minute, hour or auto"),
        (["context", "add", "c", "-a", "nohost"], "addresses: 'nohost': host:port, a port from 1 to 65535"),
        (["list", "-a", "127.0.0.1:1,127.0.0.1:2"], "127.0.0.1:1, 127.0.0.1:2: connection refused"),
        (["role", "set", "r", "--allow", "consume:pay-*"], "consume:pay-*: consume needs patterns for groups, too"),
        (["disk", "-a", "127.0.0.1:1"], "127.0.0.1:1: connection refused: no node listens there"),
        (["status", "-a", "host:99999"], "addresses: 'host:99999': host:port, a port from 1 to 65535"),
        (["certs", "--out", ""], "'--out': '': the path of a file or directory"),
        (["backup", ""], "'directory': '': the path of a file or directory"),
        (["up", "--fresh", "--data="], "'--data': '': the path of a file or directory"),
        (["pipeline", "generate", "x", "--seed", "-1"], "seed: -1: 0 or more"),
        (["pipeline", "generate", "x", "--rows", "9" * 20], f"rows: {'9' * 20}: 0 to 9999999999999999"),
        (["pipeline", "generate", "x", "--start-ms", "9" * 20], f"start_ms: {'9' * 20}: 0 to 253402300799999"),
        (["pipeline", "generate", "x", "--topics", "\udcff"], r"topics: ('\udcff',): texts of UTF-8"),
        (["pipeline", "generate", "/dev/null"], "/dev/null: no regular file"),
        (["pipeline", "generate", "/dev/null/x"], "/dev/null/x.new: Not a directory"),
        (["pipeline", "load", "", "--endpoints", "127.0.0.1:1"], "OUT: '': the path of a folder"),
        (["user", "set", "ann", "--topics-max", "9" * 20], f"topics_max: {'9' * 20}: a whole number from 0 to"),
        (["certs", "--out", "/dev/null/x", "--node", "n1"], "cannot be made in /dev/null/x: Not a directory"),
        (["certs", "--out", "/dev/null/x", "--node", "n 1=h"], "name: 'n 1': 1 to 64 characters"),
    ],
)
def test_what_is_wrong_is_named_with_value_and_limit(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words of ours: which option, what it was given and what it takes."""
    assert cli.run(arguments) in (cli.EXIT_FAILED, cli.EXIT_USAGE, cli.EXIT_UNAVAILABLE)
    told = " ".join(capsys.readouterr().err.split())
    assert said in told and "Value error" not in told and "Input should" not in told


@pytest.mark.parametrize("words", [["list", "--json", "--limit", "x"], ["pending", "histogram", "--json", "--by", "y"]])
def test_wrong_usage_is_json_where_it_is_asked_for(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As every other error, with a hint."""
    assert cli.run(words) == cli.EXIT_USAGE
    told = json.loads(capsys.readouterr().err)
    assert words[-2] in told["error"] and told["reason"] == "USAGE" and told["hint"]


@pytest.mark.parametrize(
    "words", [["node", "--set", "x"], ["node", "--config", "/nowhere"], ["config", "check", "/dev"]]
)
def test_a_wrong_configuration_ends_with_a_hint(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == cli.EXIT_USAGE
    assert capsys.readouterr().err.splitlines()[-1].startswith("Hint: ")


def test_an_unreadable_configuration_is_one_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """Fields that nobody could read are not called absent."""
    assert cli.run(["config", "check", "/nowhere/node.toml"]) == cli.EXIT_USAGE
    told = capsys.readouterr().err
    assert "cannot be read" in told and "required" not in told and "1 problem(s)" in told


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command of an extra that is not installed."""
    app = typer.Typer()

    @app.callback()
    def root() -> None: ...

    @app.command("needs")
    def needs() -> None:
        import surely_not_installed_anywhere  # type: ignore[import-not-found]  # noqa: F401

    monkeypatch.setattr(cli, "app", app)
    assert cli.run(["needs"]) == cli.EXIT_USAGE
    assert "surely_not_installed_anywhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["status", "--json"],
        ["top", "--once"],
        ["trace", "0-1-1"],
        ["trace", "0-1-1", "--json"],
        ["audit"],
        ["audit", "--json"],
        ["topic", "list"],
    ],
    ids=" ".join,
)
def test_a_node_that_is_not_there_is_named_with_the_reason(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By commands that show what nodes say, too."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert cli.run([*command, "--addresses", address]) == cli.EXIT_UNAVAILABLE
    assert f"no node can be reached: {address}: connection refused" in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_want_of_threads_or_memory_is_told_in_a_line(capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    """A command in a small container ended with a traceback."""
    assert cli._told(error, "status") == cli.EXIT_FAILED
    assert f"{str(error) or 'no memory'}: raise the limits of memory and of processes" in capsys.readouterr().err


def test_the_log_of_a_node_that_ended_is_told_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Below the error, and unable to forge one."""
    options.use_json(False)
    error = LocalClusterError("node n1 ended with code 1; n1.log ends with:\none\x1b\ntwo")
    assert cli._told(error, "up") == cli.EXIT_FAILED
    told = capsys.readouterr().err.splitlines()
    assert told[:3] == ["tickwheel: node n1 ended with code 1; n1.log ends with:", r"  one\x1b", "  two"]


@pytest.mark.parametrize("command", [["recover", "--yes"], ["rebuild"], ["restore", "BACKUP"]], ids=" ".join)
def test_a_directory_that_cannot_be_locked_is_not_called_in_use(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was: without rights, or on a full disk, an operator looked for a node that did not run."""
    (tmp_path / "data" / LOCK_NAME).mkdir(parents=True)
    (tmp_path / "backup").mkdir()
    (tmp_path / "backup" / "backup.json").write_text('{"version": 1, "files": {}}')
    config = tmp_path / "node.toml"
    config.write_text(f'[cluster]\nid = "c"\n[node]\nid = "n"\ndata_dir = "{tmp_path / "data"}"\n')
    words = [str(tmp_path / "backup") if word == "BACKUP" else word for word in command]
    assert cli.run([*words, "--config", str(config)]) in (1, 3)
    told = " ".join(capsys.readouterr().err.split())
    assert "cannot open the lock of" in told and "Is a directory" in told and "is running" not in told


@pytest.mark.parametrize("command", ["rebuild", "recover"])
def test_a_directory_that_cannot_be_locked_is_not_called_damaged(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be another user's, or mounted read-only: nothing is known of its data."""
    data, config = tmp_path / "data", tmp_path / "node.toml"
    (data / LOCK_NAME).mkdir(parents=True)
    config.write_text(f"[cluster]\nid = 'c'\n[node]\nid = 'n'\ndata_dir = '{data}'\n")
    assert cli.run([command, "--config", str(config)]) == cli.EXIT_FAILED
    told = capsys.readouterr().err
    assert "cannot open the lock" in told and "Nothing was changed" in told and "damaged" not in told
