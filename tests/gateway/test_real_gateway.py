"""Gateways beside three real nodes: REST in, posts out, through a SIGKILL of the master and of a gateway."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import pytest
from aiohttp import web

from tests.gateway.gateways import SOON_S, api, running
from tests.process.commands import COMMAND
from tickwheel.client import AsyncClient, ExponentialBackoff, Fault, RetryPolicy
from tickwheel.gateway.signing import secret_of, signature_headers
from tickwheel.node.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUICK = ExponentialBackoff(initial=timedelta(milliseconds=10), maximum=timedelta(milliseconds=10))
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

Respond = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


class Receiver:
    """An HTTP server that keeps what is posted to it."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self.posts: list[tuple[dict[str, str], bytes]] = []
        self.changed = asyncio.Condition()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with self.changed:
            self.posts.append((dict(request.headers), body))
            self.changed.notify_all()
        return await self._respond(request, body)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for posts."""
        async with asyncio.timeout(SOON_S), self.changed:
            await self.changed.wait_for(condition)


@asynccontextmanager
async def receiving(respond: Respond) -> AsyncIterator[Receiver]:
    """A receiver on a port of its own."""
    receiver = Receiver(respond)
    app = web.Application(client_max_size=8 << 20)
    app.router.add_post("/hook", receiver.handle)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield receiver
    finally:
        await runner.cleanup()


async def fine(request: web.Request, body: bytes) -> web.Response:
    return web.Response(status=204)


def target(name: str, url: str, more: str = "") -> str:
    return f"[targets.{name}]\nurl = '{url}'\ngroup = '{name}'\ntopics = ['{name}']\nprivate_addresses = true\n{more}\n"


async def test_a_message_from_schedule_to_cancel(cluster: LocalCluster, tmp_path: Path) -> None:
    """Scheduled, found, listed page by page, moved, cancelled; then there is nothing left to cancel."""
    async with api(cluster, tmp_path / "g.toml") as call:
        body = {"json": {"n": 1}, "delay": "1h", "key": "k1", "tags": ["a"], "headers": {"x": "y"}}
        status, made, _ = await call("POST", "/v1/topics/orders/messages", body)
        assert status == 201 and made["topic"] == "orders"
        status, found, _ = await call("GET", f"/v1/messages/{made['id']}?content=true")
        assert status == 200 and found["state"] == "PENDING" and json.loads(found["text"]) == {"n": 1}
        assert found["headers"] == {"x": "y", "content-type": "application/json"} and found["tags"] == ["a"]
        for number in range(3):
            await call(
                "POST", "/v1/topics/orders/messages", {"base64": "/w==", "at": f"2027-01-0{number + 1}T00:00:00Z"}
            )
        seen, after = [], ""
        while True:
            status, page, _ = await call("GET", f"/v1/topics/orders/messages?limit=2&after={after}&content=true")
            assert status == 200 and len(page["messages"]) <= 2
            seen += page["messages"]
            after = page["next"]
            if not after:
                break
        assert seen[0]["id"] == made["id"] and len(seen) == 4
        assert base64.b64decode(seen[1]["base64"]) == b"\xff"
        status, moved, _ = await call("PATCH", f"/v1/messages/{made['id']}", {"at": "2027-02-01T00:00:00+01:00"})
        assert status == 200 and moved["outcome"] == "RESCHEDULED" and moved["due"] == "2027-01-31T23:00:00Z"
        assert (await call("DELETE", f"/v1/messages/{made['id']}"))[:2] == (
            200,
            {"id": made["id"], "outcome": "CANCELLED"},
        )
        status, _, headers = await call("DELETE", f"/v1/messages/{made['id']}")
        assert status in (404, 409, 200) and (status == 200 or headers["content-type"] == "application/problem+json")
        assert "orders" in {topic["name"] for topic in (await call("GET", "/v1/topics"))[1]}
        assert (await call("PUT", "/v1/topics/lanes", {"fifo": True}))[1]["fifo"]
        assert (await call("GET", "/readyz"))[0] == 200 == (await call("GET", "/livez"))[0]
        assert "tickwheel_gateway_requests_total" in (await call("GET", "/metrics"))[1]
        schema = (await call("GET", "/openapi.json"))[1]
        for name in ("messages/{id}", "topics/{topic}/unique-keys/{unique_key}"):
            assert set(schema["paths"][f"/v1/{name}"]) == {"get", "delete", "patch"}


async def test_repeats_with_an_idempotency_key(cluster: LocalCluster, tmp_path: Path) -> None:
    """Ten at once are one message; another message under the key is refused."""
    async with api(cluster, tmp_path / "g.toml") as call:
        body = {"text": "x", "delay": "1h"}
        answers = await asyncio.gather(
            *(call("POST", "/v1/topics/once/messages", body, **{"Idempotency-Key": "k"}) for _ in range(10))
        )
        assert {status for status, _, _ in answers} == {201} and len({made["id"] for _, made, _ in answers}) == 1
        assert sum(headers.get("Idempotent-Replayed") == "true" for _, _, headers in answers) == 9
        status, answer, _ = await call(
            "POST", "/v1/topics/once/messages", body | {"text": "y"}, **{"Idempotency-Key": "k"}
        )
        assert status == 409 and answer["reason"] == "KEY_REUSED"
        assert len((await call("GET", "/v1/topics/once/messages"))[1]["messages"]) == 1


async def test_repeats_at_another_gateway(cluster: LocalCluster, tmp_path: Path) -> None:
    """It knows the key while the message is pending: the same body gets the first answer, another one is refused. Two
    at once are one message. A key of the message's own is answered as it says."""
    async with api(cluster, tmp_path / "g.toml") as call, api(cluster, tmp_path / "h.toml") as other:
        body = {"json": {"n": 1}, "delay": "1h", "key": "k", "tags": ["a"], "headers": {"x": "y"}}
        path = "/v1/topics/again/messages"
        status, made, headers = await call("POST", path, body, **{"Idempotency-Key": "one"})
        assert status == 201 and "Idempotent-Replayed" not in headers
        status, again, headers = await other("POST", path, body, **{"Idempotency-Key": "one"})
        assert (status, headers["Idempotent-Replayed"]) == (201, "true")
        assert again == made
        status, answer, _ = await other("POST", path, body | {"tags": ["b"]}, **{"Idempotency-Key": "one"})
        assert status == 409 and answer["reason"] == "KEY_REUSED"
        both = await asyncio.gather(*(each("POST", path, body, **{"Idempotency-Key": "two"}) for each in (call, other)))
        assert [status for status, _, _ in both] == [201, 201] and both[0][1]["id"] == both[1][1]["id"] != made["id"]
        own = body | {"unique_key": "mine"}
        status, made, _ = await call("POST", path, own, **{"Idempotency-Key": "three"})
        assert status == 201
        status, answer, _ = await other("POST", path, own, **{"Idempotency-Key": "three"})
        assert (status, answer["reason"], answer["id"]) == (409, "KEY_TAKEN", made["id"])
        assert len((await call("GET", path))[1]["messages"]) == 3
        await call("DELETE", f"/v1/messages/{made['id']}")
        status, anew, headers = await other("POST", path, own, **{"Idempotency-Key": "three"})
        assert status == 201 and anew["id"] != made["id"] and "Idempotent-Replayed" not in headers


