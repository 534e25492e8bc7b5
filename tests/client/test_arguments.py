"""Arguments of a wrong kind: each is refused with its name, its value and what it takes, and nothing is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
import pytest_asyncio

from tickwheel.client import (
    AsyncClient,
    Delivery,
    ExponentialBackoff,
    RequestRefused,
    Retry,
    RetryPolicy,
    Right,
    Worker,
    messages,
)
from tickwheel.client.errors import refused
from tickwheel.client.rights import Grant
from tickwheel.client.tracing import Tracing
from tickwheel.node.core.schedule import intake
from tickwheel.node.core.schedule.intake import from_message
from tickwheel.node.failure import RequestError
from tickwheel.node.state.settings import BOUNDS, Settings
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.common_pb2 import MessageMeta
from tickwheel.testing import FakeCluster
from tickwheel.wheel import filters

pytestmark = pytest.mark.asyncio(loop_scope="module")
SOON = timedelta(seconds=5)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HALF = "a\udcff"
"""Half of a pair of surrogates, which no UTF-8 has: what Python makes of other bytes on a command line."""


BACKOFF = ExponentialBackoff(initial=SOON, factor=cast(Any, "x"), maximum=SOON, jitter=0.0)


def put(**changes: Any) -> Callable[[Any], Awaitable[Any]]:
    """A put of a schedule that is right but for these."""
    given = {"name": "s", "topic": "t", "payload": b"x"} | ({} if "cron" in changes else {"every": SOON}) | changes
    return lambda client: client.schedules.put(given.pop("name"), given.pop("topic"), given.pop("payload"), **given)


def sent(**changes: Any) -> Callable[[Any], Awaitable[Any]]:
    """A schedule of a message that is right but for these."""
    given: dict[str, Any] = {"topic": "t", "payload": b"x", "delay": SOON} | changes
    return lambda client: client.schedule(**given)


WRONG: list[tuple[str, object, Callable[[Any], Awaitable[Any]]]] = [
    *((field, value, put(**{field: value})) for field, value in (
        ("name", 5), ("name", HALF), ("topic", 5), ("topic", HALF), ("payload", HALF),
        ("cron", 5), ("cron", HALF), ("zone", 5), ("every", timedelta(0)), ("every", -SOON), ("start", EPOCH),
        ("end", EPOCH), ("end", EPOCH - SOON), ("count", 1 << 60), ("late_max", timedelta(0)), ("late_max", -SOON),
        ("missed", []), ("overlap", {}), ("key", 5), ("tags", [5]), ("headers", ["a"]), ("headers", {"a": 5}),
        ("headers", {"a": HALF}), ("message_group", 5), ("paused", "yes"), ("expected_revision", -1),
        ("expected_revision", "1"), ("if_absent", "no"),
    )),
    *((field, value, sent(**{field: value})) for field, value in (
        ("topic", 5), ("topic", None), ("topic", HALF), ("payload", HALF), ("key", 5), ("key", HALF), ("tags", [5]),
        ("headers", {"a": 5}), ("message_group", HALF), ("unique_key", HALF),
    )),
    ("name", 5, lambda client: client.schedules.get(5)),
    ("name", HALF, lambda client: client.schedules.pause(HALF)),
    ("name", 5, lambda client: client.schedules.delete(5)),
    ("request_id", 5, lambda client: client.schedules.trigger("s", request_id=5)),
    ("id", 5, lambda client: client.cancel(5)),
    ("id", None, lambda client: client.get(None)),
    ("topic", 5, lambda client: client.cancel_by_key(5, "k")),
    ("topic", HALF, lambda client: client.get_by_key(HALF, "k")),
    ("name", 5, lambda client: client.admin.create_topic(5)),
    ("name", HALF, lambda client: client.admin.create_group(HALF, ["t"])),
    ("topics", [5], lambda client: client.admin.create_group("g", [5])),
    ("numbers", ["x"], lambda client: client.dead.purge("g", ["x"])),
    ("numbers", [-1], lambda client: client.dead.replay("g", [-1])),
    ("name", 5, lambda client: client.access.set_role(5, [Grant((Right.READ,))])),
    ("attempts_max", -1, lambda client: client.admin.create_group("g", ["t"], retry=RetryPolicy(attempts_max=-1))),
    ("factor", "x", lambda client: client.admin.create_group("g", ["t"], retry=RetryPolicy(backoff=BACKOFF))),
    ("job_id", 5, lambda client: client.staging.job(5)),
    ("batch", -1, lambda client: client.staging.abort("j", "r", -1)),
    ("sha256", 5, lambda client: client.cold.register("j", 5, [])),
]  # fmt: skip


async def handle(_delivery: Delivery) -> None:
    """Nothing."""


@pytest.mark.parametrize(("field", "value"), [
    ("concurrency", "3"), ("concurrency", 0), ("concurrency", True), ("prefetch", -1), ("prefetch", 1.5),
    ("on_error", "x"), ("on_error", 3), ("handlers", [handle]), ("credits", 0), ("credits", "a"), ("filter", 5),
    ("messages_max", "1"),
])  # fmt: skip
async def test_workers_and_consumers(client: AsyncClient, field: str, value: Any) -> None:
    """When they are made. A rule for what is no exception, or that is none, would never be found."""
    with pytest.raises(RequestRefused) as refusal:
        if field in ("credits", "filter", "messages_max"):
            client.consumer("g", "t", **{field: value})
        elif field == "handlers":
            Worker(client, "g", value)
        elif field == "on_error":
            Worker(client, "g", {"t": handle}, on_error={value: Retry()} if value == "x" else {ValueError: value})
        else:
            Worker(client, "g", {"t": handle}, **{field: value})
    assert refusal.value.field == field and refusal.value.value == repr(value) and refusal.value.limit


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    """Of a cluster in memory."""
    async with FakeCluster() as cluster, AsyncClient(cluster.address) as client:
        await client.admin.create_topic("t")
        yield client


@pytest.mark.parametrize(
    ("field", "value", "call"), WRONG, ids=[f"{number}-{wrong[0]}" for number, wrong in enumerate(WRONG)]
)
async def test_refused_with_name_value_and_limit(
    client: AsyncClient, field: str, value: object, call: Callable[[Any], Awaitable[Any]]
) -> None:
    """Before it travels; a request beside it is not touched."""
    with pytest.raises(RequestRefused) as refusal:
        await call(client)
    assert refusal.value.field == field and refusal.value.limit, str(refusal.value)
    assert refusal.value.value in (str(value), repr(value))
    assert [schedule async for schedule in client.schedules.list()] == []
    assert (await client.count_pending()).total == 0


@pytest.mark.parametrize("call", [
    *(sent(**{name: 5}) for name in ("unique_kei", "on_conflict", "at_ms")),
    lambda client: client.producer().send("t", b"x", delay=SOON, tag="a"),
    lambda client: client.producer().schedule_columns("t", [1], [1], b"x", on_conflict="replace"),
    lambda client: client.reschedule("0-1-1", delay=SOON, due=5),
    lambda client: client.reschedule_by_key("t", "k", delay=SOON, due=5),
    lambda client: client.count_pending("t", keys="a"),
    lambda client: asyncio.wait_for(Worker(client, "g", {"t": handle}, **cast(Any, {"concurency": 4})).run(), 0.01),
])  # fmt: skip
@pytest.mark.parametrize("traced", [False, True])
async def test_a_misspelt_option(client: AsyncClient, call: Callable[[Any], Awaitable[Any]], traced: bool) -> None:
    """A TypeError, as of any function of Python. A message without the key that its sender meant would be accepted."""
    async with AsyncClient(client.cluster.addresses, tracing=Tracing() if traced else None) as other:
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            await call(other)
    assert (await client.count_pending()).total == 0


@pytest.mark.parametrize("addresses", [3, None, [3], ["127.0.0.1:7700", None], "127.0.0.1", []])
async def test_addresses(addresses: Any) -> None:
    """When the client is made."""
    with pytest.raises(RequestRefused) as refusal:
        AsyncClient(addresses)
    assert refusal.value.field == "addresses" and refusal.value.limit


async def test_a_schedule_takes_what_a_message_takes(client: AsyncClient) -> None:
    """A dict becomes JSON, with its content type."""
    put = await client.schedules.put("s", "t", {"text": "stand up"}, every=SOON, paused=True)
    assert put.schedule.payload == b'{"text":"stand up"}'
    assert put.schedule.headers == {"content-type": "application/json"}
    assert await client.schedules.delete("s")


REFUSED_BY_NODES: list[dict[str, Any]] = [
    {"key": "k" * 4_097},
    {"tags": ["t"] * 65},
    {"tags": ["a|b"]},
    {"tags": ["t" * 129]},
    {"headers": {str(number): "" for number in range(8_193)}},
    {"headers": {"h": "v" * 40_000}},
    {"topic": ".hidden"},
    {"topic": "%DLQ%g"},
    {"topic": "t" * 128},
    {"payload": b""},
    {"payload": bytes((4 << 20) + 1)},
]


async def test_a_wrong_message_leaves_its_batch_alone(client: AsyncClient) -> None:
    """A producer's batch is refused as a whole. What no node takes is not put into it."""
    right: dict[str, Any] = {"topic": "t", "payload": b"x", "delay": SOON}
    async with client.producer(linger_ms=10_000) as producer:
        first = await producer.send("t", b"x", delay=SOON, key="k" * 4_096, tags=["t" * 128] * 64)
        for wrong in REFUSED_BY_NODES:
            options = right | wrong
            with pytest.raises(RequestRefused) as refusal:
                await producer.send(options.pop("topic"), options.pop("payload"), **options)
            assert refusal.value.field in wrong and refusal.value.limit, wrong
        last = await producer.send("t", b"x", delay=SOON)
        await producer.flush()
        assert (await first).id and (await last).id


