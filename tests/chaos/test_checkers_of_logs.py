"""What is judged at disks and wires: a bad history is caught, its good twin passes, and runs give the records."""

from __future__ import annotations

import pytest

from tests.chaos.judging import Case, is_caught, judge
from tickwheel.chaos.sim.checkers.p1_log import Durable, NoForeignCode
from tickwheel.chaos.sim.checkers.p7_one_master import OneMaster
from tickwheel.chaos.sim.checkers.p8_same_state import SameState
from tickwheel.chaos.sim.checkers.p10_live import RESTARTS, Bounded, Live
from tickwheel.chaos.sim.history import FaultBegan, FaultEnded, HandoverEnded
from tickwheel.chaos.sim.history_log import (
    AskedUnread,
    CommitSeen,
    CommittedCut,
    Recovered,
    SentAgain,
    TermIgnored,
    Unpickled,
    VoteSeen,
)
from tickwheel.chaos.sim.history_machines import ContentSeen, LeaseSeen, RoleSeen, Stopped
from tickwheel.chaos.sim.run import simulate
from tickwheel.chaos.sim.setup import Level, SimulationConfig
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.replication.guards import Guards

HANDOVER = "#1 handover n1"

GOOD: dict[str, Case] = {
    "on a majority": (Durable, [CommitSeen(0, "n1", 1, 1, 2, 3), CommitSeen(0, "n1", 2, 1, 3, 5)]),
    "starts with what it had": (Durable, [Recovered(0, "n1", 2, 7, 7)]),
    "votes once a term": (
        OneMaster,
        [VoteSeen(0, "n1", 1, 1, "n2"), VoteSeen(1, "n1", 2, 1, "n2"), VoteSeen(2, "n1", 2, 2, "n3")],
    ),
    "a lease that ends before the votes": (OneMaster, [LeaseSeen(0, "n1", 1, 1, 300, 400)]),
    "equal units": (SameState, [ContentSeen(0, "n1", 1, 5, 77), ContentSeen(1, "n2", 1, 5, 77)]),
    "stands when the lease is over": (
        Live,
        [LeaseSeen(0, "n1", 1, 1, SECOND), RoleSeen(SECOND, "n2", 1, "candidate", 2)],
    ),
    "stands beside a lease that has just come back": (
        Live,
        [
            LeaseSeen(0, "n1", 1, 1, SECOND),
            LeaseSeen(2 * SECOND, "n1", 1, 1, 3 * SECOND),
            RoleSeen(2 * SECOND + 100 * MS, "n2", 1, "candidate", 2),
        ],
    ),
    "stops for a reason": (
        Live,
        [Stopped(0, "n1", 1, "fatal", "disk", True), Stopped(0, "n2", 1, "fatal", f"{RESTARTS} of n1", False)],
    ),
    "fails to hand over amid faults": (
        Live,
        [
            FaultBegan(SECOND, "#0 kill n2"),
            FaultEnded(2 * SECOND, "#0 kill n2"),
            FaultBegan(4 * SECOND, HANDOVER),
            HandoverEnded(5 * SECOND, "n1", 4 * SECOND, False),
        ],
    ),
}

BAD: dict[str, Case] = {
    "on a minority": (Durable, [CommitSeen(0, "n1", 1, 1, 1, 3)]),
    "code of a peer": (NoForeignCode, [Unpickled(0, "n1", 1)]),
    "on half": (Durable, [CommitSeen(0, "n1", 1, 1, 2, 4)]),
    "cut": (Durable, [CommittedCut(0, "n1", 1, 4, 1)]),
    "forgotten": (Durable, [Recovered(0, "n1", 2, 6, 7)]),
    "votes twice": (OneMaster, [VoteSeen(0, "n1", 1, 1, "n2"), VoteSeen(1, "n1", 2, 1, "n3")]),
    "deaf to a higher term": (OneMaster, [TermIgnored(0, "n1", 1, 4, 5)]),
    "a lease beyond the votes": (OneMaster, [LeaseSeen(0, "n1", 1, 1, 500, 400)]),
    "unequal units": (SameState, [ContentSeen(0, "n1", 1, 5, 77), ContentSeen(1, "n2", 1, 5, 78)]),
    "stands against a lease": (
        Live,
        [LeaseSeen(0, "n1", 1, 1, SECOND), RoleSeen(900 * MS, "n2", 1, "candidate", 2)],
    ),
    "asks with unread input": (Live, [AskedUnread(0, "n1", 1, 3)]),
    "stops for none": (Live, [Stopped(0, "n1", 1, "fatal", "an impossible state", False)]),
    "fails to hand over without a fault": (
        Live,
        [FaultBegan(4 * SECOND, HANDOVER), HandoverEnded(5 * SECOND, "n1", 4 * SECOND, False)],
    ),
    "sent again": (Bounded, [SentAgain(0, "n1", "n2", 5, 9)]),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_histories_pass(name: str) -> None:
    """What the promises allow is not called broken."""
    judge(GOOD[name], settles=False)


@pytest.mark.parametrize("name", BAD)
def test_bad_histories_are_caught(name: str) -> None:
    """A history that breaks a promise is found out."""
    is_caught(BAD[name], settles=False)


def test_a_verdict_passes_through_what_catches_errors_in_a_node() -> None:
    """A promise that breaks while an entry is applied ends the run as such; the log, which turns what apply raises
    into a stop of the node, must not make a failure of ours of it and go on."""
    config = SimulationConfig(level=Level.LOG, seconds=2, faults=(), guards=Guards(durable_before_acknowledged=False))
    assert simulate(0, config).promise == Durable.promise


def test_all_that_is_judged_is_seen() -> None:
    """In a run with elections votes, leases, commits and starts are written down; else these checkers judge nothing."""
    result = simulate(2, SimulationConfig(level=Level.LOG, seconds=4, faults=("kill", "power"), nodes=3))
    assert not result.failed, result.broken
    seen = {kind.__name__ for kind in (VoteSeen, LeaseSeen, CommitSeen, Recovered)}
    assert seen <= set(result.counts)
