"""The application: pages, calls, the stream of pictures, login.

Every page is the same document; its script shows what the path names. `application` composes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from tickwheel.client.errors import LimitReached, PermissionRefused, TickwheelError
from tickwheel.console import shown
from tickwheel.console.asked import Asked
from tickwheel.console.changes import CHANGES
from tickwheel.console.door import Door, DoorConfig, answer_error, body_of, set_session
from tickwheel.console.reads import READS
from tickwheel.console.sessions import Sessions, View
from tickwheel.console.shown import Json

STATIC = Path(__file__).parent / "static"
PAGES = (
    *("/", "/topics", "/groups", "/pending", "/message", "/dead", "/sweeps", "/schedules"),
    *("/nodes", "/settings", "/access", "/audit", "/login"),
)
STREAMS_MAX = 1_000
"""Open pages: each keeps a connection."""
TOKEN_CHARACTERS_MAX = 256

Read = Callable[[View, Request], Awaitable[Json]]
Change = Callable[[View, Any], Awaitable[Json]]


class Console:
    """The routes' common state."""

    def __init__(self, config: DoorConfig, sessions: Sessions) -> None:
        self._config = config
        self._sessions = sessions
        self._streams = 0

    def _session_id(self, request: Request) -> str:
        return request.cookies.get(self._config.cookie, "")

    async def _view(self, request: Request) -> View:
        return await self._sessions.view(self._session_id(request))

    def read(self, ask: Read) -> Callable[[Request], Awaitable[Response]]:
        """A route that reads."""

        async def route(request: Request) -> Response:
            return JSONResponse(await ask(await self._view(request), request))

        return route

    def change(self, do: Change) -> Callable[[Request], Awaitable[Response]]:
        """A route that changes."""

        async def route(request: Request) -> Response:
            return JSONResponse(await do(await self._view(request), await body_of(request)))

        return route

    async def page(self, request: Request) -> Response:
        """The document; a browser without a session gets one."""
        answer = FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")
        if not self._session_id(request):
            set_session(answer, self._config, self._sessions.new_id())
        return answer

    async def session(self, request: Request) -> Response:
        """The caller's rights at the cluster, what this console allows, and the token for changes."""
        session_id = self._session_id(request)
        made = not session_id
        if made:
            session_id = self._sessions.new_id()
        body: Json = {
            "csrf": self._sessions.csrf(session_id),
            "read_only": self._config.read_only,
            "logged_in": bool(self._sessions.token(session_id)),
            "login_needed": False,
            "caller": None,
            "trouble": "",
        }
        try:
            view = await self._sessions.view(session_id)
            body["caller"] = shown.caller(await view.client.access.who_am_i())
        except PermissionRefused as error:
            body |= {"login_needed": error.reason == "UNAUTHENTICATED", "trouble": str(error)}
        except TickwheelError as error:
            body["trouble"] = str(error)
        answer = JSONResponse(body)
        if made:
            set_session(answer, self._config, session_id)
        return answer

    async def login(self, request: Request) -> Response:
        """Try a token on the cluster and keep it, under a new session."""
        token = Asked(await body_of(request), ("token",)).text("token", length_max=TOKEN_CHARACTERS_MAX).strip()
        if not token.isascii() or not token.isprintable():
            raise PermissionRefused("the token has characters that no token has", "UNAUTHENTICATED", {"field": "token"})
        async with self._sessions.open_as(token) as client:
            caller = await client.access.who_am_i()
        if not caller.rights:
            raise PermissionRefused(
                "this cluster has no rights switched on: nobody needs to log in", "WRONG_STATE", {"field": "token"}
            )
        self._sessions.log_out(self._session_id(request))
        session_id = self._sessions.log_in(token)
        answer = JSONResponse({"caller": shown.caller(caller), "csrf": self._sessions.csrf(session_id)})
        set_session(answer, self._config, session_id)
        return answer

    async def logout(self, request: Request) -> Response:
        """Forget the token."""
        self._sessions.log_out(self._session_id(request))
        session_id = self._sessions.new_id()
        answer = JSONResponse({"csrf": self._sessions.csrf(session_id)})
        set_session(answer, self._config, session_id)
        return answer

    async def stream(self, request: Request) -> Response:
        """The pictures of the cluster as server-sent events."""
        if self._streams >= STREAMS_MAX:
            raise LimitReached(
                f"{STREAMS_MAX} pages are open", "LIMIT_REACHED", {"field": "pages", "limit": str(STREAMS_MAX)}
            )
        view = await self._view(request)

        async def events() -> AsyncIterator[bytes]:
            self._streams += 1
            pictures = view.watch.listen()
            try:
                async for part in pictures:
                    yield part
            finally:
                self._streams -= 1
                await pictures.aclose()

        return StreamingResponse(events(), media_type="text/event-stream")


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    details = {"field": "path", "value": request.url.path[:100], "limit": "a page or call of this console"}
    return JSONResponse({"error": "there is nothing here", "reason": "NOT_FOUND", "details": details}, status)


def application(sessions: Sessions, config: DoorConfig) -> ASGIApp:
    """The whole console as an ASGI application. Its lifespan closes the sessions."""
    console = Console(config, sessions)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await sessions.close()

    routes = [
        *(Route(path, console.page) for path in PAGES),
        *(Route(f"/api/{name}", console.read(ask)) for name, ask in READS.items()),
        *(Route(f"/api/{name}", console.change(do), methods=["POST"]) for name, do in CHANGES.items()),
        Route("/api/session", console.session),
        Route("/api/stream", console.stream),
        Route("/api/login", console.login, methods=["POST"]),
        Route("/api/logout", console.logout, methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    # Starlette raises Exception again once it is answered: uvicorn would log it a second time.
    handlers = {404: _no_route, 405: _no_route, TickwheelError: answer_error}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    return Door(app, config, sessions)
