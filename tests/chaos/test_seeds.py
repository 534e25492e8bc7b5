"""Seeds of the simulation: every fault at once, every promise judged after each step.

A failing seed prints the command that replays it.
"""

from __future__ import annotations

import pytest

from tickwheel.chaos.sim.run import simulate
from tickwheel.chaos.sim.setup import Level, SimulationConfig


def verdict(seed: int, config: SimulationConfig) -> None:
    result = simulate(seed, config)
    command = (
        f"tickwheel chaos sim --level {config.level.value} --seeds 1 --from {seed} --seconds {config.seconds} --trace"
    )
    assert not result.failed, f"{result.broken}\n{result.where}\nreplay: {command}"


@pytest.mark.parametrize("seed", range(38))
def test_log_under_faults(seed: int) -> None:
    """The replicated log alone: committed entries stay, one master a term, it comes to rest after the heal."""
    verdict(seed, SimulationConfig(level=Level.LOG, seconds=3))


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 7, 8, 10, 11, 12, 13, 21, 30])
def test_node_under_faults(seed: int) -> None:
    """Whole nodes with clients that repeat, cancel, move, nack and die: no promise is broken."""
    verdict(seed, SimulationConfig(level=Level.NODE, seconds=2))


@pytest.mark.parametrize(("seed", "seconds"), [(13, 15), (38, 15), (26, 15)])
def test_log_seeds_that_failed_once(seed: int, seconds: int) -> None:
    """13: two answers sent the master to different places for ever. 38: a slave rebuilt from a checkpoint was not
    followed up. 26: a failed fdatasync, a restart and a power loss took entries that had counted as durable."""
    verdict(seed, SimulationConfig(level=Level.LOG, seconds=seconds))


@pytest.mark.parametrize(("seed", "seconds"), [(1, 6), (10, 10), (55, 6)])
def test_node_seeds_that_failed_once(seed: int, seconds: int) -> None:
    """1: a returned message was claimed twice. 10: what had been claimed before its return went out after it.
    55: a message went out while its return was on its way into the log."""
    verdict(seed, SimulationConfig(level=Level.NODE, seconds=seconds))
