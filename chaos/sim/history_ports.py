"""Records of calls through the client port of a node (history.py): values that operators change, refusals, the audit
log."""

from __future__ import annotations

from tickwheel.chaos.sim.history import Record


class ValueAsked(Record):
    """An operator first asks for another value of something that decides about calls. One change of a thing is under
    way at a time."""

    what: str
    value: int


class ValueAnswered(Record):
    """The value holds. `lost`: some try had no answer, so that the value may come back at any later time."""

    what: str
    value: int
    lost: bool


class CallRefused(Record):
    """A node refuses a batch because of such a value. `asked_ns`: when this try left its client."""

    what: str
    node: str
    asked_ns: int
    uids: tuple[int, ...]
    least: int
    """The batch needs at least this value."""
    certain: bool
    """By the client's own rules, no try of the batch can have been accepted, and it tries no more."""


class CallAccepted(Record):
    """The client has the receipt of a batch whose first try left at `asked_ns`."""

    what: str
    asked_ns: int
    uids: tuple[int, ...]
    least: int
    """The batch needs at least this value."""


class RepeatAnswered(Record):
    """The answer to a batch that was accepted as `first` (empty: its first receipt never came), of a user that keeps to
    its part of the producers, or to the only batch of an id."""

    producer: str
    sequence: int
    first: tuple[int, ...]
    again: tuple[int, ...]
    reason: str
    """Of a refusal: the name of an ErrorReason."""


class AuditedCall(Record):
    """A try of a change leaves its client for a node's port. Its number is in the request."""

    number: int
    node: str


class AuditedAnswer(Record):
    """The client knows that the change was carried out."""

    number: int
    node: str


class AuditSeen(Record):
    """The numbers in a node's audit log at the end, each as often as it is there."""

    node: str
    numbers: tuple[int, ...]
