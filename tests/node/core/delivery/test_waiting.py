"""Groups whose prefetched messages only wait for their time are left alone until the first is due."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.node.core.trio import Client, World
from tickwheel.node.core.config import CoreConfig

AHEAD_MS = 400


def test_a_group_that_waits_for_a_time_is_not_served_by_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that were dispatched ahead are looked at when they come and when each is due, however many ticks the
    syncs and their answers cause meanwhile; and each leaves on time."""
    world = World(31, config=replace(CoreConfig(), dispatch_ahead_ms=AHEAD_MS))
    client = Client(world)
    master = world.elect()
    client.consume()
    world.run(100)
    assert master.host is not None
    core = master.host.core
    delivery, served, ticks = core.parts.delivery, 0, 0
    serve, tick = delivery._serve, delivery.tick

    def counted_serve(group_id: int, now_ms: int) -> None:
        nonlocal served
        served += 1
        serve(group_id, now_ms)

    client.schedule([AHEAD_MS + 50, AHEAD_MS + 250])
    world.run_until(lambda: core.wheel.pending == 0 and delivery.prefetched() == 2)
    world.run(20)
    monkeypatch.setattr(delivery, "_serve", counted_serve)

    def counted_tick(now: object) -> None:
        nonlocal ticks
        ticks += 1
        tick(now)  # type: ignore[arg-type]

    monkeypatch.setattr(delivery, "tick", counted_tick)
    world.run_until(lambda: len(client.got) == 2)
    assert ticks > 10, "enough to have served it often"
    assert served <= 6
    world.run(100)
    assert len(client.got) == 2


def test_credit_that_nothing_waits_for_brings_no_look_at_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer gives credit with each settlement. What waits for credit leaves with it, as before."""
    world = World(32)
    client = Client(world)
    master = world.elect()
    client.consume(credits=1)
    world.run(100)
    client.gives_credit = False
    client.schedule([50, 60])
    world.run_until(lambda: len(client.got) == 1)
    world.run(200)
    assert len(client.got) == 1 and client.session is not None and master.host is not None
    client.session.credit(1)
    master.wake()
    world.run_until(lambda: len(client.got) == 2)
    world.run(2_500)
    served: list[int] = []
    delivery = master.host.core.parts.delivery
    serve = delivery._serve

    def counted(group_id: int, now_ms: int) -> None:
        served.append(group_id)
        serve(group_id, now_ms)

    monkeypatch.setattr(delivery, "_serve", counted)
    client.session.credit(5)
    master.wake()
    world.run(200)
    assert not served
    client.schedule([50])
    world.run_until(lambda: len(client.got) == 3)
    assert served
