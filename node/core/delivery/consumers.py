"""Requests of consumers: open (creating group and topics if that is allowed), pull, settle, extend.

Stands between the callers (streams, unary calls) and the delivery. Creates missing groups and topics
through the log.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tickwheel.node.core.delivery.delivery import Delivery
from tickwheel.node.core.delivery.sessions import CREDITS_MAX, Closed, Deliver, RanOut, Session
from tickwheel.node.core.kernel import Kernel, require_current
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Promise, Reply
from tickwheel.node.core.requests import ClientRequests
from tickwheel.node.core.schedule.creations import TOPICS_PER_GROUP_MAX
from tickwheel.node.core.world import Now
from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached, outcome_unknown
from tickwheel.node.state.names import check_group_name, check_topic_name
from tickwheel.node.state.results import SettleResult
from tickwheel.proto import common_pb2, consumer_pb2
from tickwheel.proto.admin_pb2 import CreateGroupRequest
from tickwheel.proto.log_pb2 import AdminCommand

PULL_MESSAGES_MAX = 1_024
PULL_WAIT_MS_MAX = 20_000
PULLS_MAX = 10_000
CONSUMER_NAME_LENGTH_MAX = 256
"""The name is stored with each delivery in the event files."""


SettleReply = Reply[consumer_pb2.SettleReceipt]


def tell_settled(batch: consumer_pb2.SettleBatch, reply: SettleReply, result: SettleResult) -> None:
    """Pass the result of a settlement on as a receipt; one of several topics has the counts of each."""
    if result.failure is not None:
        reply.fail(result.failure)
        return
    receipt = consumer_pb2.SettleReceipt(
        sequence=batch.sequence, settled=result.settled, stale=result.stale, unknown=result.unknown
    )
    if batch.topics:
        counts = [(part.settled, part.stale, part.unknown) for part in result.parts]
        receipt.parts = np.array(counts, "<u4").tobytes()
    reply.done(receipt)


def _heard_by(session: Session, reply: SettleReply) -> SettleReply:
    """A reply that also tells the session that its settlement has been answered."""

    def done(receipt: consumer_pb2.SettleReceipt) -> None:
        session.heard()
        reply.done(receipt)

    def fail(failure: Failure) -> None:
        session.heard()
        reply.fail(failure)

    return Reply(done, fail)


@dataclass(slots=True, eq=False)
class ConsumerHandle:
    """What the stream of an open consumer may do."""

    owner: ConsumerRequests
    session: Session
    term: int

    def opened(self) -> consumer_pb2.Opened:
        """The first message to the consumer: the term and the lease that apply."""
        return consumer_pb2.Opened(term=self.term, lease_ms=self.session.lease_ms, mixes=True)

    def mix(self, mixed: bool) -> None:
        """From now on this consumer takes batches of several topics, or no longer."""
        self.session.mixes = mixed

    def credit(self, credits: int) -> bool:
        """Accept `credits` more messages. Returns whether the consumer had none. Raises RequestError."""
        return self.owner.delivery.sessions.credit(self.session, credits)

    def suspend(self) -> None:
        """Hand the consumer nothing until `resume`. Its leases run on. Idempotent."""
        self.owner.delivery.sessions.suspend(self.session)

    def resume(self) -> bool:
        """Returns whether the consumer takes messages again. Idempotent."""
        return self.owner.delivery.sessions.resume(self.session)

    def settle(self, batch: consumer_pb2.SettleBatch, reply: SettleReply) -> None:
        """Settle deliveries, as `ConsumerRequests.settle`."""
        self.owner.settle(batch, reply, self.session)

    def extend(self, batch: consumer_pb2.ExtendBatch) -> consumer_pb2.ExtendReceipt:
        """Extend leases of this consumer. Raises RequestError."""
        return self.owner.extend(batch, self.session.session_id)

    def close(self) -> None:
        """Detach the consumer; messages it holds are delivered to others at once. Idempotent."""
        self.owner.delivery.close_session(self.session, self.owner.core.clock.now_ms(), give_back=True)


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class PullCaller:
    """The caller of a pull, who may go away before it has the answer."""

    gone: bool = False
    on_leave: Callable[[], None] = _nothing
    """Set by the pull once it waits."""

    def leave(self) -> None:
        """It did not get the answer: no message goes to it any more, and what did goes to others at once."""
        self.gone = True
        self.on_leave()


@dataclass(slots=True, eq=False)
class _Pull:
    request: consumer_pb2.PullRequest
    until_ms: int
    answer: Promise[consumer_pb2.DeliverBatch] = field(default_factory=Promise)
    session: Session | None = None
    answered: bool = False


class ConsumerRequests(Part):
    def __init__(self, core: Kernel, delivery: Delivery, requests: ClientRequests) -> None:
        self.core = core
        self.delivery = delivery
        self._requests = requests
        self._pulls: dict[_Pull, None] = {}
        self._ends: list[tuple[int, int, _Pull]] = []
        """The pulls by the end of their wait, as a heap; those that were answered before go when they come first, or
        once they are the most."""
        self._order = itertools.count()

    async def open(
        self,
        request: consumer_pb2.OpenConsumer,
        deliver: Deliver,
        closed: Closed,
        actor: str = "",
        ran_out: RanOut | None = None,
    ) -> ConsumerHandle:
        """Attach a consumer. Nothing is delivered before the handle is returned. `actor`: owner of the group and topics
        that have to be created. `ran_out`: called when a lease of unsettled messages ran out and the consumer is not
        suspended."""
        serving = self.core.serving
        deliver, closed = serving.bound(deliver), serving.bound(closed)
        self._check_names(request.group, request.topics)
        if len(request.consumer_name) > CONSUMER_NAME_LENGTH_MAX:
            name = request.consumer_name
            raise invalid("consumer_name", name, f"at most {CONSUMER_NAME_LENGTH_MAX} characters")
        if request.credits > CREDITS_MAX:
            raise invalid("credits", request.credits, f"at most {CREDITS_MAX} outstanding")
        create = CreateGroupRequest(
            name=request.group,
            topics=request.topics,
            start_from=request.start_from,
            start_ms=request.start_ms,
            filter=request.filter,
        )
        group_id = await self._group(create, actor)
        session = self.delivery.sessions.open(
            request.group,
            group_id,
            lease_ms=request.lease_ms,
            batch_messages_max=request.batch_messages_max,
            credits=0,
            deliver=deliver,
            closed=closed,
            filter=request.filter,
            ran_out=None if ran_out is None else serving.bound(ran_out),
        )
        session.name = request.consumer_name
        self.delivery.sessions.credit(session, request.credits)  # it never delivers itself
        return ConsumerHandle(self, session, self.core.term)

    async def pull(
        self, request: consumer_pb2.PullRequest, actor: str = "", caller: PullCaller | None = None
    ) -> consumer_pb2.DeliverBatch:
        """Get one batch; an empty one after `wait_ms` without messages. Not for broadcasting groups. `actor` as in
        `open`."""
        topics = list(request.topics) or ([request.topic] if request.topic else [])
        self._check_names(request.group, [*request.topics, *([request.topic] if request.topic else [])])
        if not 1 <= request.messages_max <= PULL_MESSAGES_MAX:
            raise invalid("messages_max", request.messages_max, f"1 to {PULL_MESSAGES_MAX}")
        if request.wait_ms > PULL_WAIT_MS_MAX:
            raise invalid("wait_ms", request.wait_ms, f"0 to {PULL_WAIT_MS_MAX}")
        if len(self._pulls) >= PULLS_MAX:
            raise RequestError(limit_reached("waiting_pulls", PULLS_MAX, 1_000))
        pull = _Pull(request, self.core.steady_ms() + request.wait_ms)
        create = CreateGroupRequest(
            name=request.group,
            topics=topics,
            start_from=request.start_from,
            start_ms=request.start_ms,
            filter=request.filter,
        )
        group_id = await self._group(create, actor)
        if self.core.state.group_broadcasting(group_id):
            raise invalid("group", request.group, "not a broadcasting group: those are consumed by a stream")
        if caller is not None:
            if caller.gone:
                raise RequestError(outcome_unknown())
            caller.on_leave = partial(self._left, pull)
        pull.session = self.delivery.sessions.open(
            request.group,
            group_id,
            lease_ms=request.lease_ms,
            batch_messages_max=request.messages_max,
            credits=0,
            deliver=lambda batch: self._finish(pull, partial(pull.answer.keep, batch)),
            closed=lambda failure: self._finish(pull, partial(pull.answer.refuse, failure)),
            topic=request.topic,
            filter=request.filter,
        )
        self._pulls[pull] = None
        heapq.heappush(self._ends, (pull.until_ms, next(self._order), pull))
        self.delivery.sessions.credit(pull.session, request.messages_max)
        return await pull.answer

    def _left(self, pull: _Pull) -> None:
        """The caller of a pull is gone, and has no answer."""
        self._finish(pull, partial(pull.answer.keep, consumer_pb2.DeliverBatch(group=pull.request.group)))
        if pull.session is not None:
            self.delivery.give_back(pull.session, self.core.clock.now_ms())

    def _finish(self, pull: _Pull, answer: Callable[[], None]) -> None:
        """End a pull, and call what answers it, unless it was answered before."""
        if pull.answered:
            return
        pull.answered = True
        self._pulls.pop(pull, None)
        if len(self._ends) > 2 * len(self._pulls) + 64:
            self._ends = [end for end in self._ends if not end[2].answered]
            heapq.heapify(self._ends)
        if pull.session is not None:
            pull.session.credits = 0
            self.delivery.close_session(pull.session, self.core.clock.now_ms(), give_back=False)
        answer()

    def tick(self, now: Now) -> None:
        """Answer pulls whose time is over with an empty batch."""
        while (end_ms := self._next_end_ms()) is not None and end_ms <= now.steady_ms:
            pull = self._ends[0][2]
            self._finish(pull, partial(pull.answer.keep, consumer_pb2.DeliverBatch(group=pull.request.group)))

    def wait_ms(self, now: Now) -> int | None:
        """Until the next pull's time is over."""
        end_ms = self._next_end_ms()
        return None if end_ms is None else end_ms - now.steady_ms

    def _next_end_ms(self) -> int | None:
        """When the wait of a pull is over next."""
        while self._ends and self._ends[0][2].answered:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def end(self, failure: Failure) -> None:
        """Answer the remaining pulls with `failure`; most were answered when the delivery closed their sessions."""
        for pull in list(self._pulls):
            self._finish(pull, partial(pull.answer.refuse, failure))

    def settle(self, batch: consumer_pb2.SettleBatch, reply: SettleReply, session: Session | None = None) -> None:
        """Settle deliveries. `session`: the consumer, if it answers by its stream. `reply` is told once the settlement
        is applied, or at once in a broadcasting group, which only notes it."""
        core = self.core
        awaited = True
        if session is not None:
            awaited, reply = session.settles(), _heard_by(session, reply)
        answer = Reply(partial(tell_settled, batch, reply), reply.fail)
        try:
            core.require_master()
            group = core.state.groups.named(batch.group)
            if group is None:
                require_current(core)
                raise invalid("group", batch.group, "an existing consumer group")
            if not core.state.group_broadcasting(group.group_id):
                # The pause of a nack counts from the next full millisecond, so that none is short by a fraction of one.
                self.delivery.settlements.settle(batch, group, core.clock.next_full_ms(), answer, awaited=awaited)
                return
            if session is None or session.group_id != group.group_id:
                raise invalid("group", batch.group, "not a broadcasting group: its consumers answer by their streams")
            result = self.delivery.answered_by(session, batch)
        except RequestError as error:
            reply.fail(error.failure)
            return
        answer.done(result)

    def extend(self, batch: consumer_pb2.ExtendBatch, session_id: int = -1) -> consumer_pb2.ExtendReceipt:
        """Extend leases. `session_id`: the consumer that holds them; -1: none. Raises RequestError: without its own
        lease this node extends none, as the next master would not know of it."""
        require_current(self.core)
        extended, refused, until_ms = self.delivery.settlements.extend(
            session_id, batch, self.core.clock.next_full_ms()
        )
        return consumer_pb2.ExtendReceipt(
            sequence=batch.sequence, extended=extended, refused=refused, lease_until_ms=until_ms
        )

    def _check_names(self, group: str, topics: Sequence[str]) -> None:
        problem = check_group_name(group)
        if problem:
            raise invalid("group", group, problem)
        if len(topics) > TOPICS_PER_GROUP_MAX:
            raise invalid("topics", len(topics), f"at most {TOPICS_PER_GROUP_MAX}")
        for topic in topics:
            problem = check_topic_name(topic)
            if problem:
                raise invalid("topics", topic, problem)

    async def _group(self, request: CreateGroupRequest, actor: str) -> int:
        """The group's id, once the group exists with these topics. Raises RequestError: it cannot be created, or has
        another filter than the given one."""
        core = self.core
        core.require_master()
        group, topics = request.name, list(request.topics)
        state = core.state
        group_id = state.group_id(group)
        ids = {topic: state.topic_id(topic) for topic in topics}
        missing = [
            topic
            for topic, topic_id in ids.items()
            if topic_id is None or group_id is None or state.subscription(group_id, topic_id) is None
        ]
        if group_id is not None:
            state.check_filter(group_id, request.filter)
            if not missing:
                return group_id
            request.broadcasting = state.group_broadcasting(group_id)
        else:
            if not state.settings.groups_auto_create:
                require_current(core)
                raise _unknown("group", group, f"group {group} does not exist")
            if not topics:
                raise invalid("topics", "none", "a new group needs at least one topic")
        create = [topic for topic in missing if ids[topic] is None]
        if create and not state.settings.topics_auto_create:
            require_current(core)
            raise _unknown("topics", create[0], f"topic {create[0]} does not exist")
        await self._requests.admin(AdminCommand(create_group=request, actor=actor))
        created_id = state.group_id(group)
        if created_id is None:
            raise _unknown("group", group, f"group {group} was deleted as soon as it was created")
        return created_id


def _unknown(name: str, value: str, text: str) -> RequestError:
    return RequestError(Failure(common_pb2.UNKNOWN_NAME, text, {"field": name, "value": value}))
