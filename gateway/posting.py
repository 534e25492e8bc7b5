"""Posts deliveries to one HTTP target: the handler of a worker.

A post is a CloudEvent in binary mode (CloudEvents 1.0, HTTP protocol binding), signed as Standard Webhooks define it.
What the answer means: 2xx acknowledges; the statuses of `dead_on` make a dead letter; any other answer, none in time
and no connection return the message, after `Retry-After` where that is said, else by the group's retry policy.

Owns the breaker and the pace of its target. A delivery that waits for them keeps its lease, which the worker renews.
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import aiohttp
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tickwheel.client import Dead, Delivery, Retry
from tickwheel.gateway.addresses import public_socket
from tickwheel.gateway.breaker import Breaker, Pace
from tickwheel.gateway.config import Target, read_secrets
from tickwheel.gateway.signing import signature_headers

if TYPE_CHECKING:
    from tickwheel.gateway.traces import GatewayTracing

_log = logging.getLogger("tickwheel.gateway")

ANSWER_BYTES_MAX = 2_048
"""Of an answer that are read and, for a failure, kept with the message."""
LARGE_BYTES = 1 << 20
"""A body of this size is sent piece by piece."""
REASON_LENGTH_MAX = 1_000
RETRY_AFTER_MAX = timedelta(days=1)
SECRETS_LOOK_S = 5.0
"""Pause between two looks whether the secrets have changed."""
PASSED_ON = ("traceparent", "tracestate", "baggage")
"""Headers of a message that are headers of its post as they are."""
PREFIX = "tickwheel-header-"
"""Before the names of a message's other headers."""
_TOKEN = re.compile(r"[A-Za-z0-9-]{1,100}\Z")
_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
DOWN = (408, 425, 429, 500, 502, 503, 504)
"""Answers that count as failures of the target as a whole."""


BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class PostMetrics:
    """What Prometheus is told of the posts to all targets of one gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.posts = Counter(
            "tickwheel_gateway_posts", "Posts, by target and kind of answer (none: no answer).", ["target", "answer"],
            registry=registry,
        )  # fmt: skip
        self.seconds = Histogram(
            "tickwheel_gateway_post_seconds", "How long posts took.", ["target"], registry=registry, buckets=BUCKETS_S
        )
        self.down = Gauge(
            "tickwheel_gateway_target_down", "1 while posts to a target pause, since it failed too often in a row.",
            ["target"], registry=registry,
        )  # fmt: skip


class Secrets:
    """The keys of a target's posts, read again when their file changes."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._keys = read_secrets(path) if path is not None else []
        self._stamp = self._stamp_now()
        self._look_at_s = time.monotonic() + SECRETS_LOOK_S

    @property
    def keys(self) -> list[bytes]:
        """The keys that hold now."""
        now_s = time.monotonic()
        if self._path is not None and now_s >= self._look_at_s:
            self._look_at_s = now_s + SECRETS_LOOK_S
            self._look(self._path)
        return self._keys

    def _look(self, path: Path) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        try:
            self._keys = read_secrets(path)
        except ValueError as error:
            _log.error("%s: the secrets of before stay", error)
        else:
            _log.info("secret_file %s: %d secrets read anew", path, len(self._keys))
        self._stamp = stamp

    def _stamp_now(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_ino) if found is not None else None


