"""What consumers hold of an earlier master: its leases, as far as this node heard of them in the sync.

A held message is not delivered again before its lease is over. What was delivered ahead of a dispatch that is not in
the log is held by its id, until it is dispatched after all or its lease is over. Soft state of one reign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tickwheel.node.core.channel import Channel
from tickwheel.node.core.leases import ChannelKey, Lease, LeaseFeed, LeaseTable, current
from tickwheel.node.state.machine import StateMachine
from tickwheel.wheel.units import Units, ids_of


class Inherited:
    """One per node."""

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
        self._ids: dict[ChannelKey, dict[int, int]] = {}
        """Ids that an earlier master delivered ahead of a lost dispatch, and until when they are leased."""

    def take_over(self, lease: Lease) -> None:
        """A lease that still runs; what it delivered ahead of a dispatch that is not in the log is held by id."""
        if self._state.group_broadcasting(lease.channel[0]):
            return  # a consumer's own, and the consumers are other ones now
        subscription = self._state.subscription(*lease.channel)
        if lease.ids is not None and subscription is not None:
            places, known = subscription.locate(lease.ids, lease.positions)
            again, found = subscription.locate(lease.ids[~known], None)
            held = self._ids.setdefault(lease.channel, {})
            held.update(dict.fromkeys(lease.ids[~known][~found].tolist(), lease.until_ms))
            positions = np.sort(np.concatenate((places[known], again[found])))
            attempts = np.ones(len(positions), np.uint32)
            lease = Lease(lease.channel, positions, attempts, lease.until_ms, 0, epoch=lease.epoch)
        if subscription is not None:
            # What came back or was settled since is held by nobody.
            is_current = current(subscription, lease)
            lease = replace(lease, positions=lease.positions[is_current], attempts=lease.attempts[is_current])
        self._hold(lease)

    def dispatched(self, topic_id: int, first_position: int, units: Units) -> None:
        """Units have places now: those that an earlier master had delivered are held there until their leases end."""
        if not self._ids:
            return
        ids = ids_of(units)
        for key in [key for key in self._ids if key[1] == topic_id]:
            held = self._ids[key]
            places = [place for place, id in enumerate(ids.tolist()) if id in held]
            channel = self._channel(key)
            if not places or channel is None:
                continue
            positions = np.array(places, np.uint64) + np.uint64(first_position)
            channel.hold(positions)
            for place, position in zip(places, positions.tolist(), strict=True):
                until_ms = held.pop(int(ids[place]))
                one, first_attempt = np.array([position], np.uint64), np.ones(1, np.uint32)
                self._hold(Lease(key, one, first_attempt, until_ms, 0, epoch=channel.epoch))

    def _hold(self, lease: Lease) -> None:
        if len(lease.positions):
            self._leases.give(lease)
            self._feed.add(lease)

    def forget(self, key: ChannelKey) -> None:
        """The group was reset, or is gone."""
        self._ids.pop(key, None)

    def clear(self) -> None:
        """Mastership is gone."""
        self._ids.clear()
