"""Logins by certificate at a real console over TLS, for a node whose cluster has rights and TLS, too.

The console reaches that node with a certificate of an administrator, the worst case: whoever is not logged in must not
get its rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tickwheel.client import AsyncClient, TlsFiles
from tickwheel.client.errors import TickwheelError
from tickwheel.console import certificates
from tickwheel.console.certificates import TokenFile
from tickwheel.console.serving import Serving, serve
from tickwheel.node.certs import Authority, issue, make_certificates, open_authority
from tickwheel.node.local_cluster import LocalCluster
from tickwheel.node.tls import CLIENT_UNIT, NODE_UNIT
from tickwheel.proto import access_pb2, admin_pb2

SOON_S = 60.0
RIGHTS = (access_pb2.RIGHT_READ,)


@dataclass(slots=True)
class Place:
    """A console over TLS, its cluster, and what its visitors may show."""

    url: str
    folder: Path
    tokens: Path
    secrets: dict[str, str]
    admin: AsyncClient
    open: set[aiohttp.ClientSession] = field(default_factory=set)

    def context(self, name: str | None) -> ssl.SSLContext:
        """TLS of a browser with the certificate of `name`; None: without one."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        if name is not None:
            context.load_cert_chain(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        return context

    def browser(self, name: str | None, cookies: Mapping[str, str] | None = None) -> Browser:
        """A browser, perhaps with the cookies of another one."""
        session = aiohttp.ClientSession(
            self.url,
            connector=aiohttp.TCPConnector(ssl=self.context(name), limit=1),
            cookies=cookies,
            cookie_jar=aiohttp.CookieJar(unsafe=True),
            timeout=aiohttp.ClientTimeout(SOON_S),
        )
        self.open.add(session)
        return Browser(session)

    def write(self, *lines: str) -> None:
        """The token file with these lines."""
        self.tokens.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@dataclass(slots=True)
class Browser:
    """A browser: its connection, cookies and token for changes."""

    session: aiohttp.ClientSession
    csrf: str = ""

    @property
    def cookies(self) -> dict[str, str]:
        """Its cookies."""
        return {cookie.key: cookie.value for cookie in self.session.cookie_jar}

    async def open(self) -> Any:
        """Load the first page and the session."""
        async with self.session.get("/") as page:
            assert page.status == 200
        found = await self.read("session")
        self.csrf = found["csrf"]
        return found

    async def read(self, name: str, status: int = 200, /, **headers: str) -> Any:
        """A call that reads."""
        async with self.session.get(f"/api/{name}", headers=headers) as answer:
            assert answer.status == status, (answer.status, await answer.text())
            return await answer.json()

    async def change(self, name: str, body: object, status: int = 200, /, **headers: str) -> Any:
        """A call that changes."""
        sent = {"x-csrf-token": self.csrf, "content-type": "application/json", **headers}
        async with self.session.post(f"/api/{name}", json=body, headers=sent) as answer:
            assert answer.status == status, (answer.status, await answer.text())
            return await answer.json()

    async def log_in(self) -> Any:
        """Open the console and log in by certificate."""
        await self.open()
        found = await self.change("login", {"certificate": True})
        self.csrf = found["csrf"]
        return found


def stranger(folder: Path, file: str, authority: Authority, *names: x509.NameAttribute[str], days: float = 1.0) -> None:
    """Write a certificate that `tickwheel certs` would not make."""
    key = ec.generate_private_key(ec.SECP256R1())
    until = datetime.now(UTC) + timedelta(days=days)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(names))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(until - timedelta(days=2))
        .not_valid_after(until)
        .sign(authority.key, hashes.SHA256())
    )
    (folder / f"{file}.crt").write_bytes(made.public_bytes(Encoding.PEM))
    (folder / f"{file}.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def common_name(text: str) -> x509.NameAttribute[str]:
    """A common name of a subject."""
    return x509.NameAttribute(NameOID.COMMON_NAME, text)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    """The node, its users, and every certificate of the tests."""
    root = tmp_path_factory.mktemp("certificates")
    folder = root / "certs"
    cluster = LocalCluster(root / "nodes", 1)
    node = cluster.nodes[0]
    make_certificates(folder, {node.node_id: ["127.0.0.1"]}, ["ann", "bob", "eve"], ["root"], 1)
    authority = open_authority(folder, 1)
    issue(authority, folder, "console", NODE_UNIT, ["127.0.0.1"], 1)
    unit = x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, CLIENT_UNIT)
    stranger(folder, "nameless", authority, unit)
    stranger(folder, "expired", authority, common_name("ann"), days=-0.5)
    other = open_authority(root / "other", 1)
    stranger(folder, "foreign", other, common_name("ann"))
    tls = [
        "",
        "[tls]",
        *(
            f'client_{part}_file = "{folder / file}"'
            for part, file in {"cert": f"{node.node_id}.crt", "key": f"{node.node_id}.key", "ca": "ca.crt"}.items()
        ),
    ]
    with node.config_file.open("a", encoding="utf-8") as config:
        config.write("\n".join(tls) + "\n")
    cluster.start_node(node)
    files = TlsFiles(folder / "ca.crt", folder / "root.crt", folder / "root.key")
    try:
        async with AsyncClient(cluster.addresses, tls=files, timeout_s=SOON_S) as admin:
            secrets = await set_up(admin)
            place = Place("", folder, root / "tokens", secrets, admin)
            place.write()
            place.tokens.chmod(0o600)
            yield place
    finally:
        await cluster.stop()