async def test_unique_keys(cluster: LocalCluster, tmp_path: Path) -> None:
    """Each outcome; the message that holds a key, whatever its characters; who asks for none is told."""
    async with api(cluster, tmp_path / "g.toml") as call:
        path, key = "/v1/topics/unique/messages", "order/7?ä %/../#"
        body = {"text": "1", "delay": "1h", "unique_key": key}
        status, first, _ = await call("POST", path, body)
        assert (status, first["key_outcome"]) == (201, "FREE")
        status, taken, headers = await call("POST", path, body | {"text": "2"})
        assert status == 409 and headers["content-type"] == "application/problem+json"
        assert (taken["reason"], taken["field"], taken["value"]) == ("KEY_TAKEN", "unique_key", key)
        assert (taken["id"], taken["due_ms"]) == (first["id"], first["due_ms"])
        status, used, _ = await call("POST", path, body | {"text": "3", "on_key_conflict": "use_existing"})
        assert (status, used["id"], used["key_outcome"]) == (200, first["id"], "USED_EXISTING")
        status, last, _ = await call(
            "POST", path, body | {"text": "4", "on_key_conflict": "replace", "key_until_settled": True}
        )
        assert (status, last["key_outcome"]) == (201, "REPLACED")
        holder = f"/v1/topics/unique/unique-keys/{quote(key, safe='')}"
        status, found, _ = await call("GET", f"{holder}?content=true")
        assert (status, found["id"], found["text"], found["unique_key"]) == (200, last["id"], "4", key)
        status, moved, _ = await call("PATCH", holder, {"delay": "2h"})
        assert status == 200 and moved["due_ms"] > last["due_ms"]
        assert (await call("DELETE", holder))[:2] == (200, {"id": moved["id"], "outcome": "CANCELLED"})
        for method, more in (("DELETE", None), ("PATCH", {"delay": "1h"}), ("GET", None)):
            status, answer, _ = await call(method, holder, more)
            assert status == 404 and answer["reason"] and "order/7" in answer["detail"], answer


