"""What long runs save, and that short ones do not."""

from __future__ import annotations

import random

from tickwheel.chaos.sim.clients import PAUSE_NS_MOST, Wires
from tickwheel.chaos.sim.run import Cluster, simulate
from tickwheel.chaos.sim.setup import SimulationConfig
from tickwheel.chaos.sim.shape import SHARING_PERCENT, WRITERS, draw
from tickwheel.chaos.sim.world import SECOND, World

MEAN_NS = SECOND // 2
EDGE_NS = 2 * SECOND
"""Of a moment, before the end of the faults."""


def wires(seconds: int, **shape: int) -> Wires:
    """Of a run that nothing has happened in yet."""
    return Wires(Cluster(1, SimulationConfig(seconds=seconds, shape=tuple(shape.items()))))


def test_short_runs_are_dense_throughout() -> None:
    """Nothing of what makes long runs coarse is drawn for a run below 20 s."""
    for seed in range(20):
        shape = draw(World(seed), 19)
        assert (shape.thin, shape.sharing_percent, shape.rest_gap_us, shape.extra_stay) == (1, 100, 0, 1)


def test_kinds_of_clients_share_a_long_run() -> None:
    """Each kind that writes messages makes all clients pause longer."""
    for seed in range(20):
        shape = draw(World(seed), 60)
        took_part = sum(getattr(shape, name) for name in WRITERS)
        assert shape.sharing_percent == 100 + SHARING_PERCENT * took_part


def test_a_pause_that_reaches_over_the_end_of_the_faults() -> None:
    """Up to the end it is as long as the run is thin, and what is left passes as in a dense run."""
    run = wires(60, thin=20, sharing_percent=200)
    begun_ns = run.world.now_ns
    for seed in range(50):
        whole_ns = run.pause_ns(MEAN_NS, random.Random(seed))
        assert whole_ns <= 2 * PAUSE_NS_MOST
        run.world.now_ns = 62 * SECOND - EDGE_NS
        over_ns = run.pause_ns(MEAN_NS, random.Random(seed))
        run.world.now_ns = begun_ns
        expected_ns = whole_ns if whole_ns <= EDGE_NS else EDGE_NS + (whole_ns - EDGE_NS) // 40
        assert over_ns == expected_ns
        assert run.pause_ns(MEAN_NS, random.Random(seed), cheap=True) <= whole_ns // 2


def test_members_leave_long_runs_again() -> None:
    """Newcomers come, and for each that counts while there are too many somebody leaves."""
    counts = simulate(4, SimulationConfig(seconds=20, nodes=3, faults=("newcomer",))).counts
    assert counts["MemberRemoved"] > 0
    stay = simulate(4, SimulationConfig(seconds=20, nodes=3, faults=("newcomer",), shape=(("extra_stay", 1),))).counts
    assert stay.get("MemberRemoved", 0) == 0
