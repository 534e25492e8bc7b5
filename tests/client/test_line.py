"""The line of waiting calls: every call leaves once, in order, in batches as large as the line allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.client.line import Line

UNDER_WAY_MAX, CALLS_MAX, BYTES_MAX = 2, 4, 10


class Call:
    """A call of some bytes, which may be given up."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.gone = False


def line_of() -> Line[Call]:
    return Line(
        lambda call: call.size,
        lambda call: call.gone,
        under_way_max=UNDER_WAY_MAX,
        calls_max=CALLS_MAX,
        bytes_max=BYTES_MAX,
    )


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 12)),
        st.tuples(st.sampled_from(["take", "end", "refuse", "leave"]), st.integers(0, 100)),
    ),
    max_size=60,
)


@given(STEPS)
def test_every_call_leaves_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    """Whoever leaves, and whatever is refused and travels apart: nothing is lost, doubled or overtaken, and no limit
    is passed."""
    line = line_of()
    added: list[Call] = []
    left: list[Call] = []
    under_way: list[list[Call]] = []
    apart: list[list[Call]] = []

    def take() -> None:
        batch = line.take()
        if not batch:
            waits = [call for call in added if not call.gone and call not in left]
            assert len(under_way) == UNDER_WAY_MAX or not (waits or any(not c.gone for part in apart for c in part))
            return
        assert len(under_way) < UNDER_WAY_MAX
        under_way.append(batch)
        while apart and all(call.gone for call in apart[0]):
            apart.pop(0)
        if apart:
            assert batch == [call for call in apart.pop(0) if not call.gone]
            return
        assert len(batch) <= CALLS_MAX
        assert len(batch) == 1 or sum(call.size for call in batch) <= BYTES_MAX
        left.extend(batch)

    for step, number in steps:
        if step == "add":
            added.append(Call(number))
            line.add(added[-1])
        elif step == "take":
            take()
        elif step == "leave" and added:
            added[number % len(added)].gone = True
        elif step in ("end", "refuse") and under_way:
            batch = under_way.pop(number % len(under_way))
            line.ended()
            if step == "refuse":
                apart.append(batch)
                line.add_apart(batch)
    take()
    while under_way:
        under_way.pop()
        line.ended()
        take()
    assert left == [call for call in added if call in left]
    assert {id(call) for call in added if not call.gone} <= {id(call) for call in left}


def test_a_call_that_is_larger_than_a_batch_travels_alone() -> None:
    """It neither waits for ever nor takes others along."""
    line = line_of()
    calls = [Call(3), Call(BYTES_MAX + 1), Call(3)]
    for call in calls:
        line.add(call)
    taken = []
    while batch := line.take():
        taken.append(batch)
        line.ended()
    assert taken == [[call] for call in calls]