async def test_nodes_refuse_what_the_client_does() -> None:
    """The bounds of both are the same."""
    for wrong in REFUSED_BY_NODES:
        fields = {key: wrong[key] for key in ("key", "tags", "headers") if key in wrong}
        message = common_pb2.Message(
            topic=wrong.get("topic", "t"), payload=wrong.get("payload", b"x"), delay_ms=1, meta=MessageMeta(**fields)
        )
        with pytest.raises(RequestError):
            from_message(scheduler_pb2.ScheduleRequest(message=message), Settings())
    assert (messages.KEY_LENGTH_MAX, messages.META_BYTES_MAX) == (intake.KEY_LENGTH_MAX, intake.META_BYTES_MAX)
    assert (messages.HEADERS_MAX, messages.TAGS_MAX) == (intake.HEADERS_MAX, filters.TAGS_MAX)
    assert (messages.TAG_LENGTH_MAX, messages.TAG_RULE) == (filters.TAG_LENGTH_MAX, filters.TAG_RULE)
    assert BOUNDS["payload_bytes_max"][1] == messages.PAYLOAD_BYTES_MAX


async def test_a_refusal_shows_what_no_text_could_carry() -> None:
    """Half of a pair of surrogates as a code; a number that Python does not write out in words."""
    assert refused("key", "\ud800", "a text").metadata["value"] == r"\ud800"
    assert "more than 4,300 digits" in str(refused("level", 10**5_000, "a whole number"))
