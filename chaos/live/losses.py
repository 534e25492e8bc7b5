"""Loses the master again and again under load, and measures each step of the recovery and the duplicates.

Measured from outside: when deliveries come over the public client, and when nodes say in their logs that they are
candidate, master, running. Owns the cluster, load and consumer of a measurement; `tickwheel chaos failover` and the
benchmark call `measure`. All on one machine: what the measuring takes, the nodes do not have.

Steps of a loss, each from the end of the one before:

detection   the loss, until a node that a majority would vote for becomes candidate
election    until a candidate is master
alignment   until its first command is committed and its cursor has met the clock: the wheel runs
delivery    until the first delivery of its term has come to the consumer
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import signal
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tickwheel.chaos.live.cluster import ChaosCluster, waited_ms, within
from tickwheel.chaos.live.network import Spoiling
from tickwheel.chaos.live.switch import Switch
from tickwheel.client import AsyncClient, DeliveredBatch, TickwheelError
from tickwheel.client.ids import id_text
from tickwheel.node.local_cluster import LocalCluster, LocalNode

TOPIC = GROUP = "losses"
BATCH_MESSAGES = 250
PAYLOAD_BYTES = 256
DUE_MS = (300, 800)
"""How far ahead messages are due."""
CREDITS = 40_000
LEASE = timedelta(seconds=5)
"""Messages in flight on a broken stream come again well within DRAIN_S, even after another loss."""
WAITING_MAX = 400
"""Batches without an answer; beyond, the load waits."""
WARM_S = 2.0
LOST_FOR_S = 2.0
"""How long a stopped or cut off master stays so."""
RESUMED_S_MAX = 20.0
CALM_S = 1.0
DRAIN_S = 60.0
SYNC_MS = 50.0
LOST_TOLD_MAX, AROUND_S = 5, 5.0


class Kind(enum.Enum):
    """How the master is lost."""

    KILL = "kill"
    """SIGKILL; its connections are reset by the system."""
    STOP = "stop"
    """SIGSTOP; its connections stay and say nothing."""
    DROP = "drop"
    """Nothing passes to or from it, peers and clients alike, and nothing is reset; the process runs."""
    HANDOVER = "handover"
    """Not lost: asked to hand over."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss; ms. A step is None if it was not seen."""

    old: str
    new: str
    term: int
    detection_ms: float | None
    election_ms: float | None
    alignment_ms: float | None
    delivery_ms: float | None
    total_ms: float
    """From the loss to the first delivery by the new master."""
    silence_ms: float
    """Longest time without any delivery from then on, until a second after it."""
    duplicates: int
    """Deliveries of the new term that the consumer had had before."""
    starved_share: float
    """How much of that time the other nodes were ready to run and had no processor: then it is the machine's time."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that came to the consumer, from the master of a term."""

    at_s: float
    term: int
    ids: NDArray[np.uint64]
    late_ms: NDArray[np.int64]


@dataclass(slots=True)
class Losses:
    """All losses of a measurement."""

    kind: Kind
    rate: float
    losses: list[Loss] = field(default_factory=list)
    acknowledged: int = 0
    delivered: int = 0
    lost: int = 0
    lost_told: list[str] = field(default_factory=list)
    """For some lost messages: time of acknowledgement, and the cluster's report at the end, in words."""
    early: int = 0
    duplicates: dict[str, int] = field(default_factory=dict)
    """Number of duplicates by source."""
    unasked_elections: int = 0
    """Terms beyond one for each loss."""
    seconds: float = 0.0
    batches: list[Batch] = field(default_factory=list)
    """In the order of their arrival."""
    struck_s: list[float] = field(default_factory=list)
    """Time of each loss, on the clock of the batches."""

    def values(self, name: str) -> NDArray[np.float64]:
        """One step of all losses, where it was seen."""
        found = [getattr(loss, name) for loss in self.losses]
        return np.array([value for value in found if value is not None], np.float64)


@dataclass(frozen=True, slots=True)
class _Struck:
    at_s: float
    old: str
    term: int
    starved_share: float = 0.0


@dataclass(frozen=True, slots=True)
class _Said:
    """A line of a node's log."""

    at_s: float
    node: str
    term: int
    what: str