async def set_up(admin: AsyncClient) -> dict[str, str]:
    """Users, their tokens, and rights."""
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                await admin.admin.create_topic("alarms")
                break
            except TickwheelError as error:
                assert error.reason not in ("INVALID_FIELD", "ROLE_REQUIRED", "UNAUTHENTICATED"), error
    await admin.access.set_user("root", roles=["administrator"])
    await admin.access.set_role("reader", [access_pb2.Grant(rights=RIGHTS, topics=["*"], groups=["*"])])
    secrets = {"root": (await admin.access.create_token("root")).secret}
    for name in ("ann", "bob"):
        await admin.access.set_user(name, roles=["reader"])
        secrets[name] = (await admin.access.create_token(name)).secret
    await admin.admin.update_settings(admin_pb2.Settings(rights=True))
    return secrets


@pytest_asyncio.fixture(loop_scope="module")
async def place(base: Place, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    """A console whose token file has ann, and root's token under bob's name by mistake."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.0)
    base.write("# who may come by certificate", "", f"ann {base.secrets['ann']}", f"bob {base.secrets['root']}")
    base.tokens.chmod(0o600)
    folder = base.folder
    files = TlsFiles(folder / "ca.crt", folder / "root.crt", folder / "root.key")
    addresses = list(base.admin.cluster.addresses)

    def open_client(token: str) -> AsyncClient:
        return AsyncClient(addresses, tls=files, token=token, timeout_s=10)

    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = Serving(
        "127.0.0.1",
        0,
        cert_file=folder / "console.crt",
        key_file=folder / "console.key",
        client_ca=folder / "ca.crt",
        tokens=TokenFile(base.tokens),
    )
    task = asyncio.ensure_future(serve(open_client, serving, ready.set_result))
    found = Place((await ready).rstrip("/"), folder, base.tokens, base.secrets, base.admin)
    try:
        yield found
    finally:
        for session in found.open:
            await session.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


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


@pytest.mark.parametrize("name", ["foreign", "expired"])
async def test_a_certificate_that_is_not_good_gets_no_connection(place: Place, name: str) -> None:
    """Of another authority or expired: the handshake fails, whatever name is on it."""
    with pytest.raises(aiohttp.ClientError):
        await place.browser(name).open()


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
    """The cluster says so, and a new line in the file is a new login."""
    made = await place.admin.access.create_token("ann", label="short")
    place.write(f"ann {made.secret}")
    ann = place.browser("ann")
    await ann.log_in()
    await place.admin.access.revoke_token("ann", made.token.id)
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
