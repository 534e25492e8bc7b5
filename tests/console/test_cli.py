"""The options of `tickwheel console`: what is wrong is told before anything listens."""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tickwheel.client.errors import RequestRefused
from tickwheel.console.cli import app, hosts_of, split_bind
from tickwheel.console.serving import listener_at
from tickwheel.node.certs import make_certificates


def refusal(*words: str) -> RequestRefused:
    """The refusal of a command line."""
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, RequestRefused), (result.output, result.exception)
    return result.exception


@pytest.mark.parametrize("bind", ["", "here", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", ":80"])
def test_a_bind_has_host_and_port(bind: str) -> None:
    """Anything else is refused by name."""
    assert refusal("--bind", bind).field == "--bind"


def test_other_machines_need_tls_or_a_word() -> None:
    """As nodes: beyond loopback there are certificates, or --insecure."""
    for bind in ("0.0.0.0:0", "[::]:0", "10.1.2.3:0", "console.example:0"):
        assert "--insecure" in refusal("--bind", bind).limit


def test_certificate_and_key_belong_together(tmp_path: Path) -> None:
    """Both or neither, readable, a pair."""
    assert refusal("--cert-file", "a.pem").field == "--key-file"
    assert refusal("--key-file", "a.pem").field == "--cert-file"
    missing = str(tmp_path / "none.pem")
    assert "No such file" in refusal("--cert-file", missing, "--key-file", missing).limit
    (tmp_path / "junk.pem").write_text("junk", encoding="utf-8")
    junk = str(tmp_path / "junk.pem")
    assert "PEM" in refusal("--cert-file", junk, "--key-file", junk).limit


def test_a_login_by_certificate_needs_all_its_parts(tmp_path: Path) -> None:
    """HTTPS of its own, an authority and the tokens, each of them good."""
    make_certificates(tmp_path, {"console": ["127.0.0.1"]}, [], [], 1)
    https = ["--cert-file", str(tmp_path / "console.crt"), "--key-file", str(tmp_path / "console.key")]
    ca, tokens = ["--client-ca", str(tmp_path / "ca.crt")], ["--tokens", str(tmp_path / "tokens")]
    assert refusal(*https, *ca).field == "--tokens"
    assert refusal(*https, *tokens).field == "--client-ca"
    assert "HTTPS" in refusal(*ca, *tokens).limit
    assert "No such file" in refusal(*https, "--client-ca", str(tmp_path / "none"), *tokens).limit
    assert "PEM" in refusal(*https, "--client-ca", str(tmp_path / "console.key"), *tokens).limit
    assert "No such file" in refusal(*https, *ca, *tokens).limit
    (tmp_path / "tokens").write_text("ann\n", encoding="utf-8")
    (tmp_path / "tokens").chmod(0o600)
    assert f"{tmp_path / 'tokens'}:1: 1 words" in refusal(*https, *ca, *tokens).limit


def test_reports_lie_in_a_directory(tmp_path: Path) -> None:
    """One that is not there is told at once."""
    found = refusal("--reports", str(tmp_path / "none"))
    assert found.field == "--reports" and "No such file" in found.limit


def test_wrong_addresses_are_told_at_once() -> None:
    """Not to the first browser that comes."""
    assert refusal("--addresses", "nonsense", "--bind", "127.0.0.1:0").field == "addresses"


def test_the_names_that_browsers_may_use() -> None:
    """Loopback by any of its names, further names as given, and any for an address that stands for all."""
    assert {"127.0.0.1", "localhost", "::1"} <= hosts_of("127.0.0.1", [])
    assert "console.example" in hosts_of("0.0.0.0", ["Console.example"])
    assert hosts_of("0.0.0.0", []) == frozenset()
    assert split_bind("[::1]:80") == ("::1", 80)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_the_body_of_an_answer_does_not_wait_for_its_head(host: str) -> None:
    """The kernel sends what is written at once: an answer has two writes, and with Nagle's algorithm the second waits
    for an acknowledgement, which takes a browser 40 ms."""
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def taken(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        found.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listener_at("--bind", host, 0)
    async with await asyncio.start_server(taken, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        assert await found
        writer.close()
        await writer.wait_closed()


def test_every_command_of_the_document_starts(tmp_path: Path) -> None:
    """docs/CONSOLE.md, with files and free ports of this test: each console says where it is."""
    text = (Path(__file__).parents[2] / "docs/CONSOLE.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("tickwheel console")]
    assert len(commands) == 4
    make_certificates(tmp_path, {"console": ["127.0.0.1"]}, ["ann"], [], 1)
    (tmp_path / "chaos").mkdir()
    (tmp_path / "console.tokens").write_text("ann tw_x\n", encoding="utf-8")
    (tmp_path / "console.tokens").chmod(0o600)
    started = []
    for _, _, *options in commands:
        here = [Path(word).name if word.startswith("/") else re.sub(":7780$", ":0", word) for word in options]
        bind = [] if "--bind" in here else ["--bind", "127.0.0.1:0"]
        words = [sys.executable, "-m", "tickwheel.node.cli.main", "console", *here, *bind]
        started.append(subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
    for options, process in zip(commands, started, strict=True):
        assert process.stdout is not None
        said = process.stdout.readline()
        process.terminate()
        process.communicate(timeout=60)
        assert re.search(r"https?://\S+:\d+", said), (options, said)


def test_a_second_signal_neither_hangs_nor_fails() -> None:
    """The second Ctrl-C left threads that nobody ended, and the process stayed."""
    console = subprocess.Popen(
        [sys.executable, "-m", "tickwheel.node.cli.main", "console", "--bind", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with console:
        assert console.stdout is not None
        url = console.stdout.readline().split()[2].rstrip(",")
        with urllib.request.urlopen(url, timeout=30):  # its files are read by a thread
            pass
        console.send_signal(signal.SIGINT)
        while console.poll() is None and _pends(console.pid, signal.SIGINT):
            pass
        console.send_signal(signal.SIGINT)
        try:
            _, told = console.communicate(timeout=30)
        finally:
            console.kill()
    assert console.returncode in (0, -signal.SIGINT) and not told  # the second may come when all is over


def _pends(process_id: int, number: int) -> bool:
    """Whether the process has not taken this signal yet: the next one would be lost."""
    lines = Path(f"/proc/{process_id}/status").read_text(encoding="ascii").splitlines()
    [pending] = [line.split()[1] for line in lines if line.startswith("ShdPnd:")]
    return bool(int(pending, 16) >> (number - 1) & 1)
