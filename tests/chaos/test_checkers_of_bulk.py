"""Checkers of staged publication, bulk load, resets and lateness without faults: each catches hand-made bad histories
and lets their good twins pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.chaos.judging import Case, is_caught, judge
from tests.chaos.test_checkers_of_groups import (
    BEGAN,
    ID,
    SPORT,
    WALL_MS,
    acknowledged,
    came_and_due,
    delivered,
    reset,
    sent,
)
from tickwheel.chaos.sim.checkers.bulk import LoadsOnce, WritesOnce
from tickwheel.chaos.sim.checkers.p1_groups import ResetsHold
from tickwheel.chaos.sim.checkers.p4_soon import Soon
from tickwheel.chaos.sim.history import Healed, Record, RunBegan
from tickwheel.chaos.sim.history_bulk import (
    AbortAnswered,
    BlockStaged,
    CommitAnswered,
    CommitAsked,
    LoadAnswered,
    TakeOverAsked,
    WriteSeen,
)
from tickwheel.chaos.sim.history_messages import (
    CancelAnswered,
    CancelSent,
    CreditGiven,
    Delivered,
    RescheduleSent,
    Row,
    ScheduleSent,
    SessionOpened,
    SessionOver,
    Settled,
    SettleSent,
)
from tickwheel.chaos.sim.history_operators import PauseAnswered, PauseAsked, ResetAnswered, ResetAsked
from tickwheel.chaos.sim.world import HOUR_MS, MS

# -- staged publication

FIRST, TWIN = 11, 12
"""Attempts of one partition; what the first stages is 1 and 2, the second 3 and 4."""


def staged(attempt: int, *uids: int, run: str = "r1", at_ms: int = 0) -> list[Record]:
    rows = tuple(Row(uid, "t", WALL_MS + 500, None) for uid in uids)
    return [
        ScheduleSent(at_ms * MS, f"{run}/{attempt}", 0, "", rows),
        BlockStaged(at_ms * MS, "w", 0, run, attempt, uids),
    ]


def asked(at_ms: int, *attempts: int, run: str = "r1") -> CommitAsked:
    return CommitAsked(at_ms * MS, "w", 0, run, attempts)


def answered(at_ms: int, state: str = "STAGED_PUBLISHING", run: str = "r1") -> CommitAnswered:
    return CommitAnswered(at_ms * MS, "w", 0, run, state)


def aborted(at_ms: int, state: str = "STAGED_NONE", run: str = "r1") -> AbortAnswered:
    return AbortAnswered(at_ms * MS, "w", 0, run, state, (at_ms - 5) * MS)


def published(at_ms: int, rows: int, published_rows: int | None = None) -> WriteSeen:
    counts = (rows, rows if published_rows is None else published_rows)
    return WriteSeen(at_ms * MS, "w", 0, "STAGED_PUBLISHED", *counts, 0)


def to(groups: Sequence[str], *uids: int, at_ms: int = 600) -> list[Record]:
    return [replace(delivered(at_ms, uid, due_in_ms=500), group=group) for group in groups for uid in uids]


BOTH = ("ledger", "search")
STAGED: list[Record] = [BEGAN, *staged(FIRST, 1, 2), *staged(TWIN, 3, 4)]
COMMITTED: list[Record] = [*STAGED, asked(10, FIRST), answered(20)]
OTHER_RUN: list[Record] = [*staged(21, 5, 6, run="r2")]

GOOD: dict[str, Case] = {
    "the winners come to both groups": (WritesOnce, [*COMMITTED, published(30, 2), *to(BOTH, 1, 2)]),
    "before the commit is answered": (WritesOnce, [*STAGED, asked(10, FIRST), *to(BOTH, 1, 2), answered(700)]),
    "the other of two drivers": (
        WritesOnce,
        [*STAGED, *OTHER_RUN, asked(10, FIRST), asked(11, 21, run="r2"), answered(20), *to(BOTH, 5, 6)],
    ),
    "refused before the other was carried out, and answered later": (
        WritesOnce,
        [
            *[*STAGED, *OTHER_RUN, aborted(5, run="r2"), asked(10, FIRST), asked(11, 21, run="r2"), answered(20)],
            *[answered(21, "REFUSED", run="r2"), *to(BOTH, 1, 2)],
        ],
    ),
    "never committed": (WritesOnce, STAGED),
    "aborted": (WritesOnce, [*STAGED, aborted(20), asked(30, FIRST), answered(40, "REFUSED")]),
    "aborted too late": (WritesOnce, [*COMMITTED, aborted(40, "STAGED_PUBLISHED"), *to(BOTH, 1, 2)]),
    "committed again": (WritesOnce, [*COMMITTED, answered(40, "STAGED_PUBLISHED"), *to(BOTH, 1, 2)]),
    "not due yet": (
        WritesOnce,
        [
            BEGAN,
            ScheduleSent(0, "r1/11", 0, "", (Row(1, "t", WALL_MS + 900_000, None),)),
            BlockStaged(0, "w", 0, "r1", FIRST, (1,)),
            asked(10, FIRST),
            answered(20),
        ],
    ),
}

BAD: dict[str, Case] = {
    "one of the winners does not come": (WritesOnce, [*COMMITTED, *to(BOTH, 1)]),
    "they come to one group only": (WritesOnce, [*COMMITTED, *to(("ledger",), 1, 2)]),
    "a losing attempt comes": (WritesOnce, [*COMMITTED, *to(BOTH, 3)]),
    "staged and not committed": (WritesOnce, [*STAGED, *to(BOTH, 1)]),
    "the attempts of two commits come": (
        WritesOnce,
        [*STAGED, *OTHER_RUN, asked(10, FIRST), asked(11, 21, run="r2"), answered(20), *to(BOTH, 1, 5)],
    ),
    "a run that came after the commit was certain": (
        WritesOnce,
        [*COMMITTED, *staged(21, 5, 6, run="r2"), asked(30, 21, run="r2"), *to(BOTH, 5, 6)],
    ),
    "an aborted run comes": (WritesOnce, [*STAGED, asked(10, FIRST), aborted(20), *to(BOTH, 1)]),
    "a run that has come is aborted": (WritesOnce, [*STAGED, asked(10, FIRST), *to(BOTH, 1), aborted(700)]),
    "the commit of an aborted run counts": (WritesOnce, [*STAGED, aborted(20), asked(30, FIRST), answered(40)]),
    "an abort undoes a commit": (WritesOnce, [*COMMITTED, aborted(40, "STAGED_OPEN")]),
    "a refused commit comes": (WritesOnce, [*STAGED, asked(10, FIRST), answered(20, "REFUSED"), *to(BOTH, 1)]),
    "a commit is forgotten where another run asks": (
        WritesOnce,
        [*COMMITTED, *OTHER_RUN, asked(30, 21, run="r2"), answered(40, "REFUSED", run="r2"), *to(BOTH, 1, 2)],
    ),
    "a commit is forgotten": (WritesOnce, [*COMMITTED, answered(40, "REFUSED"), *to(BOTH, 1, 2)]),
    "published under two ids": (
        WritesOnce,
        [*COMMITTED, *to(BOTH, 1, 2), replace(delivered(700, 1, due_in_ms=500), group="search", id=ID + 99)],
    ),
    "rows are left out": (WritesOnce, [*COMMITTED, published(30, 2, 1), *to(BOTH, 1, 2)]),
    "more rows than were named": (WritesOnce, [*COMMITTED, published(30, 4), *to(BOTH, 1, 2)]),
}

# -- bundles

ROWS = tuple(Row(uid, "t", WALL_MS + 500, None) for uid in (1, 2))
ASKED: list[Record] = [BEGAN, ScheduleSent(0, "l", 1, "", ROWS), TakeOverAsked(0, "l", 1, 1, (1, 2))]
LOADED: list[Record] = [*ASKED, LoadAnswered(20 * MS, "l", 1, 1, 2)]
SHELVES = ("shelves", "mirrors")


def cancel(outcome: str) -> list[Record]:
    return [CancelSent(30 * MS, 2, ID + 2), CancelAnswered(40 * MS, 2, ID + 2, outcome)]


GONE = CancelAnswered((9 * HOUR_MS - WALL_MS) * MS, 2, ID + 2, "NOT_FOUND")
"""To a cancel of message 2, a whole hour after its own, the seventh."""

GOOD |= {
    "removed with its hour after it came": (LoadsOnce, [*LOADED, *to(SHELVES, 1, 2), GONE]),
    "a bundle comes": (LoadsOnce, [*LOADED, *to(SHELVES, 1, 2)]),
    "before the answer": (LoadsOnce, [*ASKED, *to(SHELVES, 1, 2), LoadAnswered(700 * MS, "l", 1, 1, 2)]),
    "asked for and never answered": (LoadsOnce, ASKED),
    "but for what was cancelled": (LoadsOnce, [*LOADED, *cancel("CANCELLED"), *to(SHELVES, 1)]),
    "cancelled too late": (LoadsOnce, [*LOADED, *cancel("ALREADY_DISPATCHED"), *to(SHELVES, 1, 2)]),
    "the repeat of a load": (LoadsOnce, [*LOADED, LoadAnswered(50 * MS, "l", 1, 1, 2), *to(SHELVES, 1, 2)]),
}

BAD |= {
    "a loaded message does not come": (LoadsOnce, [*LOADED, *to(SHELVES, 1)]),
    "to one group only": (LoadsOnce, [*LOADED, *to(("shelves",), 1, 2)]),
    "though its cancel was too late": (LoadsOnce, [*LOADED, *cancel("ALREADY_DISPATCHED"), *to(SHELVES, 1)]),
    "loaded twice": (
        LoadsOnce,
        [*LOADED, *to(SHELVES, 1, 2), replace(delivered(700, 1, due_in_ms=500), group="shelves", id=ID + 99)],
    ),
    "removed though one group lacks it": (LoadsOnce, [*LOADED, *to(SHELVES, 1), *to(("shelves",), 2), GONE]),
    "a loaded message is not found": (LoadsOnce, [*LOADED, *cancel("NOT_FOUND"), *to(SHELVES, 1, 2)]),
    "more messages than were in it": (LoadsOnce, [*ASKED, LoadAnswered(20 * MS, "l", 1, 1, 3)]),
    "more bundles than were asked for": (LoadsOnce, [*ASKED, LoadAnswered(20 * MS, "l", 1, 2, 4)]),
    "not taken over though it is said": (LoadsOnce, [*ASKED, LoadAnswered(20 * MS, "l", 1, 0, 0)]),
}

# -- resets, from the first word to the answer

CAME_LATE = came_and_due(3_000)
"""Message 1, due and delivered 3 s after the start."""


def begun(at_ms: int, from_in_ms: int | None) -> ResetAsked:
    return ResetAsked(at_ms * MS, "g", -1 if from_in_ms is None else WALL_MS + from_in_ms, "t")


def ended(at_ms: int, from_in_ms: int | None) -> ResetAnswered:
    return ResetAnswered(at_ms * MS, "g", -1 if from_in_ms is None else WALL_MS + from_in_ms, "t")


def again(at_ms: int, due_in_ms: int = 3_000, attempt: int = 1) -> Delivered:
    return delivered(at_ms, 1, due_in_ms=due_in_ms, attempt=attempt)


def epoch_settled(sent_ms: int, epoch: int) -> list[Record]:
    """Message 1 is settled under the epoch that its delivery named; the receipt says that it counts."""
    return [
        SettleSent(sent_ms * MS, "g", ID + 1, 1, 1, "ACK", epoch=epoch),
        Settled((sent_ms + 300) * MS, "g", ID + 1, 1, 1, "ACK", epoch=epoch),
    ]


EPOCH_AGAIN: list[Record] = [*CAME_LATE, *reset(4_000, 1_500), replace(again(4_100), epoch=1)]
"""Message 1 came, and came again after a reset."""

TWO_CAME: list[Record] = [
    *CAME_LATE,
    sent(3_100, 2, label=SPORT, due_in_ms=6_000),
    acknowledged(3_101, 2, due_in_ms=6_000),
    delivered(6_000, 2, due_in_ms=6_000),
]

GOOD |= {
    "carried out before the answer": (
        ResetsHold,
        [*CAME_LATE, begun(4_000, 1_500), again(4_100), ended(4_200, 1_500), again(4_300)],
    ),
    "not carried out yet": (ResetsHold, [*CAME_LATE, begun(4_000, 5_000), again(4_100), ended(4_200, 5_000)]),
    "by the old place, then by the new one": (
        ResetsHold,
        [
            *TWO_CAME,
            *reset(7_000, 5_500),
            delivered(7_050, 2, due_in_ms=6_000),
            begun(7_100, 2_000),
            delivered(7_110, 2, due_in_ms=6_000),
            again(7_120),
            ended(7_130, 2_000),
            again(7_140),
            delivered(7_150, 2, due_in_ms=6_000),
        ],
    ),
    "a retry of before": (ResetsHold, [*CAME_LATE, *reset(4_000, 3_900), again(4_100, attempt=2)]),
    "in the tick of the new place": (ResetsHold, [*CAME_LATE, *reset(4_000, 3_400), again(4_100)]),
    "not due when the answer came": (
        ResetsHold,
        [
            *CAME_LATE,
            sent(3_100, 2, label=SPORT, due_in_ms=90_000),
            acknowledged(3_101, 2, due_in_ms=90_000),
            *reset(4_000, 3_900),
        ],
    ),
    "from the beginning": (ResetsHold, [*CAME_LATE, *reset(4_000, -WALL_MS), again(4_100)]),
    "settled as it came again": (ResetsHold, [*EPOCH_AGAIN, *epoch_settled(4_200, 1)]),
    "settled before it came again, by the late answer": (
        ResetsHold,
        sorted([*EPOCH_AGAIN, *epoch_settled(3_900, 0)], key=lambda record: record.at_ns),
    ),
    "what comes next after a reset to it": (
        ResetsHold,
        [*CAME_LATE, *reset(4_000, None), sent(4_100, 2, label=SPORT), delivered(4_200, 2)],
    ),
}

BAD |= {
    "by neither place": (
        ResetsHold,
        [*came_and_due(500), *reset(4_000, 3_900), begun(4_100, 5_000), again(4_150, due_in_ms=500)],
    ),
    "by the old place after the new one": (
        ResetsHold,
        [
            *TWO_CAME,
            *reset(7_000, None),
            begun(7_100, 5_500),
            delivered(7_110, 2, due_in_ms=6_000),
            again(7_120),
        ],
    ),
    "settled as it came before, though it came again": (ResetsHold, [*EPOCH_AGAIN, *epoch_settled(4_200, 0)]),
    "not from the beginning": (ResetsHold, [*CAME_LATE, *reset(4_000, -WALL_MS)]),
    "had come before two resets to what comes next": (
        ResetsHold,
        [*CAME_LATE, *reset(4_000, None), begun(4_100, None), again(4_150)],
    ),
}

# -- lateness without faults

CALM = RunBegan(0, WALL_MS, (), ("g",))
OPEN = SessionOpened(2_000 * MS, "g", 1, 1)
DUE: list[Record] = [sent(2_100, 1, label=SPORT, due_in_ms=3_000), acknowledged(2_101, 1, due_in_ms=3_000)]


def first(at_ms: int) -> Delivered:
    return delivered(at_ms, 1, due_in_ms=3_000)


def resets(*at_ms: int) -> list[Record]:
    """The group begins anew so often, each time answered at once."""
    kinds = (ResetAsked, ResetAnswered)
    return [kind(at * MS, "g", -1, "t") for at in at_ms for kind in kinds]


GOOD |= {
    "soon": (Soon, [CALM, OPEN, *DUE, first(3_400)]),
    "nobody was there": (Soon, [CALM, *DUE, replace(OPEN, at_ns=5_000 * MS), first(5_100)]),
    "whoever was there left": (Soon, [CALM, OPEN, SessionOver(3_100 * MS, "g", 1), *DUE, first(5_100)]),
    "nobody had credit": (
        Soon,
        [CALM, OPEN, *DUE, delivered(2_200, 9, session=1), CreditGiven(5_000 * MS, "g", 1, 1), first(5_100)],
    ),
    "the word of a session is late": (
        Soon,
        [CALM, *DUE, delivered(2_200, 9, session=1), OPEN, CreditGiven(5_000 * MS, "g", 1, 1), first(5_100)],
    ),
    "its topic was paused": (
        Soon,
        [
            CALM,
            OPEN,
            *DUE,
            PauseAsked(2_200 * MS, "topic", "t", True),
            PauseAsked(5_000 * MS, "topic", "t", False),
            PauseAnswered(5_010 * MS, "topic", "t", False),
            first(5_100),
        ],
    ),
    "a second reset brings what the first left out": (Soon, [CALM, OPEN, *DUE, *resets(2_500, 5_000), first(5_100)]),
    "it was to be moved": (Soon, [CALM, OPEN, *DUE, RescheduleSent(2_200 * MS, 1, ID + 1, 0), first(5_100)]),
    "there were faults": (Soon, [replace(CALM, faults=("kill",)), OPEN, *DUE, first(5_100)]),
    "others were in front of it in a small window": (
        Soon,
        [replace(CALM, window_messages=12), OPEN, *DUE, first(5_100)],
    ),
    "long healed, with others in front of it in a small window": (
        Soon,
        [replace(CALM, faults=("kill",), window_messages=12), Healed(0), OPEN, *DUE, first(9_100)],
    ),
}

BAD |= {
    "late though somebody had credit": (Soon, [CALM, OPEN, *DUE, first(3_600)]),
    "late since somebody had credit": (
        Soon,
        [CALM, OPEN, *DUE, delivered(2_200, 9, session=1), CreditGiven(5_000 * MS, "g", 1, 1), first(5_600)],
    ),
    "late since the reset": (Soon, [CALM, OPEN, *DUE, *resets(4_000), first(5_100)]),
    "late since the topic goes on": (
        Soon,
        [
            CALM,
            OPEN,
            *DUE,
            PauseAsked(2_200 * MS, "topic", "t", True),
            PauseAnswered(4_000 * MS, "topic", "t", False),
            first(5_100),
        ],
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
