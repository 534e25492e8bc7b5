"""The pace of a job over all its tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.node.core.bulk import staging
from tickwheel.node.core.bulk.staging import Paces
from tickwheel.node.core.world import SteadyMs


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.integers(1, 8_192), st.integers(0, 2_000)), min_size=1, max_size=50),
)
def test_no_more_rows_than_the_rate_allows(rows_per_s: int, asked: list[tuple[int, int]]) -> None:
    """Whoever asks when: what is sent by any moment is what the rate allows since the first, and the block under way;
    and nobody waits for longer than that takes."""
    paces, now_ms, sent, last_ms = Paces(), 1_000_000, 0, 0
    began_ms = now_ms
    for rows, later_ms in asked:
        now_ms += later_ms
        at_ms = now_ms + paces.reserve("j", rows, rows_per_s, SteadyMs(now_ms))
        assert at_ms >= last_ms - 1
        assert sent <= (at_ms - began_ms + 1) * rows_per_s / 1_000
        assert at_ms - now_ms <= sent * 1_000 / rows_per_s + 1
        sent, last_ms = sent + rows, at_ms


def test_jobs_have_their_own_pace_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is through is forgotten first, then the one that is soonest."""
    monkeypatch.setattr(staging, "PACED_JOBS_MAX", 2)
    paces, start = Paces(), SteadyMs(0)
    assert [paces.reserve("a", 10, 10, start), paces.reserve("b", 50, 10, start)] == [0, 0]
    assert [paces.reserve("a", 1, 10, start), paces.reserve("b", 1, 10, start)] == [1_000, 5_000]
    assert paces.reserve("c", 1, 10, start) == 0
    assert paces.reserve("b", 1, 10, start) == 5_100
    assert paces.reserve("a", 1, 10, start) == 0
