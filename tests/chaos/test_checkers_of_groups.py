"""Checkers of what groups and operators are promised: each catches hand-made bad histories and lets their good twins
pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.judging import Case, is_caught, judge
from tickwheel.chaos.sim.checkers.p1_groups import Broadcasts, FiltersHold, InOrder, PausesHold, ResetsHold
from tickwheel.chaos.sim.checkers.p1_no_loss import RetriesCome
from tickwheel.chaos.sim.checkers.p5_duplicates import FewDuplicates
from tickwheel.chaos.sim.checkers.p9_cancels import DeletionsHold, SweepsDone
from tickwheel.chaos.sim.checkers.p11_in_flight import InFlightBounded
from tickwheel.chaos.sim.history import Record, RunBegan
from tickwheel.chaos.sim.history_machines import Booted, HoursRemoved, SyncHeard
from tickwheel.chaos.sim.history_messages import (
    Delivered,
    Label,
    Row,
    ScheduleAcknowledged,
    ScheduleSent,
    SessionClosed,
    SessionOpened,
    SessionOver,
    Settled,
    SettleSent,
)
from tickwheel.chaos.sim.history_operators import (
    DeletionAnswered,
    DeletionAsked,
    FilterAnswered,
    FilterAsked,
    PassingAccepted,
    PassingDelivered,
    PauseAnswered,
    PauseAsked,
    ResetAnswered,
    ResetAsked,
    Selected,
    SweepAsked,
    SweepBegan,
    SweepEnded,
    SweptSeen,
)
from tickwheel.chaos.sim.world import MS

WALL_MS = 1_000_000
ID = 7 << 32


def sent(at_ms: int, *uids: int, label: Label, due_in_ms: int = 0) -> ScheduleSent:
    rows = tuple(Row(uid, "t", WALL_MS + due_in_ms, None, label) for uid in uids)
    return ScheduleSent(at_ms * MS, "p", uids[0], "n1", rows)


def acknowledged(at_ms: int, *uids: int, due_in_ms: int = 0) -> ScheduleAcknowledged:
    due = (WALL_MS + due_in_ms,) * len(uids)
    return ScheduleAcknowledged(at_ms * MS, "p", uids[0], uids, tuple(ID + uid for uid in uids), due, False, ("g",))


def delivered(
    at_ms: int, uid: int, *, due_in_ms: int = 0, attempt: int = 1, node: str = "n1", session: int = 1
) -> Delivered:
    due_ms = WALL_MS + due_in_ms
    until_ms = WALL_MS + at_ms + 3_000
    return Delivered(at_ms * MS, node, 1, 1, "g", "t", session, ID + uid, uid, attempt, due_ms, until_ms)


def settled(at_ms: int, uid: int, outcome: str = "ACK", attempt: int = 1) -> SettleSent:
    return SettleSent(at_ms * MS, "g", ID + uid, uid, attempt, outcome)


def deleted(
    at_ms: int, *, kind: str = "topic", name: str = "t", cancelled: int = 0, clock_error_ms: float = 0.0
) -> list[Record]:
    return [
        DeletionAsked((at_ms - 5) * MS, kind, name),
        DeletionAnswered(at_ms * MS, kind, name, cancelled, clock_error_ms),
    ]


TWO_AT_ONCE = RunBegan(0, WALL_MS, (), ("g",), in_flight_max=2)
KEPT_SHORTLY = replace(TWO_AT_ONCE, retention_ms=1)
BEGAN_AHEAD = RunBegan(0, WALL_MS, (), ("g",), dispatch_ahead_ms=200)
ACCEPTED = PassingAccepted(5 * MS, "t", (ID + 1,), (WALL_MS,))
LATER = PassingAccepted(5 * MS, "t", (ID + 1,), (WALL_MS + 1_000,))
HANDED = PassingDelivered(10 * MS, "n1", "t", (ID + 1,))
RED, BLUE = Label(lane="red"), Label(lane="blue")
PAUSED = [PauseAsked(0, "group", "g", True), PauseAnswered(5 * MS, "group", "g", True)]

GOOD: dict[str, Case] = {
    "one after the other": (
        InOrder,
        [sent(0, 1, 2, label=RED), acknowledged(1, 1, 2), delivered(2, 1), settled(3, 1), delivered(4, 2)],
    ),
    "a nack blocks its message group alone": (
        InOrder,
        [
            sent(0, 1, label=RED),
            sent(0, 2, label=BLUE),
            acknowledged(1, 1),
            acknowledged(1, 2),
            delivered(2, 1),
            settled(3, 1, "RETRY"),
            delivered(4, 2),
            delivered(9, 1, attempt=2),
        ],
    ),
    "due first, scheduled last": (
        InOrder,
        [
            sent(0, 1, label=RED, due_in_ms=50),
            acknowledged(1, 1, due_in_ms=50),
            sent(2, 2, label=RED, due_in_ms=20),
            acknowledged(3, 2, due_in_ms=20),
            delivered(20, 2, due_in_ms=20),
            settled(21, 2),
            delivered(50, 1, due_in_ms=50),
        ],
    ),
    "other topics have no order": (
        InOrder,
        [sent(0, 1, 2, label=Label(tags=("a",))), acknowledged(1, 1, 2), delivered(2, 2), delivered(3, 1)],
    ),
    "until it is asked to go on": (PausesHold, [*PAUSED, PauseAsked(9 * MS, "group", "g", False), delivered(10, 1)]),
    "before the answer": (PausesHold, [PAUSED[0], delivered(4, 1), PAUSED[1]]),
    "delivered before its topic was gone": (DeletionsHold, [BEGAN_AHEAD, ACCEPTED, HANDED, *deleted(20)]),
    "a topic of the same name was made": (
        DeletionsHold,
        [BEGAN_AHEAD, *deleted(20), replace(ACCEPTED, at_ns=25 * MS), replace(HANDED, at_ns=30 * MS)],
    ),
    "its group is gone, and a pull has made another": (
        DeletionsHold,
        [BEGAN_AHEAD, ACCEPTED, *deleted(20, kind="group", name="g"), replace(HANDED, at_ns=30 * MS)],
    ),
    "pending, and cancelled": (DeletionsHold, [BEGAN_AHEAD, LATER, *deleted(20, cancelled=1)]),
    "deleted again, as a late request had made another": (
        DeletionsHold,
        [BEGAN_AHEAD, LATER, *deleted(20, cancelled=1), *deleted(30)],
    ),
    "accepted while its topic was deleted": (DeletionsHold, [BEGAN_AHEAD, *deleted(20)[:1], LATER, deleted(20)[1]]),
    "dispatched ahead, perhaps": (DeletionsHold, [BEGAN_AHEAD, LATER, *deleted(310)]),
    "dispatched by an uncertain clock, perhaps": (
        DeletionsHold,
        [BEGAN_AHEAD, LATER, *deleted(20, clock_error_ms=300)],
    ),
    "another group": (PausesHold, [PauseAnswered(5 * MS, "group", "h", True), delivered(10, 1)]),
}

BAD: dict[str, Case] = {
    "two of a message group": (
        InOrder,
        [sent(0, 1, 2, label=RED), acknowledged(1, 1, 2), delivered(2, 1), delivered(4, 2)],
    ),
    "behind a nack": (
        InOrder,
        [
            sent(0, 1, 2, label=RED),
            acknowledged(1, 1, 2),
            delivered(2, 1),
            settled(3, 1, "RETRY"),
            delivered(4, 2),
        ],
    ),
    "one passed over": (InOrder, [sent(0, 1, 2, label=RED), acknowledged(1, 1, 2), delivered(4, 2)]),
    "the last one again": (
        InOrder,
        [
            sent(0, 1, 2, label=RED),
            acknowledged(1, 1, 2),
            delivered(2, 1),
            settled(3, 1),
            delivered(4, 2),
            settled(5, 2),
            delivered(6, 1, node="n2"),
        ],
    ),
    "of those without a message group two": (
        InOrder,
        [sent(0, 1, 2, label=Label(lane="")), acknowledged(1, 1, 2), delivered(2, 1), delivered(4, 2)],
    ),
    "delivered when its topic was gone": (
        DeletionsHold,
        [BEGAN_AHEAD, ACCEPTED, *deleted(20), replace(HANDED, at_ns=30 * MS)],
    ),
    "pending, and not cancelled": (DeletionsHold, [BEGAN_AHEAD, LATER, *deleted(20)]),
    "two pending, and one cancelled": (
        DeletionsHold,
        [BEGAN_AHEAD, LATER, replace(LATER, ids=(ID + 2,)), *deleted(20, cancelled=1)],
    ),
    "delivered while its group is paused": (PausesHold, [*PAUSED, delivered(10, 1)]),
    "delivered while its topic is paused": (PausesHold, [PauseAnswered(0, "topic", "t", True), delivered(10, 1)]),
}

SWEPT = Label(key="s1-1", tags=("a",))
CANCEL, MOVE = Selected("t", key_prefix="s1-", cancel=True), Selected("t", tag="a", shift_ms=1_000)
WRITTEN: list[Record] = [sent(0, 1, label=SWEPT, due_in_ms=500), acknowledged(1, 1, due_in_ms=500)]


def swept(selected: Selected, done: int, *, too_late: int = 0, until_ms: int = 30) -> list[Record]:
    """A sweep from its first word to its end."""
    return [
        RunBegan(0, WALL_MS, ("kill",), ()),
        *WRITTEN,
        SweepAsked(10 * MS, "job", selected),
        SweepBegan(20 * MS, "job"),
        SweepEnded(until_ms * MS, "job", True, done, too_late, 0, 0),
    ]


def seen(state: str, *, due_in_ms: int = 500, id_: int = ID + 1) -> SweptSeen:
    return SweptSeen(900 * MS, 1, id_, state, WALL_MS + due_in_ms)


GOOD |= {
    "cancelled in bulk": (SweepsDone, [*swept(CANCEL, 1), seen("MESSAGE_CANCELLED")]),
    "too late in bulk": (SweepsDone, [*swept(CANCEL, 0, too_late=1, until_ms=600), delivered(700, 1, due_in_ms=500)]),
    "dispatched before the sweep came to it": (
        SweepsDone,
        [*swept(CANCEL, 0, until_ms=600), delivered(700, 1, due_in_ms=500)],
    ),
    "moved in bulk": (SweepsDone, [*swept(MOVE, 1), replace(delivered(1_500, 1, due_in_ms=1_500), id=ID + 9)]),
    "moved and delivered before its receipt": (
        SweepsDone,
        [
            RunBegan(0, WALL_MS, ("kill",), ()),
            sent(0, 1, label=SWEPT, due_in_ms=500),
            SweepAsked(10 * MS, "job", MOVE),
            SweepBegan(20 * MS, "job"),
            replace(delivered(1_500, 1, due_in_ms=1_500), id=ID + 9),
            SweepEnded(1_600 * MS, "job", True, 1, 0, 0, 0),
            acknowledged(1_700, 1, due_in_ms=500),
        ],
    ),
    "moved into the time of a sweep that had not begun": (
        SweepsDone,
        [
            RunBegan(0, WALL_MS, ("kill",), ()),
            *WRITTEN,
            SweepAsked(10 * MS, "job", Selected("t", tag="a", due_ms_min=WALL_MS + 1_000, cancel=True)),
            SweepAsked(11 * MS, "move", MOVE),
            SweepBegan(12 * MS, "move"),
            SweepEnded(20 * MS, "move", True, 1, 0, 0, 0),
            SweepBegan(30 * MS, "job"),
            SweepEnded(40 * MS, "job", True, 1, 0, 0, 0),
            seen("MESSAGE_CANCELLED", due_in_ms=1_500, id_=ID + 9),
        ],
    ),
    "another key": (
        SweepsDone,
        [*swept(Selected("t", key="s1-11", cancel=True), 0), delivered(500, 1, due_in_ms=500)],
    ),
    "due later than it means": (
        SweepsDone,
        [
            *swept(Selected("t", key_prefix="s1-", due_ms_max=WALL_MS + 500, cancel=True), 0),
            delivered(500, 1, due_in_ms=500),
        ],
    ),
}

BAD |= {
    "delivered after it was cancelled in bulk": (
        SweepsDone,
        [*swept(CANCEL, 1), seen("MESSAGE_CANCELLED"), delivered(901, 1, due_in_ms=500)],
    ),
    "left out by a sweep": (SweepsDone, [*swept(CANCEL, 1), delivered(500, 1, due_in_ms=500)]),
    "still pending after a sweep": (SweepsDone, [*swept(CANCEL, 1), seen("PENDING")]),
    "cancelled though no sweep means it": (
        SweepsDone,
        [*swept(Selected("t", key="s1-11", cancel=True), 0), seen("MESSAGE_CANCELLED")],
    ),
    "not met though pending": (SweepsDone, swept(CANCEL, 0)),
    "not met though due just after its end": (SweepsDone, swept(CANCEL, 0, until_ms=379)),
    "met more than there is": (SweepsDone, swept(CANCEL, 1, too_late=1)),
    "counts what it did not cancel": (SweepsDone, [*swept(CANCEL, 1, until_ms=600), delivered(610, 1, due_in_ms=500)]),
    "left where it was": (SweepsDone, [*swept(MOVE, 1), delivered(500, 1, due_in_ms=500)]),
    "moved elsewhere": (SweepsDone, [*swept(MOVE, 1), replace(delivered(1_500, 1, due_in_ms=1_400), id=ID + 9)]),
    "moved by nobody": (SweepsDone, [*swept(CANCEL, 1, until_ms=600), replace(delivered(610, 1), id=ID + 9)]),
}

SPORT, TRADE = Label(tags=("sport",)), Label(tags=("trade",))
ASKED, TAKES_SPORT = FilterAsked(0, "g", ("sport",), "t"), FilterAnswered(0, "g", ("sport",))
BEGAN = RunBegan(0, WALL_MS, ("kill",), ())


def broadcast(at_ms: int, uid: int, *, attempt: int = 1, session: int = 1) -> Delivered:
    return replace(delivered(at_ms, uid, attempt=attempt, session=session), broadcast=True)


def reset(at_ms: int, from_in_ms: int | None) -> list[Record]:
    """To a time counted from the start of the run; None: to what comes next."""
    from_ms = -1 if from_in_ms is None else WALL_MS + from_in_ms
    return [ResetAsked(at_ms * MS, "g", from_ms, "t"), ResetAnswered((at_ms + 5) * MS, "g", from_ms, "t")]


def came_and_due(due_in_ms: int) -> list[Record]:
    return [
        BEGAN,
        sent(0, 1, label=SPORT, due_in_ms=due_in_ms),
        acknowledged(1, 1, due_in_ms=due_in_ms),
        delivered(due_in_ms, 1, due_in_ms=due_in_ms),
    ]


def acked(at_ms: int, uid: int, *, attempt: int = 1, epoch: int = 0) -> Settled:
    return Settled(at_ms * MS, "g", ID + uid, uid, attempt, "ACK", epoch)


def again(at_ms: int, uid: int, *, due_in_ms: int = 0, attempt: int = 1, epoch: int = 1) -> Delivered:
    """Delivered behind a reset."""
    return replace(delivered(at_ms, uid, due_in_ms=due_in_ms, attempt=attempt), epoch=epoch)


BROUGHT_BACK = [BEGAN, delivered(1, 1), *reset(2, 0), again(9, 1), acked(10, 1, epoch=1)]
"""Delivered, delivered again by a reset, and acknowledged."""
RETRY_BESIDE = again(2_000, 1, due_in_ms=1_990, attempt=2)
"""Of the first of the two deliveries."""

GOOD |= {
    "let through": (FiltersHold, [BEGAN, ASKED, TAKES_SPORT, sent(1, 1, label=SPORT), delivered(2, 1)]),
    "of another topic": (
        FiltersHold,
        [
            BEGAN,
            FilterAsked(0, "g", (), "other"),
            FilterAnswered(0, "g", ()),
            sent(1, 1, label=SPORT),
            acknowledged(2, 1),
        ],
    ),
    "kept back": (FiltersHold, [BEGAN, ASKED, TAKES_SPORT, sent(1, 1, label=TRADE), acknowledged(2, 1)]),
    "by a filter that may be in force": (
        FiltersHold,
        [
            BEGAN,
            ASKED,
            TAKES_SPORT,
            sent(1, 1, label=TRADE),
            FilterAsked(2 * MS, "g", ("trade",), "t"),
            delivered(3, 1),
        ],
    ),
    "broadcast to two": (
        Broadcasts,
        [BEGAN, acknowledged(1, 1), broadcast(2, 1, session=1), broadcast(2, 1, session=2)],
    ),
    "of a session that ended": (
        Broadcasts,
        [BEGAN, SessionOpened(0, "g", 1), acknowledged(1, 1, due_in_ms=500), broadcast(2, 9), SessionOver(3, "g", 1)],
    ),
    "again after a reset": (
        ResetsHold,
        [*came_and_due(3_000), *reset(4_000, 1_500), delivered(4_100, 1, due_in_ms=3_000)],
    ),
    "not again after a reset to a later time": (ResetsHold, [*came_and_due(3_000), *reset(4_000, 3_900)]),
    "a retry from before a reset": (FewDuplicates, [*BROUGHT_BACK, RETRY_BESIDE]),
    "a retry from before a reset, retried": (
        FewDuplicates,
        [*BROUGHT_BACK, RETRY_BESIDE, again(6_000, 1, due_in_ms=5_990, attempt=3)],
    ),
    "two retries from before a reset, due together": (
        FewDuplicates,
        [*BROUGHT_BACK, RETRY_BESIDE, again(2_000, 1, due_in_ms=1_990, attempt=3)],
    ),
    "a retry that a reset brings back": (
        FewDuplicates,
        [
            BEGAN,
            delivered(1, 1),
            delivered(3_900, 1, due_in_ms=3_890, attempt=2),
            *reset(3_901, 0),
            again(3_910, 1),
            acked(3_911, 1, epoch=1),
            again(3_912, 1, due_in_ms=3_890, attempt=2),
        ],
    ),
    "a reset explains it": (FewDuplicates, [BEGAN, delivered(1, 1), *reset(2, 0), again(9, 1)]),
    "acknowledged before a reset, and told behind it": (
        FewDuplicates,
        [BEGAN, delivered(1, 1), *reset(2, 0), again(9, 1), acked(10, 1), again(2_000, 1, attempt=2)],
    ),
    "a reset that is carried out twice": (
        FewDuplicates,
        [
            BEGAN,
            delivered(1, 1),
            ResetAsked(2 * MS, "g", 0, "t"),
            again(3, 1),
            ResetAnswered(4, "g", 0, "t"),
            again(9, 1, epoch=2),
        ],
    ),
}

BAD |= {
    "not let through": (FiltersHold, [BEGAN, ASKED, TAKES_SPORT, sent(1, 1, label=TRADE), delivered(2, 1)]),
    "by the filter before": (
        FiltersHold,
        [
            BEGAN,
            ASKED,
            TAKES_SPORT,
            sent(1, 1, label=SPORT),
            FilterAsked(2 * MS, "g", ("trade",), "t"),
            FilterAnswered(3 * MS, "g", ("trade",)),
            delivered(4, 1),
        ],
    ),
    "let through and never there": (
        FiltersHold,
        [BEGAN, ASKED, TAKES_SPORT, sent(1, 1, label=SPORT), acknowledged(2, 1)],
    ),
    "broadcast twice": (Broadcasts, [BEGAN, broadcast(2, 1), broadcast(3, 1)]),
    "broadcast and retried": (Broadcasts, [BEGAN, broadcast(2, 1, attempt=2)]),
    "broadcast past one": (
        Broadcasts,
        [BEGAN, SessionOpened(0, "g", 1), acknowledged(1, 1, due_in_ms=500), broadcast(2, 9)],
    ),
    "not again after a reset": (ResetsHold, [*came_and_due(3_000), *reset(4_000, 1_500)]),
    "again after its acknowledgement behind a reset": (FewDuplicates, [*BROUGHT_BACK, again(20, 1)]),
    "again while a reset is under way that is no reason": (
        FewDuplicates,
        [BEGAN, delivered(1, 1), ResetAsked(2 * MS, "g", 0, "t"), delivered(9, 1)],
    ),
    "a nack from before a reset": (
        FewDuplicates,
        [*BROUGHT_BACK[:5], SettleSent(10 * MS, "g", ID + 1, 1, 1, "RETRY", epoch=0), again(11, 1)],
    ),
    "an epoch that no reset began": (FewDuplicates, [BEGAN, delivered(1, 1), again(9, 1)]),
    "one more epoch than resets": (FewDuplicates, [*BROUGHT_BACK, again(20, 1, epoch=2)]),
    "a retry from before a reset after its own acknowledgement": (
        FewDuplicates,
        [
            *BROUGHT_BACK,
            RETRY_BESIDE,
            acked(2_010, 1, attempt=2, epoch=1),
            replace(RETRY_BESIDE, at_ns=6_000 * MS, attempt=3),
        ],
    ),
    "a retry from before a reset while its lease holds": (
        FewDuplicates,
        [*BROUGHT_BACK, RETRY_BESIDE, replace(RETRY_BESIDE, at_ns=2_100 * MS)],
    ),
    "a retry of nothing from before the reset": (
        FewDuplicates,
        [BEGAN, *reset(2, 0), again(9, 1), acked(10, 1, epoch=1), RETRY_BESIDE],
    ),
    "before the new place": (
        ResetsHold,
        [*came_and_due(500), *reset(4_000, 3_900), delivered(4_100, 1, due_in_ms=500)],
    ),
    "again after a reset to what comes next": (ResetsHold, [*came_and_due(500), *reset(600, None), delivered(700, 1)]),
}


HEARD = SyncHeard(30 * MS, "n2", 1, "n1", 1, 25 * MS)
"""By then n2 knows what n1 had delivered."""
UNHEARD = SyncHeard(30 * MS, "n2", 1, "n1", 1, 1 * MS)


def by_next(at_ms: int, uid: int) -> Delivered:
    """Delivered by n2, the master of the next term."""
    return replace(delivered(at_ms, uid, node="n2"), term=2)


GOOD |= {
    "as many out as may be": (
        InFlightBounded,
        [TWO_AT_ONCE, delivered(5, 1), delivered(6, 2), settled(7, 1), delivered(8, 3), delivered(3_010, 4)],
    ),
    "one is delivered again": (InFlightBounded, [TWO_AT_ONCE, delivered(5, 1), delivered(6, 2), delivered(9, 2)]),
    "a consumer has left": (
        InFlightBounded,
        [
            TWO_AT_ONCE,
            delivered(5, 1),
            delivered(6, 2),
            SessionClosed(7 * MS, "g", 1),
            delivered(8, 3, session=2),
            delivered(8, 4, session=2),
        ],
    ),
    "a reset takes back what is out": (
        InFlightBounded,
        [TWO_AT_ONCE, delivered(5, 1), delivered(6, 2), ResetAsked(7 * MS, "g", 0, "t"), delivered(8, 3)],
    ),
    "retention takes what is out": (
        InFlightBounded,
        [KEPT_SHORTLY, delivered(5, 1), delivered(6, 2), HoursRemoved(7 * MS, "n1", 1, 9, 8, 8, 0, 2), delivered(8, 3)],
    ),
    "the next master has not heard of them": (
        InFlightBounded,
        [TWO_AT_ONCE, Booted(0, "n2", 1), delivered(5, 1), delivered(6, 2), UNHEARD, by_next(40, 3), by_next(40, 4)],
    ),
}
BAD |= {
    "an hour went that retention had not ended": (
        InFlightBounded,
        [KEPT_SHORTLY, delivered(5, 1), delivered(6, 2), HoursRemoved(7 * MS, "n1", 1, 9, 8, 7, 0, 0), delivered(8, 3)],
    ),
    "more out than may be": (InFlightBounded, [TWO_AT_ONCE, delivered(5, 1), delivered(6, 2), delivered(8, 3)]),
    "a node that cut a consumer off counts what that holds": (
        InFlightBounded,
        [
            TWO_AT_ONCE,
            delivered(5, 1),
            delivered(6, 2),
            SessionClosed(7 * MS, "g", 1, by_node=True),
            delivered(8, 3, session=2),
        ],
    ),
    "the next master has heard of them": (
        InFlightBounded,
        [TWO_AT_ONCE, Booted(0, "n2", 1), delivered(5, 1), delivered(6, 2), HEARD, by_next(40, 3)],
    ),
}


TWO_IN_LINE: list[Record] = [
    sent(0, 1, 2, label=RED),
    acknowledged(1, 1, 2),
    delivered(2, 1),
    settled(3, 1),
    delivered(4, 2),
]
"""The second one is out with a consumer."""


def answered(at_ms: int, outcome: str, *, delay_ms: int = 0, epoch: int = 0) -> list[Record]:
    """For the first attempt of message 1, and the receipt."""
    return [
        SettleSent(at_ms * MS, "g", ID + 1, 1, 1, outcome, delay_ms, epoch),
        Settled((at_ms + 2) * MS, "g", ID + 1, 1, 1, outcome, epoch),
    ]


NACKED = [BEGAN, delivered(1, 1), *answered(2, "RETRY", delay_ms=1_000)]
DEAD = [BEGAN, delivered(1, 1), *answered(2, "DEAD")]

GOOD |= {
    "in order from the place of a reset on": (
        InOrder,
        [*TWO_IN_LINE, *reset(5, 0), again(11, 1), replace(settled(12, 1), epoch=1), again(13, 2)],
    ),
    "left out by a reset to what comes next": (
        InOrder,
        [
            sent(0, 1, label=RED),
            acknowledged(1, 1),
            *reset(2, None),
            sent(8, 2, label=RED, due_in_ms=10),
            acknowledged(9, 2, due_in_ms=10),
            again(10, 2, due_in_ms=10),
        ],
    ),
    "due before the time of a reset": (
        InOrder,
        [
            *reset(0, 100),
            sent(6, 1, label=RED),
            sent(6, 2, label=RED, due_in_ms=200),
            acknowledged(7, 1),
            acknowledged(8, 2, due_in_ms=200),
            again(200, 2, due_in_ms=200),
        ],
    ),
    "a message of a message group, after a reset": (
        ResetsHold,
        [BEGAN, sent(0, 1, label=RED), acknowledged(1, 1), delivered(2, 1), *reset(3, 0), again(9, 1)],
    ),
    "a nack before a reset to what comes next": (RetriesCome, [*NACKED[:3], *reset(3, None), NACKED[3]]),
    "after a reset, sooner than the nack of before had asked": (RetriesCome, [*NACKED, *reset(5, 0), again(11, 1)]),
    "again and again after a reset, sooner than that": (
        RetriesCome,
        [*NACKED, *reset(5, 0), again(11, 1), again(12, 1, attempt=2)],
    ),
    "dead, and brought back by a reset": (RetriesCome, [*DEAD, *reset(5, 0), again(11, 1)]),
    "the retry of a message that has died since a reset": (
        RetriesCome,
        [
            *NACKED,
            *reset(5, 0),
            again(11, 1),
            *answered(12, "DEAD", epoch=1),
            again(1_003, 1, attempt=2),
        ],
    ),
}

BAD |= {
    "two of a message group, after a reset": (InOrder, [*TWO_IN_LINE, *reset(5, 0), again(11, 1), again(12, 2)]),
    "settled before a reset only": (
        InOrder,
        [*TWO_IN_LINE, *reset(5, 0), again(11, 1), settled(12, 1), again(13, 2)],
    ),
    "one passed over that was acknowledged since a reset": (
        InOrder,
        [*reset(0, None), sent(6, 1, 2, label=RED), acknowledged(7, 1, 2), again(9, 2)],
    ),
    "a message of a message group, not after a reset": (
        ResetsHold,
        [BEGAN, sent(0, 1, label=RED, due_in_ms=1_500), acknowledged(1, 1, due_in_ms=1_500), *reset(2_000, 0)],
    ),
    "nacked after a reset, and never again": (
        RetriesCome,
        [BEGAN, *reset(0, None), again(9, 1), *answered(10, "RETRY", delay_ms=1_000, epoch=1)],
    ),
    "dead since a reset, and there again": (
        RetriesCome,
        [BEGAN, *reset(0, None), again(9, 1), *answered(10, "DEAD", epoch=1), again(20, 1, attempt=2)],
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_histories_pass(name: str) -> None:
    """What the promises allow is not called broken."""
    judge(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_bad_histories_are_caught(name: str) -> None:
    """A history that breaks a promise is found out."""
    is_caught(BAD[name])
