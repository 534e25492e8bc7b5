"""The lines of a master's log about the cold tier: late promotion, unloaded messages that are due soon or overdue, and
messages that were loaded late.

A line is due at every change, and once an hour while a problem lasts. Pure: status in, lines out.
"""

from __future__ import annotations

from tickwheel.node.core.world import Reported
from tickwheel.proto import admin_pb2

REMIND_NS = 3_600_000_000_000
_TEXTS = {
    admin_pb2.COLD_BEHIND: ("warning", "the cold tier was not promoted for long: see whether the job runs"),
    admin_pb2.COLD_DUE_SOON: ("error", "the cold tier has a message that is due soon and not loaded: promote it"),
    admin_pb2.COLD_LATE: ("error", "the cold tier has an overdue message that is not loaded: promote it now"),
}
_LOADED_LATE = "messages of the cold tier were loaded after they were due, and are delivered now"


class ColdWatch:
    """Gets the node's status a few times a second through `look`."""

    def __init__(self) -> None:
        self._state = admin_pb2.COLD_EMPTY
        self._told_ns = 0
        self._loaded_late: int | None = None

    def look(self, now_ns: int, status: admin_pb2.NodeStatus) -> list[Reported]:
        """The lines that are due now."""
        cold = status.cold
        master = status.role == admin_pb2.MASTER and status.lease_held
        lines = self._of_state(now_ns, cold, cold.state if master else admin_pb2.COLD_EMPTY)
        # Messages counted before the first look were reported by another process, or long ago.
        late_before, self._loaded_late = self._loaded_late, cold.loaded_late
        if master and late_before is not None and cold.loaded_late > late_before:
            fields: dict[str, object] = {
                "messages": cold.loaded_late - late_before,
                "ever": cold.loaded_late,
                "late_ms_max": cold.loaded_late_ms_max,
            }
            lines.append(Reported("error", _LOADED_LATE, fields))
        return lines

    def _of_state(
        self, now_ns: int, cold: admin_pb2.ColdStatus, state: admin_pb2.ColdState.ValueType
    ) -> list[Reported]:
        before, self._state = self._state, state
        if state in _TEXTS:
            if state == before and now_ns - self._told_ns < REMIND_NS:
                return []
            self._told_ns = now_ns
            level, text = _TEXTS[state]
            return [
                Reported(level, text, {"next_due_ms": cold.next_due_ms, "late_ms": cold.late_ms, "parts": cold.parts})
            ]
        if before in _TEXTS and state == admin_pb2.COLD_IN_TIME:
            return [Reported("info", "the cold tier is in time again", {"next_due_ms": cold.next_due_ms})]
        return []
