"""Settlements and extensions that consumers ask for: checked, put into the log, answered when committed.

Owns the limits of such requests and the translation of their columns. Settlements change the replicated state;
extensions change only the master's own leases. Used by the master's deliveries and the requests of consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.delivery.handing import BATCH_TOPICS_MAX
from tickwheel.node.core.delivery.lease_feed import LeaseFeed
from tickwheel.node.core.delivery.leases import ChannelKey, Lease, LeaseTable
from tickwheel.node.core.delivery.retries import Leaving, RetryQueue
from tickwheel.node.core.delivery.sessions import lease_ms_of
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached, refuse
from tickwheel.node.state.groups import Group
from tickwheel.node.state.machine import CommandResult, StateMachine
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.subscription import CAPACITY_LEAST, Attempts, Positions, Subscription
from tickwheel.proto import consumer_pb2
from tickwheel.proto.log_pb2 import (
    DECLARED_DEAD,
    LEASE_EXPIRED,
    REFUSED,
    SETTLE_ACK,
    SETTLE_DEAD,
    SETTLE_RETRY,
    SETTLE_RETURN,
    SETTLE_SKIP,
    Command,
    Settle,
    SettleColumns,
    SettleKind,
)
from tickwheel.wheel.units import Ids

SETTLE_KINDS = {
    consumer_pb2.ACK: SETTLE_ACK,
    consumer_pb2.RETRY: SETTLE_RETRY,
    consumer_pb2.DEAD: SETTLE_DEAD,
    consumer_pb2.SKIP: SETTLE_SKIP,
}
WINDOW_VALUES_MAX = 1 << 28
"""Values of two bytes in all windows together: half a gigabyte. Above this limit a window grows only by the smallest
step. A consumer that settles far ahead of an unsettled message is told to try again later."""
WINDOW_HINT_MS = 1_000
SETTLE_MESSAGES_MAX = 100_000
EXTEND_MESSAGES_MAX = 10_000
"""Each may become a range of its own that every slave is told: some 3 us each, on the core's thread."""
SETTLE_TOPICS_MAX = BATCH_TOPICS_MAX
"""Topics in one settlement. Each costs apply some 40 us, on every node; 150 us if its messages were settled before."""
REASON_MAX = 1_024
EXPIRED_TEXT = "its lease ran out"


class Rows(NamedTuple):
    """The rows of one topic in a settlement, as the columns that the consumer sent."""

    topic: str
    ids: bytes
    attempts: bytes
    positions: bytes
    """Empty: the messages are searched by their ids."""
    epoch: int | None
    """As delivered (`Subscription.epoch_of`)."""

    @property
    def messages(self) -> int:
        return len(self.ids) // 8


class _Logged(NamedTuple):
    """The rows of one topic in columns of the log, each message once."""

    ids: Ids
    attempts: Attempts
    positions: Positions | None
    deliveries: Attempts
    """The attempts as the consumer gave them: they add up over retries."""


def alone(batch: consumer_pb2.SettleBatch) -> Rows:
    """The rows of a settlement of one topic. Raises RequestError."""
    count = _check_columns(batch.ids, batch.attempts, batch.positions)
    if count > SETTLE_MESSAGES_MAX:
        raise invalid("ids", count, f"at most {SETTLE_MESSAGES_MAX} messages in a settlement")
    _check_reason(batch)
    epoch = batch.epoch if batch.HasField("epoch") else None
    return Rows(batch.topic, batch.ids, batch.attempts, batch.positions, epoch)


