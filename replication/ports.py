"""What the replicated log and the node above it ask of the world: time, executor, peers, randomness.

The real ones live in `node/` (asyncio, threads, gRPC), the simulated ones in `chaos/sim/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from tickwheel.proto.peer_pb2 import PeerFrame

T = TypeVar("T")


class Clock(Protocol):
    """Two readings; nothing else in a node reads a clock."""

    def monotonic_ns(self) -> int:
        """CLOCK_BOOTTIME: never steps, counts while the machine sleeps."""
        ...

    def wall_ms(self) -> int:
        """This machine's own idea of the time, milliseconds since the Unix epoch. May step."""
        ...


class Executor(Protocol):
    """Runs blocking work beside the loop."""

    def submit(self, work: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """Run `work` in a worker; then `done(result, None)` or `done(None, error)` on the loop.

        Works are started in order, but may end in any; the caller keeps what must not overlap apart.
        """
        ...


class Network(Protocol):
    """Frames to peers: in order per connection or not at all; a lost connection loses what was in flight."""

    def send(self, peer_id: str, frame: PeerFrame) -> bool:
        """Queue a frame; False if there is no connection or its bounded queue is full."""
        ...

    def set_peers(self, addresses: dict[str, str]) -> None:
        """Member id to peer address of all others: dial new ones, drop those that are gone."""
        ...


class Random(Protocol):
    """Seeded in a simulation."""

    def random(self) -> float: ...

    def getrandbits(self, bits: int) -> int: ...
