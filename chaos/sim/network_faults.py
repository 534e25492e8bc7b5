"""Faults between machines, for `faults.KINDS`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tickwheel.chaos.sim.fault import Active, Course, Going, Scene
from tickwheel.chaos.sim.network import Link
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import MS


def links_of(scene: Scene, machine: Machine) -> list[Link]:
    return scene.fabric.of(machine.name)


def frames_hit(links: Sequence[Link]) -> int:
    return sum(link.lost + link.held_back + link.epoch for link in links)


def block(links: Sequence[Link]) -> Course:
    for link in links:
        link.block()
    before = frames_hit(links)
    yield
    for link in links:
        link.unblock()
    return frames_hit(links) - before


def reset(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    links = links_of(scene, machine)
    hit = rng.sample(links, rng.randint(1, len(links)))
    before = frames_hit(hit)
    for link in hit:
        link.reset()
    yield
    return frames_hit(hit) - before


def delay(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    links = [link for link in links_of(scene, machine) if rng.random() < 0.7] or links_of(scene, machine)[:1]
    extra_ns = rng.randrange(5 * MS, 300 * MS)
    before = sum(link.delivered for link in links)
    for link in links:
        link.extra_delay_ns += extra_ns
    yield
    for link in links:
        link.extra_delay_ns -= extra_ns
    return sum(link.delivered for link in links) - before


def replay(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    links = links_of(scene, machine)
    before = sum(link.replayed for link in links)
    rate = rng.uniform(0.05, 0.5)
    for link in links:
        link.replay_rate += rate
    yield
    for link in links:
        link.replay_rate = max(0.0, link.replay_rate - rate)
        if link.replay_rate < 1e-9:
            link.replay_rate = 0.0
    return sum(link.replayed for link in links) - before


def one_way(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    outward = rng.random() < 0.5
    ends = [link for link in links_of(scene, machine) if (link.sender == machine.name) == outward]
    return block(rng.sample(ends, rng.randint(1, len(ends))))


def partition(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    names = [m.name for m in scene.machines if m is not machine]
    side = {machine.name, *rng.sample(names, rng.randint(0, len(names) - 1))}
    links = [link for _, link in sorted(scene.fabric.links.items()) if (link.sender in side) != (link.receiver in side)]
    return block(links)


def isolate(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    return block(links_of(scene, machine))


def bridge(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """All others see the target and not each other across a cut: it connects two sides."""
    names = [m.name for m in scene.machines if m is not machine]
    side = set(rng.sample(names, max(1, len(names) // 2)))
    links = [
        link
        for _, link in sorted(scene.fabric.links.items())
        if machine.name not in (link.sender, link.receiver) and (link.sender in side) != (link.receiver in side)
    ]
    return block(links)


def left_behind(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    """The master is alone for long, with entries that nobody else has. Back among the others it only hears of what they
    have committed: their logs begin above, and copies of their checkpoints do not arrive."""
    alone = scene.master() or machine
    cut = Active(block(links_of(scene, alone)))
    before = alone.copies_failed
    alone.copies_fail += 1
    scene.world.after(going.length_ns * 2 // 3, cut.end)
    yield
    cut.end()
    alone.copies_fail -= 1
    return alone.copies_failed - before


def flap(scene: Scene, machine: Machine, going: Going, rng: random.Random) -> Course:
    links = links_of(scene, machine)
    before = frames_hit(links)
    blocked = False

    def turn() -> None:
        nonlocal blocked
        for link in links:
            if blocked:
                link.unblock()
            else:
                link.block()
        blocked = not blocked

    going.again(turn, lambda: rng.randrange(20 * MS, 600 * MS))
    yield
    if blocked:
        for link in links:
            link.unblock()
    return frames_hit(links) - before
