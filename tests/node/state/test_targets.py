"""Which positions are for one group alone: what is found, in memory and in files."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tickwheel.node.state import sequence, targets
from tickwheel.node.state.sequence import Sequence
from tickwheel.node.state.targets import TARGET, Targets
from tickwheel.storage.blocks import BLOCK_BYTES
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.wheel.units import UNIT


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_any_stretch_are_found_wherever_they_lie(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most rows have left the memory; heads are dropped in between."""
    monkeypatch.setattr(sequence, "KEEP_BYTES", 300)
    monkeypatch.setattr(sequence, "PIECE_BYTES", 2_000)
    monkeypatch.setattr(sequence, "CAPACITY_LEAST", 4)
    monkeypatch.setattr(sequence, "SEGMENT_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(targets, "CACHE_ROWS", 4)
    monkeypatch.setattr(targets, "CACHE_PIECES_MAX", 2)
    rng = Random(seed)
    disk = SimulatedDisk(Random(seed))
    disk.make_dir("d")
    made = Targets(Sequence(disk, "d/t", TARGET))
    there: list[int] = []
    end = dropped = 0
    beside_memory = 0
    for _ in range(60):
        positions = sorted(rng.sample(range(end, end + 300), rng.randrange(1, 60)))
        end = positions[-1] + 1
        units = np.zeros(len(positions), UNIT)
        units["target_group"] = 1 + np.array(positions) % 3
        made.append(np.array(positions), units)
        there += positions
        if rng.random() < 0.1:
            dropped = rng.randrange(dropped, end)
            made.drop_below(dropped)
            there = [position for position in there if position >= dropped]
        for _ in range(5):
            first = rng.randrange(dropped, end + 2)
            last = rng.randrange(first, end + 5)
            found = made.between(first, last)
            assert found["position"].tolist() == [position for position in there if first <= position < last]
            assert found["group"].tolist() == [1 + position % 3 for position in found["position"].tolist()]
            beside_memory += len(found) > 0 and int(found["position"][0]) < int(made.rows.held()[1]["position"][0])
    assert beside_memory > 20, "the test never looked into the files"
