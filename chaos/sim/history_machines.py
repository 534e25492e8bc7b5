"""Records of a node on its machine for the history (history.py), as seen from outside the node."""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.chaos.sim.history import Record


@dataclass(slots=True)
class Booted(Record):
    node: str
    boot: int


@dataclass(slots=True)
class Stopped(Record):
    node: str
    boot: int
    why: str  # kill, power, stop, fatal
    reason: str
    explained: bool
    """A fault was put on this machine that makes a process stop itself."""


@dataclass(slots=True)
class DiskWiped(Record):
    """A node has lost its disk for good, and its promises with it: its later statements count for nothing."""

    node: str


@dataclass(slots=True)
class RoleSeen(Record):
    """Role or term of a node, when it changed."""

    node: str
    boot: int
    role: str
    term: int
    voters: tuple[str, ...] = ()
    """The voters by the node's log; empty: not recorded."""


@dataclass(slots=True)
class MemberRemoved(Record):
    """The client that asked for a removal was told that the member is removed."""

    node: str


@dataclass(slots=True)
class LeaseSeen(Record):
    """A node holds the master's lease until this true time if nothing more arrives; 0: not held."""

    node: str
    boot: int
    term: int
    until_ns: int
    refused_until_ns: int = 1 << 63
    """Time until which a majority votes for nobody else, by when each last heard this master."""


@dataclass(slots=True)
class CursorSeen(Record):
    """The cursor a node shows, when it changed. `recovering`: it says that it is not yet where it was."""

    node: str
    boot: int
    term: int
    due_ms: int
    index: int
    recovering: bool


@dataclass(slots=True)
class SyncedSeen(Record):
    """The synced (tick, local index) a slave shows in a term."""

    node: str
    boot: int
    term: int
    tick: int
    local_index: int


@dataclass(slots=True)
class SyncHeard(Record):
    """A slave took a 50 ms sync of a term's master, which had left at `sent_ns` (true time)."""

    node: str
    boot: int
    master: str
    term: int
    sent_ns: int


@dataclass(slots=True)
class LeasesGathered(Record):
    """A node begins to write down the leases that it knows now."""

    node: str
    boot: int


@dataclass(slots=True)
class LeasesKept(Record):
    """The leases that the node gathered last are on stable storage."""

    node: str
    boot: int


@dataclass(slots=True)
class LeasesUnread(Record):
    """A fault keeps a starting node from reading the leases on its disk."""

    node: str
    boot: int


@dataclass(slots=True)
class DigestSeen(Record):
    node: str
    boot: int
    applied_index: int
    digest: bytes
    parts: tuple[tuple[str, bytes], ...] = ()


@dataclass(slots=True)
class SizesSeen(Record):
    """Fill of bounded things: (name, now, limit)."""

    node: str
    sizes: tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class CheckpointBegan(Record):
    """A node writes a checkpoint of its own."""

    node: str
    boot: int


@dataclass(slots=True)
class CheckpointTaken(Record):
    """A node has put a peer's checkpoint in place: it was too far behind, or new."""

    node: str
    boot: int


@dataclass(slots=True)
class MomentSeen(Record):
    """A node came to a moment that a run is to reach now and then (moments.py)."""

    node: str
    boot: int
    what: str


@dataclass(slots=True)
class ContentSeen(Record):
    """A checksum of the units that a node appended for the entry at an index."""

    node: str
    boot: int
    index: int
    checksum: int
