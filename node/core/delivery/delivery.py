"""The master's deliveries: channels, what goes to whom and what comes back.

Deliveries begin when this node leads and end at once when it no longer does. At the end the consumers are told where
the master is, and everything but the leases (known_leases.py) is dropped.

Every delivery first checks the lease of mastership again: a deposed master delivers nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tickwheel.node.core.delivery.agenda import NEVER, Agenda, GroupAgenda, Pass
from tickwheel.node.core.delivery.broadcast import Broadcasts
from tickwheel.node.core.delivery.channel import Channel, Share
from tickwheel.node.core.delivery.channels import Channels
from tickwheel.node.core.delivery.fetching import Fetching, Unreadable
from tickwheel.node.core.delivery.fifo import FifoChannel
from tickwheel.node.core.delivery.handing import Handing, batch_of
from tickwheel.node.core.delivery.known_leases import KnownLeases
from tickwheel.node.core.delivery.leases import TURN_LEASES, ChannelKey, Lease, in_turn
from tickwheel.node.core.delivery.returns import Returns
from tickwheel.node.core.delivery.sessions import CREDITS_MAX, Session, Sessions
from tickwheel.node.core.delivery.settlements import Settlements, alone, by_topic
from tickwheel.node.core.kernel import Kernel, require_current
from tickwheel.node.core.part import Part
from tickwheel.node.core.schedule.push import PushAhead
from tickwheel.node.core.watch.counts import Counts
from tickwheel.node.core.watch.events import Events
from tickwheel.node.core.world import ClusterMs, Now
from tickwheel.node.failure import Failure, RequestError, not_master, refused
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.results import DispatchResult, MadeReady, SettleResult
from tickwheel.node.state.subscription import Positions
from tickwheel.proto import common_pb2, consumer_pb2
from tickwheel.proto.log_pb2 import SettleColumns
from tickwheel.wheel.units import CursorKey, Units

SLICE_TOPICS_MAX = 64
"""Topics of one group that a tick serves, and topics of all groups from which on it serves no further group. To claim
and hand out messages of one takes up to a tenth of a millisecond, and heartbeats and votes should wait no longer than
ten. A pass over more topics goes on in the next ticks."""
SLICE_READERS_MAX = 16
"""Consumers of a broadcasting group that a tick serves, each counted for each topic: what one has credit for is claimed
and read for it alone, which takes up to a millisecond."""
READERS_HANDED_MAX = 4_096
"""Messages of a broadcasting group that a tick hands out. A pass over more goes on in the next tick."""
HANDED_MAX = 8_192
"""Messages of a group that a tick hands out, in about ten milliseconds, and of all groups from which on it serves no
further group. A pass over more goes on in the next tick."""
TURN_PAUSE_MS = 2
"""Pause between two turns of what takes many."""
FAULT_PAUSE_MS = 1_000
"""Pause before a lease is returned again whose return failed through a mistake of ours."""


def _full(sessions: Sequence[Session]) -> int:
    """Messages that make a full batch for one of these consumers; 0: none has credit."""
    return min((min(s.credits, s.batch_messages_max) for s in sessions if s.credits), default=0)


class Delivery(Part):
    """`active` is true from `begin` to `end`: the node leads, has applied everything and knows the time."""

    of_master = True

    def __init__(
        self,
        core: Kernel,
        draw: Callable[[], float],
        push: PushAhead | None,
        counts: Counts,
        events: Events,
        unreadable: Callable[[Unreadable], None],
    ) -> None:
        """`draw` returns a number from 0 to below 1, for jitter. `push` is given in delivery order push-first.
        `unreadable` takes each message that the disk cannot read."""
        config, state, proposer = core.config, core.state, core.proposer
        self._config = config
        self._state = state
        self._clock = core.clock
        self._wheel = core.wheel
        self._serving = core.serving
        self._may_act = core.may_act
        self._fatal = core.fatal
        self.agenda = Agenda(
            config.delivery_period_ms,
            lambda group_id: self.channels.candidates(group_id),
            lambda group_id, topic_id: self.channels.is_open(group_id, topic_id),
        )
        self.sessions = Sessions(config, self.agenda.credited)
        self.fetching = Fetching(core, self.agenda.wake_all, unreadable)
        self.channels = Channels(
            config, state, self.fetching.fetch, lambda group_id: self.agenda.of_group(group_id).pace, self._held
        )
        self.leases = KnownLeases(state, self.channels.of, lambda: self._now_ms, ahead=push is not None)
        self.push = push
        self.active = False
        self.term = 0
        self._leaving: dict[int, None] = {}
        """Sessions that are over and whose messages go back, as an ordered set."""
        self._counts = counts
        self._events = events
        self.settlements = Settlements(
            config,
            state,
            proposer,
            self.leases.table,
            self.leases.feed,
            self._came_back,
            self._settled,
            draw,
            partial(require_current, core),
        )
        self._broadcasts = Broadcasts(self.channels.make, self.settlements.propose)
        self._returns = Returns(
            state,
            self.leases.table,
            self.settlements,
            self._broadcasts,
            counts.deliveries,
            self.channels.made,
            self.sessions.ran_out,
        )
        self._now_ms = 0
        """Cluster time of the tick that runs, or of the last one."""
        self._handing = Handing(config.batch_bytes_max, self._send)
        self._served = 0
        """Topics served in this tick, those of each group counted."""
        self._handed = 0
        """Messages handed out in this tick."""

    # -- mastership

    def begin(self, term: int, now_ms: ClusterMs) -> None:
        """Take over the running leases that this node has heard of, and serve the consumers."""
        self.fetching.next_mastership()
        self._returns.begin()
        self.active = True
        self.term = term
        self.channels.begin(self._wheel.cursor.due_ms - 1)
        self.agenda.forget_all()
        self._now_ms = now_ms
        self.leases.begin(now_ms + self._config.lease_max_ms)
        self.agenda.wake_all(self.sessions.groups())

    def end(self, failure: Failure) -> None:
        """Stop at once, clear everything but the leases, tell the consumers. Consumers keep the messages they hold: the
        next master, perhaps this node again, must not deliver them a second time."""
        self.leases.end()
        self.fetching.next_mastership()
        self.active = False
        self._returns.end()  # first, or each return that is lost would bring its lease back
        self.settlements.retries.lose(failure)
        self.channels.clear()
        self._leaving.clear()
        self._broadcasts.end()
        self.agenda.clear()
        self._handing.drop()
        self.sessions.close_all(failure)

    def dispatched(self, result: DispatchResult) -> None:
        """A dispatch was applied: note what entered the ready queues. If that fails for a topic, its groups get new
        channels, which read the messages."""
        if self.active:
            for ready in result.ready:
                self._serving.run(partial(self._topic_failed, ready.topic_id), self._made_ready, ready, result.cursor)

    def _made_ready(self, ready: MadeReady, cursor: CursorKey) -> None:
        """Note newly ready units of a topic, and wake the groups that read it."""
        topic_id, first_position, units = ready.topic_id, ready.first_position, ready.units
        pushed = self.push.dispatched(topic_id, first_position, units, cursor) if self.push is not None else False
        if pushed is None:
            self._fatal(f"topic {topic_id}: other messages were dispatched than had been delivered ahead")
            return
        self.leases.inherited.dispatched(topic_id, first_position, units)
        if not pushed:
            self.channels.recent.add(topic_id, first_position, units)
        for subscription in self._state.groups.of_topic(topic_id):
            group_id = subscription.group_id
            if self.sessions.of_group(group_id):
                self.agenda.add(group_id, topic_id)
                self.agenda.has_news = True

    def on_pushed(self, topic_id: int, first_position: int, units: Units) -> None:
        """Prefetch units ahead of their dispatch, where a channel takes them. The dispatch will bring them to these
        positions of the ready queue."""
        self.channels.recent.add(topic_id, first_position, units)
        self.leases.inherited.dispatched(topic_id, first_position, units)
        for group_id in self.sessions.groups():
            subscription = self._state.subscription(group_id, topic_id)
            if subscription is None or self._state.group_paused(group_id) or self._state.topic_paused(topic_id):
                continue
            if self._state.group_broadcasting(group_id):
                continue
            if (group_id, topic_id) in self.leases.inherited.left:
                continue  # consumers may hold some of them, which is looked up once they are dispatched
            channel = self.channels.of((group_id, topic_id))
            assert channel is not None
            credits = sum(session.credits for session in self.sessions.of_group(group_id, channel.topic))
            if channel.push(first_position, units, credits):
                self.agenda.add(group_id, topic_id)
                self.agenda.has_news = True
        self.fetching.flush()

    def unpush(self) -> None:
        """A dispatch was not applied. Messages delivered ahead of it keep their leases; those that are only
        prefetched are dropped.

        Messages delivered ahead go out again when they are dispatched after all. Push-first allows that repetition.
        """
        self.channels.unpush()

    # -- consumers

    def wake_group(self, group_id: int) -> None:
        """Look at this group in the next tick, which comes at once."""
        self.agenda.wake(group_id)
        self.agenda.has_news = True

    def subscribed(self, group_id: int) -> None:
        """A group is new or has more topics. Nothing else about it changed, so its channels stay."""
        self.agenda.forget(group_id)
        self.wake_group(group_id)

    def administered(self) -> None:
        """A command changed or removed a topic or group. Channels and leases of a reset or removed one are dropped.
        Consumers are closed if their group is gone, or if their filter no longer matches the group's."""
        self.agenda.forget_all()
        for key in self.leases.void() | self.channels.void():
            self.channels.drop(key)
            self.leases.drop(key)
        for key in self._broadcasts.topics_read():
            subscription = self._state.subscription(*key)
            if subscription is None or any(
                channel.subscription is not subscription or channel.epoch != subscription.epoch
                for channel in self._broadcasts.channels_of(key)
            ):
                self._broadcasts.drop(key)
                self.leases.table.drop(key)
        again = self._counts.deliveries.redelivered_by_group
        for group_id in [group_id for group_id in again if not self._state.group_name(group_id)]:
            del again[group_id]
        for group_id in list(self.sessions.groups()):
            for session in list(self.sessions.of_group(group_id)):
                try:
                    self._check(session)
                except RequestError as error:
                    if self.sessions.close(session):
                        session.closed(error.failure)
            self.wake_group(group_id)
        self.agenda.retain(lambda group_id: bool(self._state.group_name(group_id)))

    def windows_moved(self) -> None:
        """The floors of groups moved without a settlement, since unsettled messages went with their hours, or limits
        changed: what waited for that goes on."""
        self.agenda.wake_all(self.sessions.groups())

    def _check(self, session: Session) -> None:
        """Raise RequestError if the session's group is gone, or has another filter than the session states."""
        if not self._state.group_name(session.group_id):
            text = f"group {session.group} was removed"
            raise refused(common_pb2.UNKNOWN_NAME, text, field="group", value=session.group)
        self._state.check_filter(session.group_id, session.filter)

    def close_session(self, session: Session, now_ms: int, *, give_back: bool) -> None:
        """End a consumer's session. With `give_back` its messages return to the ready queue at once; otherwise they
        stay leased until their leases end. A broadcasting group gives nothing back."""
        if not self.sessions.close(session) or not self.active:
            return
        if not self.sessions.of_group(session.group_id):
            self.agenda.forget(session.group_id)
        if self._state.group_broadcasting(session.group_id):
            deque(self.leases.table.close_session(session.session_id), 0)
            self._broadcasts.left(session.session_id)
        elif give_back:
            self.give_back(session, now_ms)

    def give_back(self, session: Session, now_ms: int) -> None:
        """Return the messages of a session that is over, of a group that is not broadcasting, to the ready queue."""
        if self.active:
            self._leaving[session.session_id] = None
            self._return_left(now_ms)

    def _return_left(self, now_ms: int) -> int:
        """Return the messages of consumers that left, as many as a turn has room for: all at once could take seconds.
        Returns the room that is left."""
        room = TURN_LEASES
        while self._leaving and room > 0:
            session_id = next(iter(self._leaving))
            for lease, left in in_turn(self.leases.table.close_session(session_id, room), room):
                room = left
                self._give_back(replace(lease, given_back=True), now_ms)
            if room > 0:
                del self._leaving[session_id]
        return room

    def _return_expired(self, room: int, now_ms: int) -> None:
        for lease, _ in in_turn(self.leases.table.expire(now_ms), room):
            given_back = lease.given_back or lease.session_id in self._leaving
            self._give_back(replace(lease, given_back=given_back), now_ms + self._clock.unconfirmed_ms)

    def _give_back(self, lease: Lease, now_ms: int) -> None:
        """Return the open messages of a lease that is over. If that fails, the lease runs on for `FAULT_PAUSE_MS`."""

        def failed(failure: Failure) -> None:
            self.leases.table.give(replace(lease, until_ms=now_ms + FAULT_PAUSE_MS, closed=False))

        self._serving.run(failed, self._returns.give_back, lease, now_ms)

    # -- the loop

    @property
    def has_news(self) -> bool:
        """The next tick should come at once: a group was woken or messages became ready since the last."""
        return self.agenda.has_news

    def tick(self, now: Now) -> None:
        """Expire leases, then claim, fetch and hand out due messages of the groups with work."""
        if not now.acting or not self.active:
            return
        now_ms = now.cluster_ms
        self._now_ms = now_ms
        self._return_expired(self._return_left(now_ms), now_ms)
        if self.leases.inherited.left:
            self.leases.inherited.take_some()
            if not self.leases.inherited.left:
                self.agenda.wake_all(self.sessions.groups())  # those with a limit may have more out than was counted
        self._served = self._handed = 0
        for group_id in self.agenda.due(now_ms):
            if self._served >= SLICE_TOPICS_MAX or self._handed >= HANDED_MAX:
                self.agenda.postpone(group_id)
                continue
            self._serving.run(partial(self._failed, group_id), self._serve, group_id, now_ms)

    def _failed(self, group_id: int, failure: Failure) -> None:
        """Serving a group failed half way: close its sessions and drop its channels. The next consumers get new
        channels. Messages that are out stay leased, so none is delivered twice; prefetched ones are read again. If this
        node's files are damaged, the consumers are sent to look for another master."""
        if self._serving.damage:
            failure = not_master(None, None)
        for session in list(self.sessions.of_group(group_id)):
            if self.sessions.close(session):
                session.closed(failure)
        self.agenda.forget(group_id)
        self.agenda.begin(group_id)  # its pass is over
        self._handing.drop()
        self.channels.drop_group(group_id)
        for key in [key for key in self._broadcasts.topics_read() if key[0] == group_id]:
            self._broadcasts.drop(key)
            self.leases.table.drop(key)

    def _topic_failed(self, topic_id: int, failure: Failure) -> None:
        for group_id in list(self.sessions.groups()):
            if self._state.subscription(group_id, topic_id) is not None:
                self._failed(group_id, failure)

    def wait_ms(self, now: Now) -> int | None:
        """Until a lease ends, or a message that a consumer has room for is due."""
        if not now.acting or not self.active:
            return None
        if self.agenda.goes_on:
            return 0
        if self._leaving or self.leases.inherited.left:
            return TURN_PAUSE_MS
        times = [t for t in (self.leases.table.next_end_ms(), self.agenda.rested_ms()) if t is not None]
        for group_id in self.agenda.woken:
            takers = [session for session in self.sessions.of_group(group_id) if session.credits]
            if not takers or not self._room(group_id):
                continue
            topics = {session.topic for session in takers}
            for channel in self._channels_of(group_id):
                if self._state.topic_paused(channel.key[1]) or not ("" in topics or channel.topic in topics):
                    continue  # an event will come first, whatever is prefetched
                time_ms = channel.earliest_ms()
                if time_ms is not None:
                    times.append(time_ms)
        return min(times) - now.cluster_ms if times else None

    def _channels_of(self, group_id: int) -> list[Channel]:
        """Channels of this group that may have something to hand out."""
        if self._state.group_broadcasting(group_id):
            return self._broadcasts.channels(group_id)
        return self.channels.in_topics(group_id, self.agenda.topics(group_id))

    def _open_channels(self, group_id: int) -> list[Channel]:
        """Channels of this group with unsettled messages, except those whose leases are not taken over yet."""
        if self._state.group_broadcasting(group_id):
            return self._broadcasts.channels(group_id)
        topics, left = self.agenda.unsettled(group_id), self.leases.inherited.left
        return self.channels.in_topics(group_id, [t for t in topics if (group_id, t) not in left])

    def _held(self, key: ChannelKey, epoch: int) -> Iterator[Positions]:
        """What a new channel must not hand out."""
        for lease in self.leases.table.of_channel(key):
            # Leases of an earlier master, or of consumers that `_failed` has closed.
            yield lease.positions
        returning = self._returns.positions(key, epoch)
        if returning is not None:
            yield returning

    def _serve_each(self, group_id: int, begun: Pass, now_ms: int) -> bool:
        """Serve consumers of a broadcasting group, each by itself, as many as a tick has room for. Returns whether the
        pass is over."""
        turn = READERS_HANDED_MAX
        for _ in range(SLICE_READERS_MAX):
            served = begun.next_reader() if turn > 0 else None
            if served is None:
                break
            topic_id, session = served
            topic = self._state.topics.get(topic_id)
            if topic is None or topic.paused or not session.open or session.topic not in ("", topic.name):
                continue
            reader = self._broadcasts.reader((group_id, topic_id), session)
            if reader is None:
                continue
            self._served += 1
            channel = reader.channel
            channel.advance(session.credits, topic.ready.count)
            self.fetching.flush()
            while self._may_act() and session.credits and turn > 0:
                share = channel.take(now_ms, min(session.credits, session.batch_messages_max, turn))
                if share is None:
                    break
                if share.records:
                    turn -= len(share.records)
                    self._handed += len(share.records)
                    reader.give(share.positions)
                    self._handing.put(session, share, mixes=False)
                channel.advance(session.credits, topic.ready.count)
                self.fetching.flush()
            if turn <= 0:
                begun.again.append(served)
            # The next credit wakes the group.
            begun.waits |= channel.prefetched_count > 0 and session.credits > 0
        else:
            return False
        return turn > 0

    def answered_by(self, session: Session, batch: consumer_pb2.SettleBatch) -> SettleResult:
        """Note the answer of a consumer of a broadcasting group. Every outcome counts as settled by this consumer.
        Raises RequestError."""
        parts = []
        for rows in by_topic(batch) if batch.topics else [alone(batch)]:
            topic_id = self._state.topic_id(rows.topic)
            if batch.topics and (topic_id is None or self._state.subscription(session.group_id, topic_id) is None):
                parts.append(SettleResult(stale=rows.messages))
                continue
            key, positions, named = self.settlements.positions_of(batch, rows)
            count = self._broadcasts.answered(key, session.session_id, positions)
            parts.append(SettleResult(settled=count, stale=named - count))
        return SettleResult.of(tuple(parts))

    def _serve(self, group_id: int, now_ms: int) -> None:
        """Serve one group, or go on with the pass that has begun. It stays dirty while prefetched messages that are due
        wait, for credit or for a read."""
        begun = self.agenda.begin(group_id)
        sessions = self.sessions.of_group(group_id)
        if not sessions or self._state.group_paused(group_id):
            return
        pace = self.agenda.of_group(group_id).pace
        if begun is None:
            pace.begin(now_ms)
        if self._state.group_broadcasting(group_id):
            begun = begun or Pass(readers=itertools.product(self._state.group_topics(group_id), list(sessions)))
            over = self._serve_each(group_id, begun, now_ms)
        else:
            begun = begun or Pass(list(self.agenda.topics(group_id)))
            begun.waits |= self._serve_together(group_id, begun, now_ms)
            over = not (begun.topics and any(session.credits for session in sessions))
        if not over:
            self.agenda.go_on(group_id, begun)
            return
        if begun.woken:
            self.agenda.go_on(group_id, None)
        pace.end(now_ms)
        if begun.waits:
            self.agenda.wake(group_id)

    def _serve_together(self, group_id: int, begun: Pass, now_ms: int) -> bool:
        """Claim in these topics, read what was claimed together, and hand out what is due. Topics whose messages only
        wait for their time rest until then. True: prefetched messages are waiting in others."""
        sessions = self.sessions.of_group(group_id)
        if not any(session.credits for session in sessions):
            return False  # the next credit wakes the group
        state = self._state
        picky = any(session.topic for session in sessions)
        demand = sum(session.credits for session in sessions)
        group = self.agenda.of_group(group_id)
        served: list[tuple[Channel, list[Session], int, bool]] = []
        # With a limit each part of a pass would count anew what is out in all topics.
        topics = begun.slice(None if state.settings.group_in_flight_max else SLICE_TOPICS_MAX)
        self._served += len(topics)
        taken_over = self.leases.inherited.taken
        for place, topic_id in enumerate(topics):
            if self.leases.inherited.taken - taken_over >= TURN_LEASES:
                begun.topics[:0] = topics[place:]
                break
            channel, topic = self.channels.of((group_id, topic_id)), state.topics.get(topic_id)
            if channel is None or topic is None or topic.paused:
                continue
            takers = self.sessions.of_group(group_id, channel.topic) if picky else sessions
            if takers:
                ready_count = topic.ready.count
                if claims := channel.wants(ready_count):
                    channel.advance(sum(s.credits for s in takers) if picky else demand, ready_count)
                served.append((channel, takers, ready_count, claims))
        self.fetching.flush()
        if not self._may_act():
            return any(channel.prefetched_count for channel, _, _, _ in served)
        fed: list[int] = []
        looked: list[tuple[Channel, int]] = []
        room, turn, full = self._room(group_id), HANDED_MAX, _full(sessions)
        for channel, takers, ready_count, claimed in served:
            if claimed:
                # Nearly always it was dispatched ahead and waits for its time.
                until_ms = channel.rests_until_ms(ready_count, full)
                if until_ms is not None and until_ms > now_ms:
                    self.agenda.rest(channel.key, until_ms, paced=channel.prefetched_count < full)
                    continue
            looked.append((channel, ready_count))
            handed = self._hand_out(group, channel, takers, ready_count if claimed else None, min(room, turn))
            room -= handed
            turn -= handed
            self._handed += handed
            if handed:
                fed.append(channel.key[1])
        if not self._may_act():
            # Nobody has what was gathered. New channels read it again, should this node be allowed to act again.
            for key in self._handing.drop():
                self.channels.drop(key)
            self.agenda.forget(group_id)
            return True
        self._handing.flush()
        begun.topics += [channel.key[1] for channel, _ in looked if channel.scans or turn <= 0 < room]
        waits, full = False, _full(sessions)
        for channel, ready_count in looked:
            until_ms = channel.rests_until_ms(ready_count, full)
            if until_ms is None or until_ms <= now_ms:
                waits = waits or channel.prefetched_count > 0
            else:
                paced = until_ms != NEVER and channel.prefetched_count < full
                self.agenda.rest(channel.key, until_ms, paced=paced)
        self.agenda.put_behind(group_id, fed)
        return waits

    def _hand_out(
        self, group: GroupAgenda, channel: Channel, sessions: list[Session], ready_count: int | None, room: int
    ) -> int:
        """Hand out what is due in one channel, at most `room` messages, the consumers in turn, and claim more
        meanwhile. `ready_count`: of its topic, None if there is nothing to claim. Returns how many."""
        handed = 0
        idle = 0
        while idle < len(sessions) and handed < room:
            session = sessions[(group.turns + idle) % len(sessions)]
            most = min(session.credits, session.batch_messages_max, room - handed)
            share = channel.take(self._now_ms, most) if session.credits else None
            if share is None:
                idle += 1
                continue
            group.turns += idle + 1
            idle = 0
            if share.records:
                # Since the pass began, the lease of mastership may have run out. What is mixed leaves after the pass.
                if not session.mixes and not self._may_act():
                    self.channels.drop(channel.key)  # nobody has what was taken: a new channel reads it again
                    break
                handed += len(share.records)
                self._handing.put(session, share, mixes=session.mixes)
            if ready_count is not None and channel.wants(ready_count):
                channel.advance(sum(s.credits for s in sessions), ready_count)
                self.fetching.flush()
            elif not channel.prefetched_count:
                break
        return handed

    def _room(self, group_id: int) -> int:
        """How many more messages this group may have out: `group_in_flight_max` less those out. Perhaps fewer while
        leases from before this mastership are taken over."""
        limit = self._state.settings.group_in_flight_max
        if not limit:
            return CREDITS_MAX
        out = sum(channel.out() for channel in self._open_channels(group_id))
        return max(0, limit - out - self.leases.inherited.out[group_id])

    def _send(self, session: Session, shares: list[Share]) -> None:
        """Let one batch leave, under leases from now on."""
        now_ms, group_id = self._now_ms, session.group_id
        until_ms = now_ms + session.lease_ms + self._clock.unconfirmed_ms
        inheritable = not self._state.group_broadcasting(group_id)
        for share in shares:
            key, positions = share.channel.key, share.positions
            # Ahead of its dispatch a message has no certain position: the next master must know it by its id.
            ahead = self.push is not None and int(positions[-1]) >= self._state.ready_count(key[1])
            ids = share.ids if ahead else None
            epoch = share.channel.epoch
            lease = Lease(key, positions, share.attempts, until_ms, session.session_id, ids=ids, epoch=epoch)
            self.leases.table.give(lease)
            if inheritable:
                self.leases.feed.add(lease)
        batch = batch_of(shares, self.term, until_ms, self._state.group_filter(group_id))
        due_ms, attempts = np.frombuffer(batch.due_ms, "<i8"), np.frombuffer(batch.attempts, "<u4")
        topics = [(share.channel.key[1], share.channel.topic, len(share.records)) for share in shares]
        self._counts.delivered(group_id, now_ms, topics, due_ms, attempts)
        session.deliver(batch)
        if self._events.enabled:
            self._events.delivered(now_ms, session.name, topics, batch)

    # -- messages that come back

    def _settled(self, key: ChannelKey) -> None:
        """Messages were settled: in a FIFO topic the ones behind them may go, in any other those that the window ended
        before."""
        channel = self.channels.made(key)
        if isinstance(channel, FifoChannel):
            channel.stir()
            self.agenda.add(*key)
            self.agenda.has_news = True
        elif (
            self._broadcasts.waits_for_floor(key)
            if channel is None
            else channel.next_position < channel.subscription.ready.count
        ):
            self.agenda.wake(key[0])

    def _came_back(self, key: ChannelKey, columns: SettleColumns) -> None:
        channel = self.channels.made(key)
        if channel is not None and channel.epoch == columns.epoch:
            given = np.frombuffer(columns.positions, "<u8") if columns.positions else None
            positions, known = channel.subscription.locate(np.frombuffer(columns.ids, "<u8"), given)
            channel.came_back(positions[known])
        self.agenda.add(*key)

    # -- upkeep

    def metrics(self) -> Mapping[str, MetricValue]:
        return {"consumers": float(len(self.sessions))}

    def upkeep(self, now: Now) -> Iterator[None]:
        """Forget settled leases and idle channels."""
        if not self._clock.known:
            return
        yield from self.leases.table.close_dropped()
        yield from self.leases.table.forget_settled(self._state.floor)
        yield from self.channels.upkeep()
        yield from self._broadcasts.upkeep()
        self.leases.inherited.prune(now.cluster_ms)
        yield from self.leases.heard.prune(now.cluster_ms, self._state.floor, self._state.epoch)

    def prefetched(self) -> int:
        """Messages prefetched in all channels; channels of broadcasting groups do not count."""
        return sum(channel.prefetched_count for channel in self.channels)
