"""Marks and parts of the cold tier against plain dictionaries."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.node.state import cold
from tickwheel.node.state.cold import CANCELLED, LOADED, MOVED, NEVER_MS, ColdMarks, ColdTier, Mark
from tickwheel.node.state.cold_parts import CHUNK, cold_id, ids_of_rows, is_cold, place_of
from tickwheel.proto import cold_pb2

MARKS = st.one_of(
    st.none(),
    st.builds(Mark, st.just(CANCELLED), st.sampled_from([0, 5_000_000]), st.just(0)),
    st.builds(Mark, st.just(MOVED), st.integers(1, 20), st.just(0)),
    st.builds(Mark, st.just(LOADED), st.integers(1, 20), st.integers(1, 1 << 60)),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 3), st.integers(0, 9), MARKS),
        st.tuples(st.just("drop"), st.integers(1, 3), st.integers(1, 3), st.none()),
        st.tuples(st.just("fold"), st.integers(1, 3), st.integers(0, 9), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(1, 25), st.integers(1, 7))
def test_marks_are_what_was_put(steps: list[tuple[str, int, int, Mark | None]], below_ms: int, page: int) -> None:
    """However they are folded, kept or restored: else a cancelled message would come, or a moved one twice."""
    marks, model = ColdMarks(), dict[tuple[int, int], Mark]()
    for kind, part, value, mark in steps:
        if kind == "put":
            marks.put(part, value, mark)
            model.pop((part, value), None)
            if mark is not None:
                model[part, value] = mark
        elif kind == "drop":
            marks.keep(part, marks.of(part)["kind"] != value)
            model = {key: m for key, m in model.items() if key[0] != part or m.kind != value}
        else:
            marks.of(part)
    again = ColdMarks()
    for part, rows in marks.capture():
        again.load(part, np.frombuffer(rows.tobytes(), cold.MARKED))
    waiting = {cold_id(*key): m.due_ms for key, m in model.items() if m.kind == MOVED}
    for one in (marks, again):
        assert {(p, r): m for p in range(4) for r in range(10) if (m := one.get(p, r)) is not None} == model
        assert len(one) == len(model)
        for kind_ in (CANCELLED, MOVED, LOADED):
            assert one.count(kind_) == sum(m.kind == kind_ for m in model.values())
        assert one.next_moved_ms() == min(waiting.values(), default=NEVER_MS)
        for part in range(4):
            assert one.moved_of(part) == sum(key[0] == part and m.kind == MOVED for key, m in model.items())
        found: dict[int, int] = {}
        after, more = 0, True
        while more:
            ids, due, more = one.moved(after, below_ms, page)
            assert ids == sorted(ids) and len(ids) <= page and not found.keys() & set(ids)
            found |= dict(zip(ids, due, strict=True))
            after = ids[-1] if ids else after
        assert found == {number: due for number, due in waiting.items() if due < below_ms}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100)), min_size=1, max_size=6))
def test_a_row_of_a_part_is_found_in_its_chunk(chunks: list[tuple[int, int]]) -> None:
    """Else a cancel by a cold id would hit another message once its part is loaded."""
    rows, expected = np.zeros(len(chunks), CHUNK), []
    at = 0
    for place, (count, first_index) in enumerate(chunks):
        rows[place] = (at, 500_000 + place, first_index)
        expected += [(500_000 + place) << 32 | first_index + n for n in range(count)]
        at += count
    assert ids_of_rows(rows, np.arange(at)).tolist() == expected


@given(st.integers(1, (1 << 31) - 1), st.integers(0, (1 << 32) - 1))
def test_cold_ids_are_apart_from_all_others(part: int, row: int) -> None:
    """An id of an hour is never cold: hours of this and many thousand years end below."""
    number = cold_id(part, row)
    assert is_cold(number) and number < 1 << 64 and place_of(number) == (part, row)
    assert not is_cold((1 << 31) - 1 << 32 | 0xFFFF_FFFF)


def test_jobs_and_parts_outlive_a_checkpoint() -> None:
    """A restored state answers a repeated job with the same numbers, and has the same digest."""

    def request(name: str, days: list[int]) -> cold_pb2.RegisterColdRequest:
        due = np.array(days, "<i8") * 86_400_000
        columns = cold_pb2.ColdColumns(
            days=np.array(days, "<u4").tobytes(),
            rows=np.full(len(days), 7, "<u4").tobytes(),
            due_min_ms=due.tobytes(),
            due_max_ms=(due + 5).tobytes(),
            sha256=bytes(32 * len(days)),
        )
        return cold_pb2.RegisterColdRequest(job_id=name, sha256="a" * 64, parts=columns)

    tier = ColdTier()
    assert tier.digest() == b""
    for name, days in (("one", [21_000, 21_001]), ("two", [20_999])):
        job = tier.apply(cold_pb2.ColdCommand(register=request(name, days)))
        assert isinstance(job, cold_pb2.ColdJob) and not job.repeated
    tier.apply(cold_pb2.ColdCommand(mark=cold_pb2.ColdMark(id=cold_id(2, 3), due_ms=9)))
    tier.apply(cold_pb2.ColdCommand(mark=cold_pb2.ColdMark(id=cold_id(3, 6))))
    again = ColdTier()
    again.restore(cold_pb2.ColdSnapshot.FromString(tier.capture().message().SerializeToString()))
    assert again.digest() == tier.digest() != b""
    assert again.next_due_ms() == tier.next_due_ms() == 9
    assert (again.parts.waiting, again.parts.waiting_rows, again.parts.waiting_days()) == (3, 21, 3)
    repeated = again.apply(cold_pb2.ColdCommand(register=request("two", [20_999])))
    assert isinstance(repeated, cold_pb2.ColdJob) and (repeated.first_part, repeated.repeated) == (3, True)
    assert [part.job_id for part in again.list_parts(0, waiting_only=True).parts] == ["one", "one", "two"]
