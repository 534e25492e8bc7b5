"""Checkers of what is settled and handed over: each catches hand-made bad histories and lets their good twins pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.judging import Case, is_caught, judge
from tickwheel.chaos.sim.checkers.bulk import ColdOnce
from tickwheel.chaos.sim.checkers.p1_no_loss import DeadLetters, OneContent, RetriesCome, SettledHolds
from tickwheel.chaos.sim.checkers.p5_duplicates import FewDuplicates, HandedOver
from tickwheel.chaos.sim.checkers.p7_one_master import OneMaster
from tickwheel.chaos.sim.checkers.p9_cancels import DefiniteCancel
from tickwheel.chaos.sim.history import FaultBegan, HandoverEnded, RunBegan
from tickwheel.chaos.sim.history_bulk import ColdListed, ColdLoaded, ColdLooked, ColdParked
from tickwheel.chaos.sim.history_log import VoteSeen
from tickwheel.chaos.sim.history_machines import (
    Booted,
    DiskWiped,
    LeasesGathered,
    LeasesKept,
    LeasesUnread,
    RoleSeen,
    SyncHeard,
)
from tickwheel.chaos.sim.history_messages import (
    CancelAnswered,
    CancelSent,
    DeadPurged,
    DeadReplayAsked,
    DeadReplayed,
    Delivered,
    Extended,
    RescheduleSent,
    Row,
    ScheduleAcknowledged,
    ScheduleRefused,
    ScheduleSent,
    SessionClosed,
    SessionOver,
    Settled,
    SettledSeen,
    SettleSent,
)
from tickwheel.chaos.sim.world import HOUR_MS, MS

HOUR = 500_000
WALL_MS = HOUR * HOUR_MS
ID = HOUR << 32
BEGAN = RunBegan(0, WALL_MS, ("handover",), ("g",), hours_kept=0)


def delivered(at_ms: int, *, node: str = "n1", term: int = 1, session: int = 1, attempt: int = 1) -> Delivered:
    until_ms = WALL_MS + at_ms + 3_000
    return Delivered(at_ms * MS, node, 1, term, "g", "t", session, ID + 1, 1, attempt, WALL_MS, until_ms)


def answer(at_ms: int, outcome: str = "ACK") -> list[SettleSent | Settled]:
    return [
        SettleSent(at_ms * MS, "g", ID + 1, 1, 1, outcome),
        Settled((at_ms + 1) * MS, "g", ID + 1, 1, 1, outcome),
    ]


def seen(*done: int, hour_min_kept: int = 0) -> SettledSeen:
    return SettledSeen(9_000 * MS, "n2", "g", 8_000 * MS, hour_min_kept, done)


MASTERS = [
    BEGAN,
    RoleSeen(500 * MS, "n1", 1, "master", 1),
    FaultBegan(5_000 * MS, "#0 handover-delivering n1"),
    delivered(5_010),
]
HANDED_OVER = [
    RoleSeen(5_040 * MS, "n2", 1, "master", 2),
    SessionClosed(5_041 * MS, "g", 1),
    SessionOver(5_041 * MS, "g", 1),
    HandoverEnded(5_045 * MS, "n1", 5_012 * MS, True),
]
ACKNOWLEDGED = ScheduleAcknowledged(0, "p", 1, (1,), (ID + 1,), (WALL_MS,), False)
AGAIN = delivered(5_300, node="n2", term=2, session=2)

REPLAYED = [DeadReplayAsked(50 * MS, "g", (1,)), DeadReplayed(60 * MS, "g", (1,))]
EXTENDED = Extended(20 * MS, "g", 1, 1, "n1", 1, 1, WALL_MS + 3_900)
HEARD = SyncHeard(60 * MS, "n2", 1, "n1", 1, 50 * MS)
KEPT = [LeasesGathered(70 * MS, "n2", 1), LeasesKept(80 * MS, "n2", 1)]
OTHERS_AGAIN = delivered(2_000, node="n2", term=2)

SHARED = [
    ScheduleSent(MS, "p", 1, "n1", (Row(1, "t", WALL_MS, None),)),
    ScheduleAcknowledged(2 * MS, "p", 1, (1,), (ID + 1,), (WALL_MS,), False),
    ScheduleSent(4 * MS, "p", 1, "n1", (Row(2, "t", WALL_MS, None),)),
]

CANCELLED = [CancelSent(6 * MS, 1, 1), CancelAnswered(8 * MS, 1, 1, "CANCELLED")]
PARKED = [BEGAN, ColdParked(5 * MS, "g", 7, (1,), (WALL_MS + 100,))]

GOOD: dict[str, Case] = {
    "handed over, and it does not come again": (HandedOver, [*MASTERS, *HANDED_OVER]),
    "nacked before": (
        HandedOver,
        [*MASTERS, SettleSent(5_011 * MS, "g", ID + 1, 1, 1, "RETRY"), *HANDED_OVER, replace(AGAIN, attempt=2)],
    ),
    "its lease was over": (HandedOver, [*MASTERS, *HANDED_OVER, replace(AGAIN, at_ns=8_500 * MS)]),
    "its lease was over, by a master that was less sure of the time": (
        HandedOver,
        [*MASTERS[:-1], replace(delivered(5_010), clock_error_ms=30), *HANDED_OVER, replace(AGAIN, at_ns=7_990 * MS)],
    ),
    "its consumer had left": (HandedOver, [*MASTERS, SessionOver(5_011 * MS, "g", 1), *HANDED_OVER, AGAIN]),
    "the master was lost, not handed over": (HandedOver, [*MASTERS, *HANDED_OVER[:3], AGAIN]),
    "another fault was there": (
        HandedOver,
        [*MASTERS, FaultBegan(5_011 * MS, "#1 reset n2"), *HANDED_OVER, AGAIN],
    ),
    "settled, and held for settled": (SettledHolds, [*answer(10), seen(ID + 1)]),
    "declared dead": (SettledHolds, [*answer(10, "DEAD"), seen(ID + 1)]),
    "answered, without a receipt": (SettledHolds, [answer(10)[0], seen(ID + 1)]),
    "a nack ends nothing": (SettledHolds, [*answer(10, "RETRY"), seen()]),
    "settled while it was read": (SettledHolds, [*answer(8_500), seen()]),
    "its hour has gone": (SettledHolds, [*answer(10), seen(hour_min_kept=HOUR + 1)]),
    "dead, then replayed, and open again": (SettledHolds, [*answer(10, "DEAD"), REPLAYED[0], seen()]),
    "dead, replayed, and settled again": (SettledHolds, [*answer(10, "DEAD"), REPLAYED[0], seen(ID + 1)]),
    "cancelled when its hour had gone": (
        DefiniteCancel,
        [BEGAN, ACKNOWLEDGED, delivered(10), CancelAnswered((HOUR_MS + 5_000) * MS, 1, ID + 1, "NOT_FOUND")],
    ),
    "replayed, and it comes": (DeadLetters, [*REPLAYED, delivered(90)]),
    "extended, and back after that": (
        FewDuplicates,
        [BEGAN, delivered(10), EXTENDED, delivered(4_000, attempt=2)],
    ),
    "extended, then handed back": (
        FewDuplicates,
        [BEGAN, delivered(10), EXTENDED, answer(30, "RETRY")[0], delivered(40, attempt=2)],
    ),
    "extended, and the next master has not heard of it": (
        FewDuplicates,
        [BEGAN, delivered(10), EXTENDED, delivered(3_500, node="n2", term=2)],
    ),
    "extended, and the next master heard of its lease alone": (
        FewDuplicates,
        [BEGAN, delivered(10), replace(HEARD, sent_ns=19 * MS), EXTENDED, delivered(3_500, node="n2", term=2)],
    ),
    "parked, loaded, delivered": (ColdOnce, [*PARKED, ColdLoaded(10 * MS, 7), delivered(200)]),
    "parked, and cancelled": (ColdOnce, [*PARKED, *CANCELLED]),
    "parked, and moved beyond the end": (ColdOnce, [*PARKED, RescheduleSent(6 * MS, 1, 1, WALL_MS + 2**40)]),
    "listed after it was loaded, asked before": (
        ColdOnce,
        [*PARKED, ColdLoaded(10 * MS, 7), ColdListed(12 * MS, 9 * MS, (7,), (7,)), delivered(200)],
    ),
    "gone with its hour, before its loader was answered": (
        ColdOnce,
        [*PARKED, delivered(200), ColdListed(900 * MS, 800 * MS, (), ())],
    ),
    "a lease that was not written down": (
        FewDuplicates,
        [BEGAN, delivered(10), HEARD, KEPT[0], Booted(500 * MS, "n2", 2), replace(OTHERS_AGAIN, boot=2)],
    ),
    "a lease that was given after the rest was written down": (
        FewDuplicates,
        [BEGAN, HEARD, *KEPT, delivered(90), Booted(500 * MS, "n2", 2), replace(OTHERS_AGAIN, boot=2)],
    ),
    "a lease in a file that cannot be read": (
        FewDuplicates,
        [
            BEGAN,
            delivered(10),
            HEARD,
            *KEPT,
            Booted(500 * MS, "n2", 2),
            LeasesUnread(500 * MS, "n2", 2),
            replace(OTHERS_AGAIN, boot=2),
        ],
    ),
    "the second of two programs is told so": (
        OneContent,
        [*SHARED, ScheduleRefused(6 * MS, "p", 1, "SEQUENCE_TAKEN", (2,))],
    ),
    "a gap that was told before": (
        OneContent,
        [SHARED[0], SHARED[2], replace(SHARED[1], at_ns=5 * MS), ScheduleRefused(6 * MS, "p", 1, "SEQUENCE_GAP", (2,))],
    ),
    "dead, replayed, there again": (
        RetriesCome,
        [BEGAN, delivered(10), *answer(20, "DEAD"), REPLAYED[0], delivered(90)],
    ),
    "dead, and told so once more when it was to be replayed": (
        RetriesCome,
        [BEGAN, delivered(10), *answer(20, "DEAD"), REPLAYED[0], answer(51, "DEAD")[-1], delivered(90)],
    ),
}
BAD: dict[str, Case] = {
    "replayed, and it does not come": (DeadLetters, REPLAYED),
    "purged, and it comes": (DeadLetters, [DeadPurged(50 * MS, "g", (1,)), delivered(90)]),
    "again in its extended lease": (FewDuplicates, [BEGAN, delivered(10), EXTENDED, delivered(3_500, attempt=2)]),
    "extended, and the next master has heard of it": (
        FewDuplicates,
        [BEGAN, delivered(10), EXTENDED, HEARD, delivered(3_500, node="n2", term=2)],
    ),
    "extended, and the next master had it on its disk": (
        FewDuplicates,
        [
            BEGAN,
            delivered(10),
            EXTENDED,
            HEARD,
            *KEPT,
            Booted(500 * MS, "n2", 2),
            replace(delivered(3_500, node="n2", term=2), boot=2),
        ],
    ),
    "parked, and never delivered": (ColdOnce, [*PARKED, ColdLoaded(10 * MS, 7)]),
    "parked, and its cancel finds nothing": (
        ColdOnce,
        [*PARKED, CANCELLED[0], CancelAnswered(8 * MS, 1, 1, "NOT_FOUND")],
    ),
    "parked, and not found": (ColdOnce, [*PARKED, ColdLooked(9 * MS, 1, "NOT_FOUND")]),
    "parked, and cancelled by nobody": (ColdOnce, [*PARKED, ColdLooked(9 * MS, 1, "MESSAGE_CANCELLED")]),
    "parked, and not listed": (ColdOnce, [*PARKED, ColdListed(9 * MS, 8 * MS, (), ())]),
    "not listed while one of its messages is to come": (
        ColdOnce,
        [
            BEGAN,
            ColdParked(5 * MS, "g", 7, (1, 2), (WALL_MS + 100, WALL_MS + 9_000)),
            delivered(200),
            ColdListed(900 * MS, 800 * MS, (), ()),
            replace(delivered(9_100), uid=2),
        ],
    ),
    "loaded, and said to wait": (
        ColdOnce,
        [*PARKED, ColdLoaded(7 * MS, 7), ColdListed(9 * MS, 8 * MS, (7,), (7,)), delivered(200)],
    ),
    "extends without its own lease": (OneMaster, [BEGAN, replace(EXTENDED, leased=False)]),
    "master with a disk that was wiped": (
        OneMaster,
        [BEGAN, DiskWiped(5 * MS, "n2"), RoleSeen(9 * MS, "n2", 2, "master", 3)],
    ),
    "by the vote of a disk that was wiped": (
        OneMaster,
        [
            BEGAN,
            DiskWiped(5 * MS, "n2"),
            VoteSeen(8 * MS, "n1", 1, 3, "n1"),
            VoteSeen(8 * MS, "n2", 2, 3, "n1"),
            RoleSeen(9 * MS, "n1", 1, "master", 3, ("n1", "n2", "n3")),
        ],
    ),
    "a lease that was written down": (
        FewDuplicates,
        [BEGAN, delivered(10), HEARD, *KEPT, Booted(500 * MS, "n2", 2), replace(OTHERS_AGAIN, boot=2)],
    ),
    "its own lease, written down": (
        FewDuplicates,
        [
            BEGAN,
            delivered(10),
            LeasesGathered(70 * MS, "n1", 1),
            LeasesKept(80 * MS, "n1", 1),
            Booted(500 * MS, "n1", 2),
            replace(delivered(2_000, term=2), boot=2),
        ],
    ),
    "a receipt for other messages": (
        OneContent,
        [*SHARED, ScheduleAcknowledged(6 * MS, "p", 1, (2,), (ID + 1,), (WALL_MS,), True)],
    ),
    "told of a gap instead": (OneContent, [*SHARED, ScheduleRefused(6 * MS, "p", 1, "SEQUENCE_GAP", (2,))]),
    "told that it is invalid": (OneContent, [*SHARED, ScheduleRefused(6 * MS, "p", 1, "INVALID_FIELD", (2,))]),
    "taken by nobody": (OneContent, [SHARED[0], ScheduleRefused(6 * MS, "p", 1, "SEQUENCE_TAKEN")]),
    "dead, not replayed, there again": (RetriesCome, [BEGAN, delivered(10), *answer(20, "DEAD"), delivered(90)]),
    "it comes again before the handover is told": (
        HandedOver,
        [*MASTERS, *HANDED_OVER[:3], replace(AGAIN, at_ns=5_043 * MS), HANDED_OVER[3]],
    ),
    "it comes again after the handover": (HandedOver, [*MASTERS, *HANDED_OVER, AGAIN]),
    "settled, and open still": (SettledHolds, [*answer(10), seen()]),
    "settled by nobody": (SettledHolds, [*answer(10), seen(ID + 1, ID + 2)]),
    "another dead letter was replayed": (
        SettledHolds,
        [*answer(10, "DEAD"), DeadReplayAsked(50 * MS, "g", (2,)), seen()],
    ),
    "the hour before has gone": (SettledHolds, [*answer(10), seen(hour_min_kept=HOUR)]),
    "not found while its hour lasts": (
        DefiniteCancel,
        [BEGAN, ACKNOWLEDGED, delivered(10), CancelAnswered(20 * MS, 1, ID + 1, "NOT_FOUND")],
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_histories_pass(name: str) -> None:
    """What may happen is no broken promise."""
    judge(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_bad_histories_are_caught(name: str) -> None:
    """A checker that cannot fail proves nothing."""
    is_caught(BAD[name])