async def dead_letters(client: AsyncClient, group: str, count: int) -> dict[bytes | None, str]:
    """Payload and reason of each, once there are so many."""
    async with asyncio.timeout(SOON_S):
        while True:
            letters = [letter async for letter in client.dead.list(group)]
            if len(letters) >= count:
                found = [await client.dead.get(group, letter.number) for letter in letters]
                return {letter.payload: letter.error for letter in found}
            await asyncio.sleep(0.05)


BAD = [
    ("POST", "/v1/topics/t/messages", b"{", 400, "body"),
    ("POST", "/v1/topics/t/messages", b"[" * 100_000, 400, "body"),
    ("POST", "/v1/topics/t/messages", b'{"text": "\xff", "delay": "1s"}', 400, "body"),
    ("POST", "/v1/topics/t%ff/messages", {"text": "x", "delay": "1s"}, 422, "path"),
    ("POST", "/v1/topics/t/messages?delay=1s", {"text": "x", "delay": "1s"}, 422, "delay"),
    ("POST", "/v1/topics/t/messages", {}, 422, "body"),
    ("POST", "/v1/topics/t/messages", {"text": "x"}, 422, "body"),
    ("POST", "/v1/topics/t/messages", {"json": {"a": float("nan")}, "delay": "1s"}, 400, "body"),
    ("POST", "/v1/topics/t/messages", b'{"text": "x", "delay": "1s", "delay": "1d"}', 400, "body"),
    ("POST", "/v1/topics/t/messages", b'\xef\xbb\xbf{"text": "x", "delay": "1s"}', 400, "body"),
    ("PUT", "/v1/topics/t", {"fifo": "\ud800"}, 400, "body"),
    ("PUT", "/v1/topics/t", {"\ud800": 1}, 400, "body"),
    ("PATCH", "/v1/messages/0-1-1", {"delay": "1s", "\udfff": 1}, 400, "body"),
    ("PUT", "/v1/schedules/s", {"text": "\ud800"}, 400, "body"),
    ("PUT", "/v1/schedules/s", {"json": {"a": float("inf")}}, 400, "body"),
    ("GET", "/v1/topics/t/messages?limit=1&limit=2", None, 422, "limit"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "json": 1, "delay": "1s"}, 422, "body"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "delay": "soon"}, 422, "delay"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "at": "2026-01-01T00:00:00"}, 422, "at"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "due_ms": 1 << 70}, 422, "due_ms"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "delay": "1s", "unknown": 1}, 422, "unknown"),
    ("POST", "/v1/topics/t/messages", {"base64": "!", "delay": "1s"}, 422, "base64"),
    ("POST", "/v1/topics/t/messages", {"text": None, "delay": "1s"}, 422, "body"),
    ("POST", "/v1/topics/t/messages", {"text": "\ud800", "delay": "1s"}, 400, "body"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "delay": "99999d"}, 422, "delay"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "at": "2999-01-01T00:00:00Z"}, 422, "at"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "due_ms": 1 << 60}, 422, "due_ms"),
    ("POST", "/v1/topics/t/messages", {"text": "", "delay": "1s"}, 422, "text"),
    ("PATCH", "/v1/messages/0-1-1", {"delay": "99999d"}, 422, "delay"),
    ("PATCH", "/v1/topics/t/unique-keys/k", {"delay": "99999d"}, 422, "delay"),
    ("GET", "/v1/topics/t/unique-keys/k", None, 404, "unique_key"),
    ("GET", f"/v1/topics/t/messages?key={'k' * 4_097}", None, 422, "key"),
    ("GET", "/", None, 404, ""),
    ("POST", "/v1/topics/t/messages", {"text": "x", "due_ms": "1"}, 422, "due_ms"),
    (
        "POST",
        "/v1/topics/t/messages",
        {"text": "x", "delay": "1s", "unique_key": "k", "key_until_settled": "yes"},
        422,
        "key_until_settled",
    ),
    ("POST", "/v1/topics/%25DLQ%25g/messages", {"text": "x", "delay": "1s"}, 422, "topic"),
    ("POST", "/v1/topics/.bad/messages", {"text": "x", "delay": "1s"}, 422, "topic"),
    ("GET", "/v1/messages/nonsense", None, 422, "id"),
    ("GET", "/v1/messages/0-1-1", None, 404, ""),
    ("PATCH", "/v1/messages/nonsense", {"delay": "1s"}, 422, "id"),
    ("GET", "/v1/topics/t/messages?limit=0", None, 422, "limit"),
    ("GET", "/v1/topics/t/messages?after=nonsense", None, 422, "after"),
    ("GET", "/v1/topics/t/messages?tags=eu", None, 422, "tags"),
    ("GET", "/v1/topics/t/messages?tag=%ff", None, 422, "query"),
    ("GET", "/v1/messages/0-1-1?contents=true", None, 422, "contents"),
    ("DELETE", "/v1/messages/0-1-1?if=pending", None, 422, "if"),
    ("DELETE", "/v1/topics/t/unique-keys/%ff", None, 422, "path"),
    ("GET", "/v1/topics/t/messages?due_from=x", None, 422, "due_from"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "delay": "1s", "unique_key": ""}, 422, "unique_key"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "delay": "1s", "unique_key": "ä" * 128}, 422, "unique_key"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "delay": "1s", "unique_key": 7}, 422, "unique_key"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "delay": "1s", "key_until_settled": True}, 422, "body"),
    (
        "POST",
        "/v1/topics/t/messages",
        {"text": "x", "delay": "1s", "unique_key": "k", "on_key_conflict": "ignore"},
        422,
        "on_key_conflict",
    ),
    ("GET", f"/v1/topics/t/unique-keys/{'k' * 256}", None, 422, "unique_key"),
    ("DELETE", "/v1/topics/t/unique-keys/", None, 422, "unique_key"),
    ("PATCH", "/v1/topics/t/unique-keys/k", {}, 422, "body"),
    ("POST", "/v1/topics/t/messages", [1], 422, "body"),
    ("POST", "/v1/topics/t/messages", {"text": "x", "due_ms": 1.5}, 422, "due_ms"),
    ("GET", "/nowhere", None, 404, ""),
    ("PUT", "/v1/messages/0-1-1", {}, 405, ""),
]


