"""The standard streams of commands: closed, of an encoding that lacks characters, given what would drive a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = r"""
import os, sys
from tickwheel.node.cli.streams import make_usable

make_usable()
for number in range(3):
    os.fstat(number)
    assert os.get_inheritable(number)
assert sys.stdin.read() == "" and not sys.stdin.isatty()
from tickwheel.node.cli.output import fail, out, payload_text, print_json, print_table

out.print("\u20ac")
print_table("", ("key",), [("\x1b[2J\u202ekey\nforged",)])
print_json({"key": "\u20ac"})
print_json({"key": "\x1b\x7f\x85\x9b2J\u2028\u202e\\"})
out.print(payload_text(b"one\r\ntwo\xc2\x9b\xff"))
fail("\u20ac\nforged", "USAGE", {})
with open(sys.argv[1], "w") as done:
    done.write(f"{os.environ.get('COLUMNS')} {out.width >= 80}")
"""


def run(shell: str, folder: Path, **environment: str) -> str:
    """What the program above says, with its streams as the shell has made them."""
    done = subprocess.run(
        ["sh", "-c", f'"$@" {shell}', "sh", sys.executable, "-c", PROGRAM, str(folder / "done")],
        env=os.environ | environment, capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (folder / "done").read_text() == "None True"
    return (done.stdout + done.stderr).decode()


def test_what_an_encoding_or_a_terminal_cannot_bear_is_a_code(tmp_path: Path) -> None:
    """Text with the codes of Python, JSON with its own; a key can neither clear the screen nor turn the text."""
    said = run("</dev/null", tmp_path, PYTHONIOENCODING="ascii", COLUMNS="0")
    lines = [line.strip() for line in said.splitlines()]
    assert lines[:4] == [r"\u20ac", "key", r"\x1b[2J\u202ekey\nforged", r'{"key": "\u20ac"}'], lines
    assert lines[4:7] == [
        r'{"key": "\u001b\u007f\u0085\u009b2J\u2028\u202e\\"}',
        r"one\r\ntwo\x9b\xff",
        r"tickwheel: \u20ac\nforged",
    ]


def test_no_output_drives_a_terminal_whose_encoding_has_all_characters(tmp_path: Path) -> None:
    """JSON stays JSON, and has every character; text of others neither ends a line nor turns it."""
    said = run("</dev/null 2>&1", tmp_path, PYTHONIOENCODING="utf-8", COLUMNS="0")
    lines = said.split("\n")
    assert all(text.isprintable() for text in lines), lines
    assert json.loads(lines[4]) == {"key": "\x1b\x7f\x85\x9b2J\u2028\u202e\\"}


LOG = r"""
import logging
from tickwheel.node.cli.output import log_to_stderr

log_to_stderr(logging.WARNING)
log = logging.getLogger("tickwheel.gateway")
log.info("not wanted")
log.warning("answered 500: %s", "a\x1b[2J\u202eb\n2026-11-26 forged")
try:
    raise ValueError("one\x9b\nforged")
except ValueError:
    log.exception("failed")
"""


def test_others_write_no_record_of_a_log() -> None:
    """The answer of a target and the text of an exception neither drive a terminal nor begin a line of the log."""
    done = subprocess.run([sys.executable, "-c", LOG], capture_output=True, check=True, timeout=60, encoding="utf-8")
    lines = done.stderr.splitlines()
    assert all(line.isprintable() for line in lines), lines
    records = [line.split(" ", 2)[2] for line in lines if not line.startswith("  ")]
    assert records == [
        r"WARNING tickwheel.gateway: answered 500: a\x1b[2J\u202eb\n2026-11-26 forged",
        "ERROR tickwheel.gateway: failed",
    ]
    assert lines[-2:] == [r"  ValueError: one\x9b", "  forged"]


def test_closed_streams_are_the_null_device(tmp_path: Path) -> None:
    """Nothing fails, and no file of ours gets the number of one."""
    assert run("<&- >&- 2>&-", tmp_path, COLUMNS="9" * 5_000) == ""


@pytest.mark.parametrize("words", [["--version"], ["context", "list", "--json"]], ids=" ".join)
def test_a_full_disk_behind_standard_output_is_told_in_a_line(words: list[str], tmp_path: Path) -> None:
    """Python added lines of its own at the end, and the exit code was 120."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["XDG_CONFIG_HOME"] = str(tmp_path)
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "tickwheel.node.cli.main", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
        assert done.returncode == 1 and "standard output: No space left on device" in done.stderr, done
        assert "ignored" not in done.stderr and "Traceback" not in done.stderr
        assert subprocess.run(command, stdout=full, stderr=full, env=environment, check=False).returncode == 1
