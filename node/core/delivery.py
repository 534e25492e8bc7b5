"""The master's deliveries: consumers and their credits, channels, leases, settlements.

Begins when this node leads, ends at once when it no longer does: then all of it is thrown away and the
consumers are told where the master is. What must survive (settled, attempts) is in the replicated
state; what should survive (who holds what) travels in the 50 ms sync.

Before anything leaves, the lease of mastership is asked again: a deposed master delivers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.core.channel import Channel, Staged
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.failure import Failure, RequestError, invalid, limit_reached
from tickwheel.node.core.leases import ChannelKey, HeardLeases, Lease, LeaseFeed, LeaseTable, Positions
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.core.push import PushAhead
from tickwheel.node.core.recent import RecentUnits
from tickwheel.node.core.work import Background, RemovedError
from tickwheel.node.state.machine import StateMachine
from tickwheel.node.state.results import SettleResult
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto import consumer_pb2
from tickwheel.proto.log_pb2 import (
    SETTLE_ACK,
    SETTLE_DEAD,
    SETTLE_RETRY,
    SETTLE_RETURN,
    SETTLE_SKIP,
    Command,
    Settle,
    SettleColumns,
)
from tickwheel.proto.peer_pb2 import LeaseRange
from tickwheel.wheel.engine import Wheel
from tickwheel.wheel.units import Units, ids_of

Deliver = Callable[[consumer_pb2.DeliverBatch], None]
Closed = Callable[[Failure], None]

SETTLE_KINDS = {
    consumer_pb2.ACK: SETTLE_ACK,
    consumer_pb2.RETRY: SETTLE_RETRY,
    consumer_pb2.DEAD: SETTLE_DEAD,
    consumer_pb2.SKIP: SETTLE_SKIP,
}
CREDITS_MAX = 1_000_000
SETTLE_MESSAGES_MAX = 100_000
RETURN_RETRY_MS = 200
LATE_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 10_000, 60_000, 600_000)
_LATE_BOUNDS = np.array(LATE_BOUNDS_MS, np.int64)


@dataclass(slots=True, eq=False)
class Session:
    """One consumer. Its stream or pull drives it; the delivery hands it batches."""

    session_id: int
    group: str
    group_id: int
    lease_ms: int
    batch_messages_max: int
    deliver: Deliver
    closed: Closed
    topic: str = ""
    """Only from this topic; empty: all of the group."""
    credits: int = 0
    open: bool = True
    delivered: int = 0


@dataclass(slots=True)
class Counters:
    """What the metrics show; totals since the process started."""

    delivered: int = 0
    redelivered: int = 0
    settled: int = 0
    expired: int = 0
    late_counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(LATE_BOUNDS_MS) + 1, np.int64))
    """First deliveries by lateness: at most each bound, the last one above all."""
    late_sum_ms: int = 0


class Delivery:
    """One per node; `reigning` only while the node leads."""

    def __init__(
        self,
        config: CoreConfig,
        state: StateMachine,
        wheel: Wheel,
        proposer: Proposer,
        background: Background,
        may_act: Callable[[], bool],
        fatal: Callable[[str], None],
    ) -> None:
        self._config = config
        self._state = state
        self._wheel = wheel
        self._proposer = proposer
        self._background = background
        self._may_act = may_act
        self._fatal = fatal
        self._sessions: dict[int, Session] = {}
        self._by_group: dict[int, list[Session]] = {}
        self._channels: dict[ChannelKey, Channel] = {}
        self._recent: dict[int, RecentUnits] = {}
        self._leases = LeaseTable()
        self._returning: dict[ChannelKey, set[int]] = {}
        """Positions whose return is on its way into the log: not to be handed out before it is applied."""
        self._held_ids: dict[ChannelKey, dict[int, int]] = {}
        """Ids that an earlier master delivered ahead of a lost dispatch, and until when they are leased."""
        self.push: PushAhead | None = None
        """Set by the core in push-first."""
        self._next_session = 1
        self._reign = 0
        self._turn = 0
        self.reigning = False
        self.term = 0
        self.feed = LeaseFeed()
        self.heard = HeardLeases()
        self.counters = Counters()
        self._hold_until_ms = 0
        self._news = False
        self._dirty: set[int] = set()
        """Groups whose channels may have something to do."""

    # -- mastership

    def begin(self, term: int, now_ms: int) -> None:
        """This node leads in `term` and has applied everything before it."""
        self._reign += 1
        self.reigning = True
        self.term = term
        self._hold_until_ms = self._wheel.cursor.due_ms - 1
        self.heard.prune(now_ms, self._floors())
        for lease in self.heard.held(now_ms):
            self._take_over(lease)
        for session in self._sessions.values():
            self._dirty.add(session.group_id)

    def _take_over(self, lease: Lease) -> None:
        """A lease of an earlier master; what it delivered ahead of a dispatch that is not in the log is held by id."""
        subscription = self._state.subscription(*lease.channel)
        if lease.ids is not None and subscription is not None:
            places, known = subscription.locate(lease.ids, lease.positions)
            again, found = subscription.locate(lease.ids[~known], None)
            held = self._held_ids.setdefault(lease.channel, {})
            held.update(dict.fromkeys(lease.ids[~known][~found].tolist(), lease.until_ms))
            positions = np.sort(np.concatenate((places[known], again[found])))
            lease = Lease(lease.channel, positions, np.ones(len(positions), np.uint32), lease.until_ms, 0)
        if len(lease.positions):
            self._leases.give(lease)
            self.feed.add(lease)

    def end(self, failure: Failure) -> None:
        """Mastership is gone: stop at once, clear everything, tell the consumers."""
        self._reign += 1
        self.reigning = False
        self._channels.clear()
        self._recent.clear()
        self._leases.clear()
        self._returning.clear()
        self._held_ids.clear()
        self.feed.clear()
        self._dirty.clear()
        sessions, self._sessions = self._sessions, {}
        self._by_group.clear()
        for session in sessions.values():
            session.open = False
            session.closed(failure)

    def on_dispatched(self, topic_id: int, first_position: int, units: Units) -> None:
        """Hook of the state machine: units entered a topic's ready queue."""
        if not self.reigning:
            return
        pushed = self.push.dispatched(topic_id, first_position, units) if self.push is not None else False
        if pushed is None:
            self._fatal(f"topic {topic_id}: other messages were dispatched than had been delivered ahead")
            return
        if self._held_ids:
            self._hold_by_id(topic_id, first_position, units)
        if not pushed:
            self._recent_of(topic_id).add(first_position, units)
        for group_id in self._by_group:
            if self._state.subscription(group_id, topic_id) is not None:
                self._dirty.add(group_id)
                self._news = True

    def on_pushed(self, topic_id: int, first_position: int, units: Units) -> None:
        """Hook of push-first: units that a dispatch under way will bring to these positions of a ready queue."""
        self._recent_of(topic_id).add(first_position, units)
        if self._held_ids:
            self._hold_by_id(topic_id, first_position, units)
        for group_id, sessions in self._by_group.items():
            subscription = self._state.subscription(group_id, topic_id)
            if subscription is None or self._state.group_paused(group_id) or self._state.topic_paused(topic_id):
                continue
            channel = self._channel((group_id, topic_id))
            assert channel is not None
            credits = sum(s.credits for s in sessions if not s.topic or s.topic == channel.topic)
            if channel.push(first_position, units, credits):
                self._dirty.add(group_id)
                self._news = True

    def unpush(self) -> None:
        """A dispatch was not applied: what was delivered ahead of it keeps its lease, what is staged is dropped.

        When it is dispatched after all it goes out once more: at most what push-first may repeat.
        """
        if self.push is not None:
            self.push.failed()
        self._recent.clear()
        for channel in self._channels.values():
            channel.recent = self._recent_of(channel.key[1])
            channel.unpush(self._state.ready_count(channel.key[1]))

    def _recent_of(self, topic_id: int) -> RecentUnits:
        recent = self._recent.get(topic_id)
        if recent is None:
            recent = self._recent[topic_id] = RecentUnits()
        return recent

    def _hold_by_id(self, topic_id: int, first_position: int, units: Units) -> None:
        """Messages that an earlier master delivered ahead of a dispatch that was lost: held until their leases end."""
        ids = ids_of(units)
        for key in [key for key in self._held_ids if key[1] == topic_id]:
            held = self._held_ids[key]
            places = [place for place, id in enumerate(ids.tolist()) if id in held]
            channel = self._channel(key)
            if not places or channel is None:
                continue
            positions = np.array(places, np.uint64) + np.uint64(first_position)
            channel.hold(positions)
            for place, position in zip(places, positions.tolist(), strict=True):
                until_ms = held.pop(int(ids[place]))
                lease = Lease(key, np.array([position], np.uint64), np.ones(1, np.uint32), until_ms, 0)
                self._leases.give(lease)
                self.feed.add(lease)

    # -- consumers

    def open_session(
        self,
        group: str,
        group_id: int,
        *,
        lease_ms: int,
        batch_messages_max: int,
        credits: int,
        deliver: Deliver,
        closed: Closed,
        topic: str = "",
    ) -> Session:
        """Attach a consumer to an existing group, for one topic of it or all. Raises RequestError."""
        config = self._config
        lease_ms = lease_ms or config.lease_default_ms
        if not config.lease_min_ms <= lease_ms <= config.lease_max_ms:
            raise invalid("lease_ms", lease_ms, f"{config.lease_min_ms} to {config.lease_max_ms}")
        if len(self._sessions) >= config.sessions_max:
            raise RequestError(limit_reached("consumers", config.sessions_max, 1_000))
        session = Session(
            session_id=self._next_session,
            group=group,
            group_id=group_id,
            lease_ms=lease_ms,
            batch_messages_max=min(batch_messages_max or 1_024, config.batch_messages_max),
            deliver=deliver,
            closed=closed,
            topic=topic,
        )
        self._next_session += 1
        self._sessions[session.session_id] = session
        self._by_group.setdefault(group_id, []).append(session)
        self.credit(session, credits)
        return session

    def credit(self, session: Session, credits: int) -> None:
        """The consumer takes so many messages more."""
        if session.credits + credits > CREDITS_MAX:
            raise invalid("credits", session.credits + credits, f"at most {CREDITS_MAX} outstanding")
        session.credits += credits
        self._dirty.add(session.group_id)

    def close_session(self, session: Session, now_ms: int, *, give_back: bool) -> None:
        """The consumer is gone; with `give_back` what it holds returns to the ready queue at once."""
        if not session.open:
            return
        session.open = False
        self._sessions.pop(session.session_id, None)
        sessions = self._by_group.get(session.group_id, [])
        sessions.remove(session)
        if not sessions:
            self._by_group.pop(session.group_id, None)
        if give_back and self.reigning:
            for lease in self._leases.close_session(session.session_id):
                self._return(lease, now_ms)

    def consumers(self, group_id: int) -> int:
        """Open consumers of a group."""
        return len(self._by_group.get(group_id, ()))

    # -- the loop

    def tick(self, now_ms: int) -> None:
        """Expire leases, claim, fetch and hand out what is due."""
        if not self.reigning:
            return
        for lease in self._leases.expire(now_ms):
            self._return(lease, now_ms)
        self._news = False
        dirty, self._dirty = self._dirty, set()
        for group_id in sorted(dirty):
            if self._serve(group_id, now_ms):
                self._dirty.add(group_id)

    @property
    def has_news(self) -> bool:
        """Messages became ready or a consumer gave credit since the last tick."""
        return self._news

    def wanted_ms(self) -> int | None:
        """When the next tick is needed at the latest."""
        if not self.reigning:
            return None
        times = [t for t in (self._leases.next_end_ms(),) if t is not None]
        for group_id in self._dirty:
            if not any(session.credits for session in self._by_group.get(group_id, ())):
                continue
            times += [t for c in self._channels_of(group_id) if (t := c.earliest_ms()) is not None]
        return min(times, default=None)

    def _channels_of(self, group_id: int) -> list[Channel]:
        channels = []
        for topic_id in self._state.group_topics(group_id):
            channel = self._channel((group_id, topic_id))
            if channel is not None:
                channels.append(channel)
        return channels

    def _channel(self, key: ChannelKey) -> Channel | None:
        channel = self._channels.get(key)
        if channel is None:
            subscription = self._state.subscription(*key)
            if subscription is None:
                return None
            channel = Channel(
                key=key,
                group=self._state.group_name(key[0]),
                topic=self._state.topic_name(key[1]),
                subscription=subscription,
                recent=self._recent.setdefault(key[1], RecentUnits()),
                config=self._config,
                fetch=self._fetch,
                next_position=subscription.floor,
                hold_until_ms=self._hold_until_ms,
            )
            for lease in self._leases.open_leases():
                if lease.session_id == 0 and lease.channel == key:
                    channel.hold(lease.positions)
            channel.hold(np.array(sorted(self._returning.get(key, ())), np.uint64))
            self._channels[key] = channel
        return channel

    def _serve(self, group_id: int, now_ms: int) -> bool:
        """Work for one group; True if something waits for its time or more may be claimed."""
        everyone = self._by_group.get(group_id)
        if not everyone or self._state.group_paused(group_id):
            return False
        waits = False
        for channel in self._channels_of(group_id):
            if self._state.topic_paused(channel.key[1]):
                continue
            sessions = [s for s in everyone if not s.topic or s.topic == channel.topic]
            if not sessions:
                continue
            credits = sum(session.credits for session in sessions)
            channel.advance(credits, self._state.ready_count(channel.key[1]))
            self._hand_out(channel, sessions, now_ms)
            waits = waits or channel.staged_count > 0
        return waits

    def _hand_out(self, channel: Channel, sessions: list[Session], now_ms: int) -> None:
        if not self._may_act():
            return
        idle = 0
        while idle < len(sessions):
            self._turn += 1
            session = sessions[self._turn % len(sessions)]
            taken = channel.take(now_ms, min(session.credits, session.batch_messages_max)) if session.credits else None
            if taken is None:
                idle += 1
                continue
            idle = 0
            self._send(channel, session, *taken, now_ms)
            credits = sum(s.credits for s in sessions)
            channel.advance(credits, self._state.ready_count(channel.key[1]))

    def _send(self, channel: Channel, session: Session, staged: Staged, first: int, last: int, now_ms: int) -> None:
        assert staged.records is not None and staged.units is not None
        places: slice | NDArray[np.int64] = slice(first, last)
        records = staged.records[first:last]
        valid = channel.subscription.attempts_of(staged.positions[places]) == staged.attempts[places]
        if not valid.all():
            # Settled or returned since it was claimed: another delivery of it counts.
            places = np.flatnonzero(valid) + first
            if not len(places):
                return
            records = [staged.records[place] for place in places.tolist()]
        positions, attempts = staged.positions[places], staged.attempts[places]
        units, due_ms = staged.units[places], staged.due_ms[places]
        count = len(positions)
        session.credits -= count
        session.delivered += count
        until_ms = now_ms + session.lease_ms
        # Ahead of its dispatch a message has no place of its own yet: the next master must know it by its id.
        ahead = self.push is not None and int(positions[-1]) >= self._state.ready_count(channel.key[1])
        ids = staged.ids[places] if ahead else None
        lease = Lease(channel.key, positions, attempts, until_ms, session.session_id, ids=ids)
        self._leases.give(lease)
        self.feed.add(lease)
        batch = consumer_pb2.DeliverBatch(
            topic=channel.topic,
            group=channel.group,
            term=self.term,
            ids=staged.ids[places].tobytes(),
            attempts=attempts.astype("<u4").tobytes(),
            positions=positions.tobytes(),
            due_ms=due_ms.tobytes(),
            meta_sizes=units["meta_size"].astype("<u4").tobytes(),
            sizes=units["size"].tobytes(),
            records=b"".join(records),
            lease_until_ms=until_ms,
        )
        counters = self.counters
        counters.delivered += count
        counters.redelivered += int((attempts > 1).sum())
        late_ms = now_ms - due_ms
        counters.late_counts += np.bincount(np.searchsorted(_LATE_BOUNDS, late_ms), minlength=len(LATE_BOUNDS_MS) + 1)
        counters.late_sum_ms += int(late_ms.sum())
        session.deliver(batch)

    def _fetch(self, staged: Staged, fetched: Callable[[], None]) -> None:
        reign = self._reign

        def records_read(records: list[bytes] | None, error: BaseException | None) -> None:
            if reign != self._reign:
                return
            if isinstance(error, RemovedError):
                staged.kept = staged.ids >> np.uint64(32) >= np.uint64(self._state.hour_min_kept)
                fetched()
                return
            if error is not None:
                staged.failed = str(error)
                fetched()
                self._fatal(
                    f"a message that is due cannot be read: {error}. Another node will deliver it; "
                    "replace this node's data (docs/DEPLOY.md, replacing a dead node)"
                )
                return
            staged.records = records
            fetched()
            self._dirty.update(self._by_group)

        def units_found(units: Units | None, error: BaseException | None) -> None:
            if reign != self._reign:
                return
            if error is not None or units is None:
                records_read(None, error)
                return
            staged.units = units
            self._background.read_records(units, records_read)

        if staged.units is not None:
            self._background.read_records(staged.units, records_read)
        else:
            self._background.read_units(staged.ids, units_found)

    # -- settlements

    def settle(
        self, batch: consumer_pb2.SettleBatch, now_ms: int, done: Callable[[SettleResult | Failure], None]
    ) -> None:
        """Put a settlement into the log; `done` comes when it is committed. Raises RequestError."""
        group_id, topic_id = self._names(batch.group, batch.topic)
        kind = SETTLE_KINDS.get(batch.outcome)
        if kind is None:
            raise invalid("outcome", batch.outcome, "ACK, RETRY, DEAD or SKIP")
        count = self._check_columns(batch.ids, batch.attempts, batch.positions)
        if count > SETTLE_MESSAGES_MAX:
            raise invalid("ids", count, f"at most {SETTLE_MESSAGES_MAX} messages in a settlement")
        if len(batch.reason) > 1_024:
            raise invalid("reason", len(batch.reason), "at most 1,024 characters")
        retry_due_ms = 0
        if kind == SETTLE_RETRY:
            if batch.delay_ms < 0:
                raise invalid("delay_ms", batch.delay_ms, "0 or more")
            retry_due_ms = now_ms + batch.delay_ms
        columns = SettleColumns(
            group_id=group_id,
            topic_id=topic_id,
            kind=kind,
            ids=batch.ids,
            attempts=batch.attempts,
            positions=batch.positions,
            retry_due_ms=retry_due_ms,
            reason=batch.reason,
        )
        self._propose_settle(columns, done)

    def _propose_settle(self, columns: SettleColumns, done: Callable[[SettleResult | Failure], None]) -> None:
        key = (columns.group_id, columns.topic_id)

        def answered(result: object) -> None:
            if isinstance(result, SettleResult):
                self.counters.settled += result.settled
                if columns.kind in (SETTLE_RETURN, SETTLE_RETRY):
                    self._came_back(key, columns)
                done(result)
            else:
                assert isinstance(result, Failure)
                done(result)

        self._proposer.submit(Command(settle=Settle(batches=[columns])), answered, may_gather=True)

    def _came_back(self, key: ChannelKey, columns: SettleColumns) -> None:
        channel = self._channels.get(key)
        if channel is not None:
            given = np.frombuffer(columns.positions, "<u8") if columns.positions else None
            positions, known = channel.subscription.locate(np.frombuffer(columns.ids, "<u8"), given)
            channel.release_hold(positions[known])
        self._dirty.add(key[0])

    def _return(self, lease: Lease, now_ms: int) -> None:
        """A lease is over: what is not settled goes back to the front of the ready queue."""
        subscription = self._state.subscription(*lease.channel)
        if subscription is None or not len(lease.positions):
            return
        if int(lease.positions[-1]) >= self._state.ready_count(lease.channel[1]):
            # Delivered ahead, and its dispatch is not applied yet: there is nothing to return it to.
            self._leases.give(replace(lease, until_ms=now_ms + RETURN_RETRY_MS, closed=False))
            return
        is_open = ~subscription.is_settled(lease.positions)
        is_open &= subscription.attempts_of(lease.positions) == lease.attempts
        positions, attempts = lease.positions[is_open], lease.attempts[is_open]
        if not len(positions):
            return
        self.counters.expired += len(positions)
        returning = self._returning.setdefault(lease.channel, set())
        returning.update(positions.tolist())
        channel = self._channels.get(lease.channel)
        if channel is not None:
            channel.hold(positions)
        columns = SettleColumns(
            group_id=lease.channel[0],
            topic_id=lease.channel[1],
            kind=SETTLE_RETURN,
            ids=subscription.ids_of(positions).tobytes(),
            attempts=attempts.astype("<u4").tobytes(),
            positions=positions.tobytes(),
        )
        reign = self._reign

        def returned(result: SettleResult | Failure) -> None:
            if reign == self._reign:
                returning.difference_update(positions.tolist())
            if isinstance(result, Failure) and reign == self._reign and self.reigning:
                self._leases.give(Lease(lease.channel, positions, attempts, now_ms + RETURN_RETRY_MS, lease.session_id))

        self._propose_settle(columns, returned)

    def extend(self, session_id: int, batch: consumer_pb2.ExtendBatch, now_ms: int) -> tuple[int, int, int]:
        """Extend leases: (extended, refused, lease_until_ms). Raises RequestError."""
        config = self._config
        key = self._names(batch.group, batch.topic)
        lease_ms = batch.lease_ms or config.lease_default_ms
        if not config.lease_min_ms <= lease_ms <= config.lease_max_ms:
            raise invalid("lease_ms", lease_ms, f"{config.lease_min_ms} to {config.lease_max_ms}")
        count = self._check_columns(batch.ids, batch.attempts, batch.positions)
        if count > SETTLE_MESSAGES_MAX:
            raise invalid("ids", count, f"at most {SETTLE_MESSAGES_MAX} messages")
        subscription = self._state.subscription(*key)
        assert subscription is not None
        ids = np.frombuffer(batch.ids, "<u8")
        attempts = np.frombuffer(batch.attempts, "<u4")
        positions = np.frombuffer(batch.positions, "<u8") if batch.positions else None
        found, known = subscription.locate(ids, positions)
        held = known.copy()
        held[known] = ~subscription.is_settled(found[known])
        held[held] = subscription.attempts_of(found[held]) == attempts[held]
        until_ms = now_ms + lease_ms
        extended = np.sort(found[held])
        if len(extended):
            order = np.argsort(found[held])
            lease = Lease(key, extended, attempts[held][order].astype(np.uint32), until_ms, session_id)
            self._leases.extend(key, extended, lease.attempts, until_ms, session_id)
            self.feed.add(lease)
        return len(extended), count - len(extended), until_ms

    def _names(self, group: str, topic: str) -> ChannelKey:
        group_id, topic_id = self._state.group_id(group), self._state.topic_id(topic)
        if group_id is None:
            raise invalid("group", group, "an existing consumer group")
        if topic_id is None or self._state.subscription(group_id, topic_id) is None:
            raise invalid("topic", topic, f"a topic of group {group}")
        return group_id, topic_id

    @staticmethod
    def _check_columns(ids: bytes, attempts: bytes, positions: bytes) -> int:
        if not ids or len(ids) % 8:
            raise invalid("ids", f"{len(ids)} bytes", "one or more elements of 8 bytes")
        count = len(ids) // 8
        if len(attempts) != 4 * count:
            raise invalid("attempts", f"{len(attempts)} bytes", f"{count} elements of 4 bytes")
        if positions and len(positions) != 8 * count:
            raise invalid("positions", f"{len(positions)} bytes", f"empty or {count} elements of 8 bytes")
        return count

    # -- upkeep

    def _floors(self) -> dict[ChannelKey, int]:
        return {key: subscription.floor for key, subscription in self._state.subscriptions()}

    def upkeep(self, now_ms: int) -> None:
        """Every second or so: let go of leases that are settled."""
        floors = self._floors()
        self._leases.forget_settled(floors)
        for channel in self._channels.values():
            channel.forget_settled()
        self.heard.prune(now_ms, floors)

    def lease_feed_for(self, peer_id: str, number: int) -> tuple[list[LeaseRange], bool]:
        """Ranges for the sync to one slave."""
        return self.feed.for_peer(peer_id, number, self._leases)

    @property
    def in_flight(self) -> int:
        """Messages out with consumers, about (settled ones leave with their floor)."""
        return sum(len(lease.positions) for lease in self._leases.open_leases())

    def in_flight_of(self, group_id: int) -> int:
        """Messages out with consumers of one group, about."""
        return sum(len(lease.positions) for lease in self._leases.open_leases() if lease.channel[0] == group_id)

    @property
    def session_count(self) -> int:
        """Open consumers."""
        return len(self._sessions)

    def staged(self) -> int:
        """Messages read and waiting."""
        return sum(channel.staged_count for channel in self._channels.values())

    def error_unknown_group(self, group: str) -> Failure:
        """A consumer asked for a group that does not exist."""
        return Failure(pb.UNKNOWN_NAME, f"group {group} does not exist", {"field": "group", "value": group})

    def held_positions(self, key: ChannelKey) -> Positions:
        """Positions out under any open lease; for tests."""
        parts = [lease.positions for lease in self._leases.open_leases() if lease.channel == key]
        return np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)