def by_topic(batch: consumer_pb2.SettleBatch) -> list[Rows]:
    """The rows of a settlement of several topics, topic by topic. Raises RequestError."""
    if batch.topic or batch.HasField("epoch"):
        raise invalid("topics", len(batch.topics), "none when topic or epoch is given")
    topics = len(batch.topics)
    if topics > SETTLE_TOPICS_MAX:
        raise invalid("topics", topics, f"at most {SETTLE_TOPICS_MAX} topics in a settlement")
    _check_reason(batch)
    if len(batch.topic_counts) != 4 * topics:
        raise invalid("topic_counts", f"{len(batch.topic_counts)} bytes", f"{topics} elements of 4 bytes")
    if len(batch.epochs) != 4 * topics:
        raise invalid("epochs", f"{len(batch.epochs)} bytes", f"{topics} elements of 4 bytes")
    if len(batch.ids) > 8 * SETTLE_MESSAGES_MAX:
        raise invalid("ids", len(batch.ids) // 8, f"at most {SETTLE_MESSAGES_MAX} messages in a settlement")
    count = _check_columns(batch.ids, batch.attempts, batch.positions)
    if not batch.positions:
        # Without them every topic is searched for its ids.
        raise invalid("positions", "0 bytes", f"{count} elements of 8 bytes, since topics are given")
    counts = np.frombuffer(batch.topic_counts, "<u4").tolist()
    if not all(counts) or sum(counts) != count:
        raise invalid("topic_counts", sum(counts), f"{count}, the number of ids, with at least 1 for each topic")
    ids, attempts, positions = batch.ids, batch.attempts, batch.positions
    parts = []
    first = 0
    for topic, rows, epoch in zip(batch.topics, counts, np.frombuffer(batch.epochs, "<u4").tolist(), strict=True):
        last = first + rows
        columns = ids[8 * first : 8 * last], attempts[4 * first : 4 * last], positions[8 * first : 8 * last]
        parts.append(Rows(topic, *columns, epoch))
        first = last
    return parts


class Joined:
    """The answers to the topics of one settlement, which come in parts. `reply` gets their sum once, with `parts`, or
    the first Failure of the log. The rows of a topic that the group does not have (any more) are stale."""

    def __init__(self, reply: Reply[SettleResult], rows: Sequence[int]) -> None:
        """`rows`: how many rows each topic has."""
        self._reply = reply
        self._results = [SettleResult(stale=count) for count in rows]
        self._failure: Failure | None = None
        self._open = {0}
        """Numbers of the parts that have no answer yet; 0 stands for those to be made."""
        self._made = 0

    def part(self, places: Sequence[int]) -> Reply[SettleResult]:
        """The reply to the topics at these places, settled together."""
        number = self._made = self._made + 1
        self._open.add(number)

        def done(result: SettleResult) -> None:
            for place, part in zip(places, result.parts or (result,), strict=True):
                if part.failure is None:
                    self._results[place] = part
            self._ended(number, None)

        return Reply(done, partial(self._ended, number))

    def close(self) -> None:
        """All parts are made."""
        self._ended(0, None)

    def _ended(self, number: int, failure: Failure | None) -> None:
        if number not in self._open:
            return
        self._open.remove(number)
        self._failure = self._failure or failure
        if self._open:
            return
        if self._failure is not None:
            self._reply.fail(self._failure)
        else:
            self._reply.done(SettleResult.of(tuple(self._results)))


class Settlements:
    """`came_back` is called for the messages that a committed settlement returned, `settled` for each channel in which
    a settlement was committed."""

    def __init__(
        self,
        config: CoreConfig,
        state: StateMachine,
        proposer: Proposer,
        leases: LeaseTable,
        feed: LeaseFeed,
        came_back: Callable[[ChannelKey, SettleColumns], None],
        settled: Callable[[ChannelKey], None],
        draw: Callable[[], float],
        require_current: Callable[[], None],
    ) -> None:
        """`draw` returns a number from 0 to below 1, for jitter. `require_current` raises RequestError if another node
        may lead by now, and know topics that this one does not."""
        self._config = config
        self._state = state
        self._proposer = proposer
        self._leases = leases
        self._feed = feed
        self._came_back = came_back
        self._settled = settled
        self._draw = draw
        self._require_current = require_current
        self.retries = RetryQueue(proposer)
        self.serving = proposer.serving

    def settle(
        self,
        batch: consumer_pb2.SettleBatch,
        group: Group,
        now_ms: int,
        reply: Reply[SettleResult],
        *,
        awaited: bool = True,
    ) -> None:
        """Put a consumer's settlement into the log, with those of all its topics in one command; `reply` is told once
        it is applied. `group` is the one that it names; `awaited`: the consumer may be waiting for the answer. Raises
        RequestError. A settlement of several topics has a result for each: rows of a topic that the group does not have
        (any more) are stale."""
        kind = _kind(batch)
        copies = kind in (SETTLE_RETRY, SETTLE_DEAD)
        if not batch.topics:
            subscription = self._named(group, batch.topic)
            if copies:
                self._leave(self._leaving(batch, kind, alone(batch), subscription, now_ms, reply))
            else:
                self.propose([self._columns(kind, alone(batch), subscription)], reply, awaited=awaited)
            return
        parts = by_topic(batch)
        found: dict[int, Subscription] = {}
        for place, rows in enumerate(parts):
            topic = self._state.topics.named(rows.topic)
            subscription_there = None if topic is None else group.subscriptions.get(topic.topic_id)
            if subscription_there is not None:
                found[place] = subscription_there
        if len(found) < len(parts):
            self._require_current()
        joined = Joined(reply, [rows.messages for rows in parts])
        # Nothing is settled where one part is refused.
        if copies:
            leaving = [
                self._leaving(batch, kind, parts[place], subscription, now_ms, joined.part((place,)))
                for place, subscription in found.items()
            ]
            refuse(self.retries.refusal(sum(some.left for some in leaving)))
            for some in leaving:
                self._leave(some)
        elif found:
            columns = [self._columns(kind, parts[place], subscription) for place, subscription in found.items()]
            self.propose(columns, joined.part(list(found)), awaited=awaited)
        joined.close()

    def _columns(self, kind: SettleKind.ValueType, rows: Rows, subscription: Subscription) -> SettleColumns:
        """What to propose for the rows of one topic. Raises RequestError."""
        _, ids, attempts, positions, epoch = rows
        if len(ids) > 8 or subscription.has_names or self._windows_full:  # else the log gets them as they are
            logged = self._logged(rows, subscription)
            ids, attempts = logged.ids.tobytes(), logged.attempts.astype("<u4").tobytes()
            positions = b"" if logged.positions is None else logged.positions.astype("<u8").tobytes()
        return SettleColumns(
            group_id=subscription.group_id,
            topic_id=subscription.topic_id,
            kind=kind,
            ids=ids,
            attempts=attempts,
            positions=positions,
            epoch=subscription.epoch_of(epoch),
        )

    def _leaving(
        self,
        batch: consumer_pb2.SettleBatch,
        kind: SettleKind.ValueType,
        rows: Rows,
        subscription: Subscription,
        now_ms: int,
        reply: Reply[SettleResult],
    ) -> Leaving:
        """What to queue for the rows of one topic, whose messages are copied. Raises RequestError."""
        key = subscription.group_id, subscription.topic_id
        ids, attempts, positions, deliveries = self._logged(rows, subscription)
        if kind == SETTLE_DEAD:
            due_ms, cause = None, DECLARED_DEAD
        else:
            due_ms, cause = self._due_ms(now_ms, self._pauses_ms(key[0], batch, deliveries)), REFUSED
        return Leaving(
            key, kind, ids, attempts, positions, due_ms, cause, batch.reason, reply, subscription.epoch_of(rows.epoch)
        )

    @property
    def _windows_full(self) -> bool:
        return self._state.backlog.window_values >= WINDOW_VALUES_MAX

    def _logged(self, rows: Rows, subscription: Subscription) -> _Logged:
        """The rows as the log has them. Raises RequestError if they would make a window grow that must not."""
        deliveries = np.frombuffer(rows.attempts, "<u4")
        ids, attempts, positions = subscription.as_logged(
            np.frombuffer(rows.ids, "<u8"),
            deliveries,
            np.frombuffer(rows.positions, "<u8") if rows.positions else None,
        )
        once = _rows_once(subscription, ids, attempts, positions)
        positions = None if positions is None else positions[once]
        if self._windows_full:
            _check_reach(subscription, ids[once], positions)
        return _Logged(ids[once], attempts[once], positions, deliveries[once])

    def _pauses_ms(self, group_id: int, batch: consumer_pb2.SettleBatch, deliveries: Attempts) -> NDArray[np.int64]:
        """How long each nacked message waits: the delay or level that the nack gives, else the group's policy. Raises
        RequestError."""
        state = self._state
        if batch.delay_ms and batch.delay_level:
            raise invalid("delay_level", batch.delay_level, "0 when delay_ms is given")
        delay_ms_max = state.settings.delay_ms_max
        if not 0 <= batch.delay_ms <= delay_ms_max:
            raise invalid("delay_ms", batch.delay_ms, f"0 to {delay_ms_max}")
        if batch.delay_ms:
            return np.full(len(deliveries), batch.delay_ms, np.int64)
        levels_ms = state.delay_levels_ms
        if batch.delay_level:
            return np.full(len(deliveries), levels_ms[min(batch.delay_level, len(levels_ms)) - 1], np.int64)
        return state.retry_policy(group_id).pauses_ms(deliveries, levels_ms, self._draw)

    def expire(
        self,
        lease: Lease,
        positions: Positions,
        attempts: Attempts,
        now_ms: int,
        reply: Reply[SettleResult],
    ) -> None:
        """A lease ran out: retry its open messages by the group's policy. `positions`, `attempts`: only the open
        ones."""
        state, channel = self._state, lease.channel
        subscription = state.subscription(*channel)
        assert subscription is not None
        deliveries = subscription.deliveries(positions, attempts)
        pauses_ms = state.retry_policy(channel[0]).pauses_ms(deliveries, state.delay_levels_ms, self._draw)
        ids, due_ms = subscription.ids_of(positions), self._due_ms(now_ms, pauses_ms)
        self._leave(
            Leaving(
                channel, SETTLE_RETRY, ids, attempts, positions, due_ms, LEASE_EXPIRED, EXPIRED_TEXT, reply, lease.epoch
            )
        )

    def _due_ms(self, now_ms: int, pauses_ms: NDArray[np.int64]) -> NDArray[np.int64]:
        """When messages come again, capped at `delay_ms_max`: apply could not take a later time."""
        due_ms: NDArray[np.int64] = now_ms + np.minimum(pauses_ms, self._state.settings.delay_ms_max)
        return due_ms

    def _leave(self, leaving: Leaving) -> None:
        reply = leaving.reply

        def applied(result: SettleResult) -> None:
            self._settled(leaving.channel)
            reply.done(result)

        leaving.reply = Reply(applied, reply.fail)
        self.retries.add(leaving)

    def propose(self, columns: Sequence[SettleColumns], reply: Reply[SettleResult], *, awaited: bool = True) -> None:
        """Put settlements of messages that are not copied into the log, as one command. `reply` is told once it is
        applied, with a part for each. `awaited` as in `settle`: if not, messages may still wait for these."""

        def applied(result: CommandResult) -> None:
            assert isinstance(result, SettleResult)
            for some in columns:
                key = (some.group_id, some.topic_id)
                if some.kind == SETTLE_RETURN:
                    self._came_back(key, some)
                self._settled(key)
            reply.done(result)

        command = Command(settle=Settle(batches=columns))
        self._proposer.submit(
            command,
            Reply(applied, reply.fail),
            may_gather=True,
            topics=len(columns),
            awaited=awaited or self._holds_others_up(columns),
        )

    def _holds_others_up(self, columns: Sequence[SettleColumns]) -> bool:
        """Whether other messages wait for one of these settlements: in a FIFO topic, or where a limit on messages in
        flight applies."""
        topics = self._state.topics
        return self._state.settings.group_in_flight_max > 0 or any(
            topic.fifo for some in columns if (topic := topics.get(some.topic_id)) is not None
        )

    def positions_of(self, batch: consumer_pb2.SettleBatch, rows: Rows) -> tuple[ChannelKey, Positions, int]:
        """The channel of a settlement's rows, the positions of its messages, and how many messages it names; of those
        that the channel does not know there is no position. Raises RequestError."""
        subscription = self._named(self._group(batch.group), rows.topic)
        _kind(batch)
        ids = np.frombuffer(rows.ids, "<u8")
        positions = np.frombuffer(rows.positions, "<u8") if rows.positions else None
        found, known = subscription.locate(ids, positions)
        if subscription.epoch_of(rows.epoch) not in (None, subscription.epoch):
            known[:] = False
        return (subscription.group_id, subscription.topic_id), found[known], len(np.unique(ids))

    def extend(self, session_id: int, batch: consumer_pb2.ExtendBatch, now_ms: int) -> tuple[int, int, int]:
        """Extend leases; returns (messages extended, messages refused, lease_until_ms). Refused are settled messages,
        those whose lease is over, and those of another attempt or epoch. Raises RequestError."""
        subscription = self._named(self._group(batch.group), batch.topic)
        key = subscription.group_id, subscription.topic_id
        lease_ms = lease_ms_of(self._config, batch.lease_ms)
        count = _check_columns(batch.ids, batch.attempts, batch.positions)
        if count > EXTEND_MESSAGES_MAX:
            raise invalid("ids", count, f"at most {EXTEND_MESSAGES_MAX} messages in an extension")
        ids, attempts, positions = subscription.as_logged(
            np.frombuffer(batch.ids, "<u8"),
            np.frombuffer(batch.attempts, "<u4"),
            np.frombuffer(batch.positions, "<u8") if batch.positions else None,
        )
        once = _rows_once(subscription, ids, attempts, positions)
        ids, attempts = ids[once], attempts[once]
        found, known = subscription.locate(ids, None if positions is None else positions[once])
        if batch.HasField("epoch") and subscription.epoch_of(batch.epoch) != subscription.epoch:
            known[:] = False
        if self._state.group_broadcasting(key[0]):
            known[:] = False  # several consumers hold a lease on one message: no single one can be extended
        held = known.copy()
        held[known] = ~subscription.is_settled(found[known])
        held[held] = subscription.attempts_of(found[held]) == attempts[held]
        held[held] = self._leases.holds(key, found[held])
        until_ms = now_ms + lease_ms
        extended = np.sort(found[held])
        if len(extended):
            order = np.argsort(found[held])
            held_attempts = attempts[held][order].astype(np.uint32)
            lease = Lease(key, extended, held_attempts, until_ms, session_id, epoch=subscription.epoch)
            self._leases.extend(lease)
            self._feed.add(lease)
        return len(extended), len(ids) - len(extended), until_ms

    def _group(self, name: str) -> Group:
        """The group of this name. Raises RequestError: there is none."""
        group = self._state.groups.named(name)
        if group is None:
            raise invalid("group", name, "an existing consumer group")
        return group

    def _named(self, group: Group, topic: str) -> Subscription:
        """The group's subscription to the topic of this name. Raises RequestError: there is none."""
        found = self._state.topics.named(topic)
        subscription = None if found is None else group.subscriptions.get(found.topic_id)
        if subscription is None:
            self._require_current()
            raise invalid("topic", topic, f"a topic of group {group.name}")
        return subscription


def _check_reach(subscription: Subscription, ids: Ids, positions: Positions | None) -> None:
    """Raise RequestError for a settlement so far ahead that a window would grow beyond the smallest step."""
    places, known = subscription.locate(ids, positions)
    if known.any() and subscription.growth(int(places[known].max())) > CAPACITY_LEAST:
        raise RequestError(limit_reached("window_values", WINDOW_VALUES_MAX, WINDOW_HINT_MS))


def _rows_once(
    subscription: Subscription, ids: Ids, attempts: Attempts, positions: Positions | None
) -> NDArray[np.intp] | slice:
    """The rows of a request that count, each message once. After a failover a consumer may hold a message twice, and
    answer for both deliveries together. The row with the message's position counts, then the highest attempt."""
    if len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()):
        return slice(None)
    ordered = np.sort(ids)
    if not (ordered[1:] == ordered[:-1]).any():
        return slice(None)
    known = np.ones(len(ids), bool) if positions is None else subscription.locate(ids, positions)[1]
    order = np.lexsort((attempts, known, ids))
    last = np.append(ids[order][1:] != ids[order][:-1], True)
    return np.sort(order[last])


def _kind(batch: consumer_pb2.SettleBatch) -> SettleKind.ValueType:
    """The kind of a settlement. Raises RequestError for an unknown one."""
    kind = SETTLE_KINDS.get(batch.outcome)
    if kind is None:
        raise invalid("outcome", batch.outcome, "ACK, RETRY, DEAD or SKIP")
    return kind


def _check_reason(batch: consumer_pb2.SettleBatch) -> None:
    if len(batch.reason) > REASON_MAX:
        raise invalid("reason", len(batch.reason), f"at most {REASON_MAX} characters")


def _check_columns(ids: bytes, attempts: bytes, positions: bytes) -> int:
    if not ids or len(ids) % 8:
        raise invalid("ids", f"{len(ids)} bytes", "one or more elements of 8 bytes")
    count = len(ids) // 8
    if len(attempts) != 4 * count:
        raise invalid("attempts", f"{len(attempts)} bytes", f"{count} elements of 4 bytes")
    if positions and len(positions) != 8 * count:
        raise invalid("positions", f"{len(positions)} bytes", f"empty or {count} elements of 8 bytes")
    return count
