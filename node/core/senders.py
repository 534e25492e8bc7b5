"""What a master can say of a producer's sequence beside the log: that it was accepted before, or that it was not.

A repeat of what is remembered is answered at once, before anything else is looked at: that its topic is gone by now, a
limit reached or a disk full changes nothing about what was accepted. A refusal says what the last accepted sequence of
its producer is, so that a client whose earlier try got no answer knows what became of it. That is said only while this
node surely leads and has no other request of that producer under way: then nothing that is still to be applied can
accept it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from tickwheel.node.core.failure import Failure
from tickwheel.node.state.producers import Batch, Sender
from tickwheel.node.state.view import StateView
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.log_pb2 import PublishRequest

A = TypeVar("A")

LOG_LEVEL = 1
"""What this version understands in the log although no older one does, and writes without being asked to: checksums and
owners of requests. A master does once all members have said that they understand it, or the log has some already."""

_UNKNOWN_OUTCOME = frozenset({pb.OUTCOME_UNKNOWN, pb.NOT_MASTER, pb.NO_MASTER, pb.RECOVERING})


class Senders:
    """One per node."""

    def __init__(
        self, state: StateView, surely_leads: Callable[[], bool], all_understand: Callable[[int], bool]
    ) -> None:
        """`all_understand`: whether every member reads a log of that level."""
        self._state = state
        self._surely_leads = surely_leads
        self._all_understand = all_understand
        self._under_way: dict[str, int] = {}
        """Requests without an answer, by producer id."""
        self._states = False

    def known(self, sender: Sender, count: int) -> Batch | Failure | None:
        """The answer of the first time; a refusal, if the sequence is another's; None: the log decides."""
        if not sender.producer_id:
            return None
        found = self._state.repeated(sender, count)
        return self.told(sender, found) if isinstance(found, Failure) else found

    def follow(self, sender: Sender, done: Callable[[A | Failure], None]) -> Callable[[A | Failure], None]:
        """A request is on its way: what to answer instead of `done`, exactly once."""
        name = sender.producer_id
        if not name:
            return done
        self._under_way[name] = self._under_way.get(name, 0) + 1

        def answered(outcome: A | Failure) -> None:
            left = self._under_way.pop(name) - 1
            if left:
                self._under_way[name] = left
            done(self.told(sender, outcome) if isinstance(outcome, Failure) else outcome)

        return answered

    def told(self, sender: Sender, failure: Failure) -> Failure:
        """A refusal, with the last accepted sequence if that is certain."""
        name = sender.producer_id
        if not name or failure.reason in _UNKNOWN_OUTCOME or name in self._under_way or not self._surely_leads():
            return failure
        last = self._state.last_accepted(name)
        if last is None:
            return failure
        return replace(failure, metadata={**failure.metadata, "accepted_sequence": str(last)})

    def stated(self, sender: Sender, count: int) -> PublishRequest:
        """A request as it stands in the log."""
        request = PublishRequest(producer_id=sender.producer_id, sequence=sender.sequence, count=count)
        if sender.producer_id and sender.checksum is not None and self._may_state():
            request.checksum = sender.checksum
            if sender.owner and not self._state.owner_of(sender.producer_id):
                request.owner = sender.owner
        return request

    def _may_state(self) -> bool:
        self._states = self._states or self._state.states_checksums or self._all_understand(LOG_LEVEL)
        return self._states
