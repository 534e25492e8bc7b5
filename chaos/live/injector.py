"""Carries out a plan: begins and ends each fault at its time and records its outcome.

Owns the faults that are active. All times count from the moment `run` is called. Records:

| k | fields |
|---|---|
| begin | n, kind, family, struck (nodes), detail |
| over | n, count, unit: the evidence |
| majority | holds: whether more than half of the nodes run and reach each other, after each change |
| died | node, code, log: a process ended and nobody killed it; it is started again |
| wrong | text: what a node did under a fault that no node may |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tickwheel.chaos.live.cluster import ChaosCluster
from tickwheel.chaos.live.faults import Active, make
from tickwheel.chaos.live.history import HistoryWriter
from tickwheel.chaos.live.plan import KINDS, Fault
from tickwheel.chaos.live.watch import Watch

REVIVE_S = 1.0
LOOK_S = 0.1
LOG_LINES = 8


class Injector:
    """One run's faults."""

    def __init__(
        self,
        cluster: ChaosCluster,
        watch: Watch,
        history: HistoryWriter,
        told: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`told` gets a line for people about each fault."""
        self._cluster = cluster
        self._watch = watch
        self._history = history
        self._told = told
        self._active: dict[int, Active] = {}
        self._holds: bool | None = None

    async def run(self, faults: Sequence[Fault]) -> None:
        """Carry out all of them."""
        began_s = asyncio.get_running_loop().time()
        self._note_majority()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                tasks.create_task(self._carry_out(fault, began_s))

    async def _carry_out(self, fault: Fault, began_s: float) -> None:
        await asyncio.sleep(max(0.0, began_s + fault.at_s - asyncio.get_running_loop().time()))
        active = await make(fault, self._cluster, self._watch)
        await self.begin(fault.number, fault.kind, active, f"for {fault.length_s:.1f} s")
        await asyncio.sleep(fault.length_s)
        await self.end(fault.number)

    async def begin(self, number: int, kind: str, active: Active, length: str = "") -> None:
        """Strike. `number` names it, in the history too; `length` is for people."""
        struck = [node.node_id for node in active.struck]
        self._history.write(
            "begin", n=number, kind=kind, family=KINDS[kind].family, struck=struck, detail=active.detail
        )
        self._told(" ".join(filter(None, (f"#{number} {kind} of {', '.join(struck)}", length, active.detail))))
        self._active[number] = active
        await active.begin()
        self._note_majority()

    async def end(self, number: int) -> None:
        """End the fault, unless it has ended, and record its evidence."""
        active = self._active.pop(number, None)
        if active is None:
            return
        evidence = await active.end()
        self._history.write("over", n=number, count=evidence.count, unit=evidence.unit)
        if evidence.broken:
            self._history.write("wrong", text=evidence.broken)
            self._told(evidence.broken)
        if not evidence.count:
            self._told(f"#{number} had no effect")
        self._note_majority()

    async def heal(self) -> None:
        """End all faults still active, also after an interruption."""
        for number in list(self._active):
            await self.end(number)

    def _note_majority(self) -> None:
        holds = self._cluster.majority_connected()
        if holds != self._holds:
            self._holds = holds
            self._history.write("majority", holds=holds)

    async def keep_alive(self) -> None:
        """Record and restart nodes that end by themselves, until cancelled."""
        while True:
            for node in self._cluster.died():
                code = node.process.returncode if node.process is not None else None
                self._history.write("died", node=node.node_id, code=code, log=node.log_tail(LOG_LINES))
                self._told(f"{node.node_id} has ended by itself with code {code}")
                await asyncio.sleep(REVIVE_S)
                self._cluster.start_node(node)
            await asyncio.sleep(LOOK_S)