class _Measurement:
    def __init__(self, cluster: LocalCluster, client: AsyncClient, kind: Kind, rate: float) -> None:
        self.cluster = cluster
        self.client = client
        self.kind = kind
        self.rate = rate
        self.batches: list[Batch] = []
        self.acknowledged: list[NDArray[np.uint64]] = []
        self.settled: list[tuple[float, NDArray[np.uint64]]] = []
        self.struck: list[_Struck] = []
        self.term = 0
        self.stop = asyncio.Event()
        self.acknowledged_s: list[float] = []
        """Time of each batch of `acknowledged`."""
        self._settling: set[asyncio.Task[None]] = set()
        self._wall_minus_monotonic_s = time.time() - time.monotonic()

    # -- load and consumer

    async def load(self) -> None:
        rng = np.random.default_rng(1)
        payloads, sizes = bytes(PAYLOAD_BYTES * BATCH_MESSAGES), np.full(BATCH_MESSAGES, PAYLOAD_BYTES, np.uint32)
        waiting: deque[asyncio.Future[Any]] = deque()
        async with self.client.producer() as producer:
            began_s, sent = time.monotonic(), 0
            while not self.stop.is_set():
                ahead_s = sent / self.rate - (time.monotonic() - began_s)
                if ahead_s > 0:
                    await asyncio.sleep(ahead_s)
                due_ms = int(time.time() * 1_000) + rng.integers(*DUE_MS, BATCH_MESSAGES)
                waiting.append(await producer.schedule_columns(TOPIC, due_ms, sizes, payloads))
                sent += BATCH_MESSAGES
                while waiting and (waiting[0].done() or len(waiting) > WAITING_MAX):
                    self._acknowledge((await waiting.popleft()).ids)
            for future in waiting:
                self._acknowledge((await future).ids)

    def _acknowledge(self, ids: NDArray[np.uint64]) -> None:
        self.acknowledged.append(ids)
        self.acknowledged_s.append(time.monotonic())

    async def consume(self) -> None:
        consumer = self.client.consumer(GROUP, [TOPIC], credits=CREDITS, lease=LEASE, batch_messages_max=4_096)
        async with consumer:
            async for batch in consumer.batches():
                now_ms = time.time_ns() // 1_000_000
                self.batches.append(Batch(time.monotonic(), batch.term, batch.ids, now_ms - batch.due_ms))
                self.term = max(self.term, batch.term)
                task = asyncio.ensure_future(self._settle(batch))
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)

    async def _settle(self, batch: DeliveredBatch) -> None:
        with contextlib.suppress(TickwheelError):  # it comes again then, and counts as a duplicate
            receipt = await batch.ack()
            if receipt.settled == len(batch):
                self.settled.append((time.monotonic(), batch.ids))

    async def drained(self, wanted: NDArray[np.uint64]) -> None:
        """Wait until all of these have been delivered. Compares in a thread: the consumer must not wait for it."""
        missing, seen = wanted, 0
        while len(missing):
            await asyncio.sleep(0.2)
            came, seen = [batch.ids for batch in self.batches[seen:]], len(self.batches)
            if came:
                missing = await asyncio.to_thread(np.setdiff1d, missing, np.concatenate(came))

    async def tell_lost(self, wanted: NDArray[np.uint64]) -> list[str]:
        """Describe messages that did not come, for the search for the reason."""
        told = []
        missing = np.setdiff1d(wanted, np.concatenate([batch.ids for batch in self.batches]))
        for message_id in missing[:LOST_TOLD_MAX].tolist():
            at_s = next(at for at, ids in zip(self.acknowledged_s, self.acknowledged, strict=True) if message_id in ids)
            losses = [
                round((at_s - struck.at_s) * 1_000) for struck in self.struck if abs(at_s - struck.at_s) < AROUND_S
            ]
            try:
                message = await self.client.get(id_text(message_id))
                state = f"{message.state}, due {message.due_ms}"
            except TickwheelError as error:
                state = str(error)
            told.append(f"{id_text(message_id)}: {state}; acknowledged {losses} ms after the losses around it")
        return told

    # -- losses

    async def lose(self) -> None:
        """Lose the master once, wait until another one delivers, and bring the lost one back."""
        old = await self.cluster.master()
        term = self.term
        others = [node.pid for node in self.cluster.nodes if node is not old and node.pid is not None]
        waited = _waited(others)
        struck = _Struck(time.monotonic(), old.node_id, term)
        async with self._lost(old):
            await within(RESUMED_S_MAX, lambda: self.term > term)  # if not, the figures show it
            passed_ms = (time.monotonic() - struck.at_s) * 1_000 * max(1, len(others))
            self.struck.append(replace(struck, starved_share=min(1.0, (_waited(others) - waited) / passed_ms)))
            left_s = struck.at_s + LOST_FOR_S - time.monotonic()
            await asyncio.sleep(max(0.0, left_s) if self.kind is not Kind.HANDOVER else 0.0)
        await self.cluster.wait_ready()
        await asyncio.sleep(CALM_S)

    @contextlib.asynccontextmanager
    async def _lost(self, node: LocalNode) -> AsyncIterator[None]:
        cluster = self.cluster
        if self.kind is Kind.HANDOVER:
            await self.client.admin.transfer()
            yield
        elif self.kind is Kind.KILL:
            await cluster.kill_node(node)
            yield
            cluster.start_node(node)
        elif self.kind is Kind.STOP:
            cluster.signal_node(node, signal.SIGSTOP)
            yield
            cluster.signal_node(node, signal.SIGCONT)
        else:
            assert isinstance(cluster, ChaosCluster)
            ways, spoiling = cluster.network.ways_of(node.node_id, clients=True), Spoiling(stalled=True)
            cluster.network.spoil(ways, spoiling)
            yield
            cluster.network.heal(ways, spoiling)

    # -- figures

    def said(self) -> list[_Said]:
        """Log records of all nodes about roles and wheels, sorted by time."""
        found = []
        for node in self.cluster.nodes:
            for line in node.log_file.read_text(encoding="utf-8", errors="replace").splitlines():
                record = json.loads(line) if line.startswith("{") else {}
                if record.get("event") in ("role changed", "wheel"):
                    wall_s = datetime.fromisoformat(record["timestamp"]).timestamp()
                    at_s = wall_s - self._wall_minus_monotonic_s
                    found.append(_Said(at_s, node.node_id, record.get("term", 0), record["now"]))
        return sorted(found, key=lambda said: said.at_s)

    def figures(self, seconds: float) -> Losses:
        result = Losses(self.kind, self.rate, seconds=seconds)
        ids = np.concatenate([batch.ids for batch in self.batches])
        terms = np.concatenate([np.full(len(batch.ids), batch.term) for batch in self.batches])
        at_s = np.concatenate([np.full(len(batch.ids), batch.at_s) for batch in self.batches])
        acknowledged = np.concatenate(self.acknowledged)
        first = np.full(len(ids), False)
        _, places = np.unique(ids, return_index=True)
        first[places] = True
        result.acknowledged, result.delivered = len(acknowledged), len(ids)
        result.lost = len(np.setdiff1d(acknowledged, ids))
        result.batches = self.batches
        result.struck_s = [struck.at_s for struck in self.struck]
        result.early = int(sum((batch.late_ms < 0).sum() for batch in self.batches))
        first_s = dict(zip(ids[places].tolist(), at_s[places].tolist(), strict=True))
        again = np.flatnonzero(~first)
        settled_s = self._settled_s(ids[again])
        sources: Counter[str] = Counter()
        for row in again.tolist():
            message_id = int(ids[row])
            sources[self._source(float(at_s[row]), first_s[message_id], settled_s.get(message_id))] += 1
        result.duplicates = dict(sources)
        said = self.said()
        arrivals = np.array([batch.at_s for batch in self.batches])
        again_terms = Counter(terms[again].tolist())
        result.losses = [self._loss(struck, said, arrivals, again_terms) for struck in self.struck]
        seen = {item.term for item in said if item.what == "MASTER" and item.term > self.struck[0].term}
        result.unasked_elections = max(0, len(seen) - len(self.struck))
        return result

    def _settled_s(self, ids: NDArray[np.uint64]) -> dict[int, float]:
        """Time of the first receipt of each of these ids."""
        found: dict[int, float] = {}
        for at_s, settled in self.settled:
            for message_id in settled[np.isin(settled, ids)].tolist():
                found.setdefault(message_id, at_s)
        return found

    def _source(self, again_s: float, first_s: float, settled_s: float | None) -> str:
        """The source of a duplicate, in words."""
        struck = next((one for one in reversed(self.struck) if one.at_s <= again_s), None)
        if struck is None:
            return "before any loss"
        if settled_s is not None and settled_s < struck.at_s:
            return "settled with a receipt before the loss"
        if first_s >= struck.at_s:
            return "came from the old master after the loss"
        if (struck.at_s - first_s) * 1_000 <= SYNC_MS:
            return "delivered within the last sync period before the loss"
        return "delivered before, its receipt was still out"

    def _loss(self, struck: _Struck, said: list[_Said], arrivals: NDArray[np.float64], again: Counter[int]) -> Loss:
        new = next((batch for batch in self.batches if batch.term > struck.term and batch.at_s > struck.at_s), None)
        end_s = new.at_s if new is not None else struck.at_s + RESUMED_S_MAX
        window = arrivals[(arrivals > struck.at_s) & (arrivals < end_s + 1.0)]
        silence_s = (
            float(np.diff(np.concatenate([[struck.at_s], window])).max()) if len(window) else end_s - struck.at_s
        )
        term = new.term if new is not None else 0
        after = [item for item in said if item.at_s >= struck.at_s and item.term > struck.term]
        candidate = next((item for item in after if item.what == "CANDIDATE"), None)
        master = next((item for item in after if item.what == "MASTER" and item.term == term), None)
        running = next((item for item in after if item.what == "running" and item.term == term), None)
        times = [struck.at_s, *(item.at_s if item is not None else None for item in (candidate, master, running))]
        times.append(new.at_s if new is not None else None)

        def step(place: int) -> float | None:
            before, now = times[place], times[place + 1]
            return None if before is None or now is None else (now - before) * 1_000

        return Loss(
            struck.old,
            master.node if master is not None else "",
            term,
            step(0),
            step(1),
            step(2),
            step(3),
            (end_s - struck.at_s) * 1_000,
            silence_s * 1_000,
            again.get(term, 0),
            struck.starved_share,
        )


