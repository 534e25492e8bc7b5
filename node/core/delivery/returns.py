"""The way back of messages whose lease is over: after a pause if it ran out, at once if it was given back.

Owns which returns are on their way into the log: such a message is not handed out before its return is applied. Soft
state of one mastership.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tickwheel.node.core.delivery.broadcast import Broadcasts
from tickwheel.node.core.delivery.channel import Channel
from tickwheel.node.core.delivery.leases import ChannelKey, Lease, LeaseTable, current
from tickwheel.node.core.delivery.settlements import Settlements
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.watch.counts import Deliveries
from tickwheel.node.failure import Failure
from tickwheel.node.state.machine import StateMachine
from tickwheel.node.state.results import SettleResult
from tickwheel.node.state.subscription import Positions
from tickwheel.proto.log_pb2 import SETTLE_RETURN, SettleColumns

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

    def positions(self, key: ChannelKey, epoch: int) -> Positions | None:
        """Positions of a channel whose return is on its way into the log, if there are any. One of an earlier epoch has
        no effect there, so nothing waits for it."""
        returning = self._under_way.get((key, epoch))
        return np.array(sorted(returning), np.uint64) if returning else None

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
