"""A console over TLS whose visitors may log in by certificate, at a node whose cluster has TLS and rights.

The console reaches that node with a certificate of an administrator, the worst case: whoever is not logged in must not
get its rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tickwheel.client import AsyncClient, Grant, Right, TlsFiles
from tickwheel.client.errors import TickwheelError
from tickwheel.console.certificates import TokenFile
from tickwheel.console.reports import Reports
from tickwheel.console.serving import Serving, serve
from tickwheel.node.certs import Authority, issue, make_certificates, open_authority
from tickwheel.node.local_cluster import LocalCluster
from tickwheel.node.tls import CLIENT_UNIT, NODE_UNIT

SOON_S = 60.0
RIGHTS = (Right.READ,)


@dataclass(slots=True)
class Place:
    """A console over TLS, its cluster, and what its visitors may show."""

    url: str
    folder: Path
    tokens: Path
    secrets: dict[str, str]
    admin: AsyncClient
    cluster: LocalCluster
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

    async def kill_master(self) -> str:
        """End the master by SIGKILL; its id."""
        master = (await self.admin.admin.master_status()).node_id
        await self.cluster.kill_node(self.cluster.node(master))
        return master

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


@contextlib.asynccontextmanager
async def secured(root: Path, nodes: int = 1) -> AsyncIterator[Place]:
    """Nodes with TLS and rights, their users, and every certificate of the tests; no console yet."""
    folder = root / "certs"
    cluster = LocalCluster(root / "nodes", nodes)
    make_certificates(
        folder, {node.node_id: ["127.0.0.1"] for node in cluster.nodes}, ["ann", "bob", "eve"], ["root"], 1
    )
    authority = open_authority(folder, 1)
    issue(authority, folder, "console", NODE_UNIT, ["127.0.0.1"], 1)
    unit = x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, CLIENT_UNIT)
    stranger(folder, "nameless", authority, unit)
    stranger(folder, "expired", authority, common_name("ann"), days=-0.5)
    other = open_authority(root / "other", 1)
    stranger(folder, "foreign", other, common_name("ann"))
    for node in cluster.nodes:
        parts = {"cert": f"{node.node_id}.crt", "key": f"{node.node_id}.key", "ca": "ca.crt"}
        tls = ["", "[tls]", *(f'client_{part}_file = "{folder / file}"' for part, file in parts.items())]
        with node.config_file.open("a", encoding="utf-8") as config:
            config.write("\n".join(tls) + "\n")
        cluster.start_node(node)
    files = TlsFiles(folder / "ca.crt", folder / "root.crt", folder / "root.key")
    try:
        async with AsyncClient(cluster.addresses, tls=files, timeout_s=SOON_S) as admin:
            secrets = await set_up(admin)
            place = Place("", folder, root / "tokens", secrets, admin, cluster)
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
    await admin.access.set_role("reader", [Grant(RIGHTS, topics=("*",), groups=("*",))])
    secrets = {"root": (await admin.access.create_token("root")).secret}
    for name in ("ann", "bob"):
        await admin.access.set_user(name, roles=["reader"])
        secrets[name] = (await admin.access.create_token(name)).secret
    await admin.admin.update_settings(rights=True)
    return secrets


@contextlib.asynccontextmanager
async def certified_console(base: Place, reports: Reports | None = None) -> AsyncIterator[Place]:
    """A console whose token file has ann, and root's token under bob's name by mistake."""
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
        reports=reports,
    )
    task = asyncio.ensure_future(serve(open_client, serving, ready.set_result))
    found = Place((await ready).rstrip("/"), folder, base.tokens, base.secrets, base.admin, base.cluster)
    try:
        yield found
    finally:
        for session in found.open:
            await session.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
