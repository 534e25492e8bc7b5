"""The console and the REST API of one gateway, on a real node: each keeps its own guard."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from fastapi.routing import APIRoute

from tests.console.secured import Place, certified_console, secured
from tests.gateway.gateways import SOON_S, running
from tickwheel.client import AsyncClient, TlsFiles
from tickwheel.console import certificates
from tickwheel.console.app import PAGES
from tickwheel.console.changes import CHANGES
from tickwheel.console.reads import READS
from tickwheel.gateway.app import itself, messages
from tickwheel.gateway.config import GatewayConfigError, read_config
from tickwheel.gateway.running import Gateway, of_rest
from tickwheel.gateway.schedules import schedules
from tickwheel.node.certs import open_authority
from tickwheel.node.local_cluster import LocalCluster

BOTH = "[listen]\nbind = '127.0.0.1:0'\n[console]\nhost_names = ['console.example']\n"


@asynccontextmanager
async def visiting(
    cluster: LocalCluster, path: Path, text: str = BOTH, own: str = ""
) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    """A gateway with a console, and a browser's session with it."""
    async with running(cluster, path, text, own) as gateway:
        host, port = await asyncio.wait_for(gateway.listening(), SOON_S)
        async with aiohttp.ClientSession(
            f"http://{host}:{port}",
            timeout=aiohttp.ClientTimeout(SOON_S),
            cookie_jar=aiohttp.CookieJar(unsafe=True),
        ) as browser:
            yield gateway, browser


async def csrf_of(browser: aiohttp.ClientSession) -> dict[str, str]:
    """The header that a page of the console shows."""
    async with browser.get("/") as page:
        assert page.status == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    async with browser.get("/api/session") as session:
        return {"x-csrf-token": (await session.json())["csrf"]}


def test_every_path_belongs_to_one() -> None:
    """No page or call of the console is taken by the REST API, and the other way round."""
    ours = [
        route.path for router in (messages, schedules, itself) for route in router.routes if isinstance(route, APIRoute)
    ]
    assert len(ours) > 15 and all(map(of_rest, [*ours, "/openapi.json"]))
    theirs = [*PAGES, *(f"/api/{name}" for name in (*READS, *CHANGES)), "/static/app.js", "/v10", "/metricsx"]
    assert not any(map(of_rest, theirs))


async def test_each_keeps_its_guard(tmp_path: Path) -> None:
    """Forged changes and foreign hosts are refused by the console, and its cookie opens nothing of the REST API."""
    (tmp_path / "runs").mkdir()
    text = f"{BOTH}reports = '{tmp_path / 'runs'}'\n"
    async with LocalCluster(tmp_path, 1) as cluster, visiting(cluster, tmp_path / "g.toml", text) as (_, browser):
        async with browser.get("/api/reports") as reports:
            assert reports.status == 200 and (await reports.json())["total"] == 0
        async with browser.put("/v1/topics/made", json={}) as made:
            assert made.status == 200 and "content-security-policy" not in made.headers
        for path in "/openapi.json", "/metrics", "/livez", "/readyz":
            async with browser.get(path) as answer:
                assert answer.status == 200, path
        shown = await csrf_of(browser)
        async with browser.get("/api/topics") as found:
            assert [one["name"] for one in (await found.json())["items"]] == ["made"]
        async with browser.post("/api/topics/pause", json={"name": "made", "paused": True}) as forged:
            assert forged.status == 403 and (await forged.json())["reason"] == "FORGED"
        async with browser.get("/", headers={"Host": "evil.example"}) as foreign:
            assert foreign.status == 400 and (await foreign.json())["details"]["field"] == "Host"
        async with browser.get("/", headers={"Host": "console.example:80"}) as named:
            assert named.status == 200
        async with AsyncClient(cluster.addresses) as client:
            await client.access.set_user("root", ["administrator"])
            token = (await client.access.create_token("root")).secret
            await client.admin.update_settings(rights=True)
        async with browser.post("/api/login", json={"token": token}, headers=shown) as login:
            assert login.status == 200
        async with browser.get("/api/topics") as found:
            assert found.status == 200
        async with browser.get("/v1/topics") as refused:
            assert refused.status == 401
        async with browser.get("/v1/topics", headers={"Authorization": f"Bearer {token}"}) as found:
            assert found.status == 200


async def test_the_gateways_own_rights_are_not_the_consoles(tmp_path: Path) -> None:
    """With credentials = own the REST API acts by the gateway's token; a visitor of the console still has to log in."""
    async with LocalCluster(tmp_path, 1) as cluster:
        async with AsyncClient(cluster.addresses) as client:
            await client.access.set_user("root", ["administrator"])
            token = (await client.access.create_token("root")).secret
            await client.admin.update_settings(rights=True)
        text = BOTH.replace("[console]", "credentials = 'own'\n[console]")
        async with visiting(cluster, tmp_path / "g.toml", text, token) as (_, browser):
            async with browser.get("/v1/topics") as found:
                assert found.status == 200
            await csrf_of(browser)
            async with browser.get("/api/topics") as refused:
                assert refused.status == 401


async def test_open_pages_do_not_hold_up_the_end(tmp_path: Path) -> None:
    """Their streams end with the gateway, though calls of the REST API would have 20 s to end."""
    async with LocalCluster(tmp_path, 1) as cluster, visiting(cluster, tmp_path / "g.toml") as (gateway, browser):
        await csrf_of(browser)
        async with browser.get("/api/stream") as stream, asyncio.timeout(SOON_S):
            await stream.content.readuntil(b"event: picture")
            gateway.stop()
            await stream.content.read()  # a stream that is cut after the 20 s raises


