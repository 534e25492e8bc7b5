"""The lines of a node's log about clocks: which one is wrong, and whether the nodes agree on a time.

A line is due at every change, and once a minute while a problem lasts. A node that has just started gets a few seconds
to find the others. Pure: status in, lines out.
"""

from __future__ import annotations

from tickwheel.node.core.world import Reported
from tickwheel.proto import admin_pb2

REMIND_NS = 60_000_000_000
PATIENCE_NS = 5_000_000_000
SLEW_TOLD_MS = 60_000
"""Correction of the cluster's time from which on it is told: at the fastest that takes ten minutes."""
WRONG = (admin_pb2.CLOCK_UNAGREED, admin_pb2.CLOCK_OWN, admin_pb2.CLOCK_HOLDOVER, admin_pb2.CLOCK_EXPIRED)


class ClockWatch:
    """Gets the node's status a few times a second through `look`."""

    def __init__(self, skew_warn_ms: int) -> None:
        self._skew_warn_ms = skew_warn_ms
        self._began_ns: int | None = None
        self._state = admin_pb2.CLOCK_STATE_UNSPECIFIED
        self._told_ns: dict[str, int] = {}
        """For each node whose clock is off: when the last warning was due."""
        self._state_told_ns = 0
        self._slew_told_ns: int | None = None
        self._jumps = self._early = 0

    def look(
        self,
        now_ns: int,
        status: admin_pb2.NodeStatus,
        jumps_refused: int,
        cursors_ahead: int,
        *,
        unconfirmed: bool = False,
    ) -> list[Reported]:
        """The lines that are due now. `unconfirmed`: the node stood still, and the others have not confirmed yet for
        how long, so its time says nothing about clocks."""
        lines = self._of_state(now_ns, status) + self._of_slew(now_ns, status)
        if not unconfirmed:
            lines += self._of_skews(now_ns, status)
        if jumps_refused > self._jumps:
            text = "refused a jump ahead of the cluster's time"
            lines.append(Reported("error", text, {"slew_ms": round(status.clock_slew_ms)}))
        if cursors_ahead > self._early:
            text = "the master has dispatched messages that are not due by this node's time"
            lines.append(Reported("error", text, {"dispatches": cursors_ahead - self._early, "error_ms": _ms(status)}))
        self._jumps, self._early = jumps_refused, cursors_ahead
        return lines

    def _of_state(self, now_ns: int, status: admin_pb2.NodeStatus) -> list[Reported]:
        if self._began_ns is None:
            self._began_ns = now_ns
        state = status.clock_state
        if state not in WRONG:
            changed, self._state = state != self._state, state
            text = "the members' clocks agree"
            return [Reported("info", text, {"error_ms": _ms(status)})] if changed else []
        starting = self._state == admin_pb2.CLOCK_STATE_UNSPECIFIED and now_ns - self._began_ns < PATIENCE_NS
        if starting or (state == self._state and now_ns - self._state_told_ns < REMIND_NS):
            return []
        self._state, self._state_told_ns = state, now_ns
        stops = status.state == admin_pb2.NODE_WITHOUT_TIME
        text = "dispatch has stopped: the members' clocks do not agree" if stops else "the members' clocks do not agree"
        return [Reported("error" if stops else "warning", text, {"reason": status.clock_reason})]

    def _of_slew(self, now_ns: int, status: admin_pb2.NodeStatus) -> list[Reported]:
        """All nodes may have started with wrong clocks that agreed. Then it is not the clocks that are wrong now."""
        slew_ms = status.clock_slew_ms
        if status.clock_state != admin_pb2.CLOCK_AGREED or abs(slew_ms) < SLEW_TOLD_MS:
            self._slew_told_ns = None
            return []
        if self._slew_told_ns is not None and now_ns - self._slew_told_ns < REMIND_NS:
            return []
        self._slew_told_ns = now_ns
        text = "the cluster's time is behind the members' clocks, and catches up slowly"
        advice = "if the clocks are right, stop all nodes, then start them: they begin with the time of the clocks"
        if slew_ms < 0:
            text = "the cluster's time is ahead of the members' clocks, and goes slower until they meet"
            advice = "if the clocks are right, keep the nodes running: after a start, dispatch waits for the clocks"
        return [Reported("warning", text, {"slew_ms": round(slew_ms), "advice": advice})]

    def _of_skews(self, now_ns: int, status: admin_pb2.NodeStatus) -> list[Reported]:
        if not status.clock_agreed_age_ms and status.clock_state in (admin_pb2.CLOCK_UNAGREED, admin_pb2.CLOCK_OWN):
            return []
        skews = {status.node_id: (status.clock_offset_ms, 0.0)}
        # An error of 0 means that no answer came lately.
        skews |= {p.node_id: (p.clock_offset_ms, p.clock_error_ms) for p in status.peers if p.clock_error_ms}
        lines = []
        for name, (offset_ms, error_ms) in skews.items():
            told_ns = self._told_ns.get(name)
            # Off beyond any error of the measurement.
            if abs(offset_ms) - error_ms > self._skew_warn_ms:
                if told_ns is None or now_ns - told_ns >= REMIND_NS:
                    self._told_ns[name] = now_ns
                    lines.append(
                        Reported("warning", "a wall clock is wrong", {"peer": name, "skew_ms": round(offset_ms)})
                    )
            elif told_ns is not None:
                del self._told_ns[name]
                lines.append(Reported("info", "a wall clock is right again", {"peer": name}))
        return lines


def _ms(status: admin_pb2.NodeStatus) -> float:
    return round(status.clock_error_ms, 1)
