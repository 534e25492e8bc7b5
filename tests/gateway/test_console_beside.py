"""The console and the REST API of one gateway, on a real node: each keeps its own guard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from fastapi.routing import APIRoute

from tests.gateway.gateways import SOON_S, running
from tickwheel.client import AsyncClient
from tickwheel.console.app import PAGES
from tickwheel.console.changes import CHANGES
from tickwheel.console.reads import READS
from tickwheel.gateway.app import itself, messages
from tickwheel.gateway.beside import of_rest
from tickwheel.gateway.running import Gateway
from tickwheel.gateway.schedules import schedules
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
