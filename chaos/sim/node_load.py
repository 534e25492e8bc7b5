"""Clients of the whole node: producers that repeat, cancels and moves, consumers that settle, nack, die or are slow.

Every client is simple and honest: it keeps a batch until it has a receipt, with the same sequence; it asks
whoever it thinks is master and goes on to the next node when that is wrong or nobody answers in time.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tickwheel.chaos.sim.checkers.p1_no_loss import NoLoss
from tickwheel.chaos.sim.core_process import CoreProcess, note_digest, small_config
from tickwheel.chaos.sim.history import (
    CancelAnswered,
    CancelSent,
    DelayCounted,
    Delivered,
    Looked,
    RescheduleAnswered,
    RescheduleSent,
    Row,
    ScheduleAcknowledged,
    ScheduleRefused,
    ScheduleSent,
    SessionClosed,
    Settled,
    SettleSent,
)
from tickwheel.chaos.sim.log_watch import Census
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.setup import Stage
from tickwheel.chaos.sim.world import HOUR_MS, MS, SECOND
from tickwheel.node.core.face import CoreFace, Session
from tickwheel.node.core.failure import Failure
from tickwheel.node.core.intake import KIND_DELAY, KIND_DUE, IncomingBatch
from tickwheel.node.core.publisher import BatchOutcome
from tickwheel.proto import common_pb2, consumer_pb2, scheduler_pb2

PRODUCERS = 3
TOPICS = ("orders", "mails")
GROUPS = ("billing", "audit")
CONSUMERS_PER_GROUP = 2
UID = struct.Struct("<Q")
TIMEOUT_NS = 900 * MS
LEASE_MS = 3_000
CREDITS = 200
PROBE_BATCHES = 4
LOOKED_FOR = 40
CHANGED_NEWEST = 300
"""Cancels and moves are of one of so many that were acknowledged last."""
LOOK_NS = 500 * MS


@dataclass
class _Message:
    id: int
    due_ms: int


@dataclass
class _Producer:
    name: str
    sequence: int = 0
    rows: tuple[Row, ...] = ()
    attempt: int = 0
    target: int = 0
    delivered_probes: int = 0


_Together = tuple[int, int, str, consumer_pb2.Outcome.ValueType]
"""(session, when, topic, outcome) of what is settled by one call."""


@dataclass
class _Consumer:
    group: str
    number: int
    target: int = 0
    session: Session | None = None
    machine: Machine | None = None
    boot: int = 0
    session_number: int = 0
    opening: int = 0
    unanswered: dict[int, int] = field(default_factory=dict)
    thinking: dict[_Together, list[tuple[consumer_pb2.DeliverBatch, list[int]]]] = field(default_factory=dict)


class NodeLoad:
    """`setup.Load` of the whole node."""

    groups: tuple[str, ...] = GROUPS

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._world = stage.world
        self._history = stage.history
        self._rng: random.Random = stage.world.stream("clients")
        self._census = Census()
        self._next_uid = 1
        self._next_session = 1
        self._known: dict[int, _Message] = {}
        self._winding_down = False
        self._producers = [_Producer(f"p{number}") for number in range(PRODUCERS)]
        self._consumers = [_Consumer(group, number) for group in GROUPS for number in range(CONSUMERS_PER_GROUP)]
        self._open_changes = 0
        self._opens = 0

    def build(self, machine: Machine) -> CoreProcess:
        """A whole node."""
        config = small_config(self._stage.world.seed)
        stage = self._stage
        return CoreProcess(machine, stage.names, stage.config.guards, config, stage.shape, self._census)

    def start(self) -> None:
        for producer in self._producers:
            self._world.after(self._rng.randrange(SECOND), self._produce, producer)
        for consumer in self._consumers:
            self._world.after(self._rng.randrange(SECOND), self._keep_open, consumer)
        self._world.after(SECOND, self._change_one)

    def wind_down(self) -> None:
        self._winding_down = True

    def unfinished(self) -> str:
        positions = {}
        for machine in self._stage.machines:
            if not isinstance(machine.process, CoreProcess):
                return f"{machine.name} does not run"
            positions[machine.name] = machine.process.position
        probing = [p.name for p in self._producers if p.delivered_probes < PROBE_BATCHES]
        if probing:
            return f"the last batches of {', '.join(probing)}"
        missing = self._no_loss().outstanding(self._world.now_ns)
        if missing:
            return f"{len(missing)} deliveries, for instance {missing[0]}"
        if self._open_changes:
            return "answers to cancels or moves"
        unsettled = sum(len(c.unanswered) for c in self._consumers)
        if unsettled:
            return f"{unsettled} settlements"
        return "" if len(set(positions.values())) == 1 else f"equal applied indexes: {positions}"

    def _no_loss(self) -> NoLoss:
        checkers = getattr(self._stage, "checkers", ())
        return next(checker for checker in checkers if isinstance(checker, NoLoss))

    def finish(self) -> None:
        """Look for what is not due yet on every node, and take digests of all of them."""
        waiting = [uid for uid in self._no_loss().not_due(self._world.now_ns) if uid in self._known][:LOOKED_FOR]
        for machine in self._stage.machines:
            for uid in waiting:
                self._look(machine, uid, self._known[uid].id)
        self._world.run_until(self._world.now_ns + LOOK_NS)
        for machine in self._stage.machines:
            assert isinstance(machine.process, CoreProcess)
            note_digest(machine, machine.process.host.core)

    def _look(self, machine: Machine, uid: int, id64: int) -> None:
        def told(answer: scheduler_pb2.GetResponse | Failure) -> None:
            if not isinstance(answer, Failure):
                state = scheduler_pb2.MessageState.Name(answer.state)
            elif answer.reason == common_pb2.UNKNOWN_NAME:
                state = "NOT_FOUND"
            else:
                return  # not the master: it names who is
            self._history.add(Looked(self._world.now_ns, uid, id64, state))

        process = machine.process
        assert isinstance(process, CoreProcess)
        machine.deliver(process.host.face.get, id64, False, told)

    def hand_over(self, machine: Machine, target: str, done: Callable[[bool], None]) -> None:
        """Planned handover from this machine."""
        process = machine.process
        assert isinstance(process, CoreProcess)
        machine.deliver(process.host.core.transfer, target, lambda failure: done(failure is None))

    # -- reaching a node

    def _machine(self, target: int) -> Machine:
        machines = self._stage.machines
        return machines[target % len(machines)]

    def _call(self, machine: Machine, action: Callable[[CoreFace], None]) -> None:
        """Run something on a node's client face after the way there; lost if the process is gone by then."""

        def arrive() -> None:
            process = machine.process
            if isinstance(process, CoreProcess):
                boot = machine.boot
                machine.deliver(lambda: action(process.host.face) if machine.boot == boot else None)

        self._world.after(self._rng.randrange(100_000, 2 * MS), arrive)

    def _back(self, function: Callable[..., None], *args: object) -> None:
        """An answer on its way to the client."""
        self._world.after(self._rng.randrange(100_000, 2 * MS), function, *args)

    def _redirect(self, failure: Failure, target: int) -> int:
        names = list(self._stage.names)
        master = failure.metadata.get("master_id", "")
        return names.index(master) if master in names else target + 1

    # -- producers

    def _produce(self, producer: _Producer) -> None:
        """Send the current batch, or make a new one."""
        if not producer.rows:
            if self._winding_down and producer.delivered_probes >= PROBE_BATCHES:
                return
            producer.sequence += 1
            producer.rows = self._new_rows()
            producer.attempt = 0
        producer.attempt += 1
        attempt, sequence = producer.attempt, producer.sequence
        machine = self._machine(producer.target)
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
                self._back(self._receipt, producer, sequence, outcome)

        self._call(machine, taken)
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
            producer.target = self._redirect(outcome, producer.target)
            producer.attempt += 1  # its time-out no longer counts
            self._world.after(self._rng.randrange(20 * MS, 150 * MS), self._again, producer, sequence)
            return
        uids = tuple(row.uid for row in producer.rows)
        ids, due = tuple(outcome.ids.tolist()), tuple(outcome.due_ms.tolist())
        self._history.add(ScheduleAcknowledged(now_ns, producer.name, sequence, uids, ids, due, outcome.repeated))
        for uid, id64, due_ms in zip(uids, ids, due, strict=True):
            self._known[uid] = _Message(id64, due_ms)
        producer.rows = ()
        producer.delivered_probes += self._winding_down
        pause_ns = int(self._rng.expovariate(1 / (self._stage.shape.pause_ms * MS)))
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
            elif shape < 0.42 and not self._winding_down:
                due_ms = wall_ms + HOUR_MS * rng.randrange(1, 1_000)
            elif shape < 0.5:
                due_ms, delay_ms = None, rng.randrange(3_000)
            else:
                due_ms = (wall_ms + rng.randrange(5_000)) // grid_ms * grid_ms
            rows.append(Row(self._next_uid, topic, due_ms, delay_ms))
            self._next_uid += 1
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

    # -- cancels and moves

    def _change_one(self) -> None:
        if self._winding_down:
            return
        rng = self._rng
        self._world.after(int(rng.expovariate(1 / (250 * MS))), self._change_one)
        if not self._known:
            return
        newest = list(islice(reversed(self._known.items()), CHANGED_NEWEST))
        uid, message = rng.choice(newest)
        del self._known[uid]
        self._open_changes += 1
        if rng.random() < 0.6:
            self._cancel(uid, message.id, rng.randrange(3), 0)
        else:
            due_ms = self._world.wall_ms + rng.randrange(100, 4_000)
            self._move(uid, message.id, due_ms, rng.randrange(3))

    def _cancel(self, uid: int, id64: int, target: int, attempt: int) -> None:
        machine = self._machine(target)
        answered: list[bool] = []
        self._history.add(CancelSent(self._world.now_ns, uid, id64))

        def done(outcome: scheduler_pb2.CancelResponse | Failure) -> None:
            self._back(answer, outcome)

        def answer(outcome: scheduler_pb2.CancelResponse | Failure) -> None:
            if answered:
                return
            answered.append(True)
            if isinstance(outcome, Failure):
                self._world.after(100 * MS, self._cancel, uid, id64, self._redirect(outcome, target), attempt + 1)
                return
            self._open_changes -= 1
            name = scheduler_pb2.CancelOutcome.Name(outcome.outcome)
            self._history.add(CancelAnswered(self._world.now_ns, uid, id64, name))

        def timed_out() -> None:
            if not answered:
                answered.append(True)
                self._cancel(uid, id64, target + 1, attempt + 1)

        self._call(machine, lambda face: face.cancel(id64, done))
        self._world.after(TIMEOUT_NS, timed_out)

    def _move(self, uid: int, id64: int, due_ms: int, target: int) -> None:
        """One try: a repeat could move it twice, which is allowed and would prove nothing."""
        machine = self._machine(target)
        self._history.add(RescheduleSent(self._world.now_ns, uid, id64, due_ms))
        request = scheduler_pb2.RescheduleRequest(
            id=common_pb2.MessageId(hour=id64 >> 32, index=id64 & 0xFFFF_FFFF), due_ms=due_ms
        )
        ended: list[bool] = []

        def done(outcome: scheduler_pb2.RescheduleResponse | Failure) -> None:
            self._back(answer, outcome)

        def answer(outcome: scheduler_pb2.RescheduleResponse | Failure) -> None:
            if ended:
                return
            if isinstance(outcome, Failure):
                end()
                return
            ended.append(True)
            self._open_changes -= 1
            name = scheduler_pb2.RescheduleOutcome.Name(outcome.outcome)
            number = outcome.id.hour << 32 | outcome.id.index
            self._history.add(RescheduleAnswered(self._world.now_ns, uid, id64, name, number, outcome.due_ms))

        def end() -> None:
            if not ended:
                ended.append(True)
                self._open_changes -= 1

        self._call(machine, lambda face: face.reschedule(request, done))
        self._world.after(TIMEOUT_NS, end)

    # -- consumers

    def _keep_open(self, consumer: _Consumer) -> None:
        """Open a session where the master is thought to be; look after it for ever."""
        machine = consumer.machine
        lost = machine is None or machine.boot != consumer.boot or machine.process is None
        if consumer.session is not None and lost:
            self._session_over(consumer)
        if consumer.session is None and not consumer.opening:
            self._open(consumer)
        elif consumer.session is not None and not self._winding_down and self._rng.random() < 0.02:
            self._die(consumer)
        self._world.after(200 * MS, self._keep_open, consumer)

    def _open(self, consumer: _Consumer) -> None:
        machine = self._machine(consumer.target)
        number = self._next_session
        self._next_session += 1
        consumer.opening = number
        boot = machine.boot
        request = consumer_pb2.OpenConsumer(
            group=consumer.group, topics=TOPICS, credits=CREDITS, lease_ms=LEASE_MS, batch_messages_max=16
        )

        def deliver(batch: consumer_pb2.DeliverBatch) -> None:
            self._deliver(consumer, machine, number, batch)

        def closed(failure: Failure) -> None:
            self._history.add(SessionClosed(self._world.now_ns, consumer.group, number))
            if consumer.session_number == number:
                consumer.target = self._redirect(failure, consumer.target)
                self._session_over(consumer)

        def opened(session: Session | Failure) -> None:
            if isinstance(session, Failure):
                if consumer.opening == number:
                    consumer.opening = 0
                    consumer.target = self._redirect(session, consumer.target)
            elif consumer.opening == number:
                consumer.opening = 0
                consumer.session, consumer.session_number = session, number
                consumer.machine, consumer.boot = machine, boot
            else:
                session.close()

        def give_up() -> None:
            if consumer.opening == number:
                consumer.opening = 0
                consumer.target += 1

        self._call(machine, lambda face: face.open_consumer(request, deliver, closed, opened))
        self._world.after(TIMEOUT_NS, give_up)

    def _session_over(self, consumer: _Consumer) -> None:
        consumer.session = None
        consumer.machine = None
        consumer.unanswered.clear()

    def _die(self, consumer: _Consumer) -> None:
        """The consumer goes away with messages in hand."""
        session, machine, number = consumer.session, consumer.machine, consumer.session_number
        self._session_over(consumer)
        if session is None or machine is None:
            return

        def close() -> None:
            self._history.add(SessionClosed(self._world.now_ns, consumer.group, number))
            session.close()

        machine.deliver(close)

    def _deliver(self, consumer: _Consumer, machine: Machine, number: int, batch: consumer_pb2.DeliverBatch) -> None:
        clock_error_ms = 0.0
        if isinstance(machine.process, CoreProcess):
            machine.process.observe_lease()
            clock_error_ms = machine.process.host.core.clock.error_ns() / MS
        ids = np.frombuffer(batch.ids, "<u8").tolist()
        attempts = np.frombuffer(batch.attempts, "<u4").tolist()
        due = np.frombuffer(batch.due_ms, "<i8").tolist()
        sizes = np.frombuffer(batch.sizes, "<u4").tolist()
        uids = []
        at = 0
        for id64, attempt, due_ms, size in zip(ids, attempts, due, sizes, strict=True):
            uid = UID.unpack_from(batch.records, at)[0]
            at += size
            uids.append(uid)
            self._history.add(
                Delivered(
                    self._world.now_ns,
                    machine.name,
                    machine.boot,
                    batch.term,
                    batch.group,
                    batch.topic,
                    number,
                    id64,
                    uid,
                    attempt,
                    due_ms,
                    batch.lease_until_ms,
                    clock_error_ms,
                )
            )
        if consumer.session_number != number and consumer.opening != number:
            return
        rng = self._rng
        fate = rng.random() if not self._winding_down else 0.0
        if fate > 0.97:
            return  # forgotten: the lease will run out
        outcome = consumer_pb2.RETRY if fate > 0.93 else consumer_pb2.ACK
        think_ns = rng.randrange(MS, 40 * MS) if fate < 0.9 else rng.randrange(500 * MS, 4_000 * MS)
        grid_ns = self._stage.shape.settle_grid_ms * MS
        settle_ns = -(-(self._world.now_ns + think_ns) // grid_ns) * grid_ns
        together = (number, settle_ns, batch.topic, outcome)
        if together in consumer.thinking:
            consumer.thinking[together].append((batch, uids))
        else:
            consumer.thinking[together] = [(batch, uids)]
            self._world.at(settle_ns, self._settle, consumer, machine, together)

    def _settle(self, consumer: _Consumer, machine: Machine, together: _Together) -> None:
        """One settlement for all batches of a topic that the consumer has done with by now."""
        batches = consumer.thinking.pop(together)
        session = consumer.session
        number, _, topic, outcome = together
        if session is None or consumer.session_number != number:
            return
        ids, attempts, positions = (
            b"".join(getattr(batch, column) for batch, _ in batches) for column in ("ids", "attempts", "positions")
        )
        name = consumer_pb2.Outcome.Name(outcome)
        rows = list(
            zip(
                np.frombuffer(ids, "<u8").tolist(),
                [uid for _, uids in batches for uid in uids],
                np.frombuffer(attempts, "<u4").tolist(),
                strict=True,
            )
        )
        for id64, uid, attempt in rows:
            self._history.add(SettleSent(self._world.now_ns, consumer.group, id64, uid, attempt, name))
        key = self._next_uid
        self._next_uid += 1
        consumer.unanswered[key] = len(rows)
        settle = consumer_pb2.SettleBatch(
            sequence=1,
            group=consumer.group,
            topic=topic,
            outcome=outcome,
            ids=ids,
            attempts=attempts,
            positions=positions if self._rng.random() < 0.9 else b"",
        )

        def done(receipt: consumer_pb2.SettleReceipt | Failure) -> None:
            self._back(answered, receipt)

        def answered(receipt: consumer_pb2.SettleReceipt | Failure) -> None:
            consumer.unanswered.pop(key, None)
            if isinstance(receipt, Failure) or receipt.settled != len(rows):
                return
            for id64, uid, attempt in rows:
                self._history.add(Settled(self._world.now_ns, consumer.group, id64, uid, attempt, name))

        def act() -> None:
            session.settle(settle, done)
            session.credit(len(rows))

        boot = consumer.boot
        self._world.after(
            self._rng.randrange(100_000, 2 * MS),
            lambda: machine.deliver(act) if machine.boot == boot and machine.process is not None else None,
        )