class Poster:
    """The handler of one target. Close it after its worker."""

    def __init__(
        self, name: str, target: Target, source: str, metrics: PostMetrics, tracing: GatewayTracing | None = None
    ) -> None:
        """`tracing`: makes a span of each post."""
        self._name = name
        self._tracing = tracing
        self._target = target
        self._source = source
        self._metrics = metrics
        metrics.down.labels(name).set(0)
        self._secrets = Secrets(target.secret_file)
        self._breaker = Breaker(target.failures_max)
        self._pace = Pace(target.rate)
        parts = urlsplit(target.url)
        self._shown = f"{parts.scheme}://{parts.netloc}{parts.path}"
        """Without its query, which may hold a secret."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=target.concurrency,
                use_dns_cache=False,
                socket_factory=None if target.private_addresses else public_socket,
            ),
            timeout=aiohttp.ClientTimeout(total=target.timeout.total_seconds()),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # an answer is not read further than it came
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def __call__(self, delivery: Delivery) -> None:
        """Post a delivery. Raises Retry or Dead."""
        while True:
            wait_s = self._breaker.wait_s(time.monotonic())
            if not wait_s:
                break
            await asyncio.sleep(wait_s)
        began_s = time.monotonic()
        try:
            if (turn_s := self._pace.turn_s(began_s)) > 0:
                await asyncio.sleep(turn_s)
                began_s = time.monotonic()
            status, answer, retry_after = await self._post(delivery)
        except asyncio.CancelledError:
            self._breaker.gave_up()
            raise
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"{self._shown}: {_text_of(error, self._target.timeout)}"[:REASON_LENGTH_MAX]
            self._fell(reason)
            self._note("none", time.monotonic() - began_s)
            raise Retry(reason=reason) from error
        except Exception as error:  # this delivery cannot be sent at all
            self._breaker.gave_up()
            raise Dead(f"cannot be posted: {type(error).__name__}: {error}"[:REASON_LENGTH_MAX]) from error
        self._note(f"{status // 100}xx", time.monotonic() - began_s)
        reason = f"{self._shown} answered {status}: {answer}"[:REASON_LENGTH_MAX]
        if status in DOWN:
            self._fell(reason)
        else:
            self._rose()
        if 200 <= status < 300:
            return
        if status in self._target.dead_on:
            raise Dead(reason)
        raise Retry(retry_after, reason=reason)

    async def _post(self, delivery: Delivery) -> tuple[int, str, timedelta | None]:
        body = delivery.payload
        data = body if len(body) < LARGE_BYTES else io.BytesIO(body)
        headers = event_headers(delivery, self._source, self._target)
        headers |= signature_headers(self._secrets.keys, delivery.id, int(time.time()), body)
        span = self._tracing.posting(self._shown, headers) if self._tracing is not None else nullcontext()
        with span as post:
            async with self._session.post(
                self._target.url, data=data, headers=headers, allow_redirects=False
            ) as response:
                if post is not None:
                    post.answered(response.status)
                try:
                    read = await response.content.read(ANSWER_BYTES_MAX)
                except (aiohttp.ClientError, TimeoutError, OSError):
                    read = b""  # the status counts, whatever becomes of the rest
                if not response.content.at_eof():
                    response.close()  # of a long answer the rest is not read
                return response.status, shown_of(read), retry_after_of(response.headers.get("Retry-After", ""))

    def _note(self, answer: str, seconds: float) -> None:
        self._metrics.posts.labels(self._name, answer).inc()
        self._metrics.seconds.labels(self._name).observe(seconds)

    def _fell(self, reason: str) -> None:
        if self._breaker.failed(time.monotonic()):
            _log.warning("target %s is down, posts pause: %s", self._name, reason)
        self._metrics.down.labels(self._name).set(self._breaker.is_open)

    def _rose(self) -> None:
        if self._breaker.is_open:
            _log.info("target %s is up again", self._name)
        self._breaker.succeeded()
        self._metrics.down.labels(self._name).set(False)


def event_headers(delivery: Delivery, source: str, target: Target) -> dict[str, str]:
    """The headers of a post, but for its signature."""
    headers = {
        "user-agent": "tickwheel-gateway",
        "accept-encoding": "identity",
        "content-type": _value(delivery.content_type) or "application/octet-stream",
        "ce-specversion": "1.0",
        "ce-id": delivery.id,
        "ce-source": _value(source),
        "ce-type": _value(target.event_type),
        "ce-subject": _value(delivery.topic),
        "ce-time": delivery.due.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "ce-tickwheelattempt": str(delivery.attempt),
        "ce-tickwheelgroup": _value(target.group),
    }
    if delivery.key:
        headers["ce-partitionkey"] = _value(delivery.key)
    if delivery.unique_key:
        headers["ce-tickwheeluniquekey"] = _value(delivery.unique_key)
    if delivery.tags:
        headers["ce-tickwheeltags"] = _value(" ".join(delivery.tags))
    for name, value in delivery.headers.items():
        lower = name.lower()
        if lower in PASSED_ON:
            headers[lower] = _value(value)
        elif lower != "content-type" and _TOKEN.match(name):
            headers[PREFIX + lower] = _value(value)
    return headers


def _value(text: str) -> str:
    """A value as CloudEvents put it into a header: what is not printable ASCII is percent-encoded. Content types and
    alike have spaces, which are harmless."""
    return quote(text, safe=_SAFE + " ").strip()


def retry_after_of(text: str) -> timedelta | None:
    """The pause that an answer asks for, in seconds or until a date; at most a day. None: none, or nonsense."""
    text = text.strip()
    if text.isascii() and text.isdecimal():
        pause = timedelta(seconds=min(int(text[:10]), int(RETRY_AFTER_MAX.total_seconds())))
    else:
        try:
            moment = parsedate_to_datetime(text)
        except (TypeError, ValueError, IndexError, OverflowError):
            return None
        pause = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime.now(UTC)
    return min(pause, RETRY_AFTER_MAX) if pause > timedelta(0) else None


def shown_of(answer: bytes) -> str:
    """The beginning of an answer, for people."""
    return " ".join(answer.decode("utf-8", "replace").split())[:REASON_LENGTH_MAX]


def _text_of(error: Exception, timeout: timedelta) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout.total_seconds():g} s"
    if isinstance(error, aiohttp.ClientConnectorError) and str(error.os_error):
        return f"cannot connect: {error.os_error}"
    return str(error) or type(error).__name__
