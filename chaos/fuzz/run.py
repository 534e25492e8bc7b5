"""Batches of fuzzed calls against real nodes, and what must hold after each of them.

Owns the run: its batches follow from seed and number alone, so that one can be played again (against a cluster that has
not seen those before it). After each batch every node is up, none has written a traceback, no call was answered UNKNOWN
or by an INTERNAL that no log explains, memory is bounded, digests are equal, a canary is scheduled and delivered, and
no node has lost its mastership by its own work.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import numpy as np

from tickwheel.chaos.fuzz.calls import MASTER, OPTIONS, Call, Caller, Ended, make
from tickwheel.chaos.fuzz.known import (
    GROUP,
    HOUR_MS,
    SCHEDULES,
    TOPIC,
    TOPICS,
    Delivery,
    Known,
    delivery,
    fits_of,
    hints_of,
)
from tickwheel.chaos.fuzz.mastership import LEASE_MS, Delay, Probes
from tickwheel.chaos.fuzz.messages import Maker
from tickwheel.chaos.live.cluster import anonymous_bytes
from tickwheel.client.errors import Fault
from tickwheel.node.local_cluster import LocalCluster
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2, scheduler_pb2, schedules_pb2

CONCURRENT = 24
IDLE_STREAMS = 1_000
"""Streams a node that are opened and left alone during a batch."""
GARBAGE_CONNECTIONS = 10
"""Connections a batch that speak something else than gRPC, to the clients' ports and the peers'."""
GROWTH_BYTES_MAX = 600 << 20
"""Memory that a node may use beyond its use at the start: the bounds of its maps and buffers are below this."""
CANARY_TOPIC, CANARY_GROUP = "canary", "canaries"
CANARY_S = 20.0
SETTLES_S = 20.0
SHOWN_BYTES = 120
FINDINGS_MAX = 20
GIVEN = 2_000
"""Messages that the fuzzer's own consumer gets before each batch."""
GIVEN_LEASE_MS = 600_000
DELIVERIES_KEPT = 12
"""Batches of up to 1,024 messages that it does not settle: requests refer to these."""
PULLS_MAX = 20
HELD_KEYS = ("u1", "u2", "u3")
HELD_S = 2.0
ASKS = "TransferMaster"
"""The method that asks for another master."""
NOT_TAKEN = frozenset({"INVALID_ARGUMENT", "UNIMPLEMENTED", "LOCAL"})
"""Answers by which it was not even begun."""
CALLS_SHOWN = 10
NAME_SHOWN = 40
BEFORE_S = 3.0
"""A node may still be at work for a call whose caller has gone."""
STATUS_S = 5.0

_TRACE_IDS = re.compile(r"\b[0-9a-f]{8,32}\b")


@dataclass(frozen=True, slots=True)
class FuzzConfig:
    """`batches` of `batch_calls` calls from `first` on."""

    seed: int = 0
    batches: int = 10
    batch_calls: int = 500
    first: int = 0
    idle_streams: int = IDLE_STREAMS


@dataclass(slots=True)
class FuzzReport:
    """The outcome of a run. `findings` is empty if everything held."""

    calls: int = 0
    batches: int = 0
    seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    grown_bytes_max: int = 0
    canary_ms_max: int = 0
    changes: list[str] = field(default_factory=list)
    """Changes of the master that no call asked for, each with the calls of its batch."""
    own_ms_max: int = 0
    """The longest that a node's own work has kept its loop; 0 if never for 100 ms."""
    given: int = 0
    """Messages that its own consumer got."""


