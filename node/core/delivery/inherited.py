"""Leases from before this mastership: told by earlier masters, or given out by this node in an earlier one.

A message under such a lease is not delivered again before the lease is over. The leases of a channel are taken over
into the master's table when somebody looks at the channel, all others turn by turn: tens of thousands take seconds, and
mastership would be lost meanwhile. A message that was delivered ahead of a dispatch that is not in the log is held by
its id, until it is dispatched after all or its lease is over. Slaves hear of such a lease like of any other.

Soft state of one mastership.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from tickwheel.node.core.delivery.channel import Channel
from tickwheel.node.core.delivery.heard_leases import HeardLeases
from tickwheel.node.core.delivery.lease_feed import LeaseFeed
from tickwheel.node.core.delivery.leases import TURN_LEASES, ChannelKey, Lease, LeaseTable, current
from tickwheel.node.state.machine import StateMachine
from tickwheel.wheel.units import Units, ids_of


class Inherited:
    def __init__(
        self,
        state: StateMachine,
        leases: LeaseTable,
        feed: LeaseFeed,
        channel: Callable[[ChannelKey], Channel | None],
        now_ms: Callable[[], int],
        *,
        ahead: bool,
    ) -> None:
        """`channel` makes a channel that does not exist yet. `now_ms`: cluster time of the present tick. `ahead`:
        messages may have been delivered ahead of their dispatch."""
        self._state = state
        self._leases = leases
        self._feed = feed
        self._channel = channel
        self._now_ms = now_ms
        self._ahead = ahead
        self.left = HeardLeases()
        """Those that are not taken over yet."""
        self.out = Counter[int]()
        """Group id -> messages that `left` holds, at most; groups without any are left out."""
        self._out_of: dict[ChannelKey, int] = {}
        """As `out`, by channel."""
        self.taken = 0
        """Leases taken over so far."""
        self._latest_ms = 0
        """No lease ends later."""
        self._unplaced: dict[ChannelKey, dict[int, tuple[int, int]]] = {}
        """Ids delivered ahead of a lost dispatch -> end of their lease, and the position that was expected for them."""

    def begin(self, heard: HeardLeases, latest_ms: int) -> None:
        """Take in what was heard, and take over a first turn of it. No lease ends after `latest_ms`, whatever a clock
        said when it was given out."""
        self._latest_ms = latest_ms
        self.left.take_in(heard)
        self._count()
        self.take_some()

    def clear(self) -> None:
        """The mastership is over, and nothing is left."""
        self._count()
        self._unplaced.clear()

    def _count(self) -> None:
        """Count what is left: of a channel no more than are unsettled, unless some may have been delivered ahead of
        their dispatch."""
        self._out_of.clear()
        self.out.clear()
        for key, messages in self.left.messages_by_channel().items():
            subscription = self._state.subscription(*key)
            if subscription is not None and not self._state.group_broadcasting(key[0]):
                out = messages if self._ahead else min(messages, subscription.backlog)
                self._out_of[key] = out
                self.out[key[0]] += out

    def take(self, key: ChannelKey) -> None:
        """Take over the leases of a channel, before anybody looks at it."""
        heard = self.left.take(key)
        if heard is not None:
            self._take(heard, [key])

    def take_some(self) -> None:
        """Take over one turn of leases."""
        heard = self.left.take_some(TURN_LEASES)
        self._take(heard, heard.channels())

    def _take(self, heard: HeardLeases, keys: Iterable[ChannelKey]) -> None:
        self._uncount(keys)
        leases = heard.held(self._now_ms(), self._state.epoch)
        self.taken += len(leases)
        for lease in leases:
            self._take_over(replace(lease, until_ms=min(lease.until_ms, self._latest_ms)))

    def _uncount(self, keys: Iterable[ChannelKey]) -> None:
        for key in keys:
            self.out[key[0]] -= self._out_of.pop(key, 0)
            if not self.out[key[0]]:
                del self.out[key[0]]

    def _take_over(self, lease: Lease) -> None:
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
        """Leases of messages that are not dispatched yet."""
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
        """Forget leases of messages held by their ids that have ended."""
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

    def drop(self, key: ChannelKey) -> None:
        """Forget a channel: its group was reset or deleted."""
        self.left.take(key)
        self._uncount([key])
        self._unplaced.pop(key, None)
