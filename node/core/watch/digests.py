"""GetDigest: digests of this node's state, each of one entry of the log.

A digest takes time in proportion to topics, groups, subscriptions and producers: a second with 200,000 subscriptions.
So it is made in turns of a few milliseconds, one with each tick, and the log is not applied meanwhile (`making`). All
who wait share the next one, and after each there is a pause, so that callers cannot hold up the log.
"""

from __future__ import annotations

from collections.abc import Generator

from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Promise
from tickwheel.node.core.world import Now, SteadyMs
from tickwheel.node.failure import Failure, RequestError
from tickwheel.proto import common_pb2
from tickwheel.proto.admin_pb2 import StateDigest

PAUSE_FACTOR = 19
"""A pause is this many times as long as the digest before it took: they hold up the log for at most 5 % of the time, as
long as one takes less than 150 ms."""
PAUSE_MS_MAX = 3_000
"""The longest pause, so that callers of a node with a large state get an answer in time."""


class Digests(Part):
    def __init__(self, core: Kernel) -> None:
        self._core = core
        self._waiting: list[Promise[StateDigest]] = []
        self._served: list[Promise[StateDigest]] = []
        """Callers that get the digest being made."""
        self._turns: Generator[None, None, StateDigest] | None = None
        self._begun_ms = self._next_ms = SteadyMs(0)
        self._stopped = False

    @property
    def making(self) -> bool:
        """A digest is being made: nothing may be applied."""
        return self._turns is not None

    async def get(self) -> StateDigest:
        """A digest of the state at some moment after the call. Raises RequestError: the core has stopped."""
        if self._stopped:
            raise RequestError(_stops())
        promise: Promise[StateDigest] = Promise()
        self._waiting.append(promise)
        return await promise

    def tick(self, now: Now) -> None:
        if self._turns is None:
            # Where arrivals are being absorbed an entry is applied in part.
            if not self._waiting or now.steady_ms < self._next_ms or self._core.wheel.ingestion.absorbing:
                return
            self._served, self._waiting = self._waiting, []
            self._begun_ms = now.steady_ms
            self._turns = self._core.state.digest_in_turns()
        try:
            next(self._turns)
        except StopIteration as complete:
            for promise in self._ended():
                promise.keep(complete.value)
        except Exception as error:  # of the requests, not of the node
            for promise in self._ended():
                promise.fail(error)

    def _ended(self) -> list[Promise[StateDigest]]:
        steady_ms = self._core.steady_ms()
        took_ms = steady_ms - self._begun_ms
        self._next_ms = SteadyMs(steady_ms + min(PAUSE_FACTOR * took_ms, PAUSE_MS_MAX))
        self._turns = None
        served, self._served = self._served, []
        return served

    def wait_ms(self, now: Now) -> int | None:
        if self._turns is not None:
            return 0
        return self._next_ms - now.steady_ms if self._waiting else None

    def stop(self) -> None:
        """The core stops: its state takes no part any more."""
        self._stopped = True
        self._turns = None
        waiting, self._served, self._waiting = self._served + self._waiting, [], []
        for promise in waiting:
            promise.refuse(_stops())


def _stops() -> Failure:
    return Failure(common_pb2.RECOVERING, "this node stops", {"retry_after_ms": "1000"})
