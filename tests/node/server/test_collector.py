"""Python's collector holds a node up for milliseconds at a time, and collects all where nobody waits for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tickwheel.node.server import collector


@pytest.fixture
def as_in_a_node() -> Iterator[None]:
    """The collector as a node sets it up, and afterwards as it was."""
    before = gc.get_threshold()
    collector.set_up()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("as_in_a_node")
def test_no_collection_walks_over_many_objects() -> None:
    """However many are made and kept: a pause goes with the objects of a collection."""
    walked: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            walked.append(sum(len(gc.get_objects(young)) for young in range(info["generation"] + 1)))

    gc.callbacks.append(note)
    kept = [[number] for number in range(300_000)]
    gc.callbacks.remove(note)
    assert len(kept) / collector.YOUNG_ALLOCATIONS <= len(walked) + 1
    assert max(walked) < 2 * collector.YOUNG_ALLOCATIONS * collector.YOUNG_COLLECTIONS


class Circle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("as_in_a_node")
def test_what_has_grown_old_is_collected_by_a_node_that_does_not_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MIDDLE_COLLECTIONS", 3)
    circle = Circle()
    seen = weakref.ref(circle)
    gc.collect()
    del circle
    kept = []
    for number in range(200_000):
        kept.append([number])
        if number == 100:
            assert not collector.look()
    assert seen() is not None
    assert collector.look() and seen() is None
    assert not collector.look()
