"""What a master's log says of the cold tier: that its next message is due soon, or overdue, and not loaded.

Owns when a line is due: at every change, and once an hour while something is wrong. Pure: status in, lines out.
"""

from __future__ import annotations

from tickwheel.node.server.clock_watch import Line
from tickwheel.proto import admin_pb2

REMIND_NS = 3_600_000_000_000
_TEXTS = {
    admin_pb2.COLD_DUE_SOON: ("warning", "the cold tier has a message that is due soon and not loaded: promote it"),
    admin_pb2.COLD_LATE: ("error", "the cold tier has an overdue message that is not loaded: promote it now"),
}


class ColdWatch:
    """One per process; shown the node's status a few times a second."""

    def __init__(self) -> None:
        self._state = admin_pb2.COLD_EMPTY
        self._told_ns = 0

    def look(self, now_ns: int, status: admin_pb2.NodeStatus) -> list[Line]:
        """What there is to say now."""
        cold = status.cold
        state = cold.state if status.role == admin_pb2.MASTER and status.lease_held else admin_pb2.COLD_EMPTY
        before, self._state = self._state, state
        if state in _TEXTS:
            if state == before and now_ns - self._told_ns < REMIND_NS:
                return []
            self._told_ns = now_ns
            level, text = _TEXTS[state]
            return [Line(level, text, {"next_due_ms": cold.next_due_ms, "late_ms": cold.late_ms, "parts": cold.parts})]
        if before in _TEXTS and state == admin_pb2.COLD_IN_TIME:
            return [Line("info", "the cold tier is in time again", {"next_due_ms": cold.next_due_ms})]
        return []
