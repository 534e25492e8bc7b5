"""What all services share: the core, and turning a callback into an awaited answer."""

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
    """One per node; handed to every service."""

    def __init__(self, core: CorePort, wake: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """`failed` ends the process."""
        self.core = core
        self.wake = wake
        """To be called after anything that was given to the core."""
        self._failed = failed

    def serve(self, fail: Callable[[Failure], None], piece: Callable[[], None]) -> None:
        """Have the core do something for a request: an error in it, now or in what follows on it, is told to `fail`."""
        try:
            self.core.serving.run(fail, piece)
        except Exception as error:
            self._failed(error)
            raise

    def fault(self, error: Exception) -> Failure:
        """Report an error of a service; what its caller is told."""
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
        """Start something with a `done` and wait for its answer; a Failure ends the call."""
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
    """To whom a producer id belongs that a caller uses: to its certificate or user, else to the secret that it states;
    empty if neither does. The secret itself is kept nowhere."""
    if certified:
        return f"cn/{certified}"
    return f"by/{hashlib.sha256(stated.encode()).hexdigest()[:16]}" if stated else ""


def id64_of(message_id: common_pb2.MessageId) -> int:
    """A message id as one integer."""
    return message_id.hour << 32 | message_id.index


def message_id_of(id64: int) -> common_pb2.MessageId:
    """One integer as a message id of wheel group 0."""
    return common_pb2.MessageId(hour=id64 >> 32, index=id64 & 0xFFFF_FFFF)
