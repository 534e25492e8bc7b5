"""P11 of `group_in_flight_max`: no group has more messages out with its consumers than the setting allows.

A message counts from its delivery until the first of these: its consumer sends a settlement, its lease runs out as it
was given, its consumer leaves, retention removes its hour. The deliveries of earlier masters count where P5 demands
that the present one knows them. What a reset or a changed filter may have taken back is not judged, nor are
broadcasting groups, whose consumers have no share of a limit.
"""

from __future__ import annotations

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.checkers.known_leases import KnownLeases, Telling
from tickwheel.chaos.sim.history_messages import Delivered, Extended, SessionClosed, SettleSent
from tickwheel.chaos.sim.history_operators import FilterAsked, ResetAsked
from tickwheel.chaos.sim.world import MS


class InFlightBounded(Checker):
    """`most` is the highest count seen in a run with a limit."""

    promise = "P11 (in flight)"

    def __init__(self) -> None:
        self.most = 0
        self._leases = KnownLeases()
        self._out: dict[str, dict[int, Delivered]] = {}
        """By group and message: the last delivery, until it is seen to be over."""
        self._left: set[int] = set()
        self._cut: set[int] = set()
        """Sessions that their nodes ended: their consumers keep the messages."""
        self._unjudged: set[tuple[str, str]] = set()
        """Groups and topics that were reset or filtered."""

    def _on_known(self, record: Telling) -> None:
        self._leases.take(record)

    def _on_extended(self, record: Extended) -> None:
        self._leases.take(record)

    def _on_session_closed(self, record: SessionClosed) -> None:
        if record.by_node:
            self._cut.add(record.session)
        elif record.session not in self._cut:
            self._left.add(record.session)

    def _on_settle_sent(self, record: SettleSent) -> None:
        self._out.get(record.group, {}).pop(record.uid, None)

    def _on_filter_asked_or_reset_asked(self, record: FilterAsked | ResetAsked) -> None:
        self._unjudged.add((record.group, record.topic))

    def _on_delivered(self, record: Delivered) -> None:
        self._leases.take(record)
        limit = self.run.in_flight_max
        if not limit or record.broadcast or (record.group, record.topic) in self._unjudged:
            return
        out = self._out.setdefault(record.group, {})
        out[record.uid] = record
        if len(out) > self.most:
            for uid in [uid for uid, before in out.items() if not self._is_out(before, record)]:
                del out[uid]
            self.most = max(self.most, len(out))
        if len(out) > limit:
            others = ", ".join(str(uid) for uid in list(out)[:5])
            self.broken(
                f"{record.node} in term {record.term} delivers message {record.uid} of {record.topic} to "
                f"{record.group}, which has {len(out) - 1} out already ({others}, ...), and may have {limit}"
            )

    def _is_out(self, before: Delivered, now: Delivered) -> bool:
        """Whether the master that delivers `now` must count an earlier delivery."""
        if before.session in self._left or (before.group, before.topic) in self._unjudged or self.is_gone(before.id):
            return False
        clock_error_ms = before.clock_error_ms + now.clock_error_ms + 2 * self.run.clock_allowance_ms
        if self.true_ns(before.lease_until_ms) - clock_error_ms * MS <= now.at_ns:
            return False
        if (before.node, before.boot, before.term) == (now.node, now.boot, now.term):
            return True
        # In push-first a delivery may have been ahead of a dispatch that was lost with its master.
        own = (before.node, before.boot) == (now.node, now.boot)
        return not self.run.push_first and (own or self._leases.knows(now.node, before.node, before.term, before.at_ns))
