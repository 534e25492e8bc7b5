"""The faults themselves: each begins, ends, and gives evidence of its effect.

Owns the meaning of the kinds in `plan.py`. A fault acts through ChaosCluster alone. `begin` returns an Active, which
keeps what it needs to end; `evidence` is asked after the end and counts things that someone other than the fault has
seen: a process that is gone, bytes that waited in a proxy, packets that a switch has lost, writes that a disk refused.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter

from tickwheel.chaos.live.cluster import ChaosCluster
from tickwheel.chaos.live.network import Counts, Spoiling, Way
from tickwheel.chaos.live.plan import ALL, MASTER, SLAVE, Fault
from tickwheel.chaos.live.watch import Watch
from tickwheel.node.local_cluster import LocalNode

MASTER_S = 3.0
"""How long a fault waits for a master to strike. After that it strikes any node."""
LOOK_S = 0.02
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


class Active(ABC):
    """A fault that has begun."""

    detail = ""
    """In words, what it does beyond its kind."""
    broken = ""
    """In words, what a node did that no node may; known after `end`."""

    def __init__(self, cluster: ChaosCluster, struck: list[LocalNode]) -> None:
        self.cluster = cluster
        self.struck = struck

    @abstractmethod
    async def begin(self) -> None:
        """Strike."""

    @abstractmethod
    async def end(self) -> None:
        """Undo the fault. Called once."""

    @abstractmethod
    async def evidence(self) -> Evidence:
        """The evidence of its effect. Called after `end`."""


class Killed(Active):
    """SIGKILL; started again at the end."""

    async def begin(self) -> None:
        await asyncio.gather(*(self.cluster.kill(node) for node in self.struck))
        self._gone = sum(
            node.process is not None and node.process.returncode is not None and node.process.returncode < 0
            for node in self.struck
        )

    async def end(self) -> None:
        for node in self.struck:
            self.cluster.start_node(node)

    async def evidence(self) -> Evidence:
        return Evidence(self._gone, "processes killed")


class _CrashLoop(Active):
    """SIGKILL, start, and SIGKILL again shortly after the process is there."""

    async def begin(self) -> None:
        self._gone = 0
        self._looping = asyncio.ensure_future(self._loop())

    async def _loop(self) -> None:
        while True:
            for node in self.struck:
                self._gone += node.running
                await self.cluster.kill(node)
                self.cluster.start_node(node)
            await asyncio.sleep(CRASH_PERIOD_S)

    async def end(self) -> None:
        self._looping.cancel()
        await asyncio.gather(self._looping, return_exceptions=True)
        for node in self.struck:
            await self.cluster.kill(node)  # it may be dying just now
            self.cluster.start_node(node)

    async def evidence(self) -> Evidence:
        return Evidence(self._gone, "processes killed")


class Paused(Active):
    """SIGSTOP, then SIGCONT."""

    async def begin(self) -> None:
        self._stopped = 0
        for node in self.struck:
            self.cluster.pause(node)
            self._stopped += await self.cluster.is_stopped(node)

    async def end(self) -> None:
        for node in self.struck:
            self.cluster.resume(node)

    async def evidence(self) -> Evidence:
        return Evidence(self._stopped, "processes stopped")


def _add(counts: list[Counts]) -> Counts:
    return Counts(**{field.name: sum(getattr(one, field.name) for one in counts) for field in fields(Counts)})


class _OnTheWay(Active):
    """Ways between nodes are spoilt."""

    def __init__(
        self,
        cluster: ChaosCluster,
        struck: list[LocalNode],
        ways: list[Way],
        spoiling: Spoiling,
        counted: Callable[[Counts], int],
        unit: str,
    ) -> None:
        super().__init__(cluster, struck)
        self._ways = ways
        self._spoiling = spoiling
        self._counted = counted
        self._unit = unit
        self.detail = ", ".join(way.name for way in ways)

    async def begin(self) -> None:
        self._before = self._counted(_add([way.counts for way in self._ways]))
        self.cluster.network.spoil(self._ways, self._spoiling)

    async def end(self) -> None:
        self._after = self._counted(_add([way.counts for way in self._ways]))
        self.cluster.network.heal(self._ways, self._spoiling)

    async def evidence(self) -> Evidence:
        return Evidence(self._after - self._before, self._unit)


class WrongClock(Active):
    """Knobs of the clock are turned, from where they stand, and turned back."""

    def __init__(
        self,
        cluster: ChaosCluster,
        struck: list[LocalNode],
        *,
        offset_ms: int = 0,
        rate_ppm: int = 0,
        from_start: bool = False,
    ) -> None:
        """`from_start`: the process is killed and begins its next life under the wrong clock."""
        super().__init__(cluster, struck)
        self._offset_ms = offset_ms
        self._rate_ppm = rate_ppm
        self._from_start = from_start
        self._before = [cluster.knobs(node) for node in struck]
        self.detail = f"{offset_ms:+,} ms" if offset_ms else f"{rate_ppm:+,} ppm"

    async def begin(self) -> None:
        if self._from_start:
            await asyncio.gather(*(self.cluster.kill(node) for node in self.struck))
        self._turns = {
            node.node_id: self.cluster.turn(
                node, offset_ms=before.offset_ms + self._offset_ms, rate_ppm=before.rate_ppm + self._rate_ppm
            )
            for node, before in zip(self.struck, self._before, strict=True)
        }
        if self._from_start:
            for node in self.struck:
                self.cluster.start_node(node)

    async def end(self) -> None:
        effects = [self.cluster.effects(node) for node in self.struck]
        self._readings = sum(
            effect.readings
            for node, effect in zip(self.struck, effects, strict=True)
            if effect.turn >= self._turns[node.node_id]
        )
        for node, before in zip(self.struck, self._before, strict=True):
            self.cluster.turn(node, offset_ms=before.offset_ms, rate_ppm=before.rate_ppm)

    async def evidence(self) -> Evidence:
        return Evidence(self._readings, "wrong readings")


class _Turned(Active):
    """A knob of the disks is turned, and turned back. `effect`: what the nodes count of it."""

    def __init__(self, cluster: ChaosCluster, struck: list[LocalNode], effect: str, unit: str, **knob: int) -> None:
        super().__init__(cluster, struck)
        self._effect = effect
        self._unit = unit
        self._knob = knob

    def _count(self) -> int:
        return sum(getattr(self.cluster.effects(node), self._effect) for node in self.struck)

    async def begin(self) -> None:
        self._before = self._count()
        for node in self.struck:
            self.cluster.turn(node, **self._knob)

    async def end(self) -> None:
        for node in self.struck:
            self.cluster.turn(node, **{name: type(value)() for name, value in self._knob.items()})
        await asyncio.sleep(SETTLED_S)
        self._seen = self._count() - self._before

    async def evidence(self) -> Evidence:
        return Evidence(max(0, self._seen), self._unit)


class _FailedSync(Active):
    """Every fdatasync fails and loses the writes that it would have covered. A node has to stop; `end` starts it."""

    async def begin(self) -> None:
        for node in self.struck:
            self.cluster.failing.add(node.node_id)
            self.cluster.turn(node, sync_fails=True)

    async def end(self) -> None:
        turns = [self.cluster.turn(node, sync_fails=False) for node in self.struck]
        # One that is just starting may be about to find out, and is late with it on a busy machine.
        await asyncio.gather(
            *(self.cluster.has_read(node, turn, STOP_S) for node, turn in zip(self.struck, turns, strict=True))
        )
        await asyncio.sleep(SETTLED_S)
        self._stopped = 0
        for node in self.struck:
            effects = self.cluster.effects(node)
            if not effects.failed_syncs or (node.running and node.pid != effects.pid):
                continue  # or another fault has restarted it
            if await self.cluster.has_ended(node, STOP_S):
                self._stopped += 1
            else:
                self.broken = f"{node.node_id} went on after an fdatasync had failed"
        for node in self.struck:
            if node.node_id not in self.cluster.killed:
                self.cluster.start_node(node)
            self.cluster.failing.discard(node.node_id)

    async def evidence(self) -> Evidence:
        return Evidence(self._stopped, "nodes stopped by a failed sync")


async def _strike(fault: Fault, cluster: ChaosCluster, watch: Watch, rng: random.Random) -> list[LocalNode]:
    """The nodes that the fault strikes now."""
    if fault.target == ALL:
        return list(cluster.nodes)
    fit = [node for node in cluster.nodes if node.running and node.node_id not in cluster.paused]
    fit = fit or list(cluster.nodes)
    loop = asyncio.get_running_loop()
    end = loop.time() + MASTER_S
    master = watch.master()
    while master is None and fault.target in (MASTER, SLAVE) and loop.time() < end:
        await asyncio.sleep(LOOK_S)
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
        return _OnTheWay(cluster, struck, chosen, spoiling, counted, unit)

    def stalled(chosen: list[Way]) -> Active:
        return ways(Spoiling(stalled=True), chosen, network.held, network.held_unit)

    both = network.between([node_id], [other]) + network.between([other], [node_id])
    match fault.kind:
        case "kill" | "kill-master" | "kill-all":
            return Killed(cluster, struck)
        case "crash-loop":
            return _CrashLoop(cluster, struck)
        case "pause" | "pause-master":
            return Paused(cluster, struck)
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
            return ways(
                Spoiling(delay_ms=rng.uniform(*DELAY_MS)),
                network.ways_of(node_id),
                _late,
                "bytes late",
            )
        case "jitter":
            return ways(
                Spoiling(jitter_ms=rng.uniform(*JITTER_MS)),
                network.ways_of(node_id),
                _late,
                "bytes late",
            )
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
            return _Turned(cluster, struck, "refusals", "writes refused", disk_full=True)
        case "slow-disk":
            sync_ms = rng.randrange(*SYNC_MS)
            slow = _Turned(cluster, struck, "slow_syncs", "slow syncs", sync_ms=sync_ms)
            slow.detail = f"{sync_ms} ms more"
            return slow
        case "failed-sync":
            return _FailedSync(cluster, struck)
        case "skew":
            return WrongClock(cluster, struck, offset_ms=_signed(rng, SKEW_MS), from_start=True)
        case "drift":
            return WrongClock(cluster, struck, rate_ppm=_signed(rng, DRIFT_PPM))
        case "step":
            return WrongClock(cluster, struck, offset_ms=_signed(rng, STEP_MS))
    raise AssertionError(f"no such kind of fault: {fault.kind}")


def _signed(rng: random.Random, bounds: tuple[int, int]) -> int:
    return rng.choice((-1, 1)) * rng.randrange(*bounds)
