"""Records of unique keys for the history (history.py): receipts, calls by key, and what became of messages with keys.

Batches leave as `ScheduleSent`, whose labels have keys and rules. Those of a program without a producer id carry a name
that is used once.
"""

from __future__ import annotations

from tickwheel.chaos.sim.history import Record


class KeyedAnswered(Record):
    """The receipt of a batch with unique keys, row by row."""

    producer: str
    sequence: int
    uids: tuple[int, ...]
    outcomes: tuple[str, ...]
    """Names of KeyOutcome."""
    ids: tuple[int, ...]
    due_ms: tuple[int, ...]


class KeyAsked(Record):
    """A try of a call leaves its client, the first one or a repeat."""

    call: int
    what: str
    """cancel, move or get; sweep: cancel or move what has a tag; delete: the topic goes, and is made again later."""
    topic: str
    key: str
    """Empty: all keys of the topic."""
    uid: int = 0
    """By the id of this message; 0: by key."""
    due_ms: int = 0
    """The time to move to. A sweep moves by this much; 0: it cancels."""


class KeyUndone(Record):
    """The last try of a call was refused: it has no effect."""

    call: int


class KeyAnswered(Record):
    """The answer to the last try of a call. Of a sweep and a deletion: it is over."""

    call: int
    outcome: str = ""
    """A name of CancelOutcome or RescheduleOutcome; of a get FOUND or NOT_FOUND."""
    id: int = 0
    uid: int = 0
    """Of a get: the message by its payload."""
    due_ms: int = 0
    remembered: bool = False
    """The call has this answer for good: no earlier try has another effect."""


class KeyedSeen(Record):
    """The cluster's report, by its first id, of an acknowledged message that has not come."""

    uid: int
    id: int
    """The id in the receipt."""
    asked_ns: int
    state: str
    """A name of MessageState, or NOT_FOUND."""
    now_uid: int
    """The message that the id names, by its payload."""
    now_id: int
    due_ms: int

    @property
    def owed(self) -> bool:
        """Whether it is still to come, by this report."""
        return self.state in ("PENDING", "DISPATCHED")


class KeysUsed(Record):
    """Clients use unique keys in a topic from now on."""

    topic: str
    groups: tuple[str, ...]
    """Groups that settle its messages."""
    reset: bool
    """A group of it is reset now and then, which settles what it skips."""
