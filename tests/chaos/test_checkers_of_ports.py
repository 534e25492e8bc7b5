"""Checkers of client ports, audit logs and retention: each catches hand-made bad histories and lets their good twins
pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.judging import Case, is_caught, judge
from tickwheel.chaos.sim.checkers.p1_no_loss import NoLoss, RetentionHolds
from tickwheel.chaos.sim.checkers.p9_cancels import DefiniteCancel
from tickwheel.chaos.sim.checkers.ports import TAKEN, TAKEN_FROM, AuditKept, PortsAnswer
from tickwheel.chaos.sim.history import Record, RunBegan
from tickwheel.chaos.sim.history_machines import DiskWiped, HoursRemoved
from tickwheel.chaos.sim.history_messages import (
    CancelAnswered,
    Delivered,
    RescheduleAnswered,
    RescheduleRefused,
    RescheduleSent,
    ScheduleAcknowledged,
)
from tickwheel.chaos.sim.history_ports import (
    AuditedAnswer,
    AuditedCall,
    AuditSeen,
    CallAccepted,
    CallRefused,
    ValueAnswered,
    ValueAsked,
)
from tickwheel.chaos.sim.world import HOUR_MS, MS, SECOND

LIMIT = "payload_bytes_max"
HOUR = 500_000
BEGAN = RunBegan(0, HOUR * HOUR_MS - 2_000, (), ("g",), retention_ms=1_000)
"""Two seconds before the hour."""


def changed(value: int, from_s: int, to_s: int, *, what: str = LIMIT, lost: bool = False) -> list[Record]:
    return [ValueAsked(from_s * SECOND, what, value), ValueAnswered(to_s * SECOND, what, value, lost)]


def refused(from_s: int, to_s: int, *, needs: int = 20, certain: bool = True) -> CallRefused:
    return CallRefused(to_s * SECOND, LIMIT, "n1", from_s * SECOND, (7,), needs, certain)


def accepted(from_s: int, to_s: int, needs: int = 20) -> CallAccepted:
    return CallAccepted(to_s * SECOND, LIMIT, from_s * SECOND, (7,), needs)


def came(at_s: int, group: str = "g") -> Delivered:
    return Delivered(at_s * SECOND, "n1", 1, 1, group, "t", 1, HOUR - 1 << 32, 7, 1, 0, 0)


SMALL = changed(10, 1, 2)
SMALL_AND_LARGE = [*SMALL, *changed(99, 5, 6)]
BAD: dict[str, Case] = {
    "refused by a limit that is over": (PortsAnswer, [*SMALL_AND_LARGE, refused(7, 8)]),
    "refused though it fits": (PortsAnswer, [*SMALL, refused(3, 4, needs=10)]),
    "accepted beyond the limit": (PortsAnswer, [*SMALL, accepted(3, 4)]),
    "refused for good, and delivered": (PortsAnswer, [*SMALL, refused(3, 4), came(9)]),
    "refused after it came": (PortsAnswer, [came(2), *SMALL, refused(3, 4, certain=False)]),
    "delivered without a right": (PortsAnswer, [*changed(0, 1, 2, what=TAKEN), came(5, TAKEN_FROM)]),
    "a change that is not in the log": (
        AuditKept,
        [AuditedCall(1, 5, "n1"), AuditedAnswer(2, 5, "n1"), AuditSeen(3, "n1", ())],
    ),
    "a change that is there twice": (AuditKept, [AuditedCall(1, 5, "n1"), AuditSeen(3, "n1", (5, 5))]),
    "a change of another node": (AuditKept, [AuditedCall(1, 5, "n1"), AuditSeen(3, "n2", (5,))]),
    "an hour removed too early": (RetentionHolds, [BEGAN, HoursRemoved(2_300 * MS, "n1", 1, 9, HOUR, HOUR, 0, 1)]),
    "dead letters removed too early": (
        RetentionHolds,
        [BEGAN, HoursRemoved(SECOND, "n1", 1, 9, 1, 1, HOUR * HOUR_MS - 1_400, 1)],
    ),
    "removed and not counted": (
        NoLoss,
        [
            BEGAN,
            ScheduleAcknowledged(1, "p", 1, (7,), ((HOUR - 1) << 32,), (HOUR * HOUR_MS - 500,), False),
            HoursRemoved(4 * SECOND, "n1", 1, 9, HOUR, HOUR, 0, 0),
        ],
    ),
    "lost, and its hour not removed for retention": (
        NoLoss,
        [
            BEGAN,
            ScheduleAcknowledged(1, "p", 1, (7,), ((HOUR - 1) << 32,), (HOUR * HOUR_MS - 500,), False),
            HoursRemoved(4 * SECOND, "n1", 1, 9, HOUR, HOUR - 1, 0, 5),
        ],
    ),
}
AHEAD = ScheduleAcknowledged(1, "p", 1, (7,), (HOUR << 32,), (HOUR * HOUR_MS + 500,), False)
INTO_GONE = RescheduleSent(2, 7, HOUR << 32, HOUR * HOUR_MS - 500)
GONE = HoursRemoved(4 * SECOND, "n1", 1, 9, HOUR, HOUR, 0, 0)
BAD["moved into a removed hour, and not counted"] = (
    NoLoss,
    [
        BEGAN,
        AHEAD,
        INTO_GONE,
        RescheduleAnswered(3, 7, HOUR << 32, "RESCHEDULED", (HOUR - 1) << 32, INTO_GONE.due_ms),
        GONE,
    ],
)
BAD["its move into a removed hour was refused"] = (
    NoLoss,
    [BEGAN, AHEAD, INTO_GONE, RescheduleRefused(3, 7, INTO_GONE.due_ms), GONE],
)
ACKNOWLEDGED = ScheduleAcknowledged(1, "p", 1, (7,), ((HOUR - 1) << 32,), (HOUR * HOUR_MS - 500,), False)
NOT_FOUND = CancelAnswered(5 * SECOND, 7, (HOUR - 1) << 32, "NOT_FOUND")
BAD["not found, and its hour not removed for retention"] = (DefiniteCancel, [BEGAN, ACKNOWLEDGED, NOT_FOUND])
GOOD: dict[str, Case] = {
    "refused while the limit changes": (PortsAnswer, [*SMALL, *changed(99, 5, 7), refused(5, 6), refused(6, 8)]),
    "refused by a change that may come back": (
        PortsAnswer,
        [*changed(10, 1, 2, lost=True), *changed(99, 5, 6), refused(7, 8)],
    ),
    "accepted while the limit changes": (PortsAnswer, [ValueAsked(SECOND, LIMIT, 10), accepted(0, 4)]),
    "accepted at its first try": (PortsAnswer, [*SMALL, accepted(1, 4)]),
    "refused in doubt, and delivered": (PortsAnswer, [*SMALL, refused(3, 4, certain=False), came(9)]),
    "delivered just after a right was lost": (PortsAnswer, [*changed(0, 1, 2, what=TAKEN), came(3, TAKEN_FROM)]),
    "delivered with a right that was given back": (
        PortsAnswer,
        [*changed(0, 1, 2, what=TAKEN), ValueAsked(4 * SECOND, TAKEN, 1), came(5, TAKEN_FROM)],
    ),
    "a try without an answer is there or not": (
        AuditKept,
        [AuditedCall(1, 5, "n1"), AuditedCall(1, 6, "n1"), AuditSeen(3, "n1", (5,))],
    ),
    "a disk that is gone": (
        AuditKept,
        [AuditedCall(1, 5, "n1"), AuditedAnswer(2, 5, "n1"), DiskWiped(2, "n1"), AuditSeen(3, "n1", ())],
    ),
    "not found in a removed hour": (
        DefiniteCancel,
        [BEGAN, ACKNOWLEDGED, HoursRemoved(4 * SECOND, "n1", 1, 9, HOUR, HOUR, 0, 1), NOT_FOUND],
    ),
    "an hour whose retention is over": (
        RetentionHolds,
        [BEGAN, HoursRemoved(3_100 * MS, "n1", 1, 9, HOUR, HOUR, HOUR * HOUR_MS, 1)],
    ),
    "perhaps moved into a removed hour": (NoLoss, [BEGAN, AHEAD, INTO_GONE, GONE]),
    "a move was refused after the answer to another": (
        NoLoss,
        [
            BEGAN,
            AHEAD,
            INTO_GONE,
            RescheduleAnswered(3, 7, HOUR << 32, "RESCHEDULED", HOUR << 32, AHEAD.due_ms[0]),
            RescheduleRefused(4, 7, INTO_GONE.due_ms),
            came(5),
        ],
    ),
    "its move into a removed hour was refused, and it came": (
        NoLoss,
        [BEGAN, AHEAD, INTO_GONE, RescheduleRefused(3, 7, INTO_GONE.due_ms), GONE, came(5)],
    ),
    "removed, and counted on every node": (
        NoLoss,
        [
            BEGAN,
            ScheduleAcknowledged(1, "p", 1, (7,), ((HOUR - 1) << 32,), (HOUR * HOUR_MS - 500,), False),
            HoursRemoved(4 * SECOND, "n1", 1, 9, HOUR, HOUR, 0, 1),
            HoursRemoved(5 * SECOND, "n2", 1, 9, HOUR, HOUR, 0, 1),
        ],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_broken_history_is_caught(name: str) -> None:
    """By the checker of the promise that it breaks."""
    is_caught(BAD[name])


@pytest.mark.parametrize("name", GOOD)
def test_its_good_twin_passes(name: str) -> None:
    """No checker asks for more than is promised."""
    judge(GOOD[name])


def test_a_disk_that_fails_may_lose_lines() -> None:
    """A change that cannot be noted is carried out all the same."""
    kind, records = BAD["a change that is not in the log"]
    is_caught((kind, [replace(BEGAN, faults=("kill",)), *records]))
    judge((kind, [replace(BEGAN, faults=("disk-full",)), *records]))
