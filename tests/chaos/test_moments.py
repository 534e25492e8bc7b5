"""Moments at which two things of a node meet: the simulation comes to each of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tickwheel.chaos.sim.moments import (
    COPY_OF_LATER,
    COPY_RESUMED,
    FOUNDER_REFUSED,
    FOUNDERS_CONNECTED,
    MOMENTS,
    MOMENTS_OF_FAULTS,
)
from tickwheel.chaos.sim.mutation_table import FEW_CLIENTS
from tickwheel.chaos.sim.run import simulate
from tickwheel.chaos.sim.setup import RunResult, SimulationConfig

BUSY_BACKGROUND = (
    *FEW_CLIENTS,
    ("work_ms", 4_000),
    ("buffer_bytes", 4 << 10),
    ("preload_ms", 3_000),
    ("hours_kept", 0),
    ("checkpoint_ms", 700),
)
SEEDS = (45, *range(48))
"""The first is known to come to all."""
DEFAULT_SEEDS = (0, 19, *range(12))
RARE = {"an hour is removed while a merge writes to it"}
"""That the dice of a seed alone hardly ever lead to."""


def reached(result: RunResult) -> set[str]:
    """Moments of a run, which must be clean."""
    assert not result.failed, f"seed {result.seed}: {result.broken}\n{result.where}"
    return {what for what in (*MOMENTS, *MOMENTS_OF_FAULTS) if result.facts.get(f"moment: {what}")}


def until_all(wanted: set[str], config: SimulationConfig, seeds: Sequence[int]) -> set[str]:
    """Which of them were not reached by these seeds; as few are run as it takes."""
    for seed in seeds:
        wanted = wanted - reached(simulate(seed, config))
        if not wanted:
            break
    return wanted


def test_each_is_reached_where_the_background_is_busy() -> None:
    """Slow merges and loads, small buffers, short retention: before, no run began a checkpoint while a merge ran."""
    assert not until_all(set(MOMENTS), SimulationConfig(seconds=6, shape=BUSY_BACKGROUND), SEEDS)


@pytest.mark.parametrize("nodes", [3, 5])
def test_founders_that_were_away_meet_one_with_an_empty_disk(nodes: int) -> None:
    """It is refused by those that recorded its disk, and is connected with those of an earlier version: they found no
    cluster anew, and what the others had accepted comes."""
    config = SimulationConfig(seconds=5, nodes=nodes, faults=("stale-founders",), shape=FEW_CLIENTS)
    assert not until_all({FOUNDER_REFUSED, FOUNDERS_CONNECTED}, config, range(8))


def test_copies_of_checkpoints_break_and_resume() -> None:
    """With what earlier copies left, also from a later checkpoint of the same or another node. All end in one state."""
    shape = (*FEW_CLIENTS, ("journal_tail_bytes", 0))
    config = SimulationConfig(seconds=8, nodes=3, faults=("broken-copy",), shape=shape)
    assert not until_all({COPY_RESUMED, COPY_OF_LATER}, config, range(8))


def test_the_dice_reach_them_too() -> None:
    """Default runs come to nearly all of them by themselves."""
    assert not until_all(set(MOMENTS) - RARE, SimulationConfig(seconds=20), DEFAULT_SEEDS)
