"""The REST API, as an ASGI application. Its OpenAPI document is at /openapi.json."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import Counter, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from tickwheel.client import (
    AsyncClient,
    CancelOutcome,
    KeyConflict,
    KeyOutcome,
    NotFound,
    PermissionRefused,
    RequestRefused,
    RescheduleOutcome,
    TickwheelError,
)
from tickwheel.client.errors import refused
from tickwheel.console.door import foreign_host
from tickwheel.gateway.api import ERRORS, NO_QUERY, WELL_FORMED, Api, Caller, JsonRoute, Token, TopicName, api_of
from tickwheel.gateway.idempotency import KEY_LENGTH_MAX, KeyReusedError, unique_key_of
from tickwheel.gateway.models import (
    Cancelled,
    Look,
    MessageView,
    Moved,
    NewMessage,
    NewTopic,
    Page,
    Pending,
    Scheduled,
    TopicView,
    When,
    moment_of,
)
from tickwheel.gateway.problems import (
    MEDIA_TYPE,
    in_the_callers_words,
    not_json,
    problem,
    problem_of,
    problem_of_validation,
)
from tickwheel.gateway.schedules import schedules

_log = logging.getLogger("tickwheel.gateway")

BODY_BYTES_MAX = 8 << 20
SMALL_BYTES = 64 << 10
LARGE_BYTES_MAX = 256 << 20
"""Of all requests at a time whose bodies are larger than SMALL_BYTES; small ones are bounded by the connections."""
MessageId = Annotated[str, Path(min_length=1, max_length=100, description="As `id` of the receipt.")]
UniqueKey = Annotated[str, Path(max_length=255, description="Percent-encoded.")]

messages = APIRouter(prefix="/v1", responses=ERRORS, dependencies=WELL_FORMED, route_class=JsonRoute)
itself = APIRouter(include_in_schema=False)


@messages.post(
    "/topics/{topic}/messages",
    status_code=201,
    response_model=Scheduled,
    responses={200: {"model": Scheduled, "description": "Another message holds the unique key; nothing is scheduled"}},
    summary="Schedule a message",
    dependencies=NO_QUERY,
)
async def schedule(
    topic: TopicName,
    message: NewMessage,
    request: Request,
    response: Response,
    token: Token,
    idempotency_key: Annotated[
        str, Header(max_length=KEY_LENGTH_MAX, description="A repeat with the same key gets the first answer.")
    ] = "",
) -> Scheduled | JSONResponse:
    """The answer means that the message is on stable storage of a majority."""
    api = api_of(request)

    async def work() -> tuple[Scheduled, bool]:
        async with api.clients.of(token) as client:  # it may outlive this request
            with in_the_callers_words(message):
                if idempotency_key and message.unique_key is None:
                    return await _schedule_once(client, topic, message, unique_key_of(token, idempotency_key))
                receipt = await client.schedule(topic, message.payload(), **message.message_options())
            return Scheduled.of(receipt, topic=topic), False

    if not idempotency_key:
        scheduled, _ = await work()
        return _with_status(scheduled, response)
    content = f"{topic}\n{message.model_dump_json()}".encode()
    try:
        (scheduled, known), repeated = await api.repeats.once(token, idempotency_key, content, work)
    except KeyReusedError:
        return problem(
            409, "the key came before with another message", "KEY_REUSED",
            field="Idempotency-Key", value=idempotency_key, limit="a new key for each message",
        )  # fmt: skip
    if known or repeated:
        response.headers["Idempotent-Replayed"] = "true"
    return _with_status(scheduled, response)


def _with_status(scheduled: Scheduled, response: Response) -> Scheduled:
    if scheduled.key_outcome is KeyOutcome.USED_EXISTING:
        response.status_code = 200
    return scheduled


async def _schedule_once(
    client: AsyncClient, topic: str, message: NewMessage, unique_key: str
) -> tuple[Scheduled, bool]:
    """Schedule a message unless one is pending under this key; then the answer is that message's. Raises KeyReusedError
    if that one has other content, as far as the caller may read it."""
    options = message.message_options()
    options["unique_key"], options["on_key_conflict"] = unique_key, KeyConflict.USE_EXISTING
    receipt = await client.schedule(topic, message.payload(), **options)
    known = receipt.key_outcome is KeyOutcome.USED_EXISTING
    if known:
        try:
            held = await client.get(receipt.id, content=True)
        except (NotFound, PermissionRefused):
            held = None
        if held is not None and held.payload and not message.is_content_of(held):
            raise KeyReusedError
    return Scheduled.of(receipt, topic=topic, key_outcome=KeyOutcome.FREE), known


@messages.get("/messages/{id}", summary="A message and its state")
async def get(id: MessageId, client: Caller, look: Annotated[Look, Query()]) -> MessageView:
    """`content`: with payload, key, tags and headers."""
    return MessageView.of_message(await client.get(id, content=look.content))


@messages.delete("/messages/{id}", response_model=Cancelled, summary="Cancel a message", dependencies=NO_QUERY)
async def cancel(id: MessageId, client: Caller) -> Cancelled | JSONResponse:
    """The outcome is final. 409: it was dispatched before."""
    outcome = await client.cancel(id)
    if outcome is CancelOutcome.CANCELLED:
        return Cancelled(id=id, outcome=outcome)
    return _not_done("id", id, outcome, "cancelled")


@messages.patch("/messages/{id}", response_model=Moved, summary="Move a message to another time", dependencies=NO_QUERY)
async def reschedule(id: MessageId, when: When, client: Caller) -> Moved | JSONResponse:
    """The outcome is final. The message keeps its id."""
    with in_the_callers_words(when):
        outcome, receipt = await client.reschedule(id, **when.options())
    if receipt is None:
        return _not_done("id", id, outcome, "moved")
    return Moved(id=id, outcome=outcome, due=receipt.due, due_ms=receipt.due_ms)


BY_KEY = "/topics/{topic}/unique-keys/{unique_key:path}"
"""A key may have slashes, which arrive decoded."""


@messages.get(BY_KEY, summary="The message that holds a unique key")
async def get_by_key(
    topic: TopicName, unique_key: UniqueKey, client: Caller, look: Annotated[Look, Query()]
) -> MessageView:
    """404: no message holds it. `content`: with payload, key, tags and headers."""
    with in_the_callers_words():
        return MessageView.of_message(await client.get_by_key(topic, unique_key, content=look.content))


@messages.delete(
    BY_KEY, response_model=Cancelled, summary="Cancel the message that holds a unique key", dependencies=NO_QUERY
)
async def cancel_by_key(topic: TopicName, unique_key: UniqueKey, client: Caller) -> Cancelled | JSONResponse:
    """The outcome is final. 404: no message holds the key. 409: it was dispatched before."""
    with in_the_callers_words():
        outcome, id = await client.cancel_by_key(topic, unique_key)
    if outcome is CancelOutcome.CANCELLED:
        return Cancelled(id=id, outcome=outcome)
    return _not_done("unique_key", unique_key, outcome, "cancelled")


@messages.patch(
    BY_KEY,
    response_model=Moved,
    summary="Move the message that holds a unique key to another time",
    dependencies=NO_QUERY,
)
async def reschedule_by_key(
    topic: TopicName, unique_key: UniqueKey, when: When, client: Caller
) -> Moved | JSONResponse:
    """The outcome is final. The message keeps its key."""
    with in_the_callers_words(when):
        outcome, receipt = await client.reschedule_by_key(topic, unique_key, **when.options())
    if receipt is None:
        return _not_done("unique_key", unique_key, outcome, "moved")
    return Moved(id=receipt.id, outcome=outcome, due=receipt.due, due_ms=receipt.due_ms)


@messages.get("/topics/{topic}/messages", response_model=Pending, summary="Pending messages, in order of delivery")
async def pending(topic: TopicName, client: Caller, page: Annotated[Page, Query()]) -> Pending:
    """`after`: `next` of the page before, with the same conditions. A page may be empty and still have a next one."""
    try:
        found = await client.pending_page(
            topic,
            content=page.content,
            meta=True,
            page_size=page.limit,
            after=page.after,
            tag=page.tag,
            key=page.key,
            due_from=moment_of(page.due_from) if page.due_from is not None else None,
            due_before=moment_of(page.due_before) if page.due_before is not None else None,
        )
    except RequestRefused as error:
        if error.field != "page_token":
            raise
        raise refused("after", page.after, "`next` of the page before, with the same conditions") from None
    return Pending(messages=[MessageView.of_message(message) for message in found.messages], next=found.next)


@messages.get("/topics", summary="All topics", dependencies=NO_QUERY)
async def topics(client: Caller) -> list[TopicView]:
    """In the order in which they were made."""
    return [TopicView.of(topic) for topic in await client.admin.topics()]


@messages.put("/topics/{topic}", summary="Create a topic; no error if the same one exists", dependencies=NO_QUERY)
async def create_topic(topic: TopicName, kind: NewTopic, client: Caller) -> TopicView:
    """Topics also come into being with their first message, if the cluster's settings allow that."""
    return TopicView.of(await client.admin.create_topic(topic, fifo=kind.fifo))


