"""What happened, as a bystander with a true clock would write it down.

Every record carries true time in ns, which no fault touches. A history is only ever added to; each record
goes to the checkers at once (safety after each step) and into the digest of the run. Nobody changes a record
(frozen ones take three times as long to make, and a run makes tens of thousands).

Messages are named by `uid`, a number the workload puts into the payload: what a node says about ids and
due times is judged against it, never believed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

from tickwheel.chaos.sim.world import World


@dataclass(slots=True)
class Record:
    """Anything that happened at a true time."""

    at_ns: int


# -- machines


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
class RoleSeen(Record):
    """Role or term of a node, when it changed."""

    node: str
    boot: int
    role: str
    term: int
    voters: tuple[str, ...] = ()
    """Who counts, by the node's log; empty: not said."""


@dataclass(slots=True)
class MemberRemoved(Record):
    """Whoever asked for it was told that a member is removed."""

    node: str


@dataclass(slots=True)
class LeaseSeen(Record):
    """A node holds the master's lease until this true time if nothing more arrives; 0: not held."""

    node: str
    boot: int
    term: int
    until_ns: int
    refused_until_ns: int = 1 << 63
    """Until when a majority will vote for nobody else, by when they heard this master last."""


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
class ContentSeen(Record):
    """A checksum of the units that a node appended for the entry at an index."""

    node: str
    boot: int
    index: int
    checksum: int


# -- what a bystander at the disks and wires of a log sees (log_watch.py)


@dataclass(slots=True)
class VoteSeen(Record):
    """A node has put down for whom it votes in a term."""

    node: str
    boot: int
    term: int
    voted_for: str


@dataclass(slots=True)
class TermIgnored(Record):
    """A node took a frame of a higher term and goes on in its own."""

    node: str
    boot: int
    term: int
    heard: int


@dataclass(slots=True)
class CommitSeen(Record):
    """An entry was applied for the first time anywhere; `holders` of the voters have it on stable storage."""

    node: str
    index: int
    term: int
    holders: int
    voters: int


@dataclass(slots=True)
class CommittedCut(Record):
    """A node cut an entry from its log that was applied somewhere."""

    node: str
    boot: int
    index: int
    term: int


@dataclass(slots=True)
class Recovered(Record):
    """A node's log after a start; `durable_before` is the last committed entry that was on stable storage before."""

    node: str
    boot: int
    last_index: int
    durable_before: int


@dataclass(slots=True)
class SentAgain(Record):
    """A master sends an entry again on a connection on which nobody asked for that."""

    node: str
    peer: str
    index: int
    sent_before: int


@dataclass(slots=True)
class AskedUnread(Record):
    """A node asks for an election while input waits for it unread."""

    node: str
    boot: int
    waiting: int


# -- the log alone


@dataclass(slots=True)
class Applied(Record):
    """A node applied an entry; `command` 0 is an entry that no client proposed."""

    node: str
    boot: int
    index: int
    term: int
    command: int


@dataclass(slots=True)
class Proposed(Record):
    node: str
    command: int


@dataclass(slots=True)
class ProposalEnded(Record):
    node: str
    command: int
    verdict: str
    index: int


# -- producers


@dataclass(slots=True, frozen=True)
class Label:
    """What a producer writes on a message besides its payload."""

    lane: str | None = None
    """Its message group, in a FIFO topic; empty: it names none."""
    tags: tuple[str, ...] = ()
    key: str = ""


@dataclass(slots=True)
class Row:
    """One message as its producer wants it; delay_ms is set for relative times."""

    uid: int
    topic: str
    due_ms: int | None
    delay_ms: int | None
    label: Label | None = None


@dataclass(slots=True)
class ScheduleSent(Record):
    """A batch leaves its producer for a node, for the first time or again."""

    producer: str
    sequence: int
    node: str
    rows: tuple[Row, ...]


@dataclass(slots=True)
class DelayCounted(Record):
    """A node turns delays into due times, or just has, by a clock that it says may be off by so much."""

    node: str
    uids: tuple[int, ...]
    clock_error_ms: float


@dataclass(slots=True)
class ScheduleAcknowledged(Record):
    """The producer has the receipt. `due_ms` are the times that hold."""

    producer: str
    sequence: int
    uids: tuple[int, ...]
    ids: tuple[int, ...]
    due_ms: tuple[int, ...]
    repeated: bool
    groups: tuple[str, ...] = ()
    """Whom they are for; empty: all groups of the run."""


