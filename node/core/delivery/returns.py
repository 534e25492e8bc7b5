"""What becomes of leases that no consumer of this mastership holds.

`Returns` gives back the open messages of ended leases: after a pause if a lease ran out, at once if it was given back.
It owns which returns are on their way into the log: such a message is not handed out before its return is applied.

`Inherited` has the messages that consumers hold from an earlier mastership, under leases heard of in the sync or given
out by this node. A held message is not delivered again before its lease is over. A message that was delivered ahead of
a dispatch that is not in the log is held by its id, until it is dispatched after all or its lease is over. Slaves hear
of such a lease like of any other.

Soft state of one mastership.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from tickwheel.node.core.delivery.broadcast import Broadcasts
from tickwheel.node.core.delivery.channel import Channel
from tickwheel.node.core.delivery.lease_feed import LeaseFeed
from tickwheel.node.core.delivery.leases import ChannelKey, Lease, LeaseTable, current
from tickwheel.node.core.delivery.settlements import Settlements
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.watch.counts import Deliveries
from tickwheel.node.failure import Failure
from tickwheel.node.state.machine import StateMachine
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.subscription import Positions
from tickwheel.proto.log_pb2 import SETTLE_RETURN, SettleColumns
from tickwheel.wheel.units import Units, ids_of

RETURN_RETRY_MS = 200


class Returns:
    def __init__(
        self,
        state: StateMachine,
        leases: LeaseTable,
        settlements: Settlements,
        broadcasts: Broadcasts,
        counts: Deliveries,
        channel: Callable[[ChannelKey], Channel | None],
        ran_out: Callable[[int], None],
    ) -> None:
        """`channel` returns an existing channel or None; it makes none. `ran_out` gets the session of each lease that
        ran out with open messages."""
        self._state = state
        self._leases = leases
        self._settlements = settlements
        self._broadcasts = broadcasts
        self._counts = counts
        self._channel = channel
        self._ran_out = ran_out
        self._under_way: dict[tuple[ChannelKey, int], set[int]] = {}
        """By channel and epoch: positions whose return is on its way into the log."""
        self._mastership = 0

    def begin(self) -> None:
        self._mastership += 1

    def end(self) -> None:
        self._mastership += 1
        self._under_way.clear()

    def positions(self, key: ChannelKey, epoch: int) -> Positions:
        """Positions of a channel whose return is on its way into the log. One of an earlier epoch has no effect there,
        so nothing waits for it."""
        return np.array(sorted(self._under_way.get((key, epoch), ())), np.uint64)

    def _ended(self, lease: Lease, positions: Positions) -> None:
        """Their return has been applied, or was refused."""
        key = lease.channel, lease.epoch
        returning = self._under_way.get(key, set())
        returning.difference_update(positions.tolist())
        if not returning:
            self._under_way.pop(key, None)

    def _void(self, lease: Lease) -> bool:
        """Whether its group was reset or deleted since."""
        subscription = self._state.subscription(*lease.channel)
        return subscription is None or subscription.epoch != lease.epoch

    def give_back(self, lease: Lease, now_ms: int) -> None:
        """Return the open messages of a lease that ran out or was given back by its consumer."""
        expired = not lease.given_back
        subscription = self._state.subscription(*lease.channel)
        if subscription is None or self._void(lease) or not len(lease.positions):
            return
        if self._state.group_broadcasting(lease.channel[0]):
            count = self._broadcasts.answered(lease.channel, lease.session_id, lease.positions)
            self._counts.expired += count
            if count:
                self._ran_out(lease.session_id)
            return
        if int(lease.positions[-1]) >= self._state.ready_count(lease.channel[1]):
            # Delivered ahead of a dispatch that is not applied yet: there is no position to return to.
            self._leases.give(replace(lease, until_ms=now_ms + RETURN_RETRY_MS, closed=False))
            return
        is_open = current(subscription, lease)
        still_open = lease.only(is_open)
        positions, attempts = still_open.positions, still_open.attempts
        channel = self._channel(lease.channel)
        if channel is not None:
            # Messages that were settled or came back in another way: this lease no longer holds them.
            channel.release_hold(lease.positions[~is_open])
        if not len(positions):
            return
        if expired:
            self._counts.expired += len(positions)
            self._ran_out(lease.session_id)
        self._under_way.setdefault((lease.channel, lease.epoch), set()).update(positions.tolist())
        if channel is not None:
            channel.hold(positions)
        mastership = self._mastership

        def returned(result: SettleResult) -> None:
            if result.failure is not None:
                failed(result.failure)
            elif mastership == self._mastership:
                self._ended(lease, positions)
                now_there = self._channel(lease.channel)
                if expired and now_there is not None and now_there.epoch == lease.epoch:
                    now_there.release_hold(positions)

        def failed(failure: Failure) -> None:
            if mastership == self._mastership:
                self._ended(lease, positions)
                if self._void(lease):
                    return
                self._leases.give(replace(still_open, until_ms=now_ms + RETURN_RETRY_MS, closed=False))

        # A mistake in either is told to `failed`: the messages are not lost with it.
        serving = self._settlements.serving
        reply = Reply(serving.of(failed, returned), serving.of(failed, failed))
        if expired:
            self._settlements.expire(lease, positions, attempts, now_ms, reply)
            return
        columns = SettleColumns(
            group_id=lease.channel[0],
            topic_id=lease.channel[1],
            kind=SETTLE_RETURN,
            ids=subscription.ids_of(positions).tobytes(),
            attempts=attempts.astype("<u4").tobytes(),
            positions=positions.tobytes(),
            epoch=lease.epoch,
        )
        self._settlements.propose([columns], reply)


class Inherited:
    def __init__(
        self,
        state: StateMachine,
        leases: LeaseTable,
        feed: LeaseFeed,
        channel: Callable[[ChannelKey], Channel | None],
    ) -> None:
        self._state = state
        self._leases = leases
        self._feed = feed
        self._channel = channel
        self._unplaced: dict[ChannelKey, dict[int, tuple[int, int]]] = {}
        """Ids delivered ahead of a lost dispatch -> end of their lease, and the position that was expected for them."""

    @property
    def waiting(self) -> bool:
        """Whether messages are held by their ids."""
        return bool(self._unplaced)

    def take_over(self, lease: Lease) -> None:
        """Take over a running lease. Messages delivered ahead of a dispatch that is not in the log are held by id."""
        if self._state.group_broadcasting(lease.channel[0]):
            return  # each consumer had its own lease, and a new master has new consumers
        subscription = self._state.subscription(*lease.channel)
        if lease.ids is not None and subscription is not None:
            places, known = subscription.locate(lease.ids, lease.positions)
            again, found = subscription.locate(lease.ids[~known], None)
            unplaced = ~known
            unplaced[~known] = ~found
            self._wait_for(lease.only(unplaced))
            positions = np.sort(np.concatenate((places[known], again[found])))
            attempts = np.ones(len(positions), np.uint32)
            lease = Lease(lease.channel, positions, attempts, lease.until_ms, 0, epoch=lease.epoch)
        if subscription is not None:
            # A message that came back or was settled since is no longer held.
            lease = lease.only(current(subscription, lease))
        self._hold(lease)

    def _wait_for(self, lease: Lease) -> None:
        """Hold by id the messages of a lease that are not dispatched yet."""
        if lease.ids is None or not len(lease.ids):
            return
        waiting = self._unplaced.setdefault(lease.channel, {})
        for id, position in zip(lease.ids.tolist(), lease.positions.tolist(), strict=True):
            waiting[id] = max(waiting.get(id, (0, 0)), (lease.until_ms, position))

    def unplaced(self) -> Iterator[Lease]:
        """Leases of messages that are not dispatched yet, for a slave that is told everything."""
        for key, waiting in list(self._unplaced.items()):
            subscription = self._state.subscription(*key)
            if subscription is None:
                continue
            rows = sorted((until_ms, position, id) for id, (until_ms, position) in waiting.items())
            for until_ms, group in itertools.groupby(rows, key=lambda row: row[0]):
                of_end = list(group)
                positions = np.array([position for _, position, _ in of_end], np.uint64)
                ids = np.array([id for _, _, id in of_end], np.uint64)
                attempts = np.ones(len(ids), np.uint32)
                yield Lease(key, positions, attempts, until_ms, 0, ids=ids, epoch=subscription.epoch)

    def prune(self, now_ms: int) -> None:
        """Forget leases that have ended."""
        for key in list(self._unplaced):
            kept = {id: held for id, held in self._unplaced[key].items() if held[0] > now_ms}
            if kept:
                self._unplaced[key] = kept
            else:
                del self._unplaced[key]

    def dispatched(self, topic_id: int, first_position: int, units: Units) -> None:
        """Units got their positions: hold those that an earlier master had delivered until their leases end."""
        if not self._unplaced:
            return
        ids = ids_of(units)
        for key in [key for key in self._unplaced if key[1] == topic_id]:
            held = self._unplaced[key]
            places = [place for place, id in enumerate(ids.tolist()) if id in held]
            channel = self._channel(key)
            if not places or channel is None:
                continue
            positions = np.array(places, np.uint64) + np.uint64(first_position)
            channel.hold(positions)
            for place, position in zip(places, positions.tolist(), strict=True):
                until_ms, _ = held.pop(int(ids[place]))
                one, first_attempt = np.array([position], np.uint64), np.ones(1, np.uint32)
                self._hold(Lease(key, one, first_attempt, until_ms, 0, epoch=channel.epoch))

    def _hold(self, lease: Lease) -> None:
        if len(lease.positions):
            self._leases.give(lease)
            self._feed.add(lease)

    def forget(self, key: ChannelKey) -> None:
        """Forget a channel: its group was reset or deleted."""
        self._unplaced.pop(key, None)

    def clear(self) -> None:
        self._unplaced.clear()
