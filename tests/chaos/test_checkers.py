"""Each checker catches a hand-made bad history, and lets its good twin pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.judging import Case, is_caught, judge
from tickwheel.chaos.sim.checkers.p1_log import CommittedNeverLost
from tickwheel.chaos.sim.checkers.p1_no_loss import NoLoss, RetriesCome
from tickwheel.chaos.sim.checkers.p2_no_invention import NoInvention
from tickwheel.chaos.sim.checkers.p3_never_early import NeverEarly
from tickwheel.chaos.sim.checkers.p4_soon import Soon
from tickwheel.chaos.sim.checkers.p5_duplicates import FewDuplicates, LeasesWritten
from tickwheel.chaos.sim.checkers.p6_monotone import Monotone
from tickwheel.chaos.sim.checkers.p7_one_master import OneMaster
from tickwheel.chaos.sim.checkers.p8_same_state import SameState
from tickwheel.chaos.sim.checkers.p9_cancels import DefiniteCancel
from tickwheel.chaos.sim.checkers.p10_live import Bounded, Live
from tickwheel.chaos.sim.history import Drained, FaultBegan, FaultEnded, Healed, Record, RunBegan
from tickwheel.chaos.sim.history_log import Applied, ProposalEnded, Proposed, VoteSeen
from tickwheel.chaos.sim.history_machines import (
    Booted,
    CursorSeen,
    DigestSeen,
    LeaseSeen,
    LeasesGathered,
    LeasesKept,
    MemberRemoved,
    RoleSeen,
    SizesSeen,
    SyncedSeen,
    SyncHeard,
)
from tickwheel.chaos.sim.history_messages import (
    CancelAnswered,
    CancelSent,
    DeadReplayAsked,
    DelayCounted,
    Delivered,
    Looked,
    RescheduleAnswered,
    RescheduleSent,
    Row,
    ScheduleAcknowledged,
    ScheduleSent,
    SessionClosed,
    Settled,
    SettleSent,
)
from tickwheel.chaos.sim.world import MS, SECOND

WALL_MS = 1_000_000
ID = 7 << 32


def began(faults: tuple[str, ...] = ("kill",)) -> RunBegan:
    return RunBegan(0, WALL_MS, faults, ("g",))


def sent(at_ms: int, uid: int, due_in_ms: int, topic: str = "t") -> ScheduleSent:
    return ScheduleSent(at_ms * MS, "p", uid, "n1", (Row(uid, topic, WALL_MS + due_in_ms, None),))


def sent_with_delay(at_ms: int, uid: int, delay_ms: int) -> ScheduleSent:
    return ScheduleSent(at_ms * MS, "p", uid, "n1", (Row(uid, "t", None, delay_ms),))


def acknowledged(at_ms: int, uid: int, due_in_ms: int, id_: int = 0) -> ScheduleAcknowledged:
    return ScheduleAcknowledged(at_ms * MS, "p", uid, (uid,), (id_ or ID + uid,), (WALL_MS + due_in_ms,), False)


def nack(at_ms: int, delay_ms: int) -> SettleSent:
    return SettleSent(at_ms * MS, "g", ID + 1, 1, 1, "RETRY", delay_ms)


def delivered(
    at_ms: int,
    uid: int,
    *,
    node: str = "n1",
    term: int = 1,
    topic: str = "t",
    session: int = 1,
    id_: int = 0,
    attempt: int = 1,
    lease_ms: int = 1_000,
) -> Delivered:
    return Delivered(
        at_ms * MS, node, 1, term, "g", topic, session, id_ or ID + uid, uid, attempt, 0, WALL_MS + at_ms + lease_ms
    )


def lease(at_ms: int, node: str, term: int, until_ms: int) -> LeaseSeen:
    return LeaseSeen(at_ms * MS, node, 1, term, until_ms * MS)


ONE_MASTER_START: list[Record] = [RoleSeen(0, "n1", 1, "master", 1), lease(0, "n1", 1, 300)]

CURSOR = CursorSeen(0, "n1", 1, 1, WALL_MS + 9, 0, False)

NACKED_TWICE = [
    began(),
    delivered(1, 1),
    nack(2, 3_000),
    delivered(1_000, 1, node="n2", term=2),
    nack(1_010, 200),
    Settled(1_020 * MS, "g", ID + 1, 1, 1, "RETRY"),
]
"""By two masters, each with a pause of its own."""

GOOD: dict[str, Case] = {
    "delivered": (NoLoss, [began(), acknowledged(1, 1, 100), delivered(100, 1)]),
    "delivered before its receipt came": (NoLoss, [began(), delivered(2, 1), acknowledged(3, 1, 0)]),
    "cancelled": (
        NoLoss,
        [
            began(),
            acknowledged(1, 1, 100),
            CancelSent(2 * MS, 1, ID + 1),
            CancelAnswered(3 * MS, 1, ID + 1, "CANCELLED"),
        ],
    ),
    "not due": (NoLoss, [began(), acknowledged(1, 1, 10_000_000), Looked(50 * SECOND, 1, ID + 1, "PENDING")]),
    "moved beyond the end": (
        NoLoss,
        [
            began(),
            acknowledged(1, 1, 100),
            RescheduleSent(2 * MS, 1, ID + 1, WALL_MS + 10_000_000),
            RescheduleAnswered(3 * MS, 1, ID + 1, "RESCHEDULED", ID + 9, WALL_MS + 10_000_000),
        ],
    ),
    "log in order": (
        CommittedNeverLost,
        [
            Proposed(0, "n1", 5),
            Applied(1, "n1", 1, 1, 1, 0),
            Applied(1, "n1", 1, 2, 1, 5),
            ProposalEnded(2, "n1", 5, "COMMITTED", 2),
            Applied(3, "n2", 1, 1, 1, 0),
            Applied(3, "n2", 1, 2, 1, 5),
            Booted(4, "n2", 2),
            Applied(5, "n2", 2, 2, 1, 5),
        ],
    ),
    "known": (NoInvention, [sent(0, 1, 5), acknowledged(1, 1, 5), delivered(6, 1)]),
    "in time": (NeverEarly, [began(), sent(0, 1, 100), delivered(100, 1)]),
    "a delay counted by a clock in doubt": (
        NeverEarly,
        [began(), sent_with_delay(0, 1, 100), DelayCounted(MS, "n1", (1,), 20.0), delivered(81, 1)],
    ),
    "earlier by reschedule": (
        NeverEarly,
        [began(), sent(0, 1, 100), RescheduleSent(1, 1, ID + 1, WALL_MS + 50), delivered(50, 1)],
    ),
    "after a nack": (
        FewDuplicates,
        [began(), delivered(1, 1), SettleSent(2 * MS, "g", ID + 1, 1, 1, "RETRY"), delivered(3, 1, attempt=2)],
    ),
    "after a nack, and a late one of the attempt before": (
        FewDuplicates,
        [
            began(),
            delivered(1, 1),
            delivered(1_001, 1, attempt=2),
            SettleSent(1_002 * MS, "g", ID + 1, 1, 2, "RETRY"),
            SettleSent(1_003 * MS, "g", ID + 1, 1, 1, "RETRY"),
            delivered(1_004, 1, attempt=3),
        ],
    ),
    "after the pause that counts of two": (RetriesCome, [*NACKED_TWICE, delivered(1_215, 1, attempt=2)]),
    "leases written down every second": (
        LeasesWritten,
        [
            delivered(100, 1),
            LeasesGathered(1_000 * MS, "n1", 1),
            delivered(1_001, 2),
            LeasesKept(1_003 * MS, "n1", 1),
            LeasesGathered(2_000 * MS, "n1", 1),
            LeasesKept(2_004 * MS, "n1", 1),
            delivered(9_000, 3),
            Booted(9_500 * MS, "n1", 2),
            delivered(12_000, 4),
        ],
    ),
    "leases written late for a slow disk": (
        LeasesWritten,
        [
            delivered(100, 1),
            FaultBegan(1_000 * MS, "#1 slow-disk n1"),
            FaultEnded(2_000 * MS, "#1 slow-disk n1"),
            delivered(2_200, 2),
        ],
    ),
    "leases written late for a disk that hangs beyond the end of its fault": (
        LeasesWritten,
        [
            FaultBegan(1_000 * MS, "#1 hung-disk n1"),
            FaultEnded(1_500 * MS, "#1 hung-disk n1"),
            delivered(1_600, 1),
            delivered(3_800, 2),
        ],
    ),
    "after the lease": (FewDuplicates, [began(), delivered(1, 1), delivered(1_001, 1, attempt=2)]),
    "after its second replay": (
        FewDuplicates,
        [
            began(),
            delivered(1, 1),
            delivered(1_001, 1, attempt=2),
            DeadReplayAsked(1_003 * MS, "g", (1,)),
            SettleSent(1_003 * MS, "g", ID + 1, 1, 2, "RETRY"),
            delivered(1_005, 1),
            DeadReplayAsked(1_007 * MS, "g", (1,)),
            SettleSent(1_007 * MS, "g", ID + 1, 1, 1, "RETRY"),
            delivered(1_009, 1),
        ],
    ),
    "after its session": (
        FewDuplicates,
        [began(), delivered(1, 1), SessionClosed(2 * MS, "g", 1), delivered(3, 1, session=2, attempt=2)],
    ),
    "the master that gave it out was started anew since": (
        FewDuplicates,
        [
            began(),
            delivered(1, 1),
            SessionClosed(2 * MS, "g", 1, by_node=True),
            replace(delivered(500, 1, term=2), boot=2),
        ],
    ),
    "failover without a sync": (
        FewDuplicates,
        [
            began(),
            SyncHeard(0, "n2", 1, "n1", 1, 0),
            delivered(1, 1),
            delivered(500, 1, node="n2", term=2),
        ],
    ),
    "failover while the table was told": (
        FewDuplicates,
        [
            began(),
            delivered(1, 1),
            SyncHeard(50 * MS, "n2", 1, "n1", 1, 49 * MS, complete=False),
            delivered(500, 1, node="n2", term=2),
        ],
    ),
    "failover right after lost syncs": (
        FewDuplicates,
        [
            began(),
            SyncHeard(50 * MS, "n2", 1, "n1", 1, 49 * MS),
            delivered(70, 1),
            SyncHeard(500 * MS, "n2", 1, "n1", 1, 499 * MS, 449 * MS),
            delivered(510, 1, node="n2", term=2),
        ],
    ),
    "in a bundle, at the cursor": (
        Monotone,
        [CURSOR, replace(sent(1, 1, 5), node=""), replace(delivered(9, 1), due_ms=CURSOR.due_ms)],
    ),
    "cursor forward": (Monotone, [CursorSeen(0, "n1", 1, 1, 5, 0, False), CursorSeen(1, "n1", 2, 1, 3, 0, True)]),
    "one after the other": (
        OneMaster,
        [
            *ONE_MASTER_START,
            delivered(299, 1),
            RoleSeen(500 * MS, "n2", 1, "master", 2),
            lease(500, "n2", 2, 800),
            delivered(510, 1, node="n2", term=2),
        ],
    ),
    "equal": (SameState, [DigestSeen(0, "n1", 1, 5, b"a"), DigestSeen(1, "n2", 1, 5, b"a")]),
    "too late to cancel": (
        DefiniteCancel,
        [
            began(),
            acknowledged(0, 1, 5),
            CancelAnswered(10 * MS, 1, ID + 1, "ALREADY_DISPATCHED"),
            delivered(11, 1),
        ],
    ),
    "resumed when it was asked for": (
        Live,
        [began(), Healed(1 * SECOND), sent(8_000, 1, 1), acknowledged(8_100, 1, 1), Drained(9 * SECOND, "")],
    ),
    "resumed late, by loops that need a tenth of a second a turn": (
        Live,
        [
            replace(began(), loop_gap_ns=100 * MS),
            Healed(1 * SECOND),
            acknowledged(6_500, 1, 1),
            Drained(9 * SECOND, ""),
        ],
    ),
    "resumed": (Live, [began(), Healed(1 * SECOND), acknowledged(1_800, 1, 1), Drained(9 * SECOND, "")]),
    "cancelled after a delivery ahead of a lost dispatch": (
        DefiniteCancel,
        [
            RunBegan(0, WALL_MS, ("kill",), ("g",), push_first=True),
            delivered(6, 1),
            CancelAnswered(7 * MS, 1, ID + 1, "CANCELLED"),
        ],
    ),
    "within": (Bounded, [SizesSeen(0, "n1", (("intake_bytes", 5, 5),))]),
}

BAD: dict[str, Case] = {
    "before its pause is over": (
        RetriesCome,
        [*NACKED_TWICE[:3], Settled(3 * MS, "g", ID + 1, 1, 1, "RETRY"), delivered(1_500, 1, attempt=2)],
    ),
    "before either pause is over": (RetriesCome, [*NACKED_TWICE, delivered(1_100, 1, attempt=2)]),
    "never delivered": (NoLoss, [began(), acknowledged(1, 1, 100)]),
    "acknowledged and not found": (
        NoLoss,
        [began(), acknowledged(1, 1, 10_000_000), Looked(50 * SECOND, 1, ID + 1, "NOT_FOUND")],
    ),
    "cancelled by nobody": (
        NoLoss,
        [began(), acknowledged(1, 1, 10_000_000), Looked(50 * SECOND, 1, ID + 1, "MESSAGE_CANCELLED")],
    ),
    "moved and never delivered": (
        NoLoss,
        [
            began(),
            acknowledged(1, 1, 10_000_000),
            RescheduleSent(2 * MS, 1, ID + 1, WALL_MS + 50),
            RescheduleAnswered(3 * MS, 1, ID + 1, "RESCHEDULED", ID + 9, WALL_MS + 50),
        ],
    ),
    "log with two truths": (
        CommittedNeverLost,
        [
            Proposed(0, "n1", 5),
            Proposed(0, "n1", 6),
            Applied(1, "n1", 1, 1, 1, 5),
            Applied(2, "n2", 1, 1, 2, 6),
        ],
    ),
    "log with a gap": (CommittedNeverLost, [Applied(1, "n1", 1, 1, 1, 0), Applied(2, "n1", 1, 3, 1, 0)]),
    "log applies what it refused": (
        CommittedNeverLost,
        [Proposed(0, "n1", 5), ProposalEnded(1, "n1", 5, "NOT_MASTER", 0), Applied(2, "n1", 1, 1, 1, 5)],
    ),
    "log applies twice": (
        CommittedNeverLost,
        [Proposed(0, "n1", 5), Applied(1, "n1", 1, 1, 1, 5), Applied(2, "n1", 1, 2, 1, 5)],
    ),
    "log invents": (CommittedNeverLost, [Applied(1, "n1", 1, 1, 1, 5)]),
    "log forgets": (
        CommittedNeverLost,
        [
            Proposed(0, "n1", 5),
            Applied(1, "n2", 1, 1, 1, 0),
            Applied(1, "n1", 1, 1, 1, 0),
            Applied(1, "n1", 1, 2, 1, 5),
            ProposalEnded(2, "n1", 5, "COMMITTED", 2),
        ],
    ),
    "invented": (NoInvention, [delivered(6, 1)]),
    "wrong topic": (NoInvention, [sent(0, 1, 5), delivered(6, 1, topic="u")]),
    "an id for two": (
        NoInvention,
        [sent(0, 1, 5), sent(0, 2, 5), acknowledged(1, 1, 5, ID), acknowledged(1, 2, 5, ID)],
    ),
    "early": (NeverEarly, [began(), sent(0, 1, 100), delivered(99, 1)]),
    "early by more than the doubt of the clock that counted": (
        NeverEarly,
        [began(), sent_with_delay(0, 1, 100), DelayCounted(MS, "n1", (1,), 20.0), delivered(79, 1)],
    ),
    "the doubt of a delay does not excuse a due time": (
        NeverEarly,
        [began(), sent(0, 1, 100), DelayCounted(MS, "n1", (1,), 20.0), delivered(99, 1)],
    ),
    "early after a move": (
        NeverEarly,
        [
            began(),
            sent(0, 1, 100),
            RescheduleSent(1, 1, ID + 1, WALL_MS + 900),
            RescheduleAnswered(2, 1, ID + 1, "RESCHEDULED", ID + 9, WALL_MS + 900),
            delivered(100, 1),
        ],
    ),
    "a lease that is written down late": (LeasesWritten, [delivered(100, 1), delivered(2_101, 2)]),
    "a lease that was given while others were gathered": (
        LeasesWritten,
        [
            LeasesGathered(1_000 * MS, "n1", 1),
            delivered(1_001, 1),
            LeasesKept(1_003 * MS, "n1", 1),
            LeasesKept(3_100 * MS, "n1", 1),
        ],
    ),
    "a kill delays no file": (
        LeasesWritten,
        [delivered(100, 1), FaultBegan(1_000 * MS, "#1 kill n2"), delivered(2_200, 2)],
    ),
    "again in a held lease": (FewDuplicates, [began(), delivered(1, 1), delivered(3, 1)]),
    "again after its acknowledgement": (
        FewDuplicates,
        [began(), delivered(1, 1), Settled(2 * MS, "g", ID + 1, 1, 1, "ACK"), delivered(3, 1, node="n2", term=2)],
    ),
    "dispatched twice": (FewDuplicates, [began(), delivered(1, 1), delivered(2_000, 1, id_=ID + 99)]),
    "its session was closed by a node that was deposed": (
        FewDuplicates,
        [
            began(),
            delivered(1, 1),
            SyncHeard(50 * MS, "n2", 1, "n1", 1, 49 * MS),
            SessionClosed(60 * MS, "g", 1, by_node=True),
            SessionClosed(61 * MS, "g", 1),
            delivered(500, 1, session=2, node="n2", term=2),
        ],
    ),
    "by the master that gave it out, elected again": (
        FewDuplicates,
        [
            began(),
            delivered(1, 1),
            SessionClosed(60 * MS, "g", 1, by_node=True),
            delivered(500, 1, session=2, term=3),
        ],
    ),
    "lease was in a sync before the last master's": (
        FewDuplicates,
        [
            began(),
            delivered(1, 1),
            SyncHeard(50 * MS, "n2", 1, "n1", 1, 49 * MS),
            SyncHeard(90 * MS, "n2", 1, "n3", 2, 89 * MS),
            delivered(500, 1, node="n2", term=3),
        ],
    ),
    "lease was in syncs that were lost, and was told again": (
        FewDuplicates,
        [
            began(),
            SyncHeard(50 * MS, "n2", 1, "n1", 1, 49 * MS),
            delivered(70, 1),
            SyncHeard(500 * MS, "n2", 1, "n1", 1, 499 * MS, 449 * MS),
            *(SyncHeard(at * MS, "n2", 1, "n1", 1, (at - 1) * MS, (at - 51) * MS) for at in range(550, 850, 50)),
            delivered(860, 1, node="n2", term=2),
        ],
    ),
    "lease was in the sync": (
        FewDuplicates,
        [
            began(),
            delivered(1, 1),
            SyncHeard(50 * MS, "n2", 1, "n1", 1, 49 * MS),
            delivered(500, 1, node="n2", term=2),
        ],
    ),
    "other ids on repeat": (FewDuplicates, [began(), acknowledged(1, 1, 5, ID), acknowledged(2, 1, 5, ID + 50)]),
    "long healed and late": (Soon, [began(), Healed(0), acknowledged(0, 1, 5), delivered(5_006, 1)]),
    "cursor back": (Monotone, [CursorSeen(0, "n1", 1, 1, 5, 0, False), CursorSeen(1, "n1", 2, 1, 3, 0, False)]),
    "synced pair back": (Monotone, [SyncedSeen(0, "n1", 1, 1, 5, 3), SyncedSeen(1, "n1", 1, 1, 5, 2)]),
    "synced term back": (Monotone, [SyncedSeen(0, "n1", 1, 2, 5, 3), SyncedSeen(1, "n1", 1, 1, 6, 0)]),
    "behind the cursor": (
        Monotone,
        [CursorSeen(0, "n1", 1, 1, WALL_MS + 9, 0, False), sent(1, 1, 5), acknowledged(2, 1, 5)],
    ),
    "in a bundle, behind the cursor": (
        Monotone,
        [CURSOR, replace(sent(1, 1, 5), node=""), replace(delivered(9, 1), due_ms=CURSOR.due_ms - 1)],
    ),
    "a master that does not count": (
        OneMaster,
        [VoteSeen(0, "n4", 1, 1, "n4"), VoteSeen(0, "n2", 1, 1, "n4"), RoleSeen(1, "n4", 1, "master", 1, ("n1", "n2"))],
    ),
    "votes of learners": (
        OneMaster,
        [VoteSeen(0, "n1", 1, 1, "n1"), VoteSeen(0, "n4", 1, 1, "n1"), RoleSeen(1, "n1", 1, "master", 1, ("n1", "n2"))],
    ),
    "a lease of a removed member": (OneMaster, [*ONE_MASTER_START, MemberRemoved(1, "n1"), lease(2, "n1", 1, 300)]),
    "two masters": (OneMaster, [*ONE_MASTER_START, RoleSeen(1, "n2", 1, "master", 1)]),
    "two leases": (
        OneMaster,
        [*ONE_MASTER_START, RoleSeen(200 * MS, "n2", 1, "master", 2), lease(200, "n2", 2, 500)],
    ),
    "term falls": (OneMaster, [RoleSeen(0, "n1", 1, "slave", 3), RoleSeen(1, "n1", 2, "slave", 2)]),
    "delivers without lease": (OneMaster, [*ONE_MASTER_START, delivered(301, 1)]),
    "delivers deposed": (
        OneMaster,
        [*ONE_MASTER_START, lease(400, "n2", 2, 700), delivered(410, 1, node="n1", term=1)],
    ),
    "unequal": (SameState, [DigestSeen(0, "n1", 1, 5, b"a"), DigestSeen(1, "n2", 1, 5, b"b")]),
    "delivered after its cancel": (
        DefiniteCancel,
        [began(), CancelAnswered(1 * MS, 1, ID + 1, "CANCELLED"), delivered(6, 1)],
    ),
    "cancelled after delivery": (
        DefiniteCancel,
        [began(), delivered(6, 1), CancelAnswered(7 * MS, 1, ID + 1, "CANCELLED")],
    ),
    "cancel of nothing": (
        DefiniteCancel,
        [began(), acknowledged(0, 1, 5), CancelAnswered(1 * MS, 1, ID + 1, "NOT_FOUND")],
    ),
    "too late too early": (
        DefiniteCancel,
        [began(), acknowledged(0, 1, 5_000), CancelAnswered(1 * MS, 1, ID + 1, "ALREADY_DISPATCHED")],
    ),
    "two answers": (
        DefiniteCancel,
        [
            began(),
            CancelAnswered(1 * MS, 1, ID + 1, "CANCELLED"),
            CancelAnswered(2 * MS, 1, ID + 1, "ALREADY_DISPATCHED"),
        ],
    ),
    "resumed late, since it was asked for": (
        Live,
        [began(), Healed(1 * SECOND), sent(2_000, 1, 1), acknowledged(8_000, 1, 1), Drained(20 * SECOND, "")],
    ),
    "never resumed": (Live, [began(), Healed(1 * SECOND), Drained(9 * SECOND, "")]),
    "resumed later than slow loops need": (
        Live,
        [
            replace(began(), loop_gap_ns=100 * MS),
            Healed(1 * SECOND),
            acknowledged(7_500, 1, 1),
            Drained(9 * SECOND, ""),
        ],
    ),
    "resumed late": (Live, [began(), Healed(1 * SECOND), acknowledged(15_000, 1, 1), Drained(20 * SECOND, "")]),
    "not drained": (Live, [began(), Healed(1), acknowledged(2, 1, 1), Drained(9 * SECOND, "3 messages")]),
    "election without a fault": (
        Live,
        [began(()), RoleSeen(0, "n1", 1, "master", 1), RoleSeen(1, "n2", 1, "master", 2)],
    ),
    "above its limit": (Bounded, [SizesSeen(0, "n1", (("intake_bytes", 6, 5),))]),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_histories_pass(name: str) -> None:
    """What the promises allow is not called broken."""
    judge(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_bad_histories_are_caught(name: str) -> None:
    """A history that breaks a promise is found out."""
    is_caught(BAD[name])
