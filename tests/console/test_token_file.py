"""Certificates and the token file of the console by themselves: what counts, and what is refused with its place."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from tickwheel.client import AsyncClient
from tickwheel.client.errors import PermissionRefused, RequestRefused
from tickwheel.console import certificates
from tickwheel.console.certificates import FILE_BYTES_MAX, Certificate, TokenFile, certificate_of, parsed
from tickwheel.console.sessions import Sessions, Visitor


def client(token: str) -> AsyncClient:
    """A client of a cluster that is not there."""
    return AsyncClient("127.0.0.1:1", token=token)


def token_file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    """A token file."""
    path.write_bytes(content)
    path.chmod(mode)
    return path


async def test_a_session_ends_with_its_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a connection that stays open: each request looks at the time."""
    tokens = TokenFile(token_file(tmp_path / "tokens", b"ann secret\n"))
    sessions = Sessions(client, tokens)
    shown = Certificate("ann", b"print", time.time() + 60)
    visitor = Visitor(sessions.log_in(sessions.certified(shown), shown), shown)
    assert sessions.token(visitor) == "secret"
    monkeypatch.setattr(time, "time", lambda: shown.until_s + 1)
    assert sessions.token(visitor) == ""
    with pytest.raises(PermissionRefused, match="a certificate that is valid; this one was until"):
        sessions.certified(shown)


async def test_a_session_does_not_come_back_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes a line out has ended the session, also if the same line is there again later."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.0)
    path = token_file(tmp_path / "tokens", b"ann secret\n")
    sessions = Sessions(client, TokenFile(path))
    shown = Certificate("ann", b"print", time.time() + 60)
    visitor = Visitor(sessions.log_in(sessions.certified(shown), shown), shown)
    path.write_bytes(b"")
    assert sessions.token(Visitor(visitor.session_id)) == "" and sessions.token(visitor) == ""
    path.write_bytes(b"ann secret\n")
    assert sessions.token(visitor) == ""


async def test_a_renewed_certificate_is_a_new_login(tmp_path: Path) -> None:
    """The same name on another certificate of the authority does not take a session over."""
    tokens = TokenFile(token_file(tmp_path / "tokens", b"ann secret\n"))
    sessions = Sessions(client, tokens)
    old, new = (Certificate("ann", fingerprint, time.time() + 60) for fingerprint in (b"old", b"new"))
    session_id = sessions.log_in(sessions.certified(old), old)
    assert sessions.token(Visitor(session_id, new)) == "" and sessions.token(Visitor(session_id, old)) == "secret"


def test_what_is_no_certificate_names_nobody() -> None:
    """A connection is not lost for it: its visitor reads why."""
    found = certificate_of(b"\x30\x03\x02\x01\x01")
    assert found.name == "" and "can be read" in found.trouble()


def refusal(path: Path) -> RequestRefused:
    """Why a token file is refused at the start."""
    with pytest.raises(RequestRefused) as caught:
        TokenFile(path)
    assert caught.value.field == "--tokens"
    return caught.value


def test_each_bad_line_is_named_and_never_shown(tmp_path: Path) -> None:
    """File, line and reason: a line may be a token."""
    lines = (
        b"# a comment\n\nann tw_good\n  bob\ttw_too  \ntw_alone\nann tw_twice\nx y tw_three\n"
        b"\xc3\xa4 tw_name\nb \x01tw\nc " + b"t" * 257 + b"\n"
    )
    tokens, wrong = parsed(lines, Path("tokens"))
    assert tokens == {"ann": "tw_good", "bob": "tw_too"}
    assert [place.split(": ")[0] for place in wrong] == [f"tokens:{number}" for number in (5, 6, 7, 8, 9, 10)]
    path = token_file(tmp_path / "tokens", lines)
    told = refusal(path).limit
    assert f"{path}:5: 1 words" in told and "token in line 3" in told
    assert not any(secret in told for secret in ("tw_alone", "tw_twice", "tw_three", "tw_name"))
    many = refusal(token_file(path, b"alone\n" * 1_000)).limit
    assert "and 980 more" in many


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o700 | 0o010])
def test_a_token_file_is_for_its_owner_alone(tmp_path: Path, mode: int) -> None:
    """Any right of group or others is refused, with what to do."""
    assert "chmod 600" in refusal(token_file(tmp_path / "tokens", b"", mode)).limit


def test_what_is_no_token_file_is_refused(tmp_path: Path) -> None:
    """Absent, a directory, a pipe that nobody writes to, too large."""
    assert "No such file" in refusal(tmp_path / "none").limit
    assert refusal(tmp_path).limit == "a file"
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert refusal(tmp_path / "pipe").limit == "a file"
    assert "bytes" in refusal(token_file(tmp_path / "large", b"#" * (FILE_BYTES_MAX + 1))).limit


def test_good_lines_count_when_a_changed_file_has_bad_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator in the middle of an edit locks nobody out; the bad line is logged by its place, once."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.0)
    path = token_file(tmp_path / "tokens", b"ann one\n")
    tokens = TokenFile(path)
    path.write_bytes(b"ann two\nbob\n")
    with caplog.at_level(logging.INFO):
        assert [tokens.token(name) for name in ("ann", "bob", "ann")] == ["two", "", "two"]
    assert caplog.text.count(f"left out: {path}:2:") == 1
    path.unlink()
    assert [tokens.token("ann") for _ in range(3)] == ["", "", ""]
    assert caplog.text.count("nobody can log in by certificate") == 1
    token_file(path, b"ann two\nbob\n")
    assert tokens.token("ann") == "two"
