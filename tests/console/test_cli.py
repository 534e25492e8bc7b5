"""The options of `tickwheel console`: what is wrong is told before anything listens."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tickwheel.client.errors import RequestRefused
from tickwheel.console.cli import app, hosts_of, split_bind


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


def test_wrong_addresses_are_told_at_once() -> None:
    """Not to the first browser that comes."""
    assert refusal("--addresses", "nonsense", "--bind", "127.0.0.1:0").field == "addresses"


def test_the_names_that_browsers_may_use() -> None:
    """Loopback by any of its names, further names as given, and any for an address that stands for all."""
    assert {"127.0.0.1", "localhost", "::1"} <= hosts_of("127.0.0.1", [])
    assert "console.example" in hosts_of("0.0.0.0", ["Console.example"])
    assert hosts_of("0.0.0.0", []) == frozenset()
    assert split_bind("[::1]:80") == ("::1", 80)
