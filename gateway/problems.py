"""Errors as HTTP has them: status and problem details (RFC 9457), with field, value and limit where they are known."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from tickwheel.client import (
    ClusterUnavailable,
    KeyTaken,
    LimitReached,
    NotFound,
    OutcomeUnknown,
    PermissionRefused,
    RequestRefused,
    TickwheelError,
)
from tickwheel.client.errors import refused
from tickwheel.gateway.models import Content, Problem, When
from tickwheel.node.times import span_text

MEDIA_TYPE = "application/problem+json"
TITLES = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Not permitted",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Too large",
    415: "Wrong media type",
    422: "Not allowed",
    429: "Limit reached",
    500: "Internal error",
    503: "Cluster unavailable",
    504: "Outcome unknown",
}
VALUE_LENGTH_MAX = 200
_LIMITS = {"missing": "required", "model_attributes_type": "a JSON object", "int_type": "a whole number"}
"""By kind of error, where pydantic speaks of Python or of forms."""


class NotJsonError(RequestRefused):
    """The caller's: the body has another content type."""


def problem(
    status: int,
    detail: str,
    reason: str,
    *,
    field: str = "",
    value: str = "",
    limit: str = "",
    id: str = "",
    due_ms: int = 0,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The response for an error."""
    body = Problem(
        title=TITLES.get(status, "Error"),
        status=status,
        detail=detail,
        reason=reason,
        field=field,
        value=value[:VALUE_LENGTH_MAX],
        limit=limit,
        id=id,
        due_ms=due_ms,
    )
    content = body.model_dump(exclude_defaults=True) | {"type": body.type}
    return JSONResponse(content, status, dict(headers or {}), MEDIA_TYPE)


def not_json(why: str) -> JSONResponse:
    """The response for a body that cannot be read."""
    limit = "JSON in UTF-8 that says each field once"
    return problem(400, f"the body is not JSON: {why}", "INVALID_JSON", field="body", limit=limit)


def problem_of(error: TickwheelError) -> JSONResponse:
    """The response for an error of the cluster or the client."""
    if isinstance(error, KeyTaken):
        return problem(
            409, str(error), error.reason, field="unique_key", value=error.unique_key, limit=error.limit,
            id=error.id, due_ms=error.due_ms,
        )  # fmt: skip
    headers = {}
    if isinstance(error, LimitReached):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    data = error.metadata
    return problem(
        _status_of(error),
        str(error),
        error.reason or type(error).__name__,
        field=data.get("field", ""),
        value=data.get("value", ""),
        limit=data.get("limit", ""),
        headers=headers,
    )


@contextmanager
def in_the_callers_words(given: When | None = None) -> Iterator[None]:
    """Raises a refusal of a message with the field, value and units of the REST API. `given`: what was asked for."""
    try:
        yield
    except (RequestRefused, NotFound) as error:
        full = error.metadata.get("field", "")
        wire = re.sub(r"\[\d+\]$", "", full)
        name, value = _given_as(wire, given)
        if name == full:
            raise
        facts = error.metadata | {"field": name}
        if value and error.reason == "INVALID_FIELD":
            limit = re.sub(r" \(\d+\)", "", error.metadata.get("limit", ""))
            limit = re.sub(r"\d+(?: ms)?", lambda ms: span_text(int(ms[0].removesuffix(" ms"))), limit)
            raise refused(name, value, limit) from None
        raise type(error)(str(error).replace(full, name), error.reason, facts) from None


def _given_as(wire: str, given: When | None) -> tuple[str, str]:
    """The field of the REST API that a field of the wire was made of; of a time also its value."""
    if wire == "key.unique_key":
        return "unique_key", ""
    if given is not None and wire == "delay_ms" and given.delay is not None:
        return "delay", given.delay
    if given is not None and wire == "due_ms":
        return ("due_ms", str(given.due_ms)) if given.at is None else ("at", given.at)
    if wire == "payload" and isinstance(given, Content):
        payloads = {"text": given.text is not None, "base64": given.base64 is not None}
        return next((name for name, is_it in payloads.items() if is_it), "json"), ""
    return wire, ""


def _status_of(error: TickwheelError) -> int:
    if isinstance(error, NotJsonError):
        return 415
    if isinstance(error, RequestRefused):
        return 409 if error.reason in ("NAME_TAKEN", "WRONG_STATE", "FILTER_DIFFERS", "KEY_REUSED") else 422
    if isinstance(error, PermissionRefused):
        return 401 if error.reason == "UNAUTHENTICATED" else 403
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, LimitReached):
        return 429
    if isinstance(error, OutcomeUnknown):
        return 504
    return 503 if isinstance(error, ClusterUnavailable) else 500


def problem_of_validation(error: RequestValidationError) -> JSONResponse:
    """The response for a request that does not fit its model: the first problem, and how many there are."""
    problems = error.errors()
    first = problems[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        return not_json(str(first.get("ctx", {}).get("error", "")))
    field = ".".join(place[1:]) or place[0]
    said = re.sub("^(Value error, |Input should be |[A-Z][a-z]+ should have )", "", str(first["msg"]))
    limit = _LIMITS.get(first["type"], said)
    value = first.get("input")
    shown = str(value) if isinstance(value, str | int | float | bool) else ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    text = f"{field}: {shown[:VALUE_LENGTH_MAX]}: {limit}{more}" if shown else f"{field}: {limit}{more}"
    return problem(422, text, "INVALID_FIELD", field=field, value=shown, limit=limit)
