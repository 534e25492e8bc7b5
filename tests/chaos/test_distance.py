"""Nodes far from each other in the simulation."""

from __future__ import annotations

import pytest

from tickwheel.chaos.sim.faults import Injector
from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_log import ProposalEnded
from tickwheel.chaos.sim.history_machines import RoleSeen
from tickwheel.chaos.sim.run import Cluster
from tickwheel.chaos.sim.setup import Level, SimulationConfig
from tickwheel.chaos.sim.world import MS, SECOND

SECONDS = 6


@pytest.mark.parametrize(("there_ms", "seed"), [(50, 0), (75, 1), (100, 2), (125, 1)])
def test_a_master_is_elected_over_a_long_way(there_ms: int, seed: int) -> None:
    """From a tenth of a second there and back on, nobody ever was: each answer to the question before an election came
    after the next had been asked, and counted for nothing. And who is master stays it."""
    cluster = Cluster(seed, SimulationConfig(level=Level.LOG, nodes=3, seconds=SECONDS, faults=()))
    for link in cluster.fabric.links.values():
        link.extra_delay_ns += there_ms * MS
    masters: list[str] = []
    committed: list[float] = []

    def see(record: Record) -> None:
        match record:
            case RoleSeen(role="master"):
                masters.append(record.node)
            case ProposalEnded(outcome="COMMITTED"):
                committed.append(record.at_ns / SECOND)

    cluster.history.subscribe((RoleSeen, ProposalEnded), see)
    cluster.play(Injector(cluster, []))
    assert len(masters) == 1
    assert committed[0] < SECONDS / 2