async def test_bad_requests_are_problems_with_field_and_limit(cluster: LocalCluster, tmp_path: Path) -> None:
    """Each a client's error in problem details, none the gateway's; too large a body is not read."""
    async with api(cluster, tmp_path / "g.toml") as call:
        for method, path, body, status, field in BAD:
            got, answer, headers = await call(method, path, body)
            assert got == status, (path, body, answer)
            assert headers["content-type"] == "application/problem+json" and answer["detail"] and answer["reason"]
            assert not field or answer["field"].startswith(field), answer
            assert not re.search(r"\[\d+\]|_ms\b|\bpayload\b|key\.", answer.get("field", "")) or field == "due_ms", (
                answer
            )
            # Pydantic's, which speak of Python and of forms; and a name of gRPC's API.
            words = ("Input should", "should have", "dictionary", "Field required", "page_token")
            assert not any(word in answer["detail"] + answer.get("limit", "") for word in words), answer
        far = (await call("PATCH", "/v1/messages/0-1-1", {"delay": "99999d"}))[1]
        assert (far["value"], far["limit"]) == ("99999d", "at most 1100d")
        assert (await call("GET", f"/v1/topics/t/messages?key={'k' * 4_096}"))[0] == 200, "as long as a key may be"
        assert (await call("POST", "/v1/topics/t/messages", io.BytesIO(b" " * (9 << 20))))[0] == 413
        for method, path in (("POST", "/v1/topics/t/messages"), ("PUT", "/v1/schedules/t"), ("PUT", "/v1/topics/t")):
            form = {"content-type": "application/x-www-form-urlencoded"}  # what curl sends unless told otherwise
            got, answer, _ = await call(method, path, b'{"text": "x", "delay": "1s"}', **form)
            assert (got, answer["field"], answer["limit"]) == (415, "content-type", "application/json"), answer
            assert answer["value"] == form["content-type"]


