"""Dead letters of consumer groups: list, replay, purge.

Changes are repeated after a lost answer. A letter that the first try replayed or purged is gone, and letters that have
come since the call began are left alone: also a replayed one that died again. So nothing happens twice; only the
returned counts then leave out the first try.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from tickwheel.client.answers import reader
from tickwheel.client.calls import Method, ServiceCalls
from tickwheel.client.errors import RequestRefused
from tickwheel.client.moments import moment_of
from tickwheel.client.payloads import Carrier
from tickwheel.client.requests import request_of
from tickwheel.client.states import DeadCause
from tickwheel.proto import dead_pb2
from tickwheel.proto.dead_pb2_grpc import DeadLettersStub

C = TypeVar("C", dead_pb2.ReplayDeadRequest, dead_pb2.PurgeDeadRequest)

PAGE = 500
TRY_TIMEOUT_S = 10.0
"""Time-out of a change, in which up to 2,048 letters go through the log."""


@dataclass(frozen=True, slots=True)
class DeadLetter(Carrier):
    """A message that its group has given up."""

    number: int
    """Its number in the queue, for `replay` and `purge`."""
    id: str
    """The message id that `schedule` returned."""
    topic: str
    """Empty if the topic was deleted."""
    cause: DeadCause
    error: str
    """The reason that the consumer gave last."""
    attempts: int
    first_due_ms: int
    died_ms: int
    payload_bytes: int
    key: str = ""
    tags: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    message_group: str = ""
    unique_key: str = ""
    """The key that it had; a dead letter holds none."""
    payload: bytes | None = None
    """None in a list."""
    payload_missing: bool = False
    """The payload and the five fields before it are missing: they are lost, or the answering node cannot read them."""

    @property
    def first_due(self) -> datetime:
        """Its first due time, in UTC."""
        return moment_of(self.first_due_ms)

    @property
    def died_at(self) -> datetime:
        """When its group gave it up, in UTC."""
        return moment_of(self.died_ms)


@dataclass(frozen=True, slots=True)
class DeadPage:
    """A page of the dead letters of a group, without payloads."""

    letters: tuple[DeadLetter, ...]
    total: int
    """Number of all dead letters of the group."""
    next: str
    """For the next call of `page`; empty: this was the last page."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The numbers of letters that were replayed or purged, that were named but do not exist, and that stayed.

    Letters stay if their topic is gone or no longer belongs to the group.
    """

    changed: int = 0
    missing: int = 0
    kept: int = 0


_letter_of = reader(DeadLetter, dead_pb2.DeadLetter, "meta")


def letter_of(wire: dead_pb2.DeadLetter, payload: bytes | None) -> DeadLetter:
    """A dead letter from its protobuf message."""
    return _letter_of(wire, payload=None if wire.payload_missing else payload)


def page_of(wire: dead_pb2.ListDeadResponse) -> DeadPage:
    """A page from its protobuf message."""
    letters = tuple(letter_of(letter, None) for letter in wire.letters)
    return DeadPage(letters=letters, total=wire.total, next=wire.next_page_token)


class DeadClient(ServiceCalls[DeadLettersStub]):
    """`AsyncClient.dead`."""

    _service = DeadLettersStub

    async def page(self, group: str, after: str = "", size: int = PAGE) -> DeadPage:
        """One page of `list`. `after`: `next` of the page before."""
        request = request_of(dead_pb2.ListDeadRequest, group=group, page_size=size, page_token=after)
        return page_of(await self._ask(lambda stub: stub.ListDead, request))

    async def list(self, group: str) -> AsyncIterator[DeadLetter]:
        """All dead letters of a group, oldest first, without payloads."""
        after = ""
        while True:
            page = await self.page(group, after)
            for letter in page.letters:
                yield letter
            after = page.next
            if not after:
                return

    async def get(self, group: str, number: int) -> DeadLetter:
        """One dead letter with its payload."""
        request = request_of(dead_pb2.GetDeadRequest, group=group, number=number)
        wire = await self._ask(lambda stub: stub.GetDead, request)
        return letter_of(wire, wire.payload)

    async def replay(self, group: str, numbers: Sequence[int] | None = None) -> Changed:
        """Deliver these letters to their group again, with attempts from 1; None: all that exist now."""
        request = request_of(dead_pb2.ReplayDeadRequest, group=group, numbers=numbers or ())
        total = Changed()
        if not await self._has_letters(request, numbers, lambda stub: stub.ReplayDead):
            return total
        while True:
            answer = await self._ask(lambda stub: stub.ReplayDead, request, try_timeout_s=TRY_TIMEOUT_S)
            total = Changed(total.changed + answer.changed, total.missing + answer.missing, total.kept + answer.kept)
            if not answer.more:
                return total
            request.first, request.below = answer.next, answer.below

    async def purge(self, group: str, numbers: Sequence[int] | None = None) -> Changed:
        """Delete these letters; None: all that exist now."""
        request = request_of(dead_pb2.PurgeDeadRequest, group=group, numbers=numbers or ())
        if not await self._has_letters(request, numbers, lambda stub: stub.PurgeDead):
            return Changed()
        answer = await self._ask(lambda stub: stub.PurgeDead, request, try_timeout_s=TRY_TIMEOUT_S)
        return Changed(answer.changed, answer.missing, answer.kept)

    async def _has_letters(
        self, request: C, numbers: Sequence[int] | None, method: Method[DeadLettersStub, C, dead_pb2.ChangeDeadResponse]
    ) -> bool:
        """Whether there are letters for it to change. One without numbers is bounded to those that exist now."""
        if numbers is not None:
            return bool(numbers)
        asking = type(request)(group=request.group, ask=True)
        try:
            request.below = (await self._ask(method, asking)).below
        except RequestRefused as error:
            if error.field != str(asking.DESCRIPTOR.fields_by_name["ask"].number):
                raise
            return True  # a node of the version before does not know the question, and has no name for its field
        return request.below > 0
