"""Settlements and extensions that consumers ask for: checked, put into the log, answered when committed.

Owns the limits of such requests and the translation of their columns. Settlements change the replicated state;
extensions change only the master's own leases. Used by the master's deliveries and the requests of consumers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.delivery.handing import BATCH_TOPICS_MAX
from tickwheel.node.core.delivery.leases import Attempts, ChannelKey, Lease, LeaseFeed, LeaseTable, Positions
from tickwheel.node.core.delivery.retries import Leaving, RetryQueue
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached, refuse
from tickwheel.node.state.machine import CommandResult, StateMachine
from tickwheel.node.state.names import check_group_name
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.subscription import CAPACITY_LEAST, Subscription
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

    @property
    def messages(self) -> int:
        return len(self.ids) // 8


def alone(batch: consumer_pb2.SettleBatch) -> Rows:
    """The rows of a settlement of one topic. Raises RequestError."""
    count = _check_columns(batch.ids, batch.attempts, batch.positions)
    if count > SETTLE_MESSAGES_MAX:
        raise invalid("ids", count, f"at most {SETTLE_MESSAGES_MAX} messages in a settlement")
    if len(batch.reason) > REASON_MAX:
        raise invalid("reason", len(batch.reason), f"at most {REASON_MAX} characters")
    epoch = batch.epoch if batch.HasField("epoch") else None
    return Rows(batch.topic, batch.ids, batch.attempts, batch.positions, epoch)


def by_topic(batch: consumer_pb2.SettleBatch) -> list[Rows]:
    """The rows of a settlement of several topics, topic by topic. Raises RequestError."""
    if batch.topic or batch.HasField("epoch"):
        raise invalid("topics", len(batch.topics), "none when topic or epoch is given")
    topics = len(batch.topics)
    if topics > SETTLE_TOPICS_MAX:
        raise invalid("topics", topics, f"at most {SETTLE_TOPICS_MAX} topics in a settlement")
    if len(batch.reason) > REASON_MAX:
        raise invalid("reason", len(batch.reason), f"at most {REASON_MAX} characters")
    if check_group_name(batch.group):
        raise invalid("group", batch.group, "an existing consumer group")
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
    """The answers to the parts of one settlement. `reply` gets their sum once, with `parts`, or the first Failure of
    the log. The rows of a topic that left the group on the way are stale."""

    def __init__(self, reply: Reply[SettleResult]) -> None:
        self._reply = reply
        self._results: list[SettleResult | None] = []
        self._failures: dict[int, Failure] = {}
        """By the place of the part."""
        self._missing = 0
        self._closed = False

    def part(self, rows: int) -> Reply[SettleResult]:
        """The reply to the next part, which has `rows` rows."""
        place = len(self._results)
        self._results.append(None)
        self._missing += 1

        def done(result: SettleResult) -> None:
            if self._results[place] is None and place not in self._failures:
                self._results[place] = SettleResult(stale=rows) if result.failure is not None else result
                self._ended()

        def fail(failure: Failure) -> None:
            if self._results[place] is None and place not in self._failures:
                self._failures[place] = failure
                self._ended()

        return Reply(done, fail)

    def close(self) -> None:
        """All parts are made."""
        self._closed = True
        self._finish()

    def _ended(self) -> None:
        self._missing -= 1
        self._finish()

    def _finish(self) -> None:
        if self._missing or not self._closed:
            return
        self._closed = False
        if self._failures:
            self._reply.fail(self._failures[min(self._failures)])
        else:
            self._reply.done(SettleResult.of(tuple([result for result in self._results if result is not None])))


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
    ) -> None:
        """`draw` returns a number from 0 to below 1, for jitter."""
        self._config = config
        self._state = state
        self._proposer = proposer
        self._leases = leases
        self._feed = feed
        self._came_back = came_back
        self._settled = settled
        self._draw = draw
        self.retries = RetryQueue(proposer)
        self.serving = proposer.serving

    def settle(self, batch: consumer_pb2.SettleBatch, now_ms: int, reply: Reply[SettleResult]) -> None:
        """Put a consumer's settlement into the log, with those of all its topics in one command; `reply` is told once
        it is applied. Raises RequestError. A settlement of several topics has a result for each: rows of a topic that
        the group does not have (any more) are stale."""
        if not batch.topics:
            named = self._named(batch.group, batch.topic)
            taken = self._taken(batch, _kind(batch), alone(batch), *named, now_ms, reply)
            if isinstance(taken, Leaving):
                self._leave(taken)
            else:
                self.propose(taken, reply)
            return
        joined = Joined(reply)
        proposed: list[SettleColumns] = []
        answers: list[Reply[SettleResult]] = []
        leaving: list[Leaving] = []
        parts, kind = by_topic(batch), _kind(batch)
        group = self._state.groups.named(batch.group)
        if group is None:
            raise invalid("group", batch.group, "an existing consumer group")
        for rows in parts:
            topic_id = self._state.topic_id(rows.topic)
            subscription = None if topic_id is None else group.subscriptions.get(topic_id)
            answer = joined.part(rows.messages)
            if topic_id is None or subscription is None:
                answer.done(SettleResult(stale=rows.messages))
                continue
            # Nothing is settled where one part is refused.
            taken = self._taken(batch, kind, rows, (group.group_id, topic_id), subscription, now_ms, answer)
            if isinstance(taken, Leaving):
                leaving.append(taken)
            else:
                proposed.append(taken)
                answers.append(answer)
        refuse(self.retries.refusal(sum(some.left for some in leaving)))
        for some in leaving:
            self._leave(some)
        if proposed:
            self.propose_together(proposed, answers)
        joined.close()

    def _taken(
        self,
        batch: consumer_pb2.SettleBatch,
        kind: SettleKind.ValueType,
        rows: Rows,
        key: ChannelKey,
        subscription: Subscription,
        now_ms: int,
        reply: Reply[SettleResult],
    ) -> SettleColumns | Leaving:
        """What to propose for the rows of one topic, or to queue if its messages are copied, with `reply` for the
        result. Changes nothing. Raises RequestError."""
        _, ids_bytes, attempts_bytes, positions_bytes, epoch = rows
        group_id, topic_id = key
        copies = kind in (SETTLE_RETRY, SETTLE_DEAD)
        full = self._state.backlog.window_values >= WINDOW_VALUES_MAX
        if len(ids_bytes) == 8 and not (copies or full or subscription.has_names):
            # Over many topics nearly every settlement: one row, which the log gets as it is.
            return SettleColumns(
                group_id=group_id,
                topic_id=topic_id,
                kind=kind,
                ids=ids_bytes,
                attempts=attempts_bytes,
                positions=positions_bytes,
                epoch=epoch,
            )
        given = np.frombuffer(attempts_bytes, "<u4")
        ids, attempts, positions = subscription.as_logged(
            np.frombuffer(ids_bytes, "<u8"), given, np.frombuffer(positions_bytes, "<u8") if positions_bytes else None
        )
        once = _rows_once(subscription, ids, attempts, positions)
        given, ids, attempts = given[once], ids[once], attempts[once]
        positions = None if positions is None else positions[once]
        if full:
            _check_reach(subscription, ids, positions)
        if copies:
            dies = kind == SETTLE_DEAD
            due_ms = None if dies else self._due_ms(now_ms, self._pauses_ms(group_id, batch, given))
            cause = DECLARED_DEAD if dies else REFUSED
            return Leaving(key, kind, ids, attempts, positions, due_ms, cause, batch.reason, reply, epoch)
        return SettleColumns(
            group_id=group_id,
            topic_id=topic_id,
            kind=kind,
            ids=ids.tobytes(),
            attempts=attempts.astype("<u4").tobytes(),
            positions=b"" if positions is None else positions.astype("<u8").tobytes(),
            epoch=epoch,
        )

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

    def propose(self, columns: SettleColumns, reply: Reply[SettleResult]) -> None:
        """Put settlement columns into the log; `reply` is told once they are applied."""
        key = (columns.group_id, columns.topic_id)

        def applied(result: CommandResult) -> None:
            assert isinstance(result, SettleResult)
            if columns.kind == SETTLE_RETURN:
                self._came_back(key, columns)
            self._settled(key)
            reply.done(result)

        self._proposer.submit(Command(settle=Settle(batches=[columns])), Reply(applied, reply.fail), may_gather=True)

    def propose_together(self, columns: list[SettleColumns], answers: list[Reply[SettleResult]]) -> None:
        """As `propose`, for acknowledgements of several topics: one command. Each has its answer."""

        def applied(result: CommandResult) -> None:
            assert isinstance(result, SettleResult) and len(result.parts) == len(columns)
            for some, answer, part in zip(columns, answers, result.parts, strict=True):
                self._settled((some.group_id, some.topic_id))
                answer.done(part)

        def failed(failure: Failure) -> None:
            for answer in answers:
                answer.fail(failure)

        command = Command()
        command.settle.batches.extend(columns)
        self._proposer.submit(command, Reply(applied, failed), may_gather=True, topics=len(columns))

    def positions_of(self, batch: consumer_pb2.SettleBatch, rows: Rows) -> tuple[ChannelKey, Positions, int]:
        """The channel of a settlement's rows, the positions of its messages, and how many messages it names; of those
        that the channel does not know there is no position. Raises RequestError."""
        key, subscription = self._named(batch.group, rows.topic)
        _kind(batch)
        ids = np.frombuffer(rows.ids, "<u8")
        positions = np.frombuffer(rows.positions, "<u8") if rows.positions else None
        found, known = subscription.locate(ids, positions)
        if rows.epoch not in (None, subscription.epoch):
            known[:] = False
        return key, found[known], len(np.unique(ids))

    def extend(self, session_id: int, batch: consumer_pb2.ExtendBatch, now_ms: int) -> tuple[int, int, int]:
        """Extend leases; returns (messages extended, messages refused, lease_until_ms). Refused are settled messages,
        those whose lease is over, and those of another attempt or epoch. Raises RequestError."""
        config = self._config
        key, subscription = self._named(batch.group, batch.topic)
        lease_ms = batch.lease_ms or config.lease_default_ms
        if not config.lease_min_ms <= lease_ms <= config.lease_max_ms:
            raise invalid("lease_ms", lease_ms, f"{config.lease_min_ms} to {config.lease_max_ms}")
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
        if batch.HasField("epoch") and batch.epoch != subscription.epoch:
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

    def _named(self, group: str, topic: str) -> tuple[ChannelKey, Subscription]:
        """The subscription of these names. Raises RequestError: there is none."""
        group_id, topic_id = self._state.group_id(group), self._state.topic_id(topic)
        if group_id is None:
            raise invalid("group", group, "an existing consumer group")
        subscription = None if topic_id is None else self._state.subscription(group_id, topic_id)
        if topic_id is None or subscription is None:
            raise invalid("topic", topic, f"a topic of group {group}")
        return (group_id, topic_id), subscription


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


def _check_columns(ids: bytes, attempts: bytes, positions: bytes) -> int:
    if not ids or len(ids) % 8:
        raise invalid("ids", f"{len(ids)} bytes", "one or more elements of 8 bytes")
    count = len(ids) // 8
    if len(attempts) != 4 * count:
        raise invalid("attempts", f"{len(attempts)} bytes", f"{count} elements of 4 bytes")
    if positions and len(positions) != 8 * count:
        raise invalid("positions", f"{len(positions)} bytes", f"empty or {count} elements of 8 bytes")
    return count
