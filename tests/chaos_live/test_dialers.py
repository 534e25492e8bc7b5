"""Who has opened a connection: found by its process, for both kinds of sockets that gRPC uses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tickwheel.chaos.live.dialers import dialer


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")], ids=["v4", "mapped"]
)
def test_the_process_behind_a_connection_is_found(family: socket.AddressFamily, host: str) -> None:
    """Taken for another node, its faults would hit the wrong way; taken for none, it would be refused for ever."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(family) as caller,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other,
    ):
        remote_port = server.getsockname()[1]
        caller.connect((host, remote_port))
        port = caller.getsockname()[1]
        assert dialer(port, remote_port, {"other": other.pid, "me": os.getpid()}) == "me"
        assert dialer(port, remote_port, {"other": other.pid}) is None
        assert dialer(remote_port, 1, {"me": os.getpid()}) is None
        other.communicate(b"\n")
    assert dialer(port, remote_port, {"me": os.getpid()}) is None
