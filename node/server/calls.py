"""Shared by all services: access to the core, and the step from a callback to an awaited answer."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable
from typing import TypeVar

import grpc

from tickwheel.node.core.failure import Failure
from tickwheel.node.server.core_port import CorePort
from tickwheel.node.server.errors import abort
from tickwheel.node.server.resolving import resolve
from tickwheel.proto import common_pb2

A = TypeVar("A")


class Calls:
    """Every service gets the node's one instance."""

    def __init__(self, core: CorePort, wake: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """`failed` ends the process."""
        self.core = core
        self.wake = wake
        """Must be called after each call into the core, so that its next tick comes soon."""
        self._failed = failed

    def serve(self, fail: Callable[[Failure], None], piece: Callable[[], None]) -> None:
        """Run `piece` for a request. An error in it, or in later work of the core that it began, goes to `fail`."""
        try:
            self.core.serving.run(fail, piece)
        except Exception as error:
            self._failed(error)
            raise

    def fault(self, error: Exception) -> Failure:
        """Report an error of a service. Returns the failure for its caller."""
        try:
            return self.core.serving.fault(error)
        except Exception as fatal:
            self._failed(fatal)
            raise

    async def answer(
        self,
        context: grpc.aio.ServicerContext[object, object],
        start: Callable[[Callable[[A | Failure], None]], None],
    ) -> A:
        """Call `start(done)` and wait for the answer given to `done`. A Failure ends the call."""
        future: asyncio.Future[A | Failure] = asyncio.get_running_loop().create_future()

        def done(result: A | Failure) -> None:
            resolve(future, result)

        self.serve(done, lambda: start(done))
        self.wake()
        result = await future
        if isinstance(result, Failure):
            await abort(context, result)
        return result


@functools.lru_cache(maxsize=1_024)
def owner_of(certified: str, stated: str) -> str:
    """The owner of a producer id: the caller's certificate or user, else the hash of the secret that it states.

    Empty without either. The secret itself is not kept.
    """
    if certified:
        return f"cn/{certified}"
    return f"by/{hashlib.sha256(stated.encode()).hexdigest()[:16]}" if stated else ""


def id64_of(message_id: common_pb2.MessageId) -> int:
    """A message id as one integer; the wheel group is left out."""
    return message_id.hour << 32 | message_id.index


def message_id_of(id64: int) -> common_pb2.MessageId:
    """The message id of an integer, in wheel group 0."""
    return common_pb2.MessageId(hour=id64 >> 32, index=id64 & 0xFFFF_FFFF)
