"""How handlers reach the core from the node's loop: the current core, containment, and the wait for an answer."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tickwheel.node.core.core import NodeCore, serve
from tickwheel.node.core.promise import Promise
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.server.resolving import resolve
from tickwheel.node.state.producer_shares import IDENTIFIED

A = TypeVar("A")


class Calls:
    """One for the client port of a node."""

    def __init__(
        self, current: Callable[[], NodeCore], wake: Callable[[], None], failed: Callable[[BaseException], None]
    ) -> None:
        """`current` gives the current core: a peer's checkpoint replaces it. `failed` ends the process."""
        self._current = current
        self.wake = wake
        """Must be called after each call into the core, so that its next tick comes soon."""
        self._failed = failed

    @property
    def core(self) -> NodeCore:
        """The current core."""
        return self._current()

    def serve(self, fail: Callable[[Failure], None], piece: Callable[[], None]) -> None:
        """Run `piece`, the first of a request. An error in it, or in later work of the core that it began, goes to
        `fail`."""
        serving = self.core.serving
        if serving.closed is not None:
            fail(serving.closed)
            return
        try:
            serving.run(fail, piece)
        except Exception as error:
            self._failed(error)
            raise

    def fault(self, error: Exception) -> Failure:
        """Report an error of a handler. Returns the failure for its caller."""
        try:
            return self.core.serving.fault(error)
        except Exception as fatal:
            self._failed(fatal)
            raise

    async def ask(self, begin: Callable[[NodeCore, Callable[[A | Failure], None]], None]) -> A:
        """Call `begin` with the core and a callback, and wait for the answer. Raises RequestError for a refusal."""
        return await self.answered(lambda done: self.begin(begin, done))

    async def answered(self, begin: Callable[[Callable[[A | Failure], None]], None]) -> A:
        """Call `begin` with a callback, and wait for the answer. Raises RequestError for a refusal."""
        future: asyncio.Future[A | Failure] = asyncio.get_running_loop().create_future()

        def done(result: A | Failure) -> None:
            resolve(future, result)

        begin(done)
        result = await future
        if isinstance(result, Failure):
            raise RequestError(result)
        return result

    def begin(
        self, begin: Callable[[NodeCore, Callable[[A | Failure], None]], None], done: Callable[[A | Failure], None]
    ) -> None:
        """Call `begin` with the core and `done`, which gets the answer, or the failure by a mistake."""
        core = self.core
        self.serve(done, lambda: begin(core, done))
        self.wake()

    async def answer(self, begin: Callable[[NodeCore], Coroutine[Promise[Any], None, A]], *, master: bool = False) -> A:
        """Run a coroutine of the core and wait for what it returns. Raises RequestError for a refusal.
        `master`: as in `serve` of core.py."""
        return await self.ask(lambda core, done: serve(core, begin(core), done, master=master))


@functools.lru_cache(maxsize=1_024)
def owner_of(certified: str, stated: str) -> str:
    """The owner of a producer id: the caller's certificate or user, else the hash of the secret that it states.

    Empty without either. The secret itself is not kept.
    """
    if certified:
        return f"{IDENTIFIED}{certified}"
    return f"by/{hashlib.sha256(stated.encode()).hexdigest()[:16]}" if stated else ""
