"""Logins by certificate at a real console over TLS: whom each certificate lets in, and what is not enough."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.console.secured import SOON_S, Place, certified_console, secured
from tickwheel.console import certificates
from tickwheel.console.reports import Reports


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    """The node and every certificate."""
    async with secured(tmp_path_factory.mktemp("certificates")) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def place(base: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Place]:
    """A console of its own for each test, which looks at its token file with each request."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.0)
    async with certified_console(base, Reports(tmp_path)) as found:
        yield found


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_certificate_logs_its_user_in_and_out(place: Place) -> None:
    """By a login that the user asks for: the certificate alone opens nothing, before it and after it."""
    ann = place.browser("ann")
    session = await ann.open()
    assert session["certificate"] == {"name": "ann", "trouble": ""}
    assert session["login_needed"] and not session["logged_in"] and session["caller"] is None
    assert (await ann.read("topics", 401))["reason"] == "UNAUTHENTICATED"

    before = ann.cookies
    assert (await ann.log_in())["caller"]["name"] == "ann"
    assert ann.cookies.keys() == before.keys() and ann.cookies != before
    assert [item["name"] for item in (await ann.read("topics"))["items"]] == ["alarms"]
    assert (await ann.read("reports"))["items"] == []
    refused = await ann.change("topics/pause", {"name": "alarms", "paused": True}, 403)
    assert refused["reason"] == "RIGHT_REQUIRED"

    ann.csrf = (await ann.change("logout", {}))["csrf"]
    await ann.read("topics", 401)
    assert (await ann.open())["login_needed"]


async def test_without_a_certificate_the_token_still_logs_in(place: Place) -> None:
    """A certificate is asked for, not demanded; a token that somebody types is bound to no certificate."""
    plain = place.browser(None)
    session = await plain.open()
    assert session["certificate"] is None and session["login_needed"]
    absent = await plain.change("login", {"certificate": True}, 400)
    assert absent["details"]["field"] == "certificate" and "--client-ca" in absent["details"]["limit"]
    found = await plain.change("login", {"token": place.secrets["bob"]})
    assert found["caller"]["name"] == "bob"
    await place.browser("ann", plain.cookies).read("topics")


async def test_nobody_acts_by_the_certificate_of_the_console(place: Place) -> None:
    """It is an administrator's here, and the cluster would let it do everything."""
    for name in (None, "eve"):
        visitor = place.browser(name)
        assert (await visitor.open())["login_needed"]
        await visitor.read("settings", 401)
        await visitor.read("reports", 401)
        await visitor.change("topics/create", {"name": "taken"}, 401)


async def test_a_session_needs_the_certificate_that_began_it(place: Place) -> None:
    """A stolen cookie opens nothing without the key of the certificate, and does no harm to its owner."""
    ann = place.browser("ann")
    await ann.log_in()
    for thief in (place.browser(None, ann.cookies), place.browser("bob", ann.cookies)):
        thief.csrf = ann.csrf
        await thief.read("topics", 401)
        await thief.change("topics/pause", {"name": "alarms", "paused": True}, 401)
        assert not (await thief.read("session"))["logged_in"]
    await ann.read("topics")


async def test_each_request_of_a_connection_is_judged_by_itself(place: Place) -> None:
    """As behind a proxy that sends several visitors through one connection: a cookie's session, and nothing left over
    from the request before."""
    ann = place.browser("ann")
    await ann.log_in()
    cookie = "; ".join(f"{name}={value}" for name, value in ann.cookies.items())
    nobody = place.browser("ann")
    for _ in range(3):
        await nobody.read("topics", 401, cookie="")
        await nobody.read("topics", 200, cookie=cookie)
    assert len(nobody.session.connector._conns) <= 1  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "why"), [("foreign", "signature"), ("expired", "expired")])
