"""Whether a numbered request was accepted: the one place that decides it, for calls and for producers' batches.

A request keeps its (producer id, sequence) until it is known whether the log has it. `Doubt` holds that of one request:
from the moment a try is sent until a node has said what became of it, it may have been accepted. A refusal is about its
own try; of an earlier one without an answer it says something only if it names the producer's last accepted sequence,
or is about the sequence itself. `Lanes` numbers unary calls: one call at a time uses a lane, and a lane whose last
request is in doubt is never used again, so that no message is sent under a sequence that another may have.
"""

from __future__ import annotations

from tickwheel.client.errors import Fault, OutcomeUnknown, TickwheelError, error_of

_ANSWERED_WITHOUT_OUTCOME = frozenset({"OUTCOME_UNKNOWN", "SEQUENCE_FORGOTTEN"})
_OF_OTHER_CONTENT = frozenset({"SEQUENCE_GAP", "SEQUENCE_TAKEN"})
"""These say that the sequence, with this content, is not in the log."""


class Doubt:
    """Of one request; `sequence` may change as long as it is surely not accepted."""

    __slots__ = ("_earlier", "_now", "foreign", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self._earlier = False
        """A try before the last one may have been accepted."""
        self._now = False
        self.foreign = False
        """The producer's sequences are not what its user believes: nothing more is to be sent under its id."""

    @property
    def exists(self) -> bool:
        """It may have been accepted."""
        return self._earlier or self._now

    def sending(self) -> None:
        """A try is about to leave."""
        self._earlier, self._now = self.exists, True

    def accepted(self) -> None:
        """The receipt is there."""
        self._earlier = self._now = False

    def refused(self, fault: Fault) -> None:
        """How the last try ended, if not with a receipt."""
        if not fault.not_sent and (fault.lost or fault.reason in _ANSWERED_WITHOUT_OUTCOME):
            return
        self._now = False
        self.foreign = self.foreign or fault.reason in _OF_OTHER_CONTENT
        if fault.reason in _OF_OTHER_CONTENT or fault.never_accepted(self.sequence):
            self._earlier = False

    def error(self, fault: Fault) -> TickwheelError:
        """What to tell the caller after the last try: the refusal only if nothing was accepted."""
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
    """Of one client. `name`: nobody else's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._free: list[Lane] = []
        self._made = 0

    def take(self) -> Lane:
        """One that nobody uses."""
        if self._free:
            return self._free.pop()
        self._made += 1
        return Lane(f"{self._name}-{self._made}")

    def give_back(self, lane: Lane) -> None:
        """The lane's request has ended, and nothing about it is in doubt."""
        self._free.append(lane)
