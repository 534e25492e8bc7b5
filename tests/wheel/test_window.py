"""A tick with very many units leaves in order, and no step sorts more than a few milliseconds' worth of them."""

from __future__ import annotations

import numpy as np
import pytest

from tickwheel.wheel import window
from tickwheel.wheel.buffer import Block, join_blocks
from tickwheel.wheel.units import UNIT, CursorKey
from tickwheel.wheel.window import SORTED_UNITS_MAX, SecondWheel

SLOT_MS = 1_000
DISPATCHED_MAX = 8_192


def arrivals(units: int, batch: int, due_ms: int, width_ms: int) -> list[Block]:
    """Sorted batches with rising indexes, due within `width_ms` from `due_ms` on."""
    rng, blocks = np.random.default_rng(1), []
    for first in range(0, units, batch):
        rows = np.zeros(batch, UNIT)
        rows["index"] = np.arange(first, first + batch)
        blocks.append(Block(np.sort(due_ms + rng.integers(0, width_ms, batch)), rows))
    return blocks


@pytest.mark.parametrize("batch", [100, 7_500])
@pytest.mark.parametrize("width_ms", [1, 2, SLOT_MS])
@pytest.mark.parametrize("planned", [True, False])
def test_a_tick_with_many_units_is_sorted_in_turns(
    batch: int, width_ms: int, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[int] = []

    def join(blocks: list[Block]) -> Block:
        joined.append(sum(len(block.due_ms) for block in blocks) if len(blocks) > 1 else 0)
        return join_blocks(blocks)

    monkeypatch.setattr(window, "join_blocks", join)
    wheel, units = SecondWheel(SLOT_MS, 10 * SLOT_MS), 150_000
    blocks = arrivals(units, batch, 3 * SLOT_MS, width_ms)
    for block in blocks:
        wheel.insert(block)
    due_ms = np.concatenate([block.due_ms for block in blocks])
    wanted = np.argsort(due_ms, kind="stable")
    came: list[int] = []
    while wheel.units:
        # A slave learns the key from the log, a master plans it.
        last = int(wanted[min(len(came) + DISPATCHED_MAX, units) - 1])
        key: CursorKey | None = CursorKey(int(due_ms[last]), last + 1)
        if planned:
            assert wheel.next_due_ms(CursorKey(0, 0)) == due_ms[wanted[len(came)]]
            assert wheel.key_after(4 * SLOT_MS, DISPATCHED_MAX) == (key, min(DISPATCHED_MAX, units - len(came)))
        assert key is not None and wheel.count_below(key) == min(DISPATCHED_MAX, units - len(came))
        came += [index for block in wheel.take(key) for index in block.units["index"].tolist()]
    assert came == wanted.tolist()
    assert max(joined) <= 2 * SORTED_UNITS_MAX + DISPATCHED_MAX
