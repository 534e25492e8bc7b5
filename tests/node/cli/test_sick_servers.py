"""Commands against servers that accept and then say nothing, stop, or speak something else: a line that names the
address, within a time that docs/CLI.md states."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tickwheel.client import AsyncClient
from tickwheel.node.cli import backup, messages, output
from tickwheel.node.cli import program as cli

SETTINGS = b"\0\0\0\4\0\0\0\0\0"
"""An empty frame of settings, with which a server of HTTP/2 begins."""
ANSWERS = {
    "silent": b"",
    "stopped": SETTINGS,
    "http1": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "noise": os.urandom(4_096),
}
TIMEOUT_S = 0.4


@contextlib.contextmanager
def sick(answer: bytes) -> Iterator[str]:
    """The address of a server that takes every connection, sends this, and reads on."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(listener.accept()[0])
                    held[-1].sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize(
    "words",
    [
        ["schedule", "t", "x", "--delay", "1s"],
        ["member", "add", "n9", "--peer", "h:1", "--client", "h:2"],
        ["disk"],
        ["list"],
        ["consume", "t", "--group", "g"],
        ["backup", "copy"],
    ],
    ids=lambda words: words[0],
)
def test_a_server_that_does_not_answer_is_named(
    words: list[str],
    answer: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Nothing waits longer than a call may, not even what waits long once it was answered."""
    monkeypatch.chdir(tmp_path)
    opened = output.open_client

    def impatient(addresses: str, timeout_s: float = TIMEOUT_S, token: str | None = None) -> AsyncClient:
        return opened(addresses, min(timeout_s, TIMEOUT_S), token)

    for module in (output, messages, backup):
        monkeypatch.setattr(module, "open_client", impatient)
    with sick(ANSWERS[answer]) as address:
        assert cli.run([*words, "--addresses", address]) == cli.EXIT_UNAVAILABLE
    told = capsys.readouterr().err.strip().splitlines()
    assert "60 s" not in told[0], "as long as a consumer waits that has had a master"
    assert address in told[0] and "Hint:" in told[-1] and "Traceback" not in "".join(told)