@dataclass(slots=True)
class ScheduleRefused(Record):
    producer: str
    sequence: int
    reason: str


@dataclass(slots=True)
class CancelSent(Record):
    uid: int
    id: int


@dataclass(slots=True)
class CancelAnswered(Record):
    uid: int
    id: int
    outcome: str  # CANCELLED, ALREADY_DISPATCHED, NOT_FOUND


@dataclass(slots=True)
class RescheduleSent(Record):
    uid: int
    id: int
    due_ms: int


@dataclass(slots=True)
class RescheduleAnswered(Record):
    uid: int
    id: int
    outcome: str
    new_id: int
    due_ms: int


@dataclass(slots=True)
class Looked(Record):
    """State of a message as the cluster tells at the end, by the names of MessageState, or NOT_FOUND."""

    uid: int
    id: int
    state: str


# -- consumers


@dataclass(slots=True)
class Delivered(Record):
    """A node handed a message to a consumer's session (the moment it left the node)."""

    node: str
    boot: int
    term: int
    group: str
    topic: str
    session: int
    id: int
    uid: int
    attempt: int
    due_ms: int
    lease_until_ms: int
    clock_error_ms: float = 0.0
    """How far the node says its time may be off."""
    broadcast: bool = False
    """Every consumer of the group gets it."""


@dataclass(slots=True)
class SettleSent(Record):
    group: str
    id: int
    uid: int
    attempt: int
    outcome: str  # ACK, RETRY, DEAD, SKIP
    delay_ms: int = 0
    """That a RETRY names; 0: the group's policy."""


@dataclass(slots=True)
class Settled(Record):
    """The consumer has a receipt that counts this message as settled."""

    group: str
    id: int
    uid: int
    attempt: int
    outcome: str


@dataclass(slots=True)
class SessionOpened(Record):
    """A consumer knows that its session is open."""

    group: str
    session: int


@dataclass(slots=True)
class SessionClosed(Record):
    group: str
    session: int


@dataclass(slots=True)
class SessionOver(Record):
    """A consumer knows that its session is over; whether its node does is another matter."""

    group: str
    session: int


# -- the run


@dataclass(slots=True)
class RunBegan(Record):
    """First record. True wall time in ms is `start_wall_ms` + at_ns // 1_000_000."""

    start_wall_ms: int
    faults: tuple[str, ...]
    groups: tuple[str, ...]
    clock_allowance_ms: int = 0
    push_first: bool = False
    """Deliveries may come before their dispatch is committed."""
    nodes: int = 0
    """Voters of the cluster; 0: not said."""


@dataclass(slots=True)
class FaultBegan(Record):
    fault: str


@dataclass(slots=True)
class FaultEnded(Record):
    fault: str


@dataclass(slots=True)
class HandoverEnded(Record):
    """A planned handover that a master was asked for at `asked_ns`."""

    node: str
    asked_ns: int
    came_about: bool


@dataclass(slots=True)
class Healed(Record):
    """No fault is active any more and all machines run."""


@dataclass(slots=True)
class Drained(Record):
    """The run is over; `reason` says what was still missing, empty if nothing."""

    reason: str


Observer = Callable[[Record], None]


class _Kind:
    """All about one kind of record: how many there were, its values as a tuple, who judges it."""

    __slots__ = ("count", "observers", "values")

    def __init__(self, kind: type[Record]) -> None:
        self.count = 0
        self.observers: list[Observer] = []
        self.values = attrgetter("__class__.__name__", *(field.name for field in fields(kind)))


class History:
    """Records in the order in which they happened."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kinds: dict[type[Record], _Kind] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Records of each kind so far, in the order of their first."""
        return {kind.__name__: known.count for kind, known in self._kinds.items() if known.count}

    def subscribe(self, kinds: Sequence[type[Record]], observer: Observer) -> None:
        """`observer` gets every record of these kinds from now on."""
        for kind in kinds:
            self._known(kind).observers.append(observer)

    def add(self, record: Record) -> None:
        """Write a record down and let the checkers judge it."""
        known = self._kinds.get(type(record)) or self._known(type(record))
        known.count += 1
        self._world.mark(repr(known.values(record)).encode())
        for observer in known.observers:
            observer(record)

    def _known(self, kind: type[Record]) -> _Kind:
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = _Kind(kind)
        return known
