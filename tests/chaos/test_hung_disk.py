"""The directed scenario `hung-disk`: the master's fdatasync does not return, without an error; all slaves are well."""

from __future__ import annotations

import pytest

from tickwheel.chaos.sim.fault import PlannedFault
from tickwheel.chaos.sim.faults import MASTER, Injector
from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_log import ProposalEnded
from tickwheel.chaos.sim.history_machines import RoleSeen
from tickwheel.chaos.sim.history_messages import ScheduleAcknowledged
from tickwheel.chaos.sim.run import Cluster
from tickwheel.chaos.sim.setup import Level, SimulationConfig
from tickwheel.chaos.sim.world import SECOND
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.stable_storage import StableStorage

HANGS_AT_S, HANGS_FOR_S = 2, 6
COARSE = (("loop_gap_us", 10_000), ("sync_period_ms", 50), ("log_pause_ms", 40))
CHANGED_S = HANGS_AT_S + RaftConfig().fsync_hang_ms / 1_000 + 2.0
"""By then somebody else leads: P10's second or two after the disk counts as hanging."""


def play(level: Level, seed: int) -> tuple[list[tuple[float, str]], list[float]]:
    """Who became master when, and when something was accepted, of a run in which the master's disk hangs once."""
    cluster = Cluster(seed, SimulationConfig(level=level, nodes=3, seconds=6, faults=(), shape=COARSE))
    masters: list[tuple[float, str]] = []
    accepted: list[float] = []

    def see(record: Record) -> None:
        at_s = record.at_ns / SECOND
        match record:
            case RoleSeen(role="master"):
                masters.append((at_s, record.node))
            case ProposalEnded(outcome="COMMITTED") | ScheduleAcknowledged():
                accepted.append(at_s)

    cluster.history.subscribe((RoleSeen, ProposalEnded, ScheduleAcknowledged), see)
    hangs = PlannedFault(0, "hung-disk", HANGS_AT_S * SECOND, HANGS_FOR_S * SECOND, MASTER, 0)
    injector = Injector(cluster, [hangs])
    cluster.play(injector)
    assert injector.tallies["hung-disk"].effective == 1
    return masters, accepted


@pytest.mark.parametrize(("level", "seed"), [(Level.LOG, 0), (Level.LOG, 1), (Level.NODE, 0)])
def test_a_master_whose_disk_hangs_steps_down(level: Level, seed: int) -> None:
    """P10: else it would hold its lease and commit nothing until the disk answers. Another one leads soon, things go on
    while the disk still hangs, and whoever has it does not lead meanwhile."""
    masters, accepted = play(level, seed)
    before = [name for at_s, name in masters if at_s < HANGS_AT_S]
    during = [(at_s, name) for at_s, name in masters if HANGS_AT_S <= at_s < HANGS_AT_S + HANGS_FOR_S]
    assert during and during[0][0] < CHANGED_S
    assert all(name != before[-1] for _, name in during)
    seconds = [CHANGED_S, CHANGED_S + 1.0]
    assert all(any(begin_s <= at_s < begin_s + 1.0 for at_s in accepted) for begin_s in seconds)


def test_without_it_nothing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scenario is for: a master that does not notice commits nothing for as long as its disk hangs."""
    monkeypatch.setattr(StableStorage, "hangs", lambda self, now_ns: False)
    masters, accepted = play(Level.LOG, 0)
    assert not [at_s for at_s, _ in masters if HANGS_AT_S <= at_s < HANGS_AT_S + HANGS_FOR_S]
    assert not [at_s for at_s in accepted if HANGS_AT_S + 0.5 < at_s < HANGS_AT_S + HANGS_FOR_S]
