"""The application: pages, calls, the stream of pictures, login.

Every page is the same document; its script shows what the path names. `application` composes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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

from tickwheel.client.errors import LimitReached, PermissionRefused, TickwheelError, refused
from tickwheel.console import shown
from tickwheel.console.asked import Asked
from tickwheel.console.certificates import TOKEN_CHARACTERS_MAX
from tickwheel.console.changes import CHANGES
from tickwheel.console.door import Door, DoorConfig, answer_error, body_of, set_session, visitor_of
from tickwheel.console.reads import READS, query
from tickwheel.console.reports import Reports
from tickwheel.console.sessions import Sessions, View, Visitor
from tickwheel.console.shown import Json

STATIC = Path(__file__).parent / "static"
PAGES = (
    *("/", "/topics", "/groups", "/pending", "/message", "/dead", "/sweeps", "/schedules"),
    *("/nodes", "/settings", "/access", "/audit", "/reports", "/login"),
)
_log = logging.getLogger("tickwheel.console")

NAME_CHARACTERS_MAX = 100
"""Shown of a certificate's name."""
STREAMS_MAX = 1_000
"""Open pages: each keeps a connection."""
SESSION_S = 2.0
"""The frame of a page waits so long for who its visitor is: without a master it has to show that there is none."""
LOGINS_AT_ONCE = 8
"""Tokens that are tried on the cluster at a time; others wait in turn. Each opens connections, and the nodes take a
bounded number from one address: strangers must not use up those of the users."""

Read = Callable[[View, Request], Awaitable[Json]]
Change = Callable[[View, Any], Awaitable[Json]]


