"""Records of producers and consumers for the history (history.py): requests, answers, deliveries.

Messages are identified by `uid`, a number that the workload puts into the payload. The ids and due times that a node
reports are judged against it, never believed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.chaos.sim.history import Record
from tickwheel.node.failure import Failure
from tickwheel.node.state.subscription import MARKS_FROM
from tickwheel.proto import common_pb2

# -- producers


@dataclass(slots=True, frozen=True)
class Label:
    """The fields that a producer sets on a message besides its payload."""

    lane: str | None = None
    """Its message group in a FIFO topic; empty: it names none."""
    tags: tuple[str, ...] = ()
    key: str = ""
    unique_key: str = ""
    on_conflict: str = "KEY_CONFLICT_UNSPECIFIED"
    """With a unique key: the name of a KeyConflict."""
    until_settled: bool = False
    """With a unique key: it is held until every group has settled the message."""


@dataclass(slots=True)
class Row:
    """One message as its producer wants it; delay_ms is set for relative times."""

    uid: int
    topic: str
    due_ms: int | None
    delay_ms: int | None
    label: Label | None = None


class ScheduleSent(Record):
    """A batch leaves its producer for a node, for the first time or again."""

    producer: str
    sequence: int
    node: str
    rows: tuple[Row, ...]


class DelayCounted(Record):
    """A node turns delays into due times, or just did. It reports the possible error of its clock."""

    node: str
    uids: tuple[int, ...]
    clock_error_ms: float


class ScheduleAcknowledged(Record):
    """The producer has the receipt. `due_ms` are the times that hold."""

    producer: str
    sequence: int
    uids: tuple[int, ...]
    ids: tuple[int, ...]
    due_ms: tuple[int, ...]
    repeated: bool
    groups: tuple[str, ...] = ()
    """The groups that they are for; empty: all groups of the run."""


class ScheduleRefused(Record):
    producer: str
    sequence: int
    reason: str
    uids: tuple[int, ...] = ()
    """The messages refused, where several programs send under one id."""


class CancelSent(Record):
    uid: int
    id: int


class CancelAnswered(Record):
    uid: int
    id: int
    outcome: str  # CANCELLED, ALREADY_DISPATCHED, NOT_FOUND


class RescheduleSent(Record):
    uid: int
    id: int
    due_ms: int


class RescheduleAnswered(Record):
    uid: int
    id: int
    outcome: str
    new_id: int
    due_ms: int


class RescheduleRefused(Record):
    """A move was refused, and so has no effect."""

    uid: int
    due_ms: int


class Looked(Record):
    """The cluster's report of a message at the end. The state is a name of MessageState, or NOT_FOUND."""

    uid: int
    id: int
    state: str


# -- consumers


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
    epoch: int = 0
    """Number of resets of the group, as the node reports it (`epoch_in`)."""


def epoch_in(mark: int) -> int:
    """Number of resets of the group in the mark of a delivery."""
    return mark % MARKS_FROM


SETTLING = ("ACK", "DEAD", "SKIP")
"""Outcomes after which a message does not come to the group again."""


class SettleSent(Record):
    group: str
    id: int
    uid: int
    attempt: int
    outcome: str  # ACK, RETRY, DEAD, SKIP
    delay_ms: int = 0
    """Delay named by a RETRY; 0: the group's policy."""
    epoch: int = 0
    """Epoch of the delivery being settled."""


class Settled(Record):
    """The consumer has a receipt that counts this message as settled."""

    group: str
    id: int
    uid: int
    attempt: int
    outcome: str
    epoch: int = 0
    """Epoch of the delivery being settled."""


class Extended(Record):
    """The consumer has a receipt that its lease of this attempt lasts longer."""

    group: str
    uid: int
    attempt: int
    node: str
    boot: int
    term: int
    """The term in which the extending node leads."""
    until_ms: int
    clock_error_ms: float = 0.0
    """How far the node says its time may be off."""
    epoch: int = 0
    """Epoch of the group named by the delivery."""
    leased: bool = True
    """Whether that node held the lease of mastership when it extended."""


class DeadReplayAsked(Record):
    group: str
    uids: tuple[int, ...]


class DeadReplayed(Record):
    """By the answer to a replay, none of the messages is a dead letter now."""

    group: str
    uids: tuple[int, ...]


class DeadPurged(Record):
    group: str
    uids: tuple[int, ...]


class SettledSeen(Record):
    """A node's list, at the end, of ids settled for a group, in hours from `hour_min_kept` on.

    The node was asked at `asked_ns`, when it had applied every committed entry."""

    node: str
    group: str
    asked_ns: int
    hour_min_kept: int
    done: tuple[int, ...]


class SessionOpened(Record):
    """A consumer knows that its session is open."""

    group: str
    session: int
    credits: int = 0
    """Credits at the opening of the session; 0: not recorded."""


class CreditGiven(Record):
    """A session may be handed `count` more messages."""

    group: str
    session: int
    count: int


STREAM_BROKE = Failure(common_pb2.OUTCOME_UNKNOWN, "its stream broke")
"""A fault ends a session with this, as a consumer does whose connection is lost: its node gives back what it had."""


class SessionClosed(Record):
    """A node and its consumer have parted: what the consumer had is given back if it was the consumer that left, and
    the node still led."""

    group: str
    session: int
    by_node: bool = False


class SessionOver(Record):
    """A consumer knows that its session is over; whether its node does is another matter."""

    group: str
    session: int
