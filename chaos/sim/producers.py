"""Producers of the whole node: batches of all shapes, repeated under the same sequence until a receipt comes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from tickwheel.chaos.sim.clients import TIMEOUT_NS, Wires
from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.history import (
    DelayCounted,
    Row,
    ScheduleAcknowledged,
    ScheduleRefused,
    ScheduleSent,
)
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import HOUR_MS, MS, SECOND
from tickwheel.node.core.face import CoreFace
from tickwheel.node.core.failure import Failure
from tickwheel.node.core.intake import KIND_DELAY, KIND_DUE, IncomingBatch
from tickwheel.node.core.publisher import BatchOutcome
from tickwheel.proto import common_pb2

PRODUCERS = 3
TOPICS = ("orders", "mails")
PROBE_BATCHES = 4
"""Batches of each producer after the heal."""
UID = struct.Struct("<Q")
"""What names a message: the first bytes of its payload."""


@dataclass
class _Producer:
    name: str
    sequence: int = 0
    rows: tuple[Row, ...] = ()
    attempt: int = 0
    target: int = 0
    delivered_probes: int = 0


class Producers:
    """`clients.Clients`. `known` has the id of each message that was acknowledged and that nobody else has taken."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._world = wires.world
        self._history = wires.history
        self._rng = wires.rng
        self._producers = [_Producer(f"p{number}") for number in range(PRODUCERS)]
        self.known: dict[int, int] = {}

    def start(self) -> None:
        """See Clients."""
        for producer in self._producers:
            self._world.after(self._rng.randrange(SECOND), self._produce, producer)

    def unfinished(self) -> str:
        """See Clients."""
        probing = [p.name for p in self._producers if p.delivered_probes < PROBE_BATCHES]
        return f"the last batches of {', '.join(probing)}" if probing else ""

    def _produce(self, producer: _Producer) -> None:
        """Send the current batch, or make a new one."""
        if not producer.rows:
            if self._wires.winding_down and producer.delivered_probes >= PROBE_BATCHES:
                return
            producer.sequence += 1
            producer.rows = self._new_rows()
            producer.attempt = 0
        producer.attempt += 1
        attempt, sequence = producer.attempt, producer.sequence
        machine = self._wires.machine(producer.target)
        self._history.add(ScheduleSent(self._world.now_ns, producer.name, sequence, machine.name, producer.rows))
        batch = self._batch(producer)
        relative = tuple(row.uid for row in producer.rows if row.due_ms is None)

        def taken(face: CoreFace) -> None:
            self._note_delays(machine, relative)
            face.schedule(batch, answered)

        def answered(outcome: BatchOutcome | Failure) -> None:
            if isinstance(outcome, BatchOutcome):
                self._note_delays(machine, relative)
            if self._rng.random() < 0.97:  # else the answer is lost on the way
                self._wires.back(self._receipt, producer, sequence, outcome)

        self._wires.call(machine, taken)
        self._world.after(TIMEOUT_NS, self._timed_out, producer, sequence, attempt)

    def _note_delays(self, machine: Machine, uids: tuple[int, ...]) -> None:
        if uids and isinstance(machine.process, CoreProcess):
            error_ms = machine.process.host.core.clock.error_ns() / MS
            self._history.add(DelayCounted(self._world.now_ns, machine.name, uids, error_ms))

    def _timed_out(self, producer: _Producer, sequence: int, attempt: int) -> None:
        if producer.sequence == sequence and producer.attempt == attempt and producer.rows:
            producer.target += 1
            self._produce(producer)

    def _receipt(self, producer: _Producer, sequence: int, outcome: BatchOutcome | Failure) -> None:
        if producer.sequence != sequence or not producer.rows:
            return
        now_ns = self._world.now_ns
        if isinstance(outcome, Failure):
            self._history.add(
                ScheduleRefused(now_ns, producer.name, sequence, common_pb2.ErrorReason.Name(outcome.reason))
            )
            producer.target = self._wires.redirect(outcome, producer.target)
            producer.attempt += 1  # its time-out no longer counts
            self._world.after(self._rng.randrange(20 * MS, 150 * MS), self._again, producer, sequence)
            return
        uids = tuple(row.uid for row in producer.rows)
        ids, due = tuple(outcome.ids.tolist()), tuple(outcome.due_ms.tolist())
        self._history.add(ScheduleAcknowledged(now_ns, producer.name, sequence, uids, ids, due, outcome.repeated))
        for uid, id64 in zip(uids, ids, strict=True):
            self.known[uid] = id64
        producer.rows = ()
        producer.delivered_probes += self._wires.winding_down
        pause_ns = int(self._rng.expovariate(1 / (self._wires.shape.pause_ms * MS)))
        self._world.after(pause_ns, self._produce, producer)

    def _again(self, producer: _Producer, sequence: int) -> None:
        if producer.sequence == sequence and producer.rows:
            self._produce(producer)

    def _new_rows(self) -> tuple[Row, ...]:
        rng = self._rng
        wall_ms = self._world.wall_ms
        count = rng.choice((1, 1, 2, 5, 30))
        topic = rng.choice(TOPICS)
        same_ms = wall_ms + rng.randrange(200, 4_000)
        # Mostly times that many messages share, as people like them: fewer commands, faster seeds.
        grid_ms = rng.choice((1, 100, 200, 500, 500, 1_000))
        rows = []
        for _ in range(count):
            shape = rng.random()
            due_ms: int | None
            delay_ms: int | None = None
            if shape < 0.3:
                due_ms = same_ms
            elif shape < 0.36:
                due_ms = wall_ms - rng.randrange(10_000)
            elif shape < 0.42 and not self._wires.winding_down:
                due_ms = wall_ms + HOUR_MS * rng.randrange(1, 1_000)
            elif shape < 0.5:
                due_ms, delay_ms = None, rng.randrange(3_000)
            else:
                due_ms = (wall_ms + rng.randrange(5_000)) // grid_ms * grid_ms
            rows.append(Row(self._wires.number(), topic, due_ms, delay_ms))
        return tuple(rows)

    def _batch(self, producer: _Producer) -> IncomingBatch:
        rows = producer.rows
        records = [UID.pack(row.uid) + b"." * (row.uid * 7919 % 150) for row in rows]
        return IncomingBatch(
            producer_id=producer.name,
            sequence=producer.sequence,
            count=len(rows),
            topics=[rows[0].topic],
            topic_of=None,
            when=np.array([row.due_ms if row.due_ms is not None else row.delay_ms for row in rows], np.int64),
            kinds=np.array([KIND_DUE if row.due_ms is not None else KIND_DELAY for row in rows], np.uint8),
            sizes=np.array([len(record) for record in records], np.uint32),
            meta_sizes=None,
            records=b"".join(records),
        )
