"""Random histories of a filtered group against a plain model: dispatches, sweeps, changed filters, resets, crashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.node.state.driver import HOUR_0, Driver, admin, settle_command
from tests.node.state.test_filtering import ready, subscription, swept
from tickwheel.node.state import sequence
from tickwheel.node.state import subscription as subscription_module
from tickwheel.proto import admin_pb2
from tickwheel.proto.consumer_pb2 import EARLIEST, LATEST
from tickwheel.proto.log_pb2 import SETTLE_ACK

FILTERS = ("*", "a", "a || b", "b || c")
STEPS = ["dispatch"] * 5 + ["sweep"] * 4 + ["settle"] * 4 + ["filter", "reset", "checkpoint", "restart", "stale sweep"]


@dataclass
class Model:
    """One group on one topic, a place at a time."""

    tags: list[str] = field(default_factory=list)
    settled: set[int] = field(default_factory=set)
    filter: str = "*"
    checked: int = 0
    epoch: int = 0

    @property
    def floor(self) -> int:
        """First that is not settled."""
        return next((n for n in range(len(self.tags)) if n not in self.settled), len(self.tags))

    @property
    def unchecked(self) -> int:
        """First that has not met the filter."""
        return len(self.tags) if self.filter == "*" else max(self.checked, self.floor)

    def wants(self, place: int) -> bool:
        """Whether the filter of now takes it."""
        return self.filter == "*" or self.tags[place] in self.filter.split(" || ")

    def meet(self, first: int, last: int) -> None:
        """These meet the filter."""
        self.settled.update(place for place in range(first, last) if not self.wants(place))
        self.checked = last

    def handed_out(self) -> list[int]:
        """What may be delivered."""
        return [n for n in range(min(len(self.tags), self.unchecked)) if n not in self.settled]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and chunks of a few places, so that every path is walked."""
    monkeypatch.setattr(sequence, "KEEP_BYTES", 64)
    monkeypatch.setattr(sequence, "PIECE_BYTES", 32)
    monkeypatch.setattr(subscription_module, "CAPACITY_LEAST", 2)
    monkeypatch.setattr(subscription_module, "CHUNK", 3)


def step(rng: Random, node: Driver, model: Model) -> None:
    """One thing happens, to both."""
    place = subscription(node)
    match rng.choice(STEPS):
        case "dispatch":
            tags = [rng.choice("abcd") for _ in range(rng.randint(1, 6))]
            first, caught_up = len(model.tags), model.unchecked == len(model.tags)
            ready(node, tags, HOUR_0 + len(model.tags))
            model.tags += tags
            if caught_up and model.filter != "*":
                model.meet(first, len(model.tags))
        case "sweep" if model.unchecked < len(model.tags):
            first = model.unchecked
            last = rng.randint(first + 1, len(model.tags))
            keep = [model.wants(place) for place in range(first, last)]
            skipped = sum(not kept and number not in model.settled for number, kept in enumerate(keep, first))
            assert swept(node, model.filter, first, keep) == (last - first, skipped)
            model.meet(first, last)
        case "stale sweep":
            first = model.unchecked + rng.choice([-1 if model.unchecked else 1, 1, 2])
            assert swept(node, model.filter, first, [False] * rng.randint(1, 4)) == (0, 0)
            if model.tags:
                assert swept(node, "x", model.unchecked, [False]) == (0, 0)
        case "settle" if model.handed_out():
            picks = rng.sample(model.handed_out(), rng.randint(1, min(4, len(model.handed_out()))))
            ids = [int(n) for n in place.ids_of(place.deliverable(0, 10_000)[0])]
            by_place = dict(zip(model.handed_out(), ids, strict=True))
            stale = rng.random() < 0.2
            command = settle_command(SETTLE_ACK, [by_place[p] for p in picks], [1] * len(picks), picks)
            command.settle.batches[0].epoch = model.epoch + stale
            result = node.apply(command)[0]
            assert (result.settled, result.stale) == ((0, len(picks)) if stale else (len(picks), 0))
            if not stale:
                model.settled.update(picks)
        case "filter":
            asked = rng.choice(FILTERS)
            node.apply(admin(set_group_filter=admin_pb2.SetGroupFilterRequest(name="g", filter=asked)))
            if asked != model.filter:
                model.filter, model.checked = asked, model.floor
        case "reset":
            start = rng.choice([EARLIEST, LATEST])
            node.apply(admin(reset_group=admin_pb2.ResetGroupRequest(name="g", start_from=start)))
            model.settled = set() if start == EARLIEST else set(range(len(model.tags)))
            model.checked = model.floor
            model.epoch += 1
        case "checkpoint":
            node.checkpoint()
        case "restart":
            before = node.state.digest()
            node.restart(rng)
            assert node.state.digest() == before


@given(st.integers(0, 1 << 32))
def test_any_history_of_a_filtered_group(seed: int) -> None:
    """P1, P8: handed out is what the filter took and nobody settled, no more, no less; replays and crashes agree."""
    rng = Random(seed)
    node, model = Driver(), Model()
    node.create()
    node.group()
    for _ in range(50):
        step(rng, node, model)
        place = subscription(node)
        assert place.floor == model.floor
        assert [int(p) for p in place.deliverable(0, 10_000)[0]] == model.handed_out()
        assert place.backlog == len(model.tags) - len(model.settled)
    before = node.state.digest()
    node.manifest = None
    node.restart()
    assert node.state.digest() == before
