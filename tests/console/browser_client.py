"""Calls the console as a browser would, without a network: cookies, the token for changes, streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import urlencode

from starlette.types import ASGIApp, Message

HOST = "127.0.0.1:7780"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the console."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class BrowserClient:
    """One browser: its cookies and, after `open`, its token for changes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.cookies: dict[str, str] = {}
        self.csrf = ""

    async def open(self) -> Any:
        """Load the first page and its session."""
        assert (await self.call("GET", "/")).status == 200
        session = (await self.call("GET", "/api/session")).json()
        self.csrf = session["csrf"]
        return session

    async def read(self, name: str, status: int = 200, /, **fields: object) -> Any:
        """A call that reads."""
        answer = await self.call("GET", f"/api/{name}", query=fields)
        assert answer.status == status, (answer.status, answer.body)
        return answer.json()

    async def change(self, name: str, body: Mapping[str, object], status: int = 200) -> Any:
        """A call that changes."""
        answer = await self.call("POST", f"/api/{name}", body=json.dumps(body).encode())
        assert answer.status == status, (answer.status, answer.body)
        return answer.json()

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: bytes | None = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request; `headers` replace or remove (empty) those of a browser. Without a body it leaves within it."""
        sent: list[Message] = []
        whole: Message = {"type": "http.request", "body": body, "more_body": False}
        parts: list[Message] = [{"type": "http.disconnect"} if body is None else whole]

        async def receive() -> Message:
            if not parts:
                await asyncio.Event().wait()
            return parts.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(self._scope(method, path, query or {}, headers or {}), receive, send)
        return self._answer(sent)

    @contextlib.asynccontextmanager
    async def stream(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The parts of an answer as they come; the browser leaves at the end."""
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        left = asyncio.Event()
        parts: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                queue.put_nowait(message.get("body", b""))

        async def taken() -> AsyncIterator[bytes]:
            while True:
                yield await queue.get()

        task = asyncio.create_task(self._run(self._scope("GET", path, {}, {}), receive, send))
        try:
            yield taken()
        finally:
            left.set()
            await task

    async def _run(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    def _scope(self, method: str, path: str, query: Mapping[str, object], headers: Mapping[str, str]) -> dict[str, Any]:
        found = {"host": HOST, "cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        if method == "POST":
            found |= {"content-type": "application/json", "x-csrf-token": self.csrf, "origin": f"http://{HOST}"}
        found |= headers
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": urlencode(query, doseq=True).encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in found.items() if value],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 7780),
        }

    def _answer(self, sent: list[Message]) -> Answer:
        pairs = [(name.decode(), value.decode()) for name, value in sent[0]["headers"]]
        for name, value in pairs:
            if name == "set-cookie":
                self.cookies |= {key: morsel.value for key, morsel in SimpleCookie(value).items()}
        body = b"".join(message.get("body", b"") for message in sent[1:])
        return Answer(sent[0]["status"], dict(pairs), body)


@contextlib.asynccontextmanager
async def running(app: ASGIApp) -> AsyncIterator[ASGIApp]:
    """The application between its start and its end."""
    said: asyncio.Queue[Message] = asyncio.Queue()
    heard: asyncio.Queue[Message] = asyncio.Queue()

    async def receive() -> Message:
        return await said.get()

    async def send(message: Message) -> None:
        heard.put_nowait(message)

    task = asyncio.ensure_future(_lifespan(app, receive, send))
    said.put_nowait({"type": "lifespan.startup"})
    assert (await heard.get())["type"] == "lifespan.startup.complete"
    try:
        yield app
    finally:
        said.put_nowait({"type": "lifespan.shutdown"})
        assert (await heard.get())["type"] == "lifespan.shutdown.complete"
        await task


async def _lifespan(app: ASGIApp, receive: Any, send: Any) -> None:
    await app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)
