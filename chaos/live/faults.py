"""The faults themselves: each strikes, is undone, and gives evidence of its effect.

Owns the meaning of the kinds in `plan.py`. A fault acts through ChaosCluster alone. Its evidence counts things that
someone other than the fault has seen: a process that is gone, bytes that waited in a proxy, packets that a switch has
lost, writes that a disk refused.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from operator import attrgetter

from tickwheel.chaos.live.cluster import ChaosCluster, within
from tickwheel.chaos.live.network import Counts, Spoiling, Way
from tickwheel.chaos.live.plan import ALL, MASTER, SLAVE, Fault
from tickwheel.chaos.live.watch import Watch
from tickwheel.node.local_cluster import LocalNode

MASTER_S = 3.0
"""How long a fault waits for a master to strike. After that it strikes any node."""
CRASH_PERIOD_S = 2.0
"""Long enough for a node to be up and say hello before it dies again."""
SKEW_MS = (2_000, 3_600_000)
DRIFT_PPM = (5_000, 20_000)
STEP_MS = (1_000, 600_000)
DELAY_MS = (20.0, 90.0)
JITTER_MS = (20.0, 150.0)
THROTTLE_BYTES_PER_S = (40_000, 400_000)
LOST_SHARE = (0.01, 0.2)
SYNC_MS = (20, 250)
STOP_S = 10.0
"""A node must have ended this long after its fdatasync failed. Also the time it has to read its knobs."""
SETTLED_S = 0.3
"""Time after a turn by which a node follows its knobs."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """`count` of `unit` is what was seen; 0: the fault had no effect."""

    count: int
    unit: str
    broken: str = ""
    """In words, what a node did that no node may."""


Course = AsyncGenerator[Evidence | None, None]
"""A fault from its beginning: it strikes, yields until its end, undoes what it did, and yields its evidence."""


class Active:
    """A fault and the nodes that it strikes. `detail`: in words, what it does beyond its kind."""

    def __init__(self, struck: list[LocalNode], course: Course, detail: str = "") -> None:
        self.struck = struck
        self.detail = detail
        self._course = course

    async def begin(self) -> None:
        """Strike."""
        await anext(self._course)

    async def end(self) -> Evidence:
        """Undo the fault. Called once."""
        evidence = await anext(self._course)
        assert evidence is not None, "a course yields twice"
        await self._course.aclose()
        return evidence


async def killed(cluster: ChaosCluster, struck: list[LocalNode]) -> Course:
    """SIGKILL; started again at the end."""
    await asyncio.gather(*(cluster.kill(node) for node in struck))
    gone = sum(node.process is not None and (node.process.returncode or 0) < 0 for node in struck)
    yield None
    for node in struck:
        cluster.start_node(node)
    yield Evidence(gone, "processes killed")


async def _crash_loop(cluster: ChaosCluster, struck: list[LocalNode]) -> Course:
    """SIGKILL, start, and SIGKILL again shortly after the process is there."""
    gone = 0

    async def loop() -> None:
        nonlocal gone
        while True:
            for node in struck:
                gone += node.running
                await cluster.kill(node)
                cluster.start_node(node)
            await asyncio.sleep(CRASH_PERIOD_S)

    looping = asyncio.ensure_future(loop())
    yield None
    looping.cancel()
    await asyncio.gather(looping, return_exceptions=True)
    for node in struck:
        await cluster.kill(node)  # it may be dying just now
        cluster.start_node(node)
    yield Evidence(gone, "processes killed")


async def paused(cluster: ChaosCluster, struck: list[LocalNode]) -> Course:
    """SIGSTOP, then SIGCONT."""
    stopped = 0
    for node in struck:
        cluster.pause(node)
        stopped += await cluster.is_stopped(node)
    yield None
    for node in struck:
        cluster.resume(node)
    yield Evidence(stopped, "processes stopped")


async def _on_the_way(
    cluster: ChaosCluster, ways: list[Way], spoiling: Spoiling, counted: Callable[[Counts], int], unit: str
) -> Course:
    """Ways between nodes are spoilt."""
    before = sum(counted(way.counts) for way in ways)
    cluster.network.spoil(ways, spoiling)
    yield None
    seen = sum(counted(way.counts) for way in ways) - before
    cluster.network.heal(ways, spoiling)
    yield Evidence(seen, unit)


def wrong_clock(
    cluster: ChaosCluster, struck: list[LocalNode], *, offset_ms: int = 0, rate_ppm: int = 0, from_start: bool = False
) -> Active:
    """Knobs of the clock are turned, from where they stand, and turned back. `from_start`: the process is killed and
    begins its next life under the wrong clock."""

    async def course() -> Course:
        known = [(node, cluster.knobs(node)) for node in struck]
        if from_start:
            await asyncio.gather(*(cluster.kill(node) for node in struck))
        turns = [
            cluster.turn(node, offset_ms=before.offset_ms + offset_ms, rate_ppm=before.rate_ppm + rate_ppm)
            for node, before in known
        ]
        if from_start:
            for node in struck:
                cluster.start_node(node)
        yield None
        effects = [cluster.effects(node) for node in struck]
        readings = sum(one.readings for one, turn in zip(effects, turns, strict=True) if one.turn >= turn)
        for node, before in known:
            cluster.turn(node, offset_ms=before.offset_ms, rate_ppm=before.rate_ppm)
        yield Evidence(readings, "wrong readings")

    return Active(struck, course(), f"{offset_ms:+,} ms" if offset_ms else f"{rate_ppm:+,} ppm")


async def _turned(cluster: ChaosCluster, struck: list[LocalNode], effect: str, unit: str, **knob: int) -> Course:
    """A knob of the disks is turned, and turned back. `effect`: what the nodes count of it."""

    def count() -> int:
        return sum(getattr(cluster.effects(node), effect) for node in struck)

    before = count()
    for node in struck:
        cluster.turn(node, **knob)
    yield None
    for node in struck:
        cluster.turn(node, **{name: type(value)() for name, value in knob.items()})
    await asyncio.sleep(SETTLED_S)
    yield Evidence(max(0, count() - before), unit)


async def _failed_sync(cluster: ChaosCluster, struck: list[LocalNode]) -> Course:
    """Every fdatasync fails and loses the writes that it would have covered. A node has to stop; it is started again
    at the end."""
    for node in struck:
        cluster.failing.add(node.node_id)
        cluster.turn(node, sync_fails=True)
    yield None
    turns = [cluster.turn(node, sync_fails=False) for node in struck]
    # One that is just starting may be about to find out, and is late with it on a busy machine.
    await asyncio.gather(*(cluster.has_read(node, turn, STOP_S) for node, turn in zip(struck, turns, strict=True)))
    await asyncio.sleep(SETTLED_S)
    stopped, broken = 0, ""
    for node in struck:
        effects = cluster.effects(node)
        if not effects.failed_syncs or (node.running and node.pid != effects.pid):
            continue  # or another fault has restarted it
        if await cluster.has_ended(node, STOP_S):
            stopped += 1
        else:
            broken = f"{node.node_id} went on after an fdatasync had failed"
    for node in struck:
        if node.node_id not in cluster.killed:
            cluster.start_node(node)
        cluster.failing.discard(node.node_id)
    yield Evidence(stopped, "nodes stopped by a failed sync", broken)


async def _strike(fault: Fault, cluster: ChaosCluster, watch: Watch, rng: random.Random) -> list[LocalNode]:
    """The nodes that the fault strikes now."""
    if fault.target == ALL:
        return list(cluster.nodes)
    fit = [node for node in cluster.nodes if node.running and node.node_id not in cluster.paused]
    fit = fit or list(cluster.nodes)
    if fault.target in (MASTER, SLAVE):
        await within(MASTER_S, lambda: watch.master() is not None)
    master = watch.master()
    if fault.target == MASTER and master is not None:
        return [master]
    if fault.target == SLAVE:
        fit = [node for node in fit if node is not master] or fit
    return [rng.choice(fit)]


_dropped, _late, _reset = map(attrgetter, ("dropped", "late_bytes", "reset"))


async def make(fault: Fault, cluster: ChaosCluster, watch: Watch) -> Active:
    """The fault, ready to begin, with the nodes that it strikes."""
    rng = random.Random(fault.dice)
    struck = await _strike(fault, cluster, watch, rng)
    network = cluster.network
    node_id = struck[0].node_id
    others = [node.node_id for node in cluster.nodes if node.node_id != node_id]
    master = watch.master()
    # Two slaves have nothing to say to each other: one end of a pair is the master, if there is one.
    other = master.node_id if master is not None and master.node_id in others else rng.choice(others or [node_id])

    def ways(spoiling: Spoiling, chosen: list[Way], counted: Callable[[Counts], int], unit: str) -> Active:
        course = _on_the_way(cluster, chosen, spoiling, counted, unit)
        return Active(struck, course, ", ".join(way.name for way in chosen))

    def stalled(chosen: list[Way]) -> Active:
        return ways(Spoiling(stalled=True), chosen, network.held, network.held_unit)

    both = network.between([node_id], [other]) + network.between([other], [node_id])
    match fault.kind:
        case "kill" | "kill-master" | "kill-all":
            return Active(struck, killed(cluster, struck))
        case "crash-loop":
            return Active(struck, _crash_loop(cluster, struck))
        case "pause" | "pause-master":
            return Active(struck, paused(cluster, struck))
        case "split":
            return stalled(both)
        case "one-way":
            there = [(node_id, other), (other, node_id)][rng.randrange(2)]
            return stalled([network.ways[there]])
        case "master-alone":
            return stalled(network.ways_of(node_id))
        case "majority-without-master":
            alone = {node_id, *rng.sample(others, (len(cluster.nodes) - 1) // 2 - 1 if len(others) > 1 else 0)}
            rest = [name for name in others if name not in alone]
            chosen = network.between(alone, rest) + network.between(rest, alone)
            return ways(Spoiling(cut=True), chosen, _reset, "connections reset or refused")
        case "delay":
            return ways(Spoiling(delay_ms=rng.uniform(*DELAY_MS)), network.ways_of(node_id), _late, "bytes late")
        case "jitter":
            return ways(Spoiling(jitter_ms=rng.uniform(*JITTER_MS)), network.ways_of(node_id), _late, "bytes late")
        case "throttle":
            limit = rng.randrange(*THROTTLE_BYTES_PER_S)
            return ways(Spoiling(bytes_per_s=limit), both, _late, "bytes late")
        case "stall":
            return stalled(network.between(cluster.node_ids, cluster.node_ids))
        case "loss":
            share = rng.uniform(*LOST_SHARE)
            return ways(Spoiling(lost_share=share), network.ways_of(node_id), _dropped, "packets lost")
        case "cut":
            return ways(Spoiling(cut=True), network.ways_of(node_id), _reset, "connections reset or refused")
        case "disk-full":
            return Active(struck, _turned(cluster, struck, "refusals", "writes refused", disk_full=True))
        case "slow-disk":
            sync_ms = rng.randrange(*SYNC_MS)
            course = _turned(cluster, struck, "slow_syncs", "slow syncs", sync_ms=sync_ms)
            return Active(struck, course, f"{sync_ms} ms more")
        case "failed-sync":
            return Active(struck, _failed_sync(cluster, struck))
        case "skew":
            return wrong_clock(cluster, struck, offset_ms=_signed(rng, SKEW_MS), from_start=True)
        case "drift":
            return wrong_clock(cluster, struck, rate_ppm=_signed(rng, DRIFT_PPM))
        case "step":
            return wrong_clock(cluster, struck, offset_ms=_signed(rng, STEP_MS))
    raise AssertionError(f"no such kind of fault: {fault.kind}")


def _signed(rng: random.Random, bounds: tuple[int, int]) -> int:
    return rng.choice((-1, 1)) * rng.randrange(*bounds)
