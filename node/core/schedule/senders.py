"""A producer's sequences, as the master knows them beside the log: whether one was accepted before, or surely was not.

A repeat of a remembered sequence is answered at once, before anything else is checked. A deleted topic, a limit or a
full disk changes nothing about an accepted request. A refusal names the last accepted sequence of its producer, so that
a client whose earlier try got no answer knows its outcome. The master says so only while it surely leads and has no
other request of that producer under way: then no entry still to be applied can accept the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure, RequestError, refuse
from tickwheel.node.state.producers import Batch, Sender, owner_differs
from tickwheel.node.state.schema import CHECKSUMS_LEVEL, PRODUCER_SHARES_LEVEL
from tickwheel.node.state.view import StateView
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.log_pb2 import PublishRequest

A = TypeVar("A")

_UNKNOWN_OUTCOME = frozenset({pb.OUTCOME_UNKNOWN, pb.NOT_MASTER, pb.NO_MASTER, pb.RECOVERING})


class Senders:
    def __init__(
        self, state: StateView, surely_leads: Callable[[], bool], all_understand: Callable[[int], bool]
    ) -> None:
        """`all_understand` tells whether every member reads a log of a level."""
        self._state = state
        self._surely_leads = surely_leads
        self._all_understand = all_understand
        self._under_way: dict[str, int] = {}
        """Producer id -> its requests without an answer."""
        self._states = False

    def known(self, sender: Sender, count: int) -> Batch | None:
        """The first answer if the request is a repeat; None: the log decides. Raises RequestError: its sequence was
        used for another request."""
        if not sender.producer_id:
            return None
        try:
            if not sender.owner and self._state.owner_of(sender.producer_id):
                # The log states an owner once: there, a request without one counts as the owner's.
                refuse(owner_differs(sender))
            return self._state.producers.repeated(sender, count)
        except RequestError as error:
            raise RequestError(self.told(sender, error.failure)) from error

    def follow(self, sender: Sender, reply: Reply[A]) -> Reply[A]:
        """Note a request of a producer under way; returns the reply to use instead of `reply`."""
        name = sender.producer_id
        self._begin(name)

        def done(outcome: A) -> None:
            self._end(name)
            reply.done(outcome)

        def fail(failure: Failure) -> None:
            self._end(name)
            reply.fail(self.told(sender, failure))

        return Reply(done, fail)

    @contextmanager
    def following(self, sender: Sender) -> Iterator[None]:
        """Note a request under way during a `with`. A RequestError leaves it completed as by `told`."""
        name = sender.producer_id
        if not name:
            yield
            return
        refusal = None
        self._begin(name)
        try:
            yield
        except RequestError as error:
            refusal = error
        finally:
            self._end(name)
        if refusal is not None:
            raise RequestError(self.told(sender, refusal.failure)) from refusal

    def _begin(self, name: str) -> None:
        self._under_way[name] = self._under_way.get(name, 0) + 1

    def _end(self, name: str) -> None:
        left = self._under_way.pop(name) - 1
        if left:
            self._under_way[name] = left

    def told(self, sender: Sender, failure: Failure) -> Failure:
        """The refusal, with the last accepted sequence if that is certain."""
        name = sender.producer_id
        if not name or failure.reason in _UNKNOWN_OUTCOME or name in self._under_way or not self._surely_leads():
            return failure
        last = self._state.last_accepted(name)
        if last is None:
            return failure
        return replace(failure, metadata={**failure.metadata, "accepted_sequence": str(last)})

    def stated(self, sender: Sender, count: int) -> PublishRequest:
        """The request's entry in a publish, as written to the log."""
        request = PublishRequest(producer_id=sender.producer_id, sequence=sender.sequence, count=count)
        if sender.producer_id and sender.checksum is not None and self._may_state():
            request.checksum = sender.checksum
            if sender.owner and not self._state.owner_of(sender.producer_id):
                request.owner = sender.owner
            if not self._state.producers.by_owner and self._all_understand(PRODUCER_SHARES_LEVEL):
                request.by_owner = True
        return request

    def _may_state(self) -> bool:
        self._states = self._states or self._state.producers.stated or self._all_understand(CHECKSUMS_LEVEL)
        return self._states