@asynccontextmanager
async def certified_gateway(base: Place) -> AsyncIterator[Place]:
    """A gateway whose console takes certificates, before the node of `base`. Its own certificate is an
    administrator's."""
    base.write(*(f"{name} {base.secrets[user]}" for name, user in (("ann", "ann"), ("bob", "root"), ("root", "root"))))
    folder = base.folder
    text = (
        f"[listen]\nbind = '127.0.0.1:0'\ncert_file = '{folder}/console.crt'\nkey_file = '{folder}/console.key'\n"
        f"[console]\nclient_ca = '{folder}/ca.crt'\ntokens = '{base.tokens}'\n"
    )
    path = folder / "gateway.toml"
    path.write_text(text, encoding="utf-8")
    files = TlsFiles(folder / "ca.crt", folder / "root.crt", folder / "root.key")
    addresses = list(base.admin.cluster.addresses)
    gateway = Gateway(read_config(path), lambda token: AsyncClient(addresses, tls=files, token=token or ""))
    task = asyncio.ensure_future(gateway.run())
    found = Place("", folder, base.tokens, base.secrets, base.admin, base.cluster)
    try:
        host, port = await asyncio.wait_for(gateway.listening(), SOON_S)
        found.url = f"https://{host}:{port}"
        yield found
    finally:
        for session in found.open:
            await session.close()
        gateway.stop()
        await asyncio.wait_for(task, SOON_S)


async def test_visitors_log_in_by_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a console of its own: by the user's token, bound to the certificate. The REST API looks at none, and a
    caller needs none."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.0)
    async with secured(tmp_path) as base, certified_gateway(base) as place:
        ann = place.browser("ann")
        assert (await ann.open())["certificate"] == {"name": "ann", "trouble": ""}
        await ann.read("topics", 401)
        assert (await ann.log_in())["caller"]["name"] == "ann"
        assert [one["name"] for one in (await ann.read("topics"))["items"]] == ["alarms"]
        await place.browser("bob", ann.cookies).read("topics", 401)
        await place.browser(None, ann.cookies).read("topics", 401)
        bob = place.browser("bob")
        await bob.open()
        assert "another user" in (await bob.change("login", {"certificate": True}, 401))["error"]
        async with ann.session.get("/v1/topics") as refused:
            assert refused.status == 401, "a certificate and a cookie are no token"
        bearer = {"Authorization": f"Bearer {place.secrets['ann']}"}
        async with place.browser(None).session.get("/v1/topics", headers=bearer) as found:
            assert found.status == 200
        place.write()
        await ann.read("topics", 401)


async def test_logins_by_certificate_outlive_the_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes, the master killed under open pages of a console and of a gateway: no session and no stream ends, the
    streams show the next master, and each user may do what it might before, without a new login."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.0)
    async with secured(tmp_path, 3) as base, certified_console(base) as alone, certified_gateway(base) as beside:
        visits = []
        for place in (alone, beside):
            root, ann = place.browser("root"), place.browser("ann")
            await root.log_in()
            await ann.log_in()
            stream = await place.browser("ann", ann.cookies).session.get("/api/stream")
            visits.append((root, ann, stream))
            await shows_master(stream, "")
        killed = await base.kill_master()
        for number, (root, ann, stream) in enumerate(visits):
            await shows_master(stream, killed)
            paused = await root.change("topics/pause", {"name": "alarms", "paused": not number})
            assert paused["paused"] is not bool(number)
            assert [one["name"] for one in (await ann.read("topics"))["items"]] == ["alarms"]
            refused = await ann.change("topics/pause", {"name": "alarms", "paused": True}, 403)
            assert refused["reason"] == "RIGHT_REQUIRED"
            assert (await ann.read("session"))["caller"]["name"] == "ann"
            stream.close()


async def shows_master(stream: aiohttp.ClientResponse, before: str) -> None:
    """Wait until a page's stream shows a master, another one than `before`."""
    async with asyncio.timeout(SOON_S):
        while True:
            event = (await stream.content.readuntil(b"\n\n")).decode()
            assert not event.startswith("event: ended"), "the session has ended"
            if event.startswith("event: picture"):
                master = json.loads(event.partition("data: ")[2])["master_id"]
                if master and master != before:
                    return


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("client_ca = '{0}/ca.crt'", "client_ca and tokens go together"),
        ("client_ca = '{0}/none.crt'\ntokens = '{0}/tokens'", "console.client_ca = .*none.crt.*cannot be read"),
        ("client_ca = '{0}/tokens'\ntokens = '{0}/tokens'", "console.client_ca = .*certificates of an authority"),
        ("client_ca = '{0}/ca.crt'\ntokens = '{0}/open'", "console.tokens = .*chmod 600.*644"),
        ("client_ca = '{0}/ca.crt'\ntokens = '{0}/bad'", "console.tokens = .*bad:2: 3 words"),
        ("client_ca = '{0}/ca.crt'\ntokens = '{0}/tokens'", "console.client_ca needs listen.cert_file"),
    ],
)
def test_files_of_logins_that_do_not_fit_are_refused(section: str, said: str, tmp_path: Path) -> None:
    """At the start, by field and limit; never with what might be a token."""
    open_authority(tmp_path, 1)
    for name, line, mode in (("tokens", "ann tw_1", 0o600), ("open", "ann tw_1", 0o644), ("bad", "a b tw_1", 0o600)):
        (tmp_path / name).write_text(f"\n{line}\n", encoding="utf-8")
        (tmp_path / name).chmod(mode)
    path = tmp_path / "gateway.toml"
    path.write_text(f"[listen]\n[console]\n{section.format(tmp_path)}\n", encoding="utf-8")
    with pytest.raises(GatewayConfigError, match=said) as refused:
        read_config(path)
    assert "tw_1" not in str(refused.value)
