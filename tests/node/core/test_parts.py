"""The parts of a core: which of them follow mastership, and in which order it begins and ends for them."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from tests.node.core.trio import World
from tickwheel.node import core as package
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.part import Part


def a_core(world: World) -> NodeCore:
    host = world.nodes["a"].host
    assert host is not None
    return host.core


def test_no_part_is_forgotten() -> None:
    """Each class that is a part is in the core's list, once: else nobody would tell it that its mastership is over."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    parts = [type(part) for part in a_core(World()).parts.ordered]
    assert len(parts) == len(set(parts)) and set(parts) == set(Part.__subclasses__())


def test_all_end_in_order_and_begin_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves the wheel stops first and starts last, whether or not the parts before it have anything to do."""
    told: list[tuple[str, str]] = []

    def noted(part: Part, method: str) -> None:
        original = getattr(part, method)

        def call(*args: object) -> None:
            told.append((method, type(part).__name__))
            original(*args)

        monkeypatch.setattr(part, method, call)

    world = World(names="a")
    core = a_core(world)
    order = [type(part).__name__ for part in core.parts.ordered]
    for part in core.parts.ordered:
        noted(part, "begin")
        noted(part, "end")
    world.run_until(lambda: core.parts.delivery.active)
    assert told == [("begin", name) for name in reversed(order)]
    told.clear()
    core.stop()
    assert told == [("end", name) for name in order]
    assert order[0] == "Dispatcher"
