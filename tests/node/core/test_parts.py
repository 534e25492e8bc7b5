"""The parts of a core: which of them follow mastership, and in which order it begins and ends for them."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from tests.node.core.trio import MS, World
from tickwheel.node import core as package
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.part import Part
from tickwheel.node.core.world import Now


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


def test_a_tick_of_the_log_alone_leaves_the_parts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master sends heartbeats all the time. Its parts tick when input has come, when one of them wanted it, and when
    the log or the clock has changed what they act by."""
    world = World()
    master = world.elect()
    assert master.host is not None
    core, ticked = master.host.core, list[Now]()
    world.run(2_000)
    monkeypatch.setattr(core.parts.planner, "tick", ticked.append)

    def ticks(*, woken: bool = False) -> bool:
        ticked.clear()
        core.tick(woken=woken)
        return bool(ticked)

    assert ticks(woken=True) and not ticks()
    core.clock.steers += 1
    assert ticks() and not ticks()
    monkeypatch.setattr(core.log, "lease_held", lambda: False)
    assert ticks() and not ticks()
    core.applied.index += 1
    assert ticks() and not ticks()
    monkeypatch.setattr(core.parts.planner, "wait_ms", lambda now: 20)
    assert ticks(woken=True)
    world.now_ns += 18 * MS
    assert not ticks()
    world.now_ns += 2 * MS
    assert ticks()
