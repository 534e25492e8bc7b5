"""The door of the console: what every request passes before a page or a call sees it.

Foreign hosts and origins, changes without the token of their session, bodies that are too large and, in a console that
only reads, every change are refused here. Every answer carries the same headers. An error is JSON that names field,
value and limit; a mistake of ours is a number that the log explains.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tickwheel.client.errors import (
    ClientClosed,
    ClusterUnavailable,
    LimitReached,
    NotFound,
    OutcomeUnknown,
    PermissionRefused,
    RequestRefused,
    TickwheelError,
    refused,
)
from tickwheel.console.asked import json_of
from tickwheel.console.sessions import Sessions, Visitor

_log = logging.getLogger("tickwheel.console")

BODY_BYTES_MAX = 64 << 10
CSRF_HEADER = "x-csrf-token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
CERTIFICATE = "tickwheel.certificate"
"""In the state of a request: the Certificate of its connection, or None. No header can set it."""
ALWAYS_ALLOWED = ("/api/login", "/api/logout")
"""Changes of the session, not of the cluster."""


@dataclass(frozen=True, slots=True)
class DoorConfig:
    """What the door lets in."""

    hosts: frozenset[str]
    """Names under which browsers reach the console, without port; empty: any."""
    cookie: str
    secure: bool
    """The console speaks TLS: cookies go over it alone."""
    read_only: bool


def status_of(error: TickwheelError) -> int:
    """The HTTP status of an error."""
    if error.reason == "UNAUTHENTICATED":
        return 401
    if error.reason == "WRONG_STATE":
        return 409
    for kind, status in (
        (PermissionRefused, 403),
        (NotFound, 404),
        (LimitReached, 429),
        (RequestRefused, 400),
        (OutcomeUnknown, 504),
        (ClusterUnavailable, 503),
        (ClientClosed, 503),
    ):
        if isinstance(error, kind):
            return status
    return 502


def error_answer(error: TickwheelError) -> JSONResponse:
    """The error as JSON, with all that the cluster said."""
    body = {"error": str(error), "reason": error.reason, "details": error.metadata}
    return JSONResponse(body, status_of(error))


async def answer_error(request: Request, error: Exception) -> Response:
    """An error of a route as its answer. A mistake of ours is logged; the browser gets its number."""
    if isinstance(error, TickwheelError):
        return error_answer(error)
    number = secrets.token_hex(4)
    _log.error("request failed, id %s: %s %r", number, request.method, request.url.path, exc_info=error)
    body = {"error": f"the console made a mistake; its log has it under {number}", "reason": "CONSOLE_FAULT"}
    return JSONResponse(body | {"details": {"id": number}}, 500)


class Door:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, config: DoorConfig, sessions: Sessions) -> None:
        self._app = app
        self._config = config
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                headers += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                if not scope["path"].startswith("/static/"):
                    headers.append((b"cache-control", b"no-store"))
            await send(message)

        try:
            self._check(Request(scope))
        except TickwheelError as error:
            await error_answer(error)(scope, receive, with_headers)
        else:
            await self._app(scope, receive, with_headers)

    def _check(self, request: Request) -> None:
        headers = request.headers
        host = foreign_host(request, self._config.hosts)
        if host is not None:
            raise refused("Host", host or "absent", f"one of {', '.join(sorted(self._config.hosts))}; see --host-name")
        if request.method in ("GET", "HEAD"):
            return
        if request.method != "POST":
            raise refused("method", request.method, "GET or POST")
        origin = foreign_origin(request)
        if origin is not None:
            raise forbidden("Origin", origin, "a page of this console")
        if headers.get("content-type", "").split(";")[0].strip() != "application/json":
            raise refused("Content-Type", headers.get("content-type", "absent"), "application/json")
        session_id = request.cookies.get(self._config.cookie, "")
        if not self._sessions.shows(session_id, headers.get(CSRF_HEADER, "")):
            raise forbidden(CSRF_HEADER, "absent or of another session", "that of this session; load the page again")
        if self._config.read_only and request.url.path not in ALWAYS_ALLOWED:
            raise PermissionRefused("this console only reads (--read-only)", "READ_ONLY")


def foreign_host(request: Request, hosts: frozenset[str]) -> str | None:
    """The name, without its port, under which a request came that may not; None: it may. Without `hosts` all may.

    HTTP/1.0 needs no Host (RFC 9112, 3.2): probes of load balancers name none, while browsers always do.
    """
    header = request.headers.get("host")
    if not hosts or (header is None and request.scope["http_version"] == "1.0"):
        return None
    header = header or ""
    host = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0].lower()
    return None if host in hosts else host


def foreign_origin(request: Request) -> str | None:
    """The origin of the page for which a browser sent a request, if that is a page of another host; else None. Other
    programs name no origin."""
    origin = request.headers.get("origin")
    return None if origin is None or origin.partition("://")[2] == request.headers.get("host") else origin


def forbidden(field: str, value: str, limit: str) -> PermissionRefused:
    """The refusal of what a page elsewhere may have made a browser send."""
    metadata = {"field": field, "value": value[:100], "limit": limit}
    return PermissionRefused(f"{field}: {value[:100]}: {limit}", "FORGED", metadata)


async def body_of(request: Request) -> Mapping[str, Any]:
    """The JSON object that a request carries. Raises RequestRefused."""
    content = bytearray()
    try:
        async for part in request.stream():
            content += part
            if len(content) > BODY_BYTES_MAX:
                raise refused("body", f"more than {BODY_BYTES_MAX} bytes", f"at most {BODY_BYTES_MAX} bytes")
    except ClientDisconnect:
        raise refused("body", f"cut off after {len(content)} bytes", "a whole request") from None
    try:
        value = json_of(bytes(content) or b"{}")
    except ValueError as error:
        shown = bytes(content[:40]).decode("utf-8", "replace")
        raise refused("body", shown, f"a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise refused("body", type(value).__name__, "a JSON object")
    return value


def visitor_of(request: Request, config: DoorConfig) -> Visitor:
    """What the browser shows: the cookie of its session, and the certificate of its connection (serving.py)."""
    certificate = request.scope.get("state", {}).get(CERTIFICATE)
    return Visitor(request.cookies.get(config.cookie, ""), certificate)


def set_session(response: Response, config: DoorConfig, session_id: str) -> None:
    """Give the browser its session: until it closes, for this site alone, and never for scripts."""
    response.set_cookie(config.cookie, session_id, path="/", secure=config.secure, httponly=True, samesite="strict")


def cookie_name(port: int, secure: bool) -> str:
    """Browsers share cookies between the ports of a host, so the name has the port."""
    return f"{'__Host-' if secure else ''}tickwheel-console-{port}"
