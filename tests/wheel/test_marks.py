"""Marks of cancelled units: what few look-ups say is what array work says."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.counting import calls_of
from tickwheel.wheel.marks import Marks, Moves
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


IDS = st.sets(st.tuples(st.integers(3, 9), st.integers(0, 40)).map(lambda key: key[0] << 32 | key[1]), max_size=120)


@given(st.lists(IDS, max_size=5), IDS, st.randoms(use_true_random=False))
def test_many_marks_at_once_are_those_of_one_after_the_other(
    parts: list[set[int]], asked: set[int], rng: Random
) -> None:
    """Hours with a few units and with many, hours with marks and without, in any order of the hours."""
    at_once, one_by_one, marked = Marks(), Marks(), set[int]()
    for part in parts:
        hours = rng.sample(range(3, 10), 7)
        ids = sorted(part - marked, key=lambda number: (hours.index(number >> 32), number))
        at_once.add_many(np.array(ids, np.uint64))
        for number in ids:
            one_by_one.add(number >> 32, number & 0xFFFF_FFFF)
        marked |= part
        wanted = sorted(asked, key=lambda number: (hours.index(number >> 32), number))
        assert at_once.which_of(np.array(wanted, np.uint64)).tolist() == [number in marked for number in wanted]
        assert at_once.count == one_by_one.count == len(marked)
        if rng.random() < 0.5:
            assert at_once.dump()[0].tolist() == one_by_one.dump()[0].tolist() == sorted(marked)
    assert at_once.dump()[0].tolist() == one_by_one.dump()[0].tolist() == sorted(marked)


def test_marks_over_many_hours_take_no_step_for_each() -> None:
    """Nor for each unit: a command may name thousands of both."""
    marks = Marks()
    hours = np.arange(1_000, dtype=np.uint64) << np.uint64(32)
    ids = (hours.repeat(10).reshape(-1, 10) | np.arange(10, dtype=np.uint64)).ravel()
    assert calls_of(lambda: marks.add_many(ids)) < 50
    assert marks.which_of(ids).all() and not marks.which_of(ids | np.uint64(16)).any()
    assert marks.dump()[0].tolist() == ids.tolist()


MOVE = st.tuples(st.integers(0, 60), st.booleans())


@given(st.lists(MOVE, max_size=60), st.integers(1, 7), st.integers(0, 80))
def test_moves_in_any_portion_are_a_chain(moves: list[tuple[int, bool]], portion: int, below: int) -> None:
    """One by one or many at once, folded, dumped and loaded: an id leads to the newest, as in a plain dictionary; hours
    that are gone take with them only what nobody can still ask for."""
    table, model = Moves(), dict[int, tuple[int, int]]()
    waiting: list[tuple[int, int, int]] = []
    next_id = 100

    def flush() -> None:
        if waiting:
            ids, new_ids, due = (np.array(column) for column in zip(*waiting, strict=True))
            table.add_many(ids.astype(np.uint64), new_ids.astype(np.uint64), due.astype(np.int64))
            waiting.clear()

    for start, alone in moves:
        newest = start
        while newest in model:
            newest = model[newest][0]
        if newest << 32 in {row[0] for row in waiting} or alone:
            flush()
        model[newest] = (next_id, next_id * 10)
        move = (newest << 32, next_id << 32, next_id * 10)
        if alone:
            table.add(*move)
        else:
            waiting.append(move)
            if len(waiting) >= portion:
                flush()
        next_id += 1
    flush()

    def check() -> None:
        ids = np.arange(next_id, dtype=np.uint64) << np.uint64(32)
        newest, due_ms = table.resolve_many(ids, np.full(next_id, -1, np.int64))
        for number in range(next_id):
            expected, due = number, -1
            while expected in model:
                expected, due = model[expected]
            assert (int(newest[number]) >> 32, int(due_ms[number])) == (expected, due)
            assert table.resolve(number << 32) == (expected << 32, None if due == -1 else due)

    check()
    copied = Moves()
    copied.load(table.dump())
    assert copied.dump().tobytes() == table.dump().tobytes()
    table.forget(below)
    newest_of = {}
    for number in model:
        at = number
        while at in model:
            at = model[at][0]
        newest_of[number] = at
    model = {number: to for number, to in model.items() if number >= below or newest_of[number] >= below}
    assert len(table) == len(model)
    check()
