"""The queue of flows: order within a flow and a key, equal shares of bytes, and counts that fit what waits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.node.core.schedule.fair_queue import STALE_TAGS_MAX, FairQueue, Waiting


@dataclass(eq=False)
class Thing:
    name: str
    bytes: int
    requests: int = 1

    def __len__(self) -> int:
        return self.requests


def names(queue: FairQueue[Thing]) -> list[str]:
    """Everything that waits, as it is served."""
    return [queue.pop().name for _ in range(len(queue))]


def test_a_flow_alone_is_served_in_order_of_arrival() -> None:
    queue: FairQueue[Thing] = FairQueue()
    for number in range(20):
        queue.put(Thing(str(number), 1 + number * 7 % 5), "a")
    assert names(queue) == [str(number) for number in range(20)]


def test_what_comes_late_from_a_flow_with_nothing_waiting_passes_a_long_one() -> None:
    """A hundred large items wait. A small one of somebody else comes after one of them at most."""
    queue: FairQueue[Thing] = FairQueue()
    for number in range(100):
        queue.put(Thing(f"large{number}", 1_000_000), "flood")
    for number in range(10):
        assert queue.pop().name == f"large{number}"
    queue.put(Thing("small", 300), "b")
    assert "small" in [queue.pop().name for _ in range(2)]


def test_a_flow_that_waited_for_nothing_saves_nothing_up() -> None:
    """Its next items have the share of one flow, however long it was silent."""
    queue: FairQueue[Thing] = FairQueue()
    for _ in range(1_000):
        queue.put(Thing("a", 10), "a")
    for _ in range(500):
        queue.pop()
    for _ in range(500):
        queue.put(Thing("b", 10), "b")
    served = [queue.pop().name for _ in range(100)]
    assert 49 <= served.count("a") <= 51


def test_flows_are_equal_again_once_the_queue_was_emptied() -> None:
    """As at the end of a mastership: a flow whose items were all taken out owes nothing for them."""
    queue: FairQueue[Thing] = FairQueue()
    for number in range(3 * STALE_TAGS_MAX):
        queue.put(Thing("a", 1_000), "a", (f"key{number}",))
    assert len(queue.remove(lambda _: True)) == 3 * STALE_TAGS_MAX
    for _ in range(100):
        queue.put(Thing("b", 1_000), "b")
    queue.put(Thing("a", 1_000), "a")
    assert "a" in [queue.pop().name for _ in range(2)]
    assert len(queue._key_tags) + len(queue._flow_tags) <= 2, "old tags would be looked at with each new item"


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), min_size=1, max_size=200), st.data())
def test_order_within_flows_and_shares_between_them(arrivals: list[tuple[str, int]], data: st.DataObject) -> None:
    """Arrivals and service mixed: each flow keeps its order. While two flows wait all the time, what they are served
    differs by no more than twice the largest item."""
    queue: FairQueue[Thing] = FairQueue()
    arrived: dict[str, list[str]] = {}
    served: dict[str, list[str]] = {}
    since: dict[tuple[str, str], tuple[int, int]] = {}
    done = dict.fromkeys("abcd", 0)

    def serve() -> None:
        item = queue.pop()
        flow = item.name[0]
        served.setdefault(flow, []).append(item.name)
        done[flow] += item.bytes
        for one in "abcd":
            for other in "abcd":
                if not queue.of(one).requests or not queue.of(other).requests:
                    since.pop((one, other), None)
                    continue
                start = since.setdefault((one, other), (done[one], done[other]))
                assert abs((done[one] - start[0]) - (done[other] - start[1])) <= 2 * 50

    for number, (flow, size) in enumerate(arrivals):
        name = f"{flow}{number}"
        arrived.setdefault(flow, []).append(name)
        queue.put(Thing(name, size), flow)
        while len(queue) and data.draw(st.integers(0, 3)) == 0:
            serve()
    while len(queue):
        serve()
    assert served == arrived
    assert queue.all == Waiting() and not queue.flows


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(1, 50)), max_size=100))
def test_items_of_a_key_keep_their_order_across_flows(arrivals: list[tuple[str, str, int]]) -> None:
    """As a producer's requests do that came by two connections."""
    queue: FairQueue[Thing] = FairQueue()
    served: list[str] = []
    for number, (flow, key, size) in enumerate(arrivals):
        queue.put(Thing(f"{key}{number:03}", size), flow, (flow, key))
        if number % 3 == 2:
            served.append(queue.pop().name)
    served += names(queue)
    for key in "xyz":
        mine = [name for name in served if name.startswith(key)]
        assert mine == sorted(mine)


def test_an_item_grows_until_its_key_waits_behind_it() -> None:
    queue: FairQueue[Thing] = FairQueue()
    rows = Thing("rows", 10)
    tag = queue.put(rows, "rows", ("a",))
    assert queue.may_grow(tag, "a") and queue.may_grow(tag, "b")
    rows.bytes, rows.requests = 30, 2
    queue.grow(tag, "rows", "b", 20)
    queue.put(Thing("batch", 1), "b", ("b",))
    assert queue.may_grow(tag, "a") and not queue.may_grow(tag, "b")
    assert queue.all == Waiting(31, 3) and queue.of("rows") == Waiting(30, 2) and queue.flows == 2
    assert names(queue) == ["rows", "batch"]
    assert queue.all == Waiting() and queue.of("rows") == Waiting()


def test_what_is_taken_out_is_counted_no_more() -> None:
    queue: FairQueue[Thing] = FairQueue()
    for number in range(6):
        queue.put(Thing(str(number), 5), "ab"[number % 2])
    assert [item.name for item in queue.remove(lambda item: int(item.name) < 3)] == ["0", "1", "2"]
    assert sorted(item.name for item in queue) == ["3", "4", "5"] and queue.head is not None and queue.head.name == "3"
    assert queue.all == Waiting(15, 3) and queue.of("a") == Waiting(5, 1)
    assert names(queue) == ["3", "4", "5"]
    with pytest.raises(IndexError):
        queue.pop()


def test_flows_that_have_gone_leave_no_memory() -> None:
    """Connections come and go while the queue is never empty."""
    queue: FairQueue[Thing] = FairQueue()
    queue.put(Thing("first", 1), "first")
    for number in range(10 * STALE_TAGS_MAX):
        queue.put(Thing("one", 1), f"flow{number}", (f"flow{number}", f"producer{number}"))
        queue.pop()
    assert len(queue._flow_tags) + len(queue._key_tags) <= STALE_TAGS_MAX + 8
    assert queue.flows == 1