class Console:
    """The routes' common state."""

    def __init__(self, config: DoorConfig, sessions: Sessions, reports: Reports | None) -> None:
        self._config = config
        self._sessions = sessions
        self._reports = reports
        self._streams = 0
        self._trying = asyncio.Semaphore(LOGINS_AT_ONCE)

    def _visitor(self, request: Request) -> Visitor:
        return visitor_of(request, self._config)

    async def _view(self, request: Request) -> View:
        return await self._sessions.view(self._visitor(request))

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
        if not self._visitor(request).session_id:
            set_session(answer, self._config, self._sessions.new_id())
        return answer

    async def session(self, request: Request) -> Response:
        """The caller's rights at the cluster, what this console allows, and the token for changes."""
        visitor = self._visitor(request)
        made = not visitor.session_id
        if made:
            visitor = Visitor(self._sessions.new_id(), visitor.certificate)
        body: Json = {
            "csrf": self._sessions.csrf(visitor.session_id),
            "read_only": self._config.read_only,
            "reports": self._reports is not None,
            "logged_in": bool(self._sessions.token(visitor)),
            "certificate": self._certificate(visitor),
            "login_needed": False,
            "caller": None,
            "trouble": "",
        }
        try:
            view = await self._sessions.view(visitor)
            async with asyncio.timeout(SESSION_S):
                body["caller"] = shown.caller(await view.client.access.who_am_i())
        except TimeoutError:
            body["trouble"] = f"no master answered within {SESSION_S:g} s"
        except PermissionRefused as error:
            body |= {"login_needed": error.reason == "UNAUTHENTICATED", "trouble": str(error)}
        except TickwheelError as error:
            body["trouble"] = str(error)
        answer = JSONResponse(body)
        if made:
            set_session(answer, self._config, visitor.session_id)
        return answer

    def _certificate(self, visitor: Visitor) -> Json | None:
        """The certificate that the browser shows, and what a login takes that it lacks; None: it shows none."""
        if visitor.certificate is None:
            return None
        trouble = ""
        try:
            self._sessions.certified(visitor.certificate)
        except PermissionRefused as error:
            trouble = error.metadata["limit"]
        return {"name": visitor.certificate.name[:NAME_CHARACTERS_MAX], "trouble": trouble}

    async def login(self, request: Request) -> Response:
        """Try a token on the cluster and keep it, under a new session: the one that was typed, or the one that the
        token file has for the browser's certificate."""
        asked = Asked(await body_of(request), ("token", "certificate"))
        visitor = self._visitor(request)
        certificate = None
        if asked.flag("certificate"):
            if asked.has("token"):
                raise refused("token", "given", "absent in a login by certificate")
            certificate = visitor.certificate
            if certificate is None:
                raise refused("certificate", "absent", "a connection with a client certificate; see --client-ca")
            token = self._sessions.certified(certificate)
        else:
            token = asked.text("token", length_max=TOKEN_CHARACTERS_MAX).strip()
        if not token.isascii() or not token.isprintable():
            raise PermissionRefused("the token has characters that no token has", "UNAUTHENTICATED", {"field": "token"})
        async with self._trying, self._sessions.open_as(token) as client:
            caller = await client.access.who_am_i()
        if not caller.rights:
            raise PermissionRefused(
                "this cluster has no rights switched on: nobody needs to log in", "WRONG_STATE", {"field": "token"}
            )
        if certificate is not None and caller.name != certificate.name:
            text = f"the console's token file has a token of another user for {certificate.name}"
            metadata = {"field": "certificate", "value": certificate.name, "limit": "the token of this user (--tokens)"}
            _log.error("%s: its token is that of %s", text, caller.name)
            raise PermissionRefused(text, "UNAUTHENTICATED", metadata)
        self._sessions.log_out(visitor.session_id)
        session_id = self._sessions.log_in(token, certificate)
        answer = JSONResponse({"caller": shown.caller(caller), "csrf": self._sessions.csrf(session_id)})
        set_session(answer, self._config, session_id)
        return answer

    async def logout(self, request: Request) -> Response:
        """Forget the token."""
        self._sessions.log_out(self._visitor(request).session_id)
        session_id = self._sessions.new_id()
        answer = JSONResponse({"csrf": self._sessions.csrf(session_id)})
        set_session(answer, self._config, session_id)
        return answer

    async def stream(self, request: Request) -> Response:
        """The pictures of the cluster as server-sent events, for as long as the session that asked for them lasts."""
        if self._streams >= STREAMS_MAX:
            raise LimitReached(
                f"{STREAMS_MAX} pages are open", "LIMIT_REACHED", {"field": "pages", "limit": str(STREAMS_MAX)}
            )
        visitor = self._visitor(request)
        token = self._sessions.token(visitor)
        view = await self._sessions.view(visitor)

        async def events() -> AsyncIterator[bytes]:
            self._streams += 1
            pictures = view.watch.listen()
            try:
                async for part in pictures:
                    if self._sessions.token(visitor) != token or view.watch.refused:
                        yield b"event: ended\ndata: {}\n\n"
                        break
                    yield part
            finally:
                self._streams -= 1
                await pictures.aclose()

        return StreamingResponse(events(), media_type="text/event-stream")

    async def reports(self, request: Request) -> Response:
        """A page of the reports of chaos runs."""
        page = query(request, "page").whole("page", 1, 1_000_000, 1)
        reports = await self._reports_for(request)
        return JSONResponse(await reports.page(page))

    async def report(self, request: Request) -> Response:
        """One report of a chaos run."""
        name = query(request, "name").text("name")
        reports = await self._reports_for(request)
        return JSONResponse(await reports.one(name))

    async def _reports_for(self, request: Request) -> Reports:
        """The reports, for whoever the cluster knows: they lie beside the console, so the cluster cannot guard them."""
        if self._reports is None:
            raise refused("--reports", "absent", "the directory with the runs, given when the console starts")
        view = await self._view(request)
        await view.client.access.who_am_i()
        return self._reports


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    details = {"field": "path", "value": request.url.path[:100], "limit": "a page or call of this console"}
    return JSONResponse({"error": "there is nothing here", "reason": "NOT_FOUND", "details": details}, status)


def application(sessions: Sessions, config: DoorConfig, reports: Reports | None = None) -> ASGIApp:
    """The whole console as an ASGI application. Its lifespan closes the sessions."""
    console = Console(config, sessions, reports)

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
        Route("/api/reports", console.reports),
        Route("/api/report", console.report),
        Route("/api/login", console.login, methods=["POST"]),
        Route("/api/logout", console.logout, methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    # Starlette raises Exception again once it is answered: uvicorn would log it a second time.
    handlers = {404: _no_route, 405: _no_route, TickwheelError: answer_error}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    return Door(app, config, sessions)
