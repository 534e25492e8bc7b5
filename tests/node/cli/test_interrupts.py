"""Ctrl-C at any moment of a command's start and end: exit code 130, no traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tickwheel.node.cli.interrupts import end_at_once, interrupt_again

PROGRAM = """
import atexit, json, os, sys

report, *sys.argv = sys.argv[1:]
parent, seen, moments = os.getpid(), 0, []
named = {"signal", "typer", "tickwheel.node.cli.commands", "google.protobuf", "tickwheel.node.server.process"}


def moment(name):
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with open(report + ".said") as file:
            moments.append((name, code, file.read()))
        return
    sys.meta_path.remove(interrupting)
    said = os.open(report + ".said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.kill(os.getpid(), 2)


class Interrupting:
    def find_spec(self, name, path=None, target=None):
        global seen
        if os.getpid() == parent and (seen or name == "tickwheel.node.cli.interrupts"):
            seen += 1
            if seen % 25 == 1 or name in named:
                moment(name)


def told():
    if os.getpid() == parent:
        moment("the end")
    if os.getpid() == parent:
        with open(report, "w") as file:
            json.dump(moments, file)


interrupting = Interrupting()
sys.meta_path.insert(0, interrupting)
atexit.register(told)
from tickwheel.node.cli.main import main

main()
"""
"""Runs a command, and at every 25th import a copy of itself that gets a SIGINT just then. Has not imported `signal`."""


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_modules_are_imported_is_130(tmp_path: Path) -> None:
    """From the first line of the entry on, in the command's own imports, and while the interpreter ends."""
    report = tmp_path / "report"
    command = [sys.executable, "-c", PROGRAM, str(report), "tickwheel", "node", "--config", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    moments = json.loads(report.read_text())
    names = {name for name, _, _ in moments}
    assert len(names) > 20
    assert {"signal", "typer", "tickwheel.node.cli.commands", "google.protobuf", "the end"} <= names
    wrong = [(name, code, said) for name, code, said in moments if code != 130 or len(said.splitlines()) > 1]
    assert not wrong


def test_a_handler_of_others_stays() -> None:
    """A process in the background ignores SIGINT; a test runner has its own."""
    before = signal.getsignal(signal.SIGINT)
    try:
        for other in (signal.SIG_IGN, lambda number, frame: None):
            signal.signal(signal.SIGINT, other)
            end_at_once()
            interrupt_again()
            assert signal.getsignal(signal.SIGINT) is other
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_at_once()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        interrupt_again()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