class Fuzzer:
    """One run against a cluster that is up."""

    def __init__(self, cluster: LocalCluster, config: FuzzConfig, told: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._config = config
        self._told = told
        self._report = FuzzReport()
        self._known = Known()
        self._read_to = {node.node_id: 0 for node in cluster.nodes}
        self._pids = {node.node_id: node.pid for node in cluster.nodes}
        self._memory: dict[str, int] = {}
        self._settings = admin_pb2.Settings()
        self._canaries = 0
        self._probes = Probes(cluster.nodes)
        self._term = 0

    async def run(self) -> FuzzReport:
        """All batches; stops at the first one after which something does not hold."""
        config, report = self._config, self._report
        began_s = time.monotonic()
        channels = [grpc.aio.insecure_channel(node.client_address, options=OPTIONS) for node in self._cluster.nodes]
        try:
            await self._prepare()
            self._probes.start()
            for number in range(config.first, config.first + config.batches):
                try:
                    await self._provide()
                except TimeoutError as error:
                    self._found(number, f"what calls name: {error}")
                made = await self._batch(number, channels)
                await self._check(number)
                await self._check_mastership(number, made)
                report.batches += 1
                report.seconds = time.monotonic() - began_s
                codes = ", ".join(f"{name} {count:,}" for name, count in report.codes.most_common(5))
                self._told(f"batch {number}: {report.calls:,} calls; {codes}")
                if report.findings:
                    break
        finally:
            self._probes.stop()
            for channel in channels:
                await channel.close(grace=None)
        report.seconds = time.monotonic() - began_s
        return report

    async def _prepare(self) -> None:
        """Create the topics, groups and ids that batches refer to, and measure the memory of nodes at rest."""
        client = self._cluster.client()
        await client.admin.create_topic(CANARY_TOPIC)
        await client.admin.create_group(CANARY_GROUP, [CANARY_TOPIC])
        for name in ("t", "t2"):
            await client.admin.create_topic(name)
        await client.admin.create_topic("fifo", fifo=True)
        for name in ("g", "g2"):
            await client.admin.create_group(name, ["t", "fifo"])
        await client.admin.create_topic(TOPIC)
        await client.admin.create_group(GROUP, [TOPIC])
        self._settings = await self._call_master(
            "Admin/GetSettings", admin_pb2.GetSettingsRequest(), admin_pb2.Settings
        )
        self._settings.ClearField("slot_ms")
        for node in self._cluster.nodes:
            assert node.pid is not None
            self._memory[node.node_id] = anonymous_bytes(node.pid) or 0
        self._term = await self._highest_term()

    async def _provide(self) -> None:
        """Messages with the fuzzer's consumer, unique keys that are held, recurring schedules: for calls to name."""
        known = self._known
        kept = known.deliveries
        for old in kept[: max(0, len(kept) - DELIVERIES_KEPT)]:
            settle = consumer_pb2.SettleBatch(group=GROUP, topic=TOPIC, outcome=consumer_pb2.ACK)
            settle.ids, settle.attempts = old.ids.tobytes(), old.attempts.tobytes()
            settle.positions = old.positions.tobytes()
            await self._call_master("Consumer/Settle", settle, consumer_pb2.SettleReceipt)
        columns = scheduler_pb2.ColumnBatch(topic=TOPIC, payloads=b"g" * GIVEN)
        columns.delay_ms = np.zeros(GIVEN, "<i8").tobytes()
        columns.payload_sizes = np.ones(GIVEN, "<u4").tobytes()
        await self._call_master(
            "Scheduler/ScheduleMany", scheduler_pb2.ScheduleBatch(columns=columns), scheduler_pb2.BatchReceipt
        )
        pull = consumer_pb2.PullRequest(
            group=GROUP, topics=[TOPIC], messages_max=1_024, wait_ms=1_000, lease_ms=GIVEN_LEASE_MS
        )
        got: list[Delivery] = []
        rows = 0
        while len(got) < PULLS_MAX:
            if rows >= GIVEN:
                pull.wait_ms = 0
            batch = await self._call_master("Consumer/Pull", pull, consumer_pb2.DeliverBatch)
            if not batch.ids:
                break
            got.append(delivery(batch))
            rows += len(got[-1].ids)
        self._report.given += rows
        known.deliveries = [*kept[-DELIVERIES_KEPT:], *got]
        for topic in TOPICS:
            held = scheduler_pb2.ScheduleBatch()
            for key in HELD_KEYS:
                message = held.rows.messages.add(topic=topic, payload=b"holds", delay_ms=24 * HOUR_MS)
                message.meta.unique_key = key
                message.on_key_conflict = common_pb2.KEY_CONFLICT_USE_EXISTING
            with contextlib.suppress(TimeoutError):  # a call may have deleted the topic
                await self._call_master("Scheduler/ScheduleMany", held, scheduler_pb2.BatchReceipt, HELD_S)
        for name in SCHEDULES:
            put = schedules_pb2.PutScheduleRequest(paused=name == "paused")
            put.definition.name, put.definition.topic, put.definition.payload = name, TOPIC, b"run"
            put.definition.spec.interval_ms = HOUR_MS if name == "every hour" else 1_000
            await self._call_master("Schedules/Put", put, schedules_pb2.PutScheduleResponse)
        listed = await self._call_master(
            "Schedules/List", schedules_pb2.ListSchedulesRequest(), schedules_pb2.ListSchedulesResponse
        )
        known.revisions = {one.definition.name: one.revision for one in listed.schedules}

    async def _batch(self, number: int, channels: list[grpc.aio.Channel]) -> list[Ended]:
        config, report = self._config, self._report
        rng = Random(f"{config.seed}:{number}")
        now_ms = time.time_ns() // 1_000_000
        maker = Maker(rng, now_ms, hints_of(self._known), fits_of(self._known, now_ms))
        caller = Caller(rng, maker, len(channels), frozenset(self._pids))
        calls = [caller.call() for _ in range(config.batch_calls)]
        gate = asyncio.Semaphore(CONCURRENT)

        master = self._cluster.nodes.index(await self._cluster.wait_ready())

        async def one(call: Call) -> Ended:
            node = master if call.node == MASTER else call.node
            async with gate:
                return await make(call, self._cluster.nodes[node].client_address, channels[node])

        idle = self._open_idle(rng)
        garbage = asyncio.ensure_future(self._speak_garbage(rng))
        ended = await asyncio.gather(*(one(call) for call in calls))
        await garbage
        for channel, _ in idle:
            await channel.close(grace=None)
        report.calls += len(ended)
        report.codes.update(made.code for made in ended)
        logs = {node.node_id: node.log_file.read_text(errors="replace") for node in self._cluster.nodes}
        for made in ended:
            if made.code in ("UNKNOWN", "DATA_LOSS") or (made.code == "INTERNAL" and not _explained(made, logs)):
                body = b"|".join(made.call.bodies)[:SHOWN_BYTES].hex()
                self._found(number, f"{made.call.path} answered {made.code}: {made.details[:300]}; body {body}")
        return ended

    def _open_idle(self, rng: Random) -> list[tuple[grpc.aio.Channel, list[Any]]]:
        """Streams that are opened and say nothing more, by channel; dropping one would cancel it."""
        opened: list[tuple[grpc.aio.Channel, list[Any]]] = []
        paths = ("Consumer/Consume", "Scheduler/ScheduleStream", "Bulk/SendBundle")
        for node in self._cluster.nodes:
            channel: Any = grpc.aio.insecure_channel(node.client_address, options=OPTIONS)
            open_streams = range(self._config.idle_streams)
            opened.append(
                (channel, [channel.stream_stream(f"/tickwheel.v1.{rng.choice(paths)}")() for _ in open_streams])
            )
        return opened

    async def _speak_garbage(self, rng: Random) -> None:
        for _ in range(GARBAGE_CONNECTIONS):
            node = rng.choice(self._cluster.nodes)
            host, _, port = rng.choice((node.client_address, node.peer_address)).rpartition(":")
            preface = rng.choice((b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"))
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(preface + rng.randbytes(rng.randrange(2_000)))
                with contextlib.suppress(OSError):
                    await writer.drain()
                writer.close()

    # -- what must hold

    def _found(self, number: int, what: str) -> None:
        if len(self._report.findings) < FINDINGS_MAX:
            self._report.findings.append(f"batch {number}: {what}")

    async def _check(self, number: int) -> None:
        for node in self._cluster.nodes:
            if not node.running or node.pid != self._pids[node.node_id]:
                code = node.process.returncode if node.process is not None else None
                self._found(number, f"node {node.node_id} ended with code {code}: {node.log_tail()}")
            log = node.log_file.read_text(errors="replace")
            new = log[self._read_to[node.node_id] :]
            self._read_to[node.node_id] = len(log)
            if "Traceback" in new:
                at = new.index("Traceback")
                self._found(number, f"node {node.node_id} wrote a traceback: {new[max(0, at - 300) : at + 2_000]}")
            if node.pid is not None and node.running:
                grown = (anonymous_bytes(node.pid) or 0) - self._memory[node.node_id]
                self._report.grown_bytes_max = max(self._report.grown_bytes_max, grown)
                if grown > GROWTH_BYTES_MAX:
                    self._found(number, f"node {node.node_id} has grown by {grown:,} bytes")
        if self._report.findings and not all(node.running for node in self._cluster.nodes):
            return
        try:
            await self._canary()
            await self._digests()
        except (TimeoutError, grpc.aio.AioRpcError, AssertionError) as error:
            self._found(number, f"the canary or the digests: {error!r}")

    async def _highest_term(self) -> int:
        answers = (await self._cluster.statuses(STATUS_S)).values()
        return max((0 if isinstance(answer, Fault) else answer.term for answer in answers), default=0)

    async def _check_mastership(self, number: int, made: Sequence[Ended]) -> None:
        """The term has stayed, or a call asked for another, or no node was kept for a lease by its own work."""
        before, self._term = self._term, await self._highest_term()
        delays = self._probes.take()
        self._report.own_ms_max = max([self._report.own_ms_max, *(round(delay.own_ms) for delay in delays)])
        if self._term == before or asked(made):
            return
        what = changed(before, self._term, delays, made)
        self._report.changes.append(f"batch {number}: {what}")
        if any(delay.own_ms > LEASE_MS for delay in delays):
            self._found(number, what)

    async def _call_master(self, path: str, request: Any, answer: Any, within_s: float = CANARY_S) -> Any:
        """A call at whichever node takes it."""
        last: Exception | None = None
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            for node in self._cluster.nodes:
                async with grpc.aio.insecure_channel(node.client_address, options=OPTIONS) as channel:
                    dialled: Any = channel
                    try:
                        data = await dialled.unary_unary("/tickwheel.v1." + path)(
                            request.SerializeToString(), timeout=5.0
                        )
                        return answer.FromString(data)
                    except grpc.aio.AioRpcError as error:
                        last = error
            await asyncio.sleep(0.1)
        raise TimeoutError(f"{path}: {last}")

    async def _canary(self) -> None:
        """Settings as they were; then a message is scheduled, delivered and settled."""
        await self._call_master("Admin/UpdateSettings", self._settings, admin_pb2.Settings)
        self._canaries += 1
        payload = b"canary %d" % self._canaries
        message = common_pb2.Message(topic=CANARY_TOPIC, payload=payload, delay_ms=100)
        began_s = time.monotonic()
        receipt = await self._call_master(
            "Scheduler/Schedule", scheduler_pb2.ScheduleRequest(message=message), scheduler_pb2.ScheduleReceipt
        )
        self._known.ids = [*self._known.ids[-20:], receipt.id.hour << 32 | receipt.id.index]
        pull = consumer_pb2.PullRequest(group=CANARY_GROUP, topics=[CANARY_TOPIC], messages_max=10, wait_ms=1_000)
        while True:
            if time.monotonic() > began_s + CANARY_S:
                raise TimeoutError("the canary was not delivered")
            batch = await self._call_master("Consumer/Pull", pull, consumer_pb2.DeliverBatch)
            if batch.ids:
                settle = consumer_pb2.SettleBatch(
                    group=CANARY_GROUP,
                    topic=batch.topic,
                    outcome=consumer_pb2.ACK,
                    ids=batch.ids,
                    attempts=batch.attempts,
                    positions=batch.positions,
                )
                await self._call_master("Consumer/Settle", settle, consumer_pb2.SettleReceipt)
            if payload in batch.records:
                break
        self._report.canary_ms_max = max(self._report.canary_ms_max, int(1_000 * (time.monotonic() - began_s)))

    async def _digests(self) -> None:
        """Equal at one index on all nodes."""
        end_s = time.monotonic() + SETTLES_S
        while True:
            seen = []
            for node in self._cluster.nodes:
                async with grpc.aio.insecure_channel(node.client_address) as channel:
                    dialled: Any = channel
                    data = await dialled.unary_unary("/tickwheel.v1.Admin/GetDigest")(b"", timeout=10.0)
                    seen.append(admin_pb2.StateDigest.FromString(data))
            if len({digest.applied_index for digest in seen}) == 1:
                different = len({digest.SerializeToString(deterministic=True) for digest in seen}) > 1
                assert not different, f"digests differ at entry {seen[0].applied_index}"
                return
            if time.monotonic() > end_s:
                raise TimeoutError(f"nodes have applied {[digest.applied_index for digest in seen]}")
            await asyncio.sleep(0.1)


def _explained(ended: Ended, logs: dict[str, str]) -> bool:
    """Whether an INTERNAL names something by which its cause is found in a node's log."""
    return any(word in log for word in _TRACE_IDS.findall(ended.details) for log in logs.values())


def asked(made: Sequence[Ended]) -> bool:
    """Whether one of these calls may have begun a handover."""
    return any(one.call.path.endswith(f"/{ASKS}") and one.code not in NOT_TAKEN for one in made)


def changed(before: int, term: int, delays: Sequence[Delay], made: Sequence[Ended]) -> str:
    """A change of the master in words: the delays, the longest calls around them, and all calls."""
    lines = [f"the term went from {before} to {term}, and no call asked for another master"]
    for delay in delays:
        lines.append(f"{delay}; the longest calls around it:")
        calls = [one for one in made if one.began_s < delay.until_s and one.ended_s > delay.from_s - BEFORE_S]
        calls.sort(key=lambda one: -one.bytes)
        lines += [f"  {one.call.path} of {one.bytes:,} bytes: {one.code}" for one in calls[:CALLS_SHOWN]]
    if not delays:
        lines.append("no probe was answered late")
    counted = Counter(one.call.path.rpartition("/")[2][:NAME_SHOWN] for one in made)
    lines.append("calls: " + ", ".join(f"{name} {count}" for name, count in sorted(counted.items())))
    return "\n".join(lines)