@itself.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(generate_latest(api_of(request).registry), media_type=CONTENT_TYPE_LATEST)


@itself.get("/livez")
async def livez() -> Response:
    """Whether the process answers."""
    return PlainTextResponse("ok")


@itself.get("/readyz")
async def readyz(request: Request) -> Response:
    """Whether a master answers."""
    return PlainTextResponse("ok") if await api_of(request).ready() else PlainTextResponse("no master answers", 503)


def make_app(api: Api) -> FastAPI:
    """The application."""
    app = FastAPI(
        title="tickwheel",
        version="1",
        description="Schedule messages for later, over HTTP. See docs/HTTP.md.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.api = api
    app.include_router(messages)
    app.include_router(schedules)
    app.include_router(itself)
    requests = Counter(
        "tickwheel_gateway_requests", "Requests to the REST API, by route and status.", ["route", "status"],
        registry=api.registry,
    )  # fmt: skip

    large = _Large()

    async def bounded_and_counted(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        traced = api.tracing.of_request(request.headers) if api.tracing is not None else nullcontext()
        try:
            with traced, large.taking(request) as refusal:
                response = _foreign(request, api.hosts) or refusal or await call_next(request)
        except Exception:  # a mistake of ours fails this request alone
            number = uuid.uuid4().hex
            _log.exception("request %s: %s %r failed", number, request.method, request.url.path)
            response = problem(500, f"the gateway failed; its log has this under {number}", "GATEWAY_FAULT")
        route = request.scope.get("route")
        requests.labels(getattr(route, "path", "none"), str(response.status_code)).inc()
        return response

    app.middleware("http")(bounded_and_counted)
    app.openapi = lambda: _with_problems(FastAPI.openapi(app))  # type: ignore[method-assign]
    app.exception_handler(TickwheelError)(_of_cluster)
    app.exception_handler(RequestValidationError)(_of_validation)
    app.exception_handler(HTTPException)(_of_http)
    return app


def _with_problems(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document, with the models of errors under their own media type."""
    for calls in document["paths"].values():
        for call in calls.values():
            for response in call["responses"].values():
                content = response.get("content", {})
                if MEDIA_TYPE in content and "application/json" in content:
                    content[MEDIA_TYPE].update(content.pop("application/json"))
    return document


async def _of_cluster(request: Request, error: TickwheelError) -> JSONResponse:
    return problem_of(error)


async def _of_validation(request: Request, error: RequestValidationError) -> JSONResponse:
    return problem_of_validation(error)


async def _of_http(request: Request, error: HTTPException) -> JSONResponse:
    if error.status_code == 400 and error.__cause__ is not None:  # what `json_of` does not take
        return not_json(str(error.__cause__))
    detail = str(error.detail)
    if error.status_code == 404:
        detail = f"{request.url.path[:200]}: no such path; /openapi.json has them all"
    return problem(error.status_code, detail, "HTTP", headers=error.headers)


def _foreign(request: Request, hosts: frozenset[str]) -> JSONResponse | None:
    """The refusal of a request under another name: a page elsewhere could have it lead here (DNS rebinding)."""
    host = foreign_host(request, hosts)
    if host is None:
        return None
    limit = f"one of {', '.join(sorted(hosts))}; see host_names"
    return problem(400, f"Host: {host[:100]}: {limit}", "INVALID_FIELD", field="Host", value=host, limit=limit)


class _Large:
    """Bytes of the large bodies that are under way."""

    def __init__(self) -> None:
        self._bytes = 0

    @contextmanager
    def taking(self, request: Request) -> Iterator[JSONResponse | None]:
        """The refusal of a body that is too large, or for which there is no room now; None for one that may come."""
        text = request.headers.get("content-length", "0")
        stated = "transfer-encoding" not in request.headers and text.isascii() and text.isdecimal()
        length = int(text[:20]) if stated else BODY_BYTES_MAX + 1
        if length > BODY_BYTES_MAX:
            yield problem(
                413, f"a body has at most {BODY_BYTES_MAX:,} bytes, and its content-length says how many", "TOO_LARGE",
                field="content-length", value=text, limit=f"{BODY_BYTES_MAX:,}",
            )  # fmt: skip
            return
        counted = length if length > SMALL_BYTES else 0
        if counted and self._bytes + counted > LARGE_BYTES_MAX:
            yield problem(
                429, f"large bodies have {LARGE_BYTES_MAX:,} bytes at a time; retry later", "LIMIT_REACHED",
                field="content-length", value=text, limit=f"{LARGE_BYTES_MAX:,} of all at a time",
                headers={"Retry-After": "1"},
            )  # fmt: skip
            return
        self._bytes += counted
        try:
            yield None
        finally:
            self._bytes -= counted


def _not_done(field: str, value: str, outcome: CancelOutcome | RescheduleOutcome, done: str) -> JSONResponse:
    """`field`: by what the message was named."""
    status = 404 if outcome.value == "NOT_FOUND" else 409
    what = outcome.value.replace("_", " ").lower()
    name = value if field == "id" else f"of {field.replace('_', ' ')} {value!r}"
    return problem(
        status, f"message {name} was not {done}: {what}", outcome.value, field=field, value=value,
        limit="a message that is pending",
    )  # fmt: skip
