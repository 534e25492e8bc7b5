"""Commands as processes of their own that need no import: each is a fork of one that has the command line loaded.

A command takes some 0.7 s of processor to import itself. Tests that run dozens of them would mostly do that.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

COMMAND = (sys.executable, "-m", "tickwheel.node.cli.main")
"""A command as a process of its own."""
SERVER = r"""
import gc, importlib, json, os, sys

os.environ["GRPC_VERBOSITY"] = "NONE"  # as a command sets it before it imports gRPC
for name in ("program", "output", "messages", "cluster", "sweeps", "schedules", "pending", "trace", "dead"):
    importlib.import_module(f"tickwheel.node.cli.{name}")
for name in ("backup_files", "refound", "server.process"):  # of backup, recover and node
    importlib.import_module(f"tickwheel.node.{name}")
commands = importlib.import_module("tickwheel.node.cli.commands")
for name in commands.every():
    commands.load(name)  # makes its part of the tree, too
gc.collect()
gc.freeze()
answers = os.dup(1)
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        for number, (path, flags) in enumerate(asked["files"]):
            os.dup2(os.open(path, flags, 0o600), number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
        sys.argv = ["tickwheel", *asked["words"]]
        from tickwheel.node.cli.main import main

        main()
    os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class Commands:
    """Runs one command after the other, of the version of `python`. Any thread may ask."""

    def __init__(self, python: str | Path = sys.executable) -> None:
        self._files = TemporaryDirectory()
        self._asking = threading.Lock()
        self._server = subprocess.Popen(
            [python, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End it, with a command that is still running. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()
        self._files.cleanup()

    def run(
        self, words: Sequence[str], *, folder: Path, environment: Mapping[str, str], typed: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """One command, to its end; `typed` is its standard input."""
        with self._asking:
            paths = [Path(self._files.name, name) for name in ("in", "out", "err")]
            paths[0].write_text(typed, encoding="utf-8")
            writing = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            files = [(str(path), writing if number else os.O_RDONLY) for number, path in enumerate(paths)]
            asked = {"words": words, "folder": str(folder), "environment": dict(environment), "files": files}
            assert self._server.stdin is not None and self._server.stdout is not None
            print(json.dumps(asked), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            said, told = (path.read_text(encoding="utf-8") for path in paths[1:])
        return subprocess.CompletedProcess(list(words), code, said, told)


@functools.cache
def commands_here() -> Commands:
    """Those of today's version, for all tests of this process."""
    made = Commands()
    atexit.register(made.close)
    return made


async def command(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `tickwheel ...`; it must end with `code` and never show a traceback."""
    environment = {**os.environ, "COLUMNS": "160"}
    done = await asyncio.to_thread(commands_here().run, words, folder=Path.cwd(), environment=environment)
    assert done.returncode == code, (words, done)
    assert "Traceback" not in done.stderr
    return done
