"""Decides whether a numbered request may have been accepted, for calls and for producers' batches.

A request keeps its (producer id, sequence) until it is known whether the log has it. `Doubt` tracks that for one
request: from when a try is sent until a node has answered with its outcome, the request may have been accepted. A
refusal is about its own try. It tells something about an earlier, unanswered try only if it names the producer's last
accepted sequence, or is about the sequence itself.

`Lanes` numbers unary calls. One call at a time uses a lane, and a lane whose last request is in doubt is never used
again. So no message is ever sent under a sequence that another message may have.
"""

from __future__ import annotations

from tickwheel.client.errors import Fault, OutcomeUnknown, TickwheelError, error_of

_ANSWERED_WITHOUT_OUTCOME = frozenset({"OUTCOME_UNKNOWN", "SEQUENCE_FORGOTTEN"})
_OF_OTHER_CONTENT = frozenset({"SEQUENCE_GAP", "SEQUENCE_TAKEN"})
"""Reasons that state that this sequence with this content is not in the log."""


class Doubt:
    """Whether one request may have been accepted. `sequence` may change while it certainly was not."""

    __slots__ = ("_earlier", "_now", "foreign", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self._earlier = False
        """Whether a try before the last one may have been accepted."""
        self._now = False
        self.foreign = False
        """The cluster's record of the producer's sequences differs from the client's: send no more under its id."""

    @property
    def exists(self) -> bool:
        """Whether the request may have been accepted."""
        return self._earlier or self._now

    @property
    def earlier(self) -> bool:
        """Whether a try before the one that is under way may have been accepted."""
        return self._earlier

    def sending(self) -> None:
        """A try is about to be sent."""
        self._earlier, self._now = self.exists, True

    def accepted(self) -> None:
        """The receipt has come."""
        self._earlier = self._now = False

    def refused(self, fault: Fault) -> None:
        """The last try has ended with this fault instead of a receipt."""
        if not fault.not_sent and (fault.lost or fault.reason in _ANSWERED_WITHOUT_OUTCOME):
            return
        self._now = False
        self.foreign = self.foreign or fault.reason in _OF_OTHER_CONTENT
        if fault.reason in _OF_OTHER_CONTENT or fault.never_accepted(self.sequence):
            self._earlier = False

    def error(self, fault: Fault) -> TickwheelError:
        """The error for the caller after the last try: the refusal only if no try can have been accepted."""
        if not self.exists or fault.reason == "OUTCOME_UNKNOWN":
            return error_of(fault)
        if fault.reason == "SEQUENCE_FORGOTTEN" and not self._earlier:
            return error_of(fault)
        later = fault.message or fault.reason
        text = f"an earlier try may have been accepted, its answer was lost; a later one: {later}"
        return OutcomeUnknown(text, "OUTCOME_UNKNOWN", {**fault.metadata, "refusal": fault.reason})


class Lane:
    """A producer id of a client, and the sequence of its next request."""

    __slots__ = ("producer_id", "sequence")

    def __init__(self, producer_id: str) -> None:
        self.producer_id = producer_id
        self.sequence = 1


class Lanes:
    """The lanes of one client. `name` must be unique: it begins their producer ids."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._free: list[Lane] = []
        self._made = 0

    def take(self) -> Lane:
        """A lane that no call is using."""
        if self._free:
            return self._free.pop()
        self._made += 1
        return Lane(f"{self._name}-{self._made}")

    def give_back(self, lane: Lane) -> None:
        """Take a lane back. Its request has ended with a certain outcome."""
        self._free.append(lane)
