"""The network between the nodes, however it is built: one way for each directed pair, and its spoiling.

Owns what faults do to ways: a way can be stalled (nothing passes, nothing is reset), cut (connections are reset, new
ones refused), delayed with jitter, throttled, or lose packets. All traffic from one node to another goes one way,
over whichever connection; so one direction alone can be stopped. Every way counts the effects of faults on it.
`proxy.py` (TCP, anywhere) and `switch.py` (packets, between network namespaces) carry it out.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

CLIENTS = "clients"
"""The other end of a way that is no node."""


@dataclass(slots=True)
class Counts:
    """Counts of the traffic of a way, and of the effects of faults on it."""

    bytes: int = 0
    held_bytes: int = 0
    """Bytes that waited because the way was stalled."""
    dropped: int = 0
    """Packets that were lost."""
    late_bytes: int = 0
    """Delayed or throttled."""
    reset: int = 0
    """Connections reset or refused."""


@dataclass(frozen=True, slots=True, eq=False)
class Spoiling:
    """The effect of one fault on a way. Several add up."""

    stalled: bool = False
    """Nothing passes, nothing is reset: bytes wait in the proxy, packets are lost."""
    cut: bool = False
    """Connections are reset and new ones refused."""
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    """Most additional delay, drawn for each chunk."""
    bytes_per_s: int = 0
    """0: as fast as it goes."""
    lost_share: float = 0.0
    """Share of packets lost at random. A proxy passes bytes on in order or not at all, so it loses none."""


@dataclass(slots=True)
class Way:
    """The traffic from one node to another, with the combined effect of all faults on it."""

    source: str
    target: str
    counts: Counts = field(default_factory=Counts)
    _spoilt: list[Spoiling] = field(default_factory=list)
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _delay_ms: float = 0.0
    _jitter_ms: float = 0.0
    _bytes_per_s: int = 0
    _free_s: float = 0.0
    lost_share: float = 0.0
    cut: bool = False

    def __post_init__(self) -> None:
        self._open.set()

    @property
    def name(self) -> str:
        return f"{self.source}>{self.target}"

    @property
    def passes(self) -> bool:
        """Whether anything gets through, however late."""
        return self._open.is_set() and not self.cut

    def spoil(self, spoiling: Spoiling) -> None:
        """From now on, until `heal`. To cut, use Network.spoil: it knows the connections."""
        self._spoilt.append(spoiling)
        self._settle()

    def heal(self, spoiling: Spoiling) -> None:
        """This one is over; nothing if it was over before."""
        if spoiling in self._spoilt:
            self._spoilt.remove(spoiling)
            self._settle()

    def heal_all(self) -> None:
        """As it was."""
        self._spoilt.clear()
        self._settle()

    def _settle(self) -> None:
        spoilt = self._spoilt
        self.cut = any(one.cut for one in spoilt)
        self._delay_ms = sum(one.delay_ms for one in spoilt)
        self._jitter_ms = sum(one.jitter_ms for one in spoilt)
        self._bytes_per_s = min((one.bytes_per_s for one in spoilt if one.bytes_per_s), default=0)
        self.lost_share = 1.0 - math.prod(1.0 - one.lost_share for one in spoilt)
        if any(one.stalled for one in spoilt):
            self._open.clear()
        else:
            self._open.set()

    def due_s(self, now_s: float, size: int, rng: random.Random) -> float:
        """Time at which `size` bytes that arrived at `now_s` may continue."""
        due = now_s
        if self._delay_ms or self._jitter_ms:
            due += (self._delay_ms + rng.random() * self._jitter_ms) / 1_000
        if self._bytes_per_s:
            self._free_s = due = max(due, self._free_s) + size / self._bytes_per_s
        if due > now_s:
            self.counts.late_bytes += size
        return due

    async def passable(self, size: int) -> None:
        """Until the way is not stalled."""
        if not self._open.is_set():
            self.counts.held_bytes += size
            await self._open.wait()


class Network:
    """All ways of a cluster. Subclasses carry them out: a proxy or a switch."""

    held_unit = ""
    """Unit in which the effect of stalled ways is counted."""

    def __init__(self, node_ids: list[str], seed: int) -> None:
        ends = [*node_ids, CLIENTS]
        self.ways = {(a, b): Way(a, b) for a in ends for b in ends if a != b}
        self._rng = random.Random(seed)

    def held(self, counts: Counts) -> int:
        """How much was held up by ways that were stalled, in `held_unit`."""
        raise NotImplementedError

    def ways_of(self, node_id: str, *, clients: bool = False) -> list[Way]:
        """The ways from and to a node."""
        return [way for ends, way in self.ways.items() if node_id in ends and (clients or CLIENTS not in ends)]

    def between(self, some: Iterable[str], others: Iterable[str]) -> list[Way]:
        """The ways from any of some to any of the others, one direction."""
        return [self.ways[a, b] for a in some for b in others if a != b]

    def spoil(self, ways: list[Way], spoiling: Spoiling) -> None:
        """Apply the effect to all of these ways until `heal`."""
        for way in ways:
            way.spoil(spoiling)
        if spoiling.cut:
            self._cut(ways)

    def heal(self, ways: list[Way], spoiling: Spoiling) -> None:
        """End the effect on these ways."""
        for way in ways:
            way.heal(spoiling)

    def heal_all(self) -> None:
        """End the effects of all faults on all ways."""
        for way in self.ways.values():
            way.heal_all()

    def _cut(self, ways: list[Way]) -> None:
        """They have just been cut: reset what is open, where that does not come by itself."""

    async def stop(self) -> None:
        """Idempotent."""
        raise NotImplementedError
