"""Nodes of tests as processes of their own that need no import: each is a fork of one that has a node's modules loaded.

A node takes some 0.6 s of processor to import itself, and the tests start hundreds. Those of commands (`tickwheel up`,
`node`), of demonstrations and of docs/DEPLOY.md still begin as users begin them.

There are two such processes, which take turns: nodes must agree although each has its own order of sets, and forks of
one process have the same.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from tickwheel.node import local_cluster

MODULES = ("tickwheel.node.bound_node", "tickwheel.chaos.live.node_start")
"""As which nodes are started."""
NOT_IN = ("--namespace",)
"""Arguments of nodes that are started as always."""
MADE_BEFORE = ("PYTHON", "LD_", "OPENBLAS", "MALLOC")
"""How the names of variables begin that a process reads before it forks."""
SERVER = r"""
import gc, importlib, json, os, runpy, selectors, socket, struct, sys

os.environ["GRPC_VERBOSITY"] = "NONE"  # as the command sets it before it imports gRPC
for name in ("cli.program", "cli.node", "cli.streams", "cli.output", "server.process"):
    importlib.import_module(f"tickwheel.node.{name}")
importlib.import_module("tickwheel.node.cli.commands").load("node")  # makes its part of the tree, too
gc.collect()
gc.freeze()
asking = socket.socket(fileno=int(sys.argv[1]))
selector = selectors.PollSelector()
selector.register(asking, selectors.EVENT_READ)
while True:
    for key, _ in selector.select():
        if key.data is not None:
            child, ended = key.data
            selector.unregister(key.fd)
            os.close(key.fd)
            os.write(ended, struct.pack("i", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
            os.close(ended)
            continue
        data, files, _, _ = socket.recv_fds(asking, 1 << 20, 2)
        if not data:
            os._exit(0)
        log, ended = files
        asked = json.loads(data)
        child = os.fork()
        if not child:
            asking.detach()
            os.setsid()
            for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
                os.dup2(file, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            os.chdir(asked["folder"])
            os.environ.clear()
            os.environ.update(asked["environment"])
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", 1), open(2, "w", 1, errors="backslashreplace")
            sys.argv = ["", *asked["arguments"]]
            runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
            sys.exit()
        os.close(log)
        selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, ended))
        asking.send(b"%d" % child)
"""


class Forked(subprocess.Popen[bytes]):
    """A process that is a child of another one, which tells here how it ended."""

    def __init__(self, command: Sequence[str], pid: int, ended: int) -> None:
        self.args, self.pid, self.returncode = command, pid, None
        self.stdin = self.stdout = self.stderr = None
        self._ended = ended
        self._looking = threading.Lock()

    def __del__(self) -> None:
        os.close(self._ended)

    def poll(self) -> int | None:
        """See Popen. Any thread may ask."""
        with self._looking:
            if self.returncode is None and self._told(0.0):
                told = os.read(self._ended, 4)
                assert told, "the process that forks nodes has ended"
                (self.returncode,) = struct.unpack("i", told)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See Popen. Any thread may wait."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._told(left_s)
        return code

    def _told(self, timeout_s: float | None) -> bool:
        looking = select.poll()
        looking.register(self._ended, select.POLLIN)
        return bool(looking.poll(None if timeout_s is None else timeout_s * 1_000))


class Forking:
    """One process that forks nodes."""

    def __init__(self) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._one = threading.Lock()
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(theirs.fileno())], pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        atexit.register(self.close)

    def close(self) -> None:
        """End it, though a fork of this process may have the socket too. Its nodes go on."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):  # it has ended
                self._asking.shutdown(socket.SHUT_RDWR)
            self._asking.close()
            self._process.wait()

    def begin(self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> Forked:
        """Start a node."""
        _, _, module, *arguments = command
        if "--parent" in arguments:  # without which the node ends: that is not this process, but the one that forks
            arguments[arguments.index("--parent") + 1] = str(self._process.pid)
        asked = {
            "module": module, "arguments": arguments, "environment": dict(environment), "folder": os.getcwd(),  # noqa: PTH109
        }  # fmt: skip
        ended, theirs = os.pipe()
        try:
            with self._one:
                socket.send_fds(self._asking, [json.dumps(asked).encode()], [log.fileno(), theirs])
                pid = int(self._asking.recv(32))
        finally:
            os.close(theirs)
        return Forked(command, pid, ended)


@functools.cache
def _forking(number: int) -> Forking:
    """Of this process; made when it is first asked for."""
    return Forking()


_begun = itertools.count()
as_always = local_cluster.begin


def begin(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """As local_cluster.begin."""
    names = {name for name in {*environment, *os.environ} if name.startswith(MADE_BEFORE)}
    alike = all(environment.get(name) == os.environ.get(name) for name in names)
    words = [word for word in command if word != "-P"]  # the working directory is not where a fork imports from
    forks = words[:2] == [sys.executable, "-m"] and words[2] in MODULES and not set(NOT_IN) & set(words)
    if not forks or not alike:
        return as_always(command, log, environment)
    return _forking(next(_begun) % 2).begin(words, log, environment)
