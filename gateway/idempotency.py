"""Repeats of a request with the same Idempotency-Key get the first one's answer.

Kept in two places. This process has KEYS_MAX answers, each for KEEP_S; it also knows what is under way. In the cluster
the message holds a unique key made of the header while it is pending, so that other gateways, and this one started
anew, recognise a repeat.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

KEYS_MAX = 100_000
KEEP_S = 86_400.0
KEY_LENGTH_MAX = 255
UNIQUE_KEY_PREFIX = "idempotency-key/"
"""Begins the unique keys that are made of the header."""

A = TypeVar("A")


class KeyReusedError(Exception):
    """The key came before with another request."""


def unique_key_of(caller: str, key: str) -> str:
    """The unique key for a caller's Idempotency-Key. It tells neither of them."""
    digest = hashlib.sha256(hashlib.sha256(caller.encode()).digest() + key.encode()).hexdigest()
    return f"{UNIQUE_KEY_PREFIX}{digest[:40]}"


@dataclass(slots=True)
class _Kept(Generic[A]):
    content: bytes
    """Digest of the request."""
    answer: asyncio.Future[A]
    until_s: float


class Idempotency(Generic[A]):
    """The answers by key."""

    def __init__(self, keys_max: int = KEYS_MAX, keep_s: float = KEEP_S) -> None:
        self._keys_max = keys_max
        self._keep_s = keep_s
        self._kept: OrderedDict[tuple[str, str], _Kept[A]] = OrderedDict()

    async def once(self, caller: str, key: str, request: bytes, work: Callable[[], Awaitable[A]]) -> tuple[A, bool]:
        """The answer of the first request with this caller and key, and whether this is a repeat.

        A request that fails is forgotten: its repeat is tried anew. Raises KeyReusedError, and what `work` raises.
        """
        now_s = time.monotonic()
        while self._kept and next(iter(self._kept.values())).until_s <= now_s:
            self._kept.popitem(last=False)
        content = hashlib.sha256(request).digest()
        name = (caller, key)
        kept = self._kept.get(name)
        if kept is not None:
            if kept.content != content:
                raise KeyReusedError
            return await asyncio.shield(kept.answer), True
        if len(self._kept) >= self._keys_max:
            self._kept.popitem(last=False)
        # It goes on if its caller leaves, who may be the one that repeats it.
        answer = asyncio.ensure_future(work())
        kept = self._kept[name] = _Kept(content, answer, now_s + self._keep_s)

        def ended(future: asyncio.Future[A]) -> None:
            if (future.cancelled() or future.exception() is not None) and self._kept.get(name) is kept:
                del self._kept[name]

        answer.add_done_callback(ended)
        return await asyncio.shield(answer), False
