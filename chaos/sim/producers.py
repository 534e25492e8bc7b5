"""Producers of the whole node: batches of all shapes, repeated under the same sequence until a receipt comes.

What they write is a function that makes the rows of a batch, all of one topic: `mixed_rows` unless another is given.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from tickwheel.chaos.sim.clients import TIMEOUT_NS, Wires
from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.history_messages import (
    DelayCounted,
    Label,
    Row,
    ScheduleAcknowledged,
    ScheduleRefused,
    ScheduleSent,
)
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.world import HOUR_MS, MS, SECOND
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import KIND_DELAY, KIND_DUE, IncomingBatch, checksum_of, from_batch
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.failure import Failure
from tickwheel.node.state.settings import Settings
from tickwheel.proto import common_pb2, scheduler_pb2

PRODUCERS = ("p0", "p1", "p2")
TOPICS = ("orders", "mails")
PROBE_BATCHES = 4
"""Batches of each producer after the heal."""
SOONER = 4
"""After the heal pauses and times ahead are this many times shorter: the run only waits for what is due then."""
SOONER_GRID_MS = 100
UID = struct.Struct("<Q")
"""The first bytes of a payload: they identify the message."""


@dataclass
class _Producer:
    name: str
    sequence: int = 0
    rows: tuple[Row, ...] = ()
    attempt: int = 0
    target: int = 0
    delivered_probes: int = 0


class Producers:
    """`clients.Clients`. `known` has the id of each message that was acknowledged and that nobody else has taken.

    `groups`: whom the messages are for; empty: all groups of the run.
    """

    def __init__(
        self,
        wires: Wires,
        names: Sequence[str] = PRODUCERS,
        new_rows: Callable[[], tuple[Row, ...]] | None = None,
        groups: tuple[str, ...] = (),
        rng: Random | None = None,
    ) -> None:
        self._wires = wires
        self._world = wires.world
        self._history = wires.history
        self._rng = rng or wires.rng
        self._new_rows = new_rows or (lambda: mixed_rows(wires))
        self._groups = groups
        self._producers = [_Producer(name) for name in names]
        self.known: dict[int, int] = {}

    def start(self) -> None:
        for producer in self._producers:
            self._world.after(self._rng.randrange(SECOND), self._produce, producer)

    def unfinished(self) -> str:
        probing = [p.name for p in self._producers if p.delivered_probes < PROBE_BATCHES]
        return f"the last batches of {', '.join(probing)}" if probing else ""

    def _produce(self, producer: _Producer) -> None:
        """Send the current batch, or make a new one."""
        if not producer.rows:
            if self._wires.winding_down and producer.delivered_probes >= PROBE_BATCHES:
                return
            producer.sequence += 1
            producer.rows = self._new_rows()
            if self._wires.winding_down:
                producer.rows = sooner(producer.rows, self._world.wall_ms)
            producer.attempt = 0
        producer.attempt += 1
        attempt, sequence = producer.attempt, producer.sequence
        machine = self._wires.machine(producer.target)
        self._history.note(ScheduleSent, producer.name, sequence, machine.name, producer.rows)
        batch = self._batch(producer)
        batch.connection = producer.name
        relative = tuple(row.uid for row in producer.rows if row.due_ms is None)

        def taken(core: NodeCore) -> None:
            self._note_delays(machine, relative)
            core.parts.publisher.schedule(batch, Reply.either(answered))

        def answered(outcome: BatchOutcome | Failure) -> None:
            if isinstance(outcome, BatchOutcome):
                self._note_delays(machine, relative)
            if self._rng.random() < 0.97:  # else the answer is lost on the way
                self._wires.back(self._receipt, producer, sequence, outcome)

        self._wires.call(machine, taken)
        self._world.after(TIMEOUT_NS, self._timed_out, producer, sequence, attempt)

    def _note_delays(self, machine: Machine, uids: tuple[int, ...]) -> None:
        if uids and isinstance(machine.process, CoreProcess):
            clock = machine.process.host.core.clock
            # Gaps that nobody has confirmed are in the error, and no delay may be short by them.
            error_ms = max(0.0, clock.error_ns() / MS - clock.unconfirmed_ms)
            self._history.note(DelayCounted, machine.name, uids, error_ms)

    def _timed_out(self, producer: _Producer, sequence: int, attempt: int) -> None:
        if producer.sequence == sequence and producer.attempt == attempt and producer.rows:
            producer.target += 1
            self._produce(producer)

    def _receipt(self, producer: _Producer, sequence: int, outcome: BatchOutcome | Failure) -> None:
        if producer.sequence != sequence or not producer.rows:
            return
        if isinstance(outcome, Failure):
            self._history.note(ScheduleRefused, producer.name, sequence, common_pb2.ErrorReason.Name(outcome.reason))
            producer.target = self._wires.redirect(outcome, producer.target)
            producer.attempt += 1  # its time-out no longer counts
            self._world.after(self._rng.randrange(20 * MS, 150 * MS), self._again, producer, sequence)
            return
        uids = tuple(row.uid for row in producer.rows)
        ids, due = tuple(outcome.ids.tolist()), tuple(outcome.due_ms.tolist())
        self._history.note(
            ScheduleAcknowledged, producer.name, sequence, uids, ids, due, outcome.repeated, self._groups
        )
        for uid, id64 in zip(uids, ids, strict=True):
            self.known[uid] = id64
        producer.rows = ()
        producer.delivered_probes += self._wires.winding_down
        pause_ns = self._wires.pause_ns(self._wires.shape.pause_ms * MS, self._rng)
        if self._wires.winding_down:
            pause_ns //= SOONER
        self._world.after(pause_ns, self._produce, producer)

    def _again(self, producer: _Producer, sequence: int) -> None:
        if producer.sequence == sequence and producer.rows:
            self._produce(producer)

    def _batch(self, producer: _Producer) -> IncomingBatch:
        rows = producer.rows
        if any(row.label is not None for row in rows):
            return labelled_batch(producer.name, producer.sequence, rows)
        return plain_batch(producer.name, producer.sequence, rows)


def mixed_rows(wires: Wires) -> tuple[Row, ...]:
    """For one of TOPICS: due at once, soon, together, and some in hours to come."""
    rng = wires.rng
    wall_ms = wires.world.wall_ms
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
        elif shape < 0.42 and not wires.winding_down:
            due_ms = wall_ms + HOUR_MS * rng.randrange(1, 1_000)
        elif shape < 0.5:
            due_ms, delay_ms = None, rng.randrange(3_000)
        else:
            due_ms = (wall_ms + rng.randrange(5_000)) // grid_ms * grid_ms
        rows.append(Row(wires.number(), topic, due_ms, delay_ms))
    return tuple(rows)


def sooner(rows: Sequence[Row], wall_ms: int) -> tuple[Row, ...]:
    """Rows that are due the sooner, still mostly at times that many share."""

    def near(row: Row) -> Row:
        if row.due_ms is None:
            return replace(row, delay_ms=(row.delay_ms or 0) // SOONER)
        ahead_ms = max(0, row.due_ms - wall_ms)
        return replace(row, due_ms=min(row.due_ms, (wall_ms + ahead_ms // SOONER) // SOONER_GRID_MS * SOONER_GRID_MS))

    return tuple(map(near, rows))


def plain_batch(producer: str, sequence: int, rows: Sequence[Row]) -> IncomingBatch:
    """Rows of one topic without labels, with the checksum that the node's own intake makes of them."""
    records = [UID.pack(row.uid) + b"." * (row.uid * 7919 % 150) for row in rows]
    batch = IncomingBatch(
        producer_id=producer,
        sequence=sequence,
        count=len(rows),
        topics=[rows[0].topic],
        topic_of=None,
        when=np.array([row.due_ms if row.due_ms is not None else row.delay_ms for row in rows], np.int64),
        kinds=np.array([KIND_DUE if row.due_ms is not None else KIND_DELAY for row in rows], np.uint8),
        sizes=np.array([len(record) for record in records], np.uint32),
        records=b"".join(records),
    )
    batch.checksum = checksum_of(batch, batch.sizes, batch.records, [])
    return batch


def labelled_batch(producer: str, sequence: int, rows: Sequence[Row]) -> IncomingBatch:
    """Rows with message groups, tags, keys and unique keys, as the node's own intake reads them."""
    messages = []
    for row in rows:
        label = row.label or Label()
        meta = common_pb2.MessageMeta(
            message_group=label.lane or "", tags=label.tags, key=label.key, unique_key=label.unique_key
        )
        message = common_pb2.Message(
            topic=row.topic,
            payload=UID.pack(row.uid),
            meta=meta,
            on_key_conflict=common_pb2.KeyConflict.Value(label.on_conflict),
            key_until_settled=label.until_settled,
        )
        if row.due_ms is not None:
            message.due_ms = row.due_ms
        else:
            message.delay_ms = row.delay_ms or 0
        messages.append(message)
    wanted = scheduler_pb2.ScheduleBatch(
        producer_id=producer, sequence=sequence, rows=scheduler_pb2.RowBatch(messages=messages)
    )
    return from_batch(wanted, Settings())