async def test_posts_are_signed_events(cluster: LocalCluster, tmp_path: Path) -> None:
    """The body as it was, attributes as headers, a signature that verifies; hostile headers do no harm."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    async with (
        receiving(fine) as receiver,
        running(cluster, tmp_path / "g.toml", target("events", receiver.url, f"secret_file = '{secret}'")),
        AsyncClient(cluster.addresses) as client,
    ):
        hostile = {
            "traceparent": "00-1-2-03",
            "Host": "evil",
            "a b": "c",
            "note": "é\r\nx-evil: 1",
            "Authorization": "x",
        }
        receipt = await client.schedule(
            "events", {"a": 1}, delay_ms=0, key="k\u20ac", tags=["t"], headers=hostile, unique_key="u\n7"
        )
        await receiver.until(lambda: len(receiver.posts) == 1)
        large = b"x" * (3 << 20)
        await client.schedule("events", large, delay_ms=0)
        await receiver.until(lambda: len(receiver.posts) == 2)
    assert receiver.posts[1][1] == large
    headers, body = receiver.posts[0]
    got = {name.lower(): value for name, value in headers.items()}
    assert body == b'{"a":1}' and got["content-type"] == "application/json"
    assert (got["ce-id"], got["ce-subject"], got["ce-specversion"]) == (receipt.id, "events", "1.0")
    assert (got["ce-partitionkey"], got["ce-tickwheelattempt"]) == ("k%E2%82%AC", "1")
    assert got["ce-tickwheeluniquekey"] == "u%0A7"
    assert got["traceparent"] == "00-1-2-03" and got["tickwheel-header-note"] == "%C3%A9%0D%0Ax-evil: 1"
    assert "127.0.0.1" in got["host"] and "authorization" not in got and "x-evil" not in got
    signed = signature_headers([secret_of(SECRET)], receipt.id, int(got["webhook-timestamp"]), body)
    assert got["webhook-signature"] == signed["webhook-signature"]


async def test_what_follows_an_answer(cluster: LocalCluster, tmp_path: Path) -> None:
    """503 with Retry-After comes again, 422 is a dead letter with the answer, a redirect is not followed; 200 is an
    acknowledgement, although the rest of the answer never comes."""
    tried: Counter[bytes] = Counter()

    async def respond(request: web.Request, body: bytes) -> web.StreamResponse:
        tried[body] += 1
        if body == b"broken off":
            begun = web.StreamResponse(headers={"Content-Length": "10"})
            await begun.prepare(request)
            assert request.transport is not None
            request.transport.close()
            return begun
        if body == b"again" and tried[body] == 1:
            return web.Response(status=503, headers={"Retry-After": "1"})
        if body == b"wrong":
            return web.Response(status=422, text="no such\ninvoice" + "x" * 100_000)
        if body == b"moved":
            return web.Response(status=307, headers={"Location": "http://127.0.0.1:1/elsewhere"})
        return web.Response()

    async with receiving(respond) as receiver, AsyncClient(cluster.addresses) as client:
        policy = RetryPolicy(attempts_max=2, backoff=QUICK)
        await client.admin.create_topic("answers")
        await client.admin.create_group("answers", ["answers"], retry=policy)
        async with running(cluster, tmp_path / "g.toml", target("answers", receiver.url)):
            for body in (b"broken off", b"again", b"wrong", b"moved"):
                await client.schedule("answers", body, delay_ms=0)
            await receiver.until(lambda: tried == {b"broken off": 1, b"again": 2, b"wrong": 1, b"moved": 2})
            reasons = await dead_letters(client, "answers", 2)
    assert "answered 422: no such invoice" in reasons[b"wrong"] and "answered 307" in reasons[b"moved"]


async def test_a_target_that_is_down_is_left_alone(cluster: LocalCluster, tmp_path: Path) -> None:
    """After failures in a row posts pause; one tries; when it is up again, all comes, and nothing died meanwhile."""
    up = asyncio.Event()

    async def respond(request: web.Request, body: bytes) -> web.Response:
        return web.Response(status=200 if up.is_set() else 500)

    async with receiving(respond) as receiver, AsyncClient(cluster.addresses) as client:
        policy = RetryPolicy(attempts_max=100, backoff=QUICK)
        await client.admin.create_topic("down")
        await client.admin.create_group("down", ["down"], retry=policy)
        more = "failures_max = 3\nconcurrency = 2"
        async with running(cluster, tmp_path / "g.toml", target("down", receiver.url, more)):
            for number in range(20):
                await client.schedule("down", str(number).encode(), delay_ms=0)
            await receiver.until(lambda: len(receiver.posts) >= 6)
            assert len(receiver.posts) < 20  # without the pause there would be hundreds
            up.set()
            good: set[bytes] = set()
            seen = len(receiver.posts)
            await receiver.until(lambda: len(good.union(body for _, body in receiver.posts[seen:])) == 20)
        assert not [letter async for letter in client.dead.list("down")]


async def test_two_gateways_share_the_work_through_kills(cluster: LocalCluster, tmp_path: Path) -> None:
    """Master and one gateway die by SIGKILL while that gateway waits for answers: the other one posts all, also what
    the dead one had."""
    answered: dict[str, set[bytes]] = {"a": set(), "b": set()}
    hanging: set[bytes] = set()

    async def respond(request: web.Request, body: bytes) -> web.Response:
        by = request.query["by"]
        hangs = by == "b" and bool(answered["b"])
        async with receiver.changed:
            (hanging if hangs else answered[by]).add(body)
            receiver.changed.notify_all()
        if hangs:
            await asyncio.Event().wait()
        return web.Response()

    config = tmp_path / "b.toml"
    async with receiving(respond) as receiver, AsyncClient(cluster.addresses) as client:
        await asyncio.to_thread(config.write_text, target("shared", f"{receiver.url}?by=b", "timeout = '10m'"))
        await client.admin.create_topic("shared")
        await client.admin.create_group("shared", ["shared"], retry=RetryPolicy(backoff=QUICK))
        words = ("gateway", "--config", config, "--addresses", ",".join(cluster.addresses))
        dying = await asyncio.create_subprocess_exec(*COMMAND, *words)
        try:
            await client.schedule("shared", b"first", delay_ms=0)
            await receiver.until(lambda: bool(answered["b"]))
            async with running(cluster, tmp_path / "a.toml", target("shared", f"{receiver.url}?by=a")):
                wanted = {str(number).encode() for number in range(300)}
                await asyncio.gather(*(client.schedule("shared", body, delay_ms=100) for body in wanted))
                await receiver.until(lambda: len(hanging) == 8 and len(answered["a"]) >= 20)
                master = await cluster.master()
                await cluster.kill_node(master)
                dying.kill()
                await receiver.until(lambda: answered["a"] >= wanted)
        finally:
            if dying.returncode is None:
                dying.kill()
            await dying.wait()
    assert answered == {"a": wanted, "b": {b"first"}} and len(hanging) == 8
    cluster.start_node(master)
    await cluster.wait_ready()


@pytest.mark.parametrize("host", ["localhost", "①②⑦.⓪.⓪.①"])
async def test_addresses_inside_are_refused(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """A name that leads to loopback is refused after DNS, before anything is sent; so is an address in the digits of
    others, which is resolved by nobody."""
    down = asyncio.Event()

    def warning(text: str, *values: object) -> None:
        if "not public" in text % values:
            down.set()

    monkeypatch.setattr(logging.getLogger("tickwheel.gateway"), "warning", warning)
    async with receiving(fine) as receiver, AsyncClient(cluster.addresses) as client:
        topic = f"inside-{host.isascii()}".lower()
        text = target(topic, receiver.url.replace("127.0.0.1", host), "failures_max = 1")
        text = text.replace("private_addresses = true", "")
        async with running(cluster, tmp_path / "g.toml", text):
            await client.schedule(topic, b"x", delay_ms=0)
            async with asyncio.timeout(SOON_S):
                await down.wait()
        assert not receiver.posts


async def test_a_wrong_token_is_refused_by_one_node(tmp_path: Path) -> None:
    """The gateway knows the master by then. So one node notes the refusal, not each; and a master that was lost is
    found again."""
    async with LocalCluster(tmp_path, 3) as cluster, AsyncClient(cluster.addresses) as before:
        await before.access.set_user("root", ["administrator"])
        token = (await before.access.create_token("root")).secret
        await before.admin.update_settings(rights=True)
        root = {"Authorization": f"Bearer {token}"}
        async with api(cluster, tmp_path / "g.toml") as call, AsyncClient(cluster.addresses, token=token) as asking:
            assert (await call("GET", "/v1/topics", **root))[0] == 200
            for number in range(3):
                wrong = {"Authorization": f"Bearer tw_wrong{number}"}
                assert (await call("GET", "/v1/topics", **wrong))[0] == 401
            await asking.admin.know_all()
            answers = (await asking.access.audit()).values()
            noted = [record for records in answers if not isinstance(records, Fault) for record in records]
            assert len([record for record in noted if record.result.startswith("refused")]) == 3
            await cluster.kill_node(cluster.node((await asking.admin.master_status()).node_id))
            assert (await call("GET", "/v1/topics", Authorization="Bearer tw_wrong"))[0] == 401
            assert (await call("GET", "/v1/topics", **root))[0] == 200
