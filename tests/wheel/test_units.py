"""Rows of units are picked, joined and cut like numpy does it, only faster."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tickwheel.wheel.buffer import EXTENT
from tickwheel.wheel.units import UNIT, join_units, picked, spans, starts_of

KINDS = st.sampled_from([UNIT, EXTENT])
KEYS = st.lists(st.integers(-3, 3), min_size=1, max_size=40).map(lambda keys: np.array(keys, np.int64))


def rows_of(kind: np.dtype, count: int, seed: int) -> np.ndarray:
    """Rows with bytes of which hardly two are alike."""
    return np.frombuffer(np.random.default_rng(seed).bytes(count * kind.itemsize), kind)


@given(KINDS, st.data())
def test_picked_rows_are_those_that_an_index_gives(kind: np.dtype, data: st.DataObject) -> None:
    """By a mask, and by numbers in any order, repeated ones included."""
    count = data.draw(st.integers(1, 30))
    rows = rows_of(kind, count, count)
    numbers = data.draw(arrays.arrays(np.int64, st.integers(0, 40), elements=st.integers(0, count - 1)))
    mask = data.draw(arrays.arrays(np.bool_, count))
    assert picked(rows, numbers).tobytes() == rows[numbers].tobytes()
    assert picked(rows, mask).tobytes() == rows[mask].tobytes()
    assert picked(rows[1:], mask[1:]).dtype == kind


@given(KINDS, st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_joined_rows_keep_their_fields_and_order(kind: np.dtype, counts: list[int]) -> None:
    """One array, several, and empty ones among them."""
    parts = [rows_of(kind, count, seed) for seed, count in enumerate(counts)]
    joined = join_units(parts)
    assert joined.dtype == kind
    assert joined.tobytes() == b"".join(part.tobytes() for part in parts)


@given(KEYS)
def test_starts_and_spans_are_what_differences_give(keys: np.ndarray) -> None:
    """Runs of equal keys, and how long each is."""
    starts = starts_of(keys)
    assert starts.tolist() == np.flatnonzero(np.diff(keys, prepend=keys[0] - 1)).tolist()
    assert spans(starts, len(keys)).tolist() == np.diff(starts, append=len(keys)).tolist()
