"""The OpenAPI document, which generators of clients read."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tickwheel.client.errors import LimitReached, RequestRefused, TickwheelError, refused
from tickwheel.gateway import models, schedule_models
from tickwheel.gateway.api import Api
from tickwheel.gateway.app import make_app
from tickwheel.gateway.clients import Clients
from tickwheel.gateway.models import Model
from tickwheel.gateway.schedule_models import Backfill, NewSchedule
from tickwheel.gateway.schedules import in_the_callers_words

ERRORS = {"400", "401", "403", "404", "409", "413", "415", "422", "429", "503", "504"}


async def never() -> bool:
    raise AssertionError("nobody asks")


def no_client(token: str) -> Any:
    raise AssertionError("nobody calls")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """As the gateway gives it."""
    return make_app(Api(Clients(no_client), CollectorRegistry(), False, never)).openapi()


def checked(content: dict[str, Any], example: Any) -> None:
    """Validate an example by the model that the document names."""
    name = content["schema"]["$ref"].rpartition("/")[2]
    model = getattr(schedule_models, name, None) or getattr(models, name)
    model.model_validate(example)


def test_calls_of_schedules_have_examples_that_fit(document: dict[str, Any]) -> None:
    """Each has a summary; every body and answer has an example, which its own model takes."""
    calls = {
        (path, method): call
        for path, methods in document["paths"].items()
        if path.startswith("/v1/schedule")
        for method, call in methods.items()
    }
    assert len(calls) == 9
    for (_, method), call in calls.items():
        assert call["summary"] and call["description"] and call["security"] == [{"HTTPBearer": []}]
        bodies = call.get("requestBody", {}).get("content", {})
        for content in bodies.values():
            examples = [one["value"] for one in content["examples"].values()]
            assert examples
            for example in examples:
                checked(content, example)
        good = {status: answer for status, answer in call["responses"].items() if status.startswith("2")}
        assert good and (bodies or method != "put")
        for answer in good.values():
            checked(answer["content"]["application/json"], answer["content"]["application/json"]["example"])


def test_errors_are_problem_details(document: dict[str, Any]) -> None:
    """Every call says so, under the media type that the gateway sends, with an example."""
    for methods in document["paths"].values():
        for call in methods.values():
            errors = {status: one for status, one in call["responses"].items() if not status.startswith("2")}
            assert set(errors) == ERRORS
            for status, error in errors.items():
                content = error["content"]
                assert list(content) == ["application/problem+json"]
                problem = content["application/problem+json"]
                checked(problem, problem["example"])
                assert problem["example"]["status"] == int(status)
    assert make_app(Api(Clients(no_client), CollectorRegistry(), False, never)).openapi() == document


BODY = NewSchedule.model_validate(
    {"topic": "t", "text": "x", "cron": "* * * * *", "late_max": "500ms", "start": "2030-01-01T00:00:00+01:00"}
)
RANGE = Backfill.model_validate({"from": "2030-01-01T00:00:00+01:00", "until": "2031-01-01T00:00:00Z"})


YEAR = "0 (none) to 13569465600000"
THEN = "2001-09-09T01:46:40Z"
REFUSALS: list[tuple[RequestRefused, Model | None, tuple[str, str, str]]] = [
    (
        refused("definition.late_ms_max", 500, "1000 to 86400000, or 0"),
        BODY,
        ("late_max", "500ms", "1s to 1d, or 0s"),
    ),
    (
        refused("definition.spec.start_ms", 1, YEAR),
        BODY,
        ("start", "2030-01-01T00:00:00+01:00", "0 (none) to 2400-01-01T00:00:00Z"),
    ),
    (refused("spec.cron", "x", "five fields"), BODY, ("cron", "x", "five fields")),
    (
        refused("definition.spec", "x", "a time after 1000000000000"),
        BODY,
        ("cron", "* * * * *", f"a time after {THEN}"),
    ),
    (refused("definition.payload", "0 bytes", "1 to 65536 bytes"), BODY, ("text", "0 bytes", "1 to 65536 bytes")),
    (refused("tags[0]", "", "a rule"), BODY, ("tags", "", "a rule")),
    (refused("until_ms", 1, "at most now (1000000000000)"), RANGE, ("until", RANGE.until, f"at most now ({THEN})")),
    (
        refused("from_ms", -1, "0 or more, and below until_ms (5)"),
        RANGE,
        ("from", RANGE.since, "0 or more, and below until (5)"),
    ),
    (refused("name", "n", "printable"), None, ("name", "n", "printable")),
]


@pytest.mark.parametrize(("error", "given", "told"), REFUSALS)
def test_refusals_are_in_the_callers_words(
    error: RequestRefused, given: Model | None, told: tuple[str, str, str]
) -> None:
    """Field, value and limit as the caller wrote them, in the text too."""
    said = in_the_callers_words(error, given)
    assert isinstance(said, RequestRefused)
    assert (said.field, said.value, said.limit) == told and said.reason == "INVALID_FIELD"
    assert str(said) == ": ".join(part or "''" for part in told)


def test_other_errors_keep_their_kind() -> None:
    """And what they carry: how long to wait, and why."""
    full = LimitReached("full", "LIMIT_REACHED", {"limit": "5", "retry_after_ms": "2000"})
    assert in_the_callers_words(full, BODY) is full
    taken = RequestRefused("x", "NAME_TAKEN", {"field": "definition.name", "value": "n"})
    told = in_the_callers_words(taken, BODY)
    assert (
        type(told) is RequestRefused
        and told.reason == "NAME_TAKEN"
        and told.metadata == {"field": "name", "value": "n"}
    )
    assert isinstance(in_the_callers_words(TickwheelError("?"), None), TickwheelError)
