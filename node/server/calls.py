"""How handlers reach the core from the node's loop: the current core, containment, and the wait for an answer."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from tickwheel.node.core.core import NodeCore, serve
from tickwheel.node.core.promise import Promise, Reply
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.server.resolving import resolve
from tickwheel.node.state.producers import IDENTIFIED

A = TypeVar("A")
P = ParamSpec("P")


class Calls:
    """One for the client port of a node."""

    def __init__(
        self,
        current: Callable[[], NodeCore],
        wake: Callable[[], None],
        wake_within: Callable[[int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`current` gives the current core: a peer's checkpoint replaces it. `wake_within` gets milliseconds. `failed`
        ends the process."""
        self._current = current
        self.wake = wake
        """Must be called after each call into the core, so that its next tick comes soon; `serve_for_log` does it."""
        self._wake_within = wake_within
        self._failed = failed

    @property
    def core(self) -> NodeCore:
        """The current core."""
        return self._current()

    def serve(
        self, fail: Callable[[Failure], None], piece: Callable[P, None], *args: P.args, **named: P.kwargs
    ) -> None:
        """Run `piece`, the first of a request. An error in it, or in later work of the core that it began, goes to
        `fail`."""
        serving = self._current().serving
        if serving.closed is not None:
            fail(serving.closed)
            return
        try:
            serving.run(fail, piece, *args, **named)
        except Exception as error:
            self._failed(error)
            raise

    def serve_for_log(
        self, fail: Callable[[Failure], None], piece: Callable[P, None], *args: P.args, **named: P.kwargs
    ) -> None:
        """As `serve`, for a piece that needs nothing but an entry of the log: the next tick comes when that leaves."""
        self.serve(fail, self._for_log, piece, *args, **named)

    def _for_log(self, piece: Callable[P, None], /, *args: P.args, **named: P.kwargs) -> None:
        try:
            piece(*args, **named)
        finally:
            self._wake_within(self._current().proposer.held_ms())

    def fault(self, error: Exception) -> Failure:
        """Report an error of a handler. Returns the failure for its caller."""
        try:
            return self.core.serving.fault(error)
        except Exception as fatal:
            self._failed(fatal)
            raise

    def begin(self, begin: Callable[[NodeCore, Reply[A]], None], reply: Reply[A]) -> None:
        """Call `begin` with the core and `reply`, which gets the answer, or the failure by a mistake."""
        core = self.core
        self.serve(reply.fail, lambda: begin(core, reply))
        self.wake()

    async def ask(self, begin: Callable[[NodeCore, Reply[A]], None]) -> A:
        """Call `begin` with the core and a reply, and wait for the answer. Raises RequestError for a refusal."""
        return await self.answered(lambda core, tell: begin(core, Reply.either(tell)))

    async def answer(self, begin: Callable[[NodeCore], Coroutine[Promise[Any], None, A]], *, master: bool = False) -> A:
        """Run a coroutine of the core and wait for what it returns. Raises RequestError for a refusal.
        `master`: as in `serve` of core.py."""
        return await self.answered(lambda core, tell: serve(core, begin(core), tell, master=master))

    async def answered(self, begin: Callable[[NodeCore, Callable[[A | Failure], None]], None]) -> A:
        """As `ask`, where both outcomes go to one callback."""
        core = self.core
        future: asyncio.Future[A | Failure] = asyncio.get_running_loop().create_future()

        def tell(outcome: A | Failure) -> None:
            resolve(future, outcome)

        self.serve(tell, lambda: begin(core, tell))
        self.wake()
        outcome = await future
        if isinstance(outcome, Failure):
            raise RequestError(outcome)
        return outcome


@functools.lru_cache(maxsize=1_024)
def owner_of(certified: str, stated: str) -> str:
    """The owner of a producer id: the caller's certificate or user, else the hash of the secret that it states.

    Empty without either. The secret itself is not kept.
    """
    if certified:
        return f"{IDENTIFIED}{certified}"
    return f"by/{hashlib.sha256(stated.encode()).hexdigest()[:16]}" if stated else ""
