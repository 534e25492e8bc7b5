"""What the routes of the REST API share: the caller's token and client, and what they have in common in OpenAPI."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote_to_bytes

from fastapi import Depends, Path, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CollectorRegistry

from tickwheel.client import AsyncClient, PermissionRefused
from tickwheel.client.errors import refused
from tickwheel.console.asked import json_of
from tickwheel.console.door import forbidden, foreign_origin
from tickwheel.gateway.clients import Clients
from tickwheel.gateway.idempotency import Idempotency
from tickwheel.gateway.models import Problem, Scheduled
from tickwheel.gateway.problems import MEDIA_TYPE, TITLES, NotJsonError

if TYPE_CHECKING:
    from tickwheel.gateway.traces import GatewayTracing

TOKEN_LENGTH_MAX = 4_096


def _error(status: int, detail: str, reason: str, **facts: str) -> dict[str, Any]:
    example = {"type": "about:blank", "title": TITLES[status], "status": status, "detail": detail, "reason": reason}
    return {"model": Problem, "description": TITLES[status], "content": {MEDIA_TYPE: {"example": example | facts}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    400: _error(400, "the body is not JSON: Expecting value", "INVALID_JSON", field="body"),
    401: _error(401, "a token is needed", "UNAUTHENTICATED"),
    403: _error(403, "user shop has no right schedule to topic reports", "RIGHT_REQUIRED"),
    404: _error(404, "no schedule 'report' exists", "UNKNOWN_NAME", field="name", value="report"),
    409: _error(409, "expected_revision: 7: the schedule has revision 9", "WRONG_STATE", field="expected_revision"),
    413: _error(413, "a body has at most 8,388,608 bytes, and its content-length says how many", "TOO_LARGE"),
    415: _error(415, "content-type: text/plain: application/json", "INVALID_FIELD", field="content-type"),
    422: _error(
        422, "late_max: 2d: 1s to 1d, or 0s", "INVALID_FIELD", field="late_max", value="2d", limit="1s to 1d, or 0s"
    ),
    429: _error(429, "pending_max: limit 1000000 reached; retry after 100 ms", "LIMIT_REACHED"),
    503: _error(503, "no master answered within 15 s", "NO_MASTER"),
    504: _error(504, "the answer was lost", "OUTCOME_UNKNOWN"),
}
"""What every call may answer, for OpenAPI."""


@dataclass(slots=True)
class Api:
    """What the routes share."""

    clients: Clients
    registry: CollectorRegistry
    own_credentials: bool
    """Callers' tokens are not passed on."""
    ready: Callable[[], Awaitable[bool]]
    """Whether the cluster answers."""
    tracing: GatewayTracing | None = None
    """Continues the traces of callers."""
    hosts: frozenset[str] = frozenset()
    """Names under which callers come, without port; empty: any."""
    repeats: Idempotency[tuple[Scheduled, bool]] = field(default_factory=Idempotency)
    """What each request got, and whether the cluster knew it as a repeat."""


def api_of(request: Request) -> Api:
    """The Api of the application."""
    api: Api = request.app.state.api
    return api


def token_of(
    request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))]
) -> str:
    """The caller's token; empty without one."""
    if api_of(request).own_credentials or given is None:
        return ""
    token = given.credentials.strip()
    if len(token) > TOKEN_LENGTH_MAX:
        raise refused("Authorization", f"{len(token)} characters", f"at most {TOKEN_LENGTH_MAX}")
    if not token.isascii() or not token.isprintable():
        raise PermissionRefused("the token has characters that no token has", "UNAUTHENTICATED")
    return token


Token = Annotated[str, Depends(token_of)]


async def client_of(request: Request, token: Token) -> AsyncIterator[AsyncClient]:
    """The client of the caller's token."""
    async with api_of(request).clients.of(token) as client:
        yield client


Caller = Annotated[AsyncClient, Depends(client_of)]
TopicName = Annotated[str, Path(min_length=1, max_length=200)]


class _JsonRequest(Request):
    async def json(self) -> Any:
        """The body. Raises ValueError for what `json_of` does not take."""
        return json_of(await self.body())


class JsonRoute(APIRoute):
    """A route whose body is read by `json_of`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Of FastAPI."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


ONCE = ("authorization", "idempotency-key", "content-type")
"""Headers of which FastAPI would take the first."""


def is_said_once(request: Request) -> None:
    """Raise RequestRefused for a field of the query, or a header that is read, that comes more than once."""
    for name, times in Counter(name for name, _ in request.query_params.multi_items()).items():
        if times > 1:
            raise refused(name, f"given {times} times", "once")
    for name in ONCE:
        if (times := len(request.headers.getlist(name))) > 1:
            raise refused(name, f"given {times} times", "once")


def is_utf8(request: Request) -> None:
    """Raise RequestRefused for a path or query that is not: a name of other bytes would become another name."""
    for place, raw in (("path", request.scope["raw_path"]), ("query", request.scope["query_string"])):
        try:
            unquote_to_bytes(raw).decode()
        except UnicodeDecodeError:
            raise refused(place, raw.decode("ascii", "replace"), "percent-encoded UTF-8") from None


def has_json_body(request: Request) -> None:
    """Raise NotJsonError for a body of another content type. Browsers send such a body for any site unasked."""
    if not has_body(request):
        return
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        shown, limit = given[:100] or "none", "application/json"
        facts = {"field": "content-type", "value": shown, "limit": limit}
        raise NotJsonError(f"content-type: {shown}: {limit}", "INVALID_FIELD", facts)


def has_body(request: Request) -> bool:
    """Whether a body comes with the request."""
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0").strip("0") != ""


def has_no_query(request: Request) -> None:
    """Raise RequestRefused for a query: this call takes none."""
    for name, value in request.query_params.items():
        raise refused(name, value, "no field of this query")


def is_no_forgery(request: Request) -> None:
    """Raise PermissionRefused for a change that a page of another site lets a browser send.

    Without a body a POST needs no content type, so a browser would not ask first whether the page may send it.
    """
    origin = foreign_origin(request)
    if request.method != "GET" and origin is not None:
        raise forbidden("Origin", origin, "a page of this host")


WELL_FORMED = [Depends(is_no_forgery), Depends(is_utf8), Depends(is_said_once), Depends(has_json_body)]
NO_QUERY = [Depends(has_no_query)]