async def test_a_certificate_that_is_not_good_gets_no_connection(
    place: Place, name: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another authority or expired: the handshake fails, whatever name is on it, and the log says why."""
    with pytest.raises(aiohttp.ClientError):
        await place.browser(name).open()
    assert "refused the certificate of a browser" in caplog.text and why in caplog.text


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("n1", "makes it a node's"),
        ("nameless", "with a common name"),
        ("eve", "token file"),
        ("root", "token file"),
    ],
)
async def test_a_good_certificate_of_no_user_says_why(place: Place, name: str, limit: str) -> None:
    """A node's, one without a name, names without a line. The unit of an administrator gives nothing here."""
    visitor = place.browser(name)
    session = await visitor.open()
    assert limit in session["certificate"]["trouble"]
    found = await visitor.change("login", {"certificate": True}, 401)
    assert found["details"]["field"] == "certificate" and limit in found["details"]["limit"]
    await visitor.read("topics", 401)


async def test_the_token_must_be_that_of_the_certificates_user(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Root's token under bob's name makes bob no root; the log says what to correct."""
    bob = place.browser("bob")
    await bob.open()
    found = await bob.change("login", {"certificate": True}, 401)
    assert "another user" in found["error"] and place.secrets["root"] not in str(found)
    assert "that of root" in caplog.text and place.secrets["root"] not in caplog.text


async def test_a_foreign_page_cannot_use_the_certificate(place: Place) -> None:
    """A browser sends the certificate along with forged requests; without cookie and token they do nothing, and even a
    login is no request that another page can make."""
    ann = place.browser("ann")
    await ann.log_in()
    forged = place.browser("ann")
    for name, body in (("login", {"certificate": True}), ("logout", {}), ("topics/create", {"name": "taken"})):
        found = await forged.change(name, body, 403)
        assert found["reason"] == "FORGED"
        found = await ann.change(name, body, 403, **{"x-csrf-token": ""})
        assert found["reason"] == "FORGED"
        found = await ann.change(name, body, 403, origin="https://evil.example")
        assert found["reason"] == "FORGED"
    await forged.read("topics", 401)
    await ann.read("topics")


async def test_no_header_names_a_certificate(place: Place) -> None:
    """A proxy in front shows its own certificate or none; what it or anybody else writes into headers is ignored."""
    headers = {
        "x-ssl-client-s-dn": "CN=ann",
        "x-ssl-client-verify": "SUCCESS",
        "x-forwarded-client-cert": "Subject=CN=ann",
        "x-forwarded-user": "ann",
    }
    visitor = place.browser(None)
    await visitor.open()
    assert (await visitor.read("session", 200, **headers))["certificate"] is None
    await visitor.change("login", {"certificate": True}, 400, **headers)


async def test_login_is_by_one_means(place: Place) -> None:
    """Token and certificate together, or neither, are refused by name."""
    ann = place.browser("ann")
    await ann.open()
    for body in ({"certificate": True, "token": "x"}, {"certificate": False}, {}):
        assert (await ann.change("login", body, 400))["details"]["field"] == "token"
    assert (await ann.change("login", {"certificate": "yes"}, 400))["details"]["field"] == "certificate"


async def test_a_user_leaves_with_its_line(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A line that goes or changes ends the session and its open stream; a file that others may read lets nobody in."""
    ann, line = place.browser("ann"), f"ann {place.secrets['ann']}"
    for lines, mode in (([], 0o600), (["ann tw_another"], 0o600), ([line], 0o640)):
        await ann.log_in()
        stream = place.browser("ann", ann.cookies)
        async with stream.session.get("/api/stream") as pictures:
            assert (await pictures.content.readuntil(b"\n\n")).startswith(b"event: history")
            place.write(*lines)
            place.tokens.chmod(mode)
            async with asyncio.timeout(SOON_S):
                assert (await pictures.content.read()).endswith(b"event: ended\ndata: {}\n\n")
        await ann.read("topics", 401)
        place.tokens.chmod(0o600)
        place.write(line)
    assert "its mode is 640" in caplog.text
    await ann.log_in()


async def test_a_revoked_token_opens_nothing(place: Place) -> None:
    """The cluster says so, also to a stream that is open, and a new line in the file is a new login."""
    made = await place.admin.access.create_token("ann", label="short")
    place.write(f"ann {made.secret}")
    ann = place.browser("ann")
    await ann.log_in()
    stream = place.browser("ann", ann.cookies)
    async with stream.session.get("/api/stream") as pictures:
        assert (await pictures.content.readuntil(b"\n\n")).startswith(b"event: history")
        await place.admin.access.revoke_token("ann", made.token.id)
        async with asyncio.timeout(SOON_S):
            assert (await pictures.content.read()).endswith(b"event: ended\ndata: {}\n\n")
    await ann.read("topics", 401)
    await ann.open()
    await ann.change("login", {"certificate": True}, 401)
    place.write(f"ann {place.secrets['ann']}")
    await ann.log_in()


async def test_a_resumed_connection_has_its_certificate(place: Place) -> None:
    """Browsers resume TLS sessions: the certificate is then that of the first handshake, and not somebody else's."""
    context = place.context("ann")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, port = place.url.removeprefix("https://").split(":")

    def ask(known: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool, bytes]:
        with (
            socket.create_connection((host, int(port)), SOON_S) as raw,
            context.wrap_socket(raw, server_hostname=host, session=known) as link,
        ):
            link.sendall(b"GET /api/session HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            answer = b""
            while part := link.recv(65_536):
                answer += part
            return link.session, bool(link.session_reused), answer

    first, reused, answer = await asyncio.to_thread(ask, None)
    assert not reused and b'"name":"ann"' in answer
    _, reused, answer = await asyncio.to_thread(ask, first)
    assert reused and b'"name":"ann"' in answer
