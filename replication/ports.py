"""The ports through which the log and the node reach the world: time, worker threads, peers, randomness.

The real ones live in `node/` (asyncio, threads, gRPC), the simulated ones in `chaos/sim/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from tickwheel.proto.peer_pb2 import PeerFrame

T = TypeVar("T")
NS_PER_MS = 1_000_000


class Clock(Protocol):
    """The only clock of a node: nothing else in it reads the time."""

    def monotonic_ns(self) -> int:
        """CLOCK_BOOTTIME, in nanoseconds: never steps, and counts while the machine sleeps."""
        ...

    def wall_ms(self) -> int:
        """This machine's wall clock, in milliseconds since the Unix epoch. May step."""
        ...


class Executor(Protocol):
    """Runs blocking work in threads beside the loop."""

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """Run `work` in a worker; then `done(result, None)` or `done(None, error)` on the loop.

        Work starts in the order of the calls and may end in any order. The caller sees to it that work which must not
        overlap does not.
        """
        ...


class Network(Protocol):
    """Sends frames to peers, in order on each connection. A connection that breaks loses the frames under way."""

    def send(self, peer_id: str, frame: PeerFrame) -> bool:
        """Queue a frame; False if there is no connection or its bounded queue is full."""
        ...

    def set_peers(self, addresses: dict[str, str]) -> None:
        """Set all peers, member id to address: dials new ones, hangs up on those that are gone."""
        ...


class Random(Protocol):
    """A source of random numbers; the simulation's is seeded."""

    def random(self) -> float: ...

    def getrandbits(self, bits: int) -> int: ...