def _waited(pids: list[int]) -> float:
    """How long these processes have waited for a processor in all, ms."""
    return sum(waited_ms(pid) or 0.0 for pid in pids)


async def measure(
    directory: Path,
    kind: Kind,
    rounds: int,
    rate: float,
    *,
    nodes: int = 3,
    switch: Switch | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> Losses:
    """Lose the master repeatedly under load. With a `switch`, the nodes live in its namespaces. Raises the errors of
    cluster and client."""
    cluster: LocalCluster
    if switch is not None:
        cluster = ChaosCluster(directory, nodes, 1, switch=switch)
    elif kind is Kind.DROP:
        cluster = ChaosCluster(directory, nodes, 1, clients_apart=True, knobs=False)
    else:
        cluster = LocalCluster(directory, nodes)
    async with cluster, AsyncClient(cluster.addresses) as client:
        measurement = _Measurement(cluster, client, kind, rate)
        began_s = time.monotonic()
        consuming = asyncio.create_task(measurement.consume())
        loading = asyncio.create_task(measurement.load())
        try:
            await asyncio.sleep(WARM_S)
            for number in range(rounds):
                await measurement.lose()
                struck = measurement.struck[-1]
                told(f"{number + 1} of {rounds}: {kind.value} of {struck.old}, term {struck.term}")
            measurement.stop.set()
            await loading
            wanted = await asyncio.to_thread(np.unique, np.concatenate(measurement.acknowledged))
            with contextlib.suppress(TimeoutError):  # what has not come counts as lost
                async with asyncio.timeout(DRAIN_S):
                    await measurement.drained(wanted)
            lost_told = await measurement.tell_lost(wanted)
        finally:
            loading.cancel()
            consuming.cancel()
            await asyncio.gather(loading, consuming, return_exceptions=True)
        result = measurement.figures(time.monotonic() - began_s)
        result.lost_told = lost_told
        return result
