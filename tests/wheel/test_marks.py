"""Marks of cancelled units: what few look-ups say is what array work says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.wheel.marks import Marks
from tickwheel.wheel.units import HOUR_MS, UNIT

KEYS = st.tuples(st.integers(5, 7), st.integers(0, 30))


@given(st.sets(KEYS, max_size=20), st.lists(KEYS, max_size=40))
def test_few_units_and_many_get_the_same_answer(marked: set[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    """Up to some number units are looked up one by one, beyond it by array functions; a dispatch of either size
    passes exactly the units that were cancelled."""
    marks = Marks()
    for hour, index in sorted(marked):
        marks.add(hour, index)
    units = np.zeros(len(asked), UNIT)
    asked = sorted(asked)  # in order of their hours, as a dispatch has them
    units["due_ms"] = [hour * HOUR_MS + 17 for hour, _ in asked]
    units["index"] = [index for _, index in asked]
    expected = [key in marked for key in asked]
    assert marks.marked(units).tolist() == expected
    assert [bool(marks.marked(units[at : at + 1])[0]) for at in range(len(asked))] == expected
