"""From counts to figures, and what the kernel's files say."""

from __future__ import annotations

import math
import os

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.bench import processor
from tickwheel.bench.figures import NEW_MASTER
from tickwheel.bench.load import Consumed, Scheduled
from tickwheel.bench.measure import counted, quantile, spread_out, steady_rate


@given(st.lists(st.integers(-50, 5_000), min_size=1), st.sampled_from([0.5, 0.99, 0.999, 1.0]))
def test_a_quantile_is_that_of_the_values(values: list[int], share: float) -> None:
    """The smallest value that this share does not exceed, as sorting finds it."""
    place = max(0, math.ceil(share * len(values)) - 1)
    assert quantile(counted(np.array(values)), share) == sorted(values)[place]


def test_of_nothing_there_is_no_quantile() -> None:
    assert math.isnan(quantile({}, 0.5))


def test_counts_are_in_the_order_of_numbers() -> None:
    """Not of their digits: JSON has strings as keys."""
    values, numbers = spread_out({"100": 1, "20": 2, "-3": 4})
    assert values.tolist() == [-3, 20, 100] and numbers.tolist() == [4, 2, 1]


def test_ramps_do_not_count_for_a_rate() -> None:
    """100 a second for ten seconds, with a slow first and last second: still 100."""
    numbers = np.array([50, *[100] * 10, 50], np.int64)
    assert steady_rate(np.arange(12.0), numbers) == 100.0


def test_a_moment_has_no_rate() -> None:
    """Nor has nothing."""
    assert steady_rate(np.array([3.0]), np.array([500], np.int64)) == 0.0
    assert steady_rate(np.zeros(0), np.zeros(0, np.int64)) == 0.0


def test_the_processor_time_of_a_process() -> None:
    """User, system and those of children; the name may hold anything."""
    ticks = processor.TICKS_PER_S
    stat = f"12 (a b) c) S 1 1 1 0 -1 0 0 0 0 0 {3 * ticks} {ticks} {ticks // 2} {ticks // 2} 20 0 1 0 9 9 9"
    assert processor.spent_s(stat) == 5.0
    assert processor.busy_s(f"cpu  {ticks} {ticks} {ticks} 77 88 {ticks} 0 0 5 5\ncpu0 1") == 4.0
    assert processor.switches("Name:\tx\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n") == 15


def test_this_process_takes_some() -> None:
    """And one that is gone has taken nothing."""
    before = processor.processor_s([os.getpid()])
    while processor.processor_s([os.getpid()]) <= before:
        pass
    assert processor.machine_s() > before
    assert processor.switched([os.getpid()]) > 0
    assert processor.processor_s([2**22 + 1]) == 0.0


def test_repeats_and_losses_are_counted_by_id() -> None:
    """A message that came twice does not make up for one that did not come."""
    consumed = Consumed(ids=[np.array([1, 2], np.uint64), np.array([2], np.uint64)])
    scheduled = Scheduled(messages=3, batches=[np.array([1, 2], np.uint64)], texts=["0-0-3"])
    assert consumed.repeats() == 1 and consumed.lost(scheduled) == 1


def test_a_new_master_is_marked() -> None:
    """Once, when its first batch comes."""
    consumed = Consumed(arrivals_s=[1.0, 2.0, 3.0], terms=[4, 6, 6])
    assert consumed.elections() == [(2.0, NEW_MASTER)]
