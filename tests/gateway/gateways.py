"""Gateways in the process of a test, and calls to their REST API."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from opentelemetry.sdk.trace import TracerProvider
from yarl import URL

from tickwheel.client import AsyncClient
from tickwheel.gateway.config import read_config
from tickwheel.gateway.running import Gateway
from tickwheel.node.local_cluster import LocalCluster

SOON_S = 60.0
LISTEN = "[listen]\nbind = '127.0.0.1:0'\n"
Call = Callable[..., Awaitable[tuple[int, Any, Any]]]


@asynccontextmanager
async def running(
    cluster: LocalCluster, path: Path, text: str, own: str = "", spans: TracerProvider | None = None
) -> AsyncIterator[Gateway]:
    """A gateway of this configuration; `own` is its own token, `spans` go with `traces = true`."""
    await asyncio.to_thread(path.write_text, text)
    gateway = Gateway(
        read_config(path), lambda token: AsyncClient(cluster.addresses, token=own if token is None else token), spans
    )
    task = asyncio.ensure_future(gateway.run())
    try:
        yield gateway
    finally:
        gateway.stop()
        await asyncio.wait_for(task, SOON_S)


@asynccontextmanager
async def api(
    cluster: LocalCluster, path: Path, text: str = LISTEN, spans: TracerProvider | None = None
) -> AsyncIterator[Call]:
    """A gateway with the REST API; calls it and returns status, JSON and headers."""
    async with (
        running(cluster, path, text, spans=spans) as gateway,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SOON_S)) as session,
    ):
        host, port = await asyncio.wait_for(gateway.listening(), SOON_S)

        async def call(method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
            if body is not None and not isinstance(body, bytes | io.BytesIO):
                body = json.dumps(body).encode()
            data = io.BytesIO(body) if isinstance(body, bytes) else body
            headers.setdefault("content-type", "application/json")
            async with session.request(
                method, URL(f"http://{host}:{port}{path}", encoded=True), data=data, headers=headers
            ) as response:
                text = await response.text()
                kind = response.content_type
                return response.status, json.loads(text) if "json" in kind else text, response.headers

        yield call
