"""Records of a node on its machine for the history (history.py), as seen from outside the node."""

from __future__ import annotations

from tickwheel.chaos.sim.history import Record


class OfBoot(Record):
    """Of one life of a node's process."""

    node: str
    boot: int


class Booted(OfBoot):
    """A node's process has begun."""


class Stopped(OfBoot):
    why: str  # kill, power, stop, fatal
    reason: str
    explained: bool
    """A fault was put on this machine that makes a process stop itself."""


class DiskWiped(Record):
    """A node has lost its disk for good, and its promises with it: its later statements count for nothing."""

    node: str


class RoleSeen(OfBoot):
    """Role or term of a node, when it changed."""

    role: str
    term: int
    voters: tuple[str, ...] = ()
    """The voters by the node's log; empty: not recorded."""


class MemberRemoved(Record):
    """The client that asked for a removal was told that the member is removed."""

    node: str


class LeaseSeen(OfBoot):
    """A node holds the master's lease until this true time if nothing more arrives; 0: not held."""

    term: int
    until_ns: int
    refused_until_ns: int = 1 << 63
    """Time until which a majority votes for nobody else, by when each last heard this master."""


class CursorSeen(OfBoot):
    """The cursor a node shows, when it changed. `recovering`: it says that it is not yet where it was."""

    term: int
    due_ms: int
    index: int
    recovering: bool


class SyncedSeen(OfBoot):
    """The synced (tick, local index) a slave shows in a term."""

    term: int
    tick: int
    local_index: int


class SyncHeard(OfBoot):
    """A slave took a 50 ms sync of a term's master, which had left at `sent_ns` (true time), and the one before it for
    the same slave at `before_ns` (0: none did). Not `complete`: the master had more leases to tell."""

    master: str
    term: int
    sent_ns: int
    before_ns: int = 0
    complete: bool = True


class LeasesGathered(OfBoot):
    """A node begins to write down the leases that it knows now."""


class LeasesKept(OfBoot):
    """The leases that the node gathered last are on stable storage."""


class LeasesUnread(OfBoot):
    """A fault keeps a starting node from reading the leases on its disk."""


class DigestSeen(OfBoot):
    applied_index: int
    digest: bytes
    parts: tuple[tuple[str, bytes], ...] = ()


class SizesSeen(Record):
    """Fill of bounded things: (name, now, limit)."""

    node: str
    sizes: tuple[tuple[str, int, int], ...]


class CheckpointBegan(OfBoot):
    """A node writes a checkpoint of its own."""


class CheckpointTaken(OfBoot):
    """A node has put a peer's checkpoint in place: it was too far behind, or new."""


class HoursRemoved(OfBoot):
    """A node applied a removal of hours: all hours below `below` are gone. Retention was over for those below
    `forced_below` at most, and for dead letters that died before `dead_before_ms`."""

    index: int
    below: int
    forced_below: int
    dead_before_ms: int
    unsettled: int
    """Messages that a group had not settled, once for each group, and dead letters, by the node's count."""


class MomentSeen(OfBoot):
    """A node came to a moment that a run is to reach now and then (moments.py)."""

    what: str


class ContentSeen(OfBoot):
    """A checksum of the units that a node appended for the entry at an index."""

    index: int
    checksum: int
