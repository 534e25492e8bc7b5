"""Consumers of the whole node: they settle, hand back, forget, are slow, and die while they hold messages.

A `Crowd` gives their group and topics, their number, and their habits. CROWDS are those of every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from tickwheel.chaos.sim.clients import TIMEOUT_NS, Wires
from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.history_messages import (
    STREAM_BROKE,
    CreditGiven,
    Delivered,
    SessionClosed,
    SessionOpened,
    SessionOver,
    Settled,
    SettleSent,
    epoch_in,
)
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.producers import TOPICS, UID
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.node.core.delivery.consumers import ConsumerHandle
from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure
from tickwheel.proto import consumer_pb2

GROUPS = ("billing", "audit")
CREDITS = 200
LATE_PART_NS = 2 * SECOND
"""Of a part that is settled in two, the second comes at most so much later."""

_Together = tuple[int, int, str, consumer_pb2.Outcome.ValueType, int, int]
"""(session, when, topic, outcome, delay of a retry, epoch of the group) of what is settled by one call. Of a consumer
that takes mixed batches the topic is empty and the epoch 0: one call settles several topics."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one topic in a batch."""

    topic: str
    epoch: int
    ids: bytes
    attempts: bytes
    positions: bytes
    uids: tuple[int, ...]

    def only(self, first: int, last: int) -> Rows:
        """The rows [first, last)."""
        eights, fours = slice(8 * first, 8 * last), slice(4 * first, 4 * last)
        columns = self.ids[eights], self.attempts[fours], self.positions[eights]
        return Rows(self.topic, self.epoch, *columns, self.uids[first:last])


def by_topic(batch: consumer_pb2.DeliverBatch, uids: Sequence[int]) -> list[Rows]:
    """The rows of a batch by topic. `uids`: the message of each row."""
    if batch.topics:
        counts, epochs = (np.frombuffer(column, "<u4").tolist() for column in (batch.topic_counts, batch.epochs))
        topics = list(zip(batch.topics, counts, epochs, strict=True))
        assert sum(counts) == len(uids), "each row is of one topic"
    else:
        topics = [(batch.topic, len(uids), batch.epoch)]
    whole = Rows("", 0, batch.ids, batch.attempts, batch.positions, tuple(uids))
    found = []
    first = 0
    for topic, count, epoch in topics:
        found.append(replace(whole.only(first, first + count), topic=topic, epoch=epoch))
        first += count
    return found


def uids_of(batch: consumer_pb2.DeliverBatch) -> list[int]:
    """The message of each row, by its payload."""
    sizes = np.frombuffer(batch.sizes, "<u4").tolist()
    labels = np.frombuffer(batch.meta_sizes, "<u4").tolist()
    uids: list[int] = []
    at = 0
    for size, label in zip(sizes, labels, strict=True):
        uids.append(UID.unpack_from(batch.records, at + label)[0])
        at += size
    return uids


def note_delivered(
    machine: Machine,
    session: int,
    batch: consumer_pb2.DeliverBatch,
    parts: Sequence[Rows],
    clock_error_ms: float,
    broadcast: bool = False,
) -> None:
    """Write down that a batch leaves a node."""
    ids = np.frombuffer(batch.ids, "<u8").tolist()
    attempts = np.frombuffer(batch.attempts, "<u4").tolist()
    due = np.frombuffer(batch.due_ms, "<i8").tolist()
    places = [(part.topic, epoch_in(part.epoch), uid) for part in parts for uid in part.uids]
    for id64, attempt, due_ms, (topic, epoch, uid) in zip(ids, attempts, due, places, strict=True):
        machine.note(
            Delivered,
            batch.term,
            batch.group,
            topic,
            session,
            id64,
            uid,
            attempt,
            due_ms,
            batch.lease_until_ms,
            clock_error_ms,
            broadcast,
            epoch,
        )


@dataclass(frozen=True)
class Crowd:
    """The consumers of one group."""

    group: str
    topics: tuple[str, ...]
    consumers: int = 2
    batch_messages_max: int = 16
    nacks: float = 0.04
    """Share of the batches that are nacked."""
    deaths: float = 0.005
    """Share of the batches that are declared dead."""
    skips: float = 0.0
    """Share of the batches that are skipped, as by a filter."""
    broadcast: bool = False
    """Each consumer gets every message; its answers are no settlements."""


CROWDS = tuple(Crowd(group, TOPICS) for group in GROUPS)


@dataclass
class _Consumer:
    crowd: Crowd
    number: int
    target: int = 0
    session: ConsumerHandle | None = None
    machine: Machine | None = None
    boot: int = 0
    session_number: int = 0
    opening: int = 0
    unanswered: dict[int, int] = field(default_factory=dict)
    mixes: bool = False
    """Takes batches of several topics, and settles several by one call."""
    thinking: dict[_Together, list[Rows]] = field(default_factory=dict)


class Consumers:
    """`clients.Clients` of some groups."""

    def __init__(self, wires: Wires, crowds: Sequence[Crowd] = CROWDS, rng: Random | None = None) -> None:
        self._wires = wires
        self._world = wires.world
        self._history = wires.history
        self._rng = rng or wires.rng
        self._splits = wires.world.stream("clients/splits")
        self._consumers = [
            _Consumer(crowd, number, mixes=number < wires.shape.mixing)
            for crowd in crowds
            for number in range(min(crowd.consumers, wires.shape.consumers))
        ]

    def start(self) -> None:
        for consumer in self._consumers:
            self._world.after(self._rng.randrange(SECOND), self._keep_open, consumer)

    def unfinished(self) -> str:
        unsettled = sum(len(c.unanswered) for c in self._consumers)
        return f"{unsettled} settlements" if unsettled else ""

    def _keep_open(self, consumer: _Consumer) -> None:
        """Open a session at the presumed master, and open another whenever it ends."""
        machine = consumer.machine
        lost = machine is None or machine.boot != consumer.boot or machine.process is None
        if consumer.session is not None and lost:
            self._session_over(consumer)
        if consumer.session is None and not consumer.opening:
            self._open(consumer)
        elif consumer.session is not None and not self._wires.winding_down and self._rng.random() < 0.02:
            self._die(consumer)
        self._world.after(200 * MS, self._keep_open, consumer)

    def _open(self, consumer: _Consumer) -> None:
        machine = self._wires.machine(consumer.target)
        number = self._wires.session()
        consumer.opening = number
        boot = machine.boot
        request = consumer_pb2.OpenConsumer(
            group=consumer.crowd.group,
            topics=consumer.crowd.topics,
            credits=CREDITS,
            lease_ms=self._wires.shape.lease_ms,
            batch_messages_max=consumer.crowd.batch_messages_max,
        )

        def deliver(batch: consumer_pb2.DeliverBatch) -> None:
            self._deliver(consumer, machine, number, batch)

        def closed(failure: Failure) -> None:
            by_node = failure is not STREAM_BROKE
            self._history.note(SessionClosed, consumer.crowd.group, number, by_node=by_node)
            if consumer.session_number == number:
                consumer.target = self._wires.redirect(failure, consumer.target)
                self._session_over(consumer)

        def opened(session: ConsumerHandle | Failure) -> None:
            if isinstance(session, Failure):
                if consumer.opening == number:
                    consumer.opening = 0
                    consumer.target = self._wires.redirect(session, consumer.target)
            elif consumer.opening == number:
                consumer.opening = 0
                consumer.session, consumer.session_number = session, number
                consumer.machine, consumer.boot = machine, boot
                session.mix(consumer.mixes)
                self._history.note(SessionOpened, consumer.crowd.group, number, CREDITS)
            else:
                session.close()

        def give_up() -> None:
            if consumer.opening == number:
                consumer.opening = 0
                consumer.target += 1

        self._wires.call(
            machine, lambda core: core.serving.start(core.parts.consumers.open(request, deliver, closed), opened)
        )
        self._world.after(TIMEOUT_NS, give_up)

    def _session_over(self, consumer: _Consumer) -> None:
        self._history.note(SessionOver, consumer.crowd.group, consumer.session_number)
        consumer.session = None
        consumer.machine = None
        consumer.unanswered.clear()

    def _die(self, consumer: _Consumer) -> None:
        """The consumer goes away while it holds messages."""
        session, machine, number = consumer.session, consumer.machine, consumer.session_number
        self._session_over(consumer)
        if session is None or machine is None:
            return

        boot = machine.boot

        def close() -> None:
            if machine.boot == boot:
                self._history.note(SessionClosed, consumer.crowd.group, number)
                session.close()

        machine.deliver(close)

    def _deliver(self, consumer: _Consumer, machine: Machine, number: int, batch: consumer_pb2.DeliverBatch) -> None:
        clock_error_ms = 0.0
        if isinstance(machine.process, CoreProcess):
            machine.process.observe_lease()
            clock_error_ms = machine.process.host.core.clock.error_ns() / MS
        parts = by_topic(batch, self._uids(batch))
        note_delivered(machine, number, batch, parts, clock_error_ms, consumer.crowd.broadcast)
        if consumer.session_number != number and consumer.opening != number:
            return
        rng = self._rng
        fate = rng.random() if not self._wires.winding_down else 0.0
        if fate > 0.97:
            return  # forgotten: the lease will run out
        nacked = 0.97 - consumer.crowd.nacks
        dead = nacked - consumer.crowd.deaths
        outcome = consumer_pb2.RETRY if fate > nacked else consumer_pb2.DEAD if fate > dead else consumer_pb2.ACK
        if 0 < fate < consumer.crowd.skips:
            outcome = consumer_pb2.SKIP
        delay_ms = rng.choice((0, 200, 1_000, 3_000)) if outcome == consumer_pb2.RETRY else 0
        think_ns = rng.randrange(MS, 40 * MS) if fate < 0.9 else rng.randrange(500 * MS, 4_000 * MS)
        grid_ns = self._wires.shape.settle_grid_ms * MS
        settle_ns = -(-(self._world.now_ns + think_ns) // grid_ns) * grid_ns
        for part, at_ns in self._split(parts, settle_ns):
            topic, epoch = ("", 0) if consumer.mixes else (part.topic, part.epoch)
            together = (number, at_ns, topic, outcome, delay_ms, epoch)
            if together in consumer.thinking:
                consumer.thinking[together].append(part)
            else:
                consumer.thinking[together] = [part]
                self._world.at(at_ns, self._settle, consumer, machine, together)

    def _split(self, parts: Sequence[Rows], settle_ns: int) -> list[tuple[Rows, int]]:
        """What is settled together, and when: where the shape says so, some parts in two."""
        if not self._wires.shape.splits:
            return [(part, settle_ns) for part in parts]
        found = []
        for part in parts:
            at, late_ns = len(part.uids), settle_ns
            if at > 1 and self._splits.random() < 0.5:
                at, late_ns = self._splits.randrange(1, at), settle_ns + self._splits.randrange(LATE_PART_NS)
            found += [(part.only(0, at), settle_ns), (part.only(at, len(part.uids)), late_ns)]
        return [(part, at_ns) for part, at_ns in found if part.uids]

    def _uids(self, batch: consumer_pb2.DeliverBatch) -> list[int]:
        return uids_of(batch)

    def _settle(self, consumer: _Consumer, machine: Machine, together: _Together) -> None:
        """One settlement for everything of a topic that the consumer has done with by now; of one that takes mixed
        batches, for everything of all topics."""
        parts = consumer.thinking.pop(together)
        session = consumer.session
        number, _, topic, outcome, delay_ms, epoch = together
        if session is None or consumer.session_number != number:
            return
        ids, attempts, positions = (
            b"".join(getattr(part, column) for part in parts) for column in ("ids", "attempts", "positions")
        )
        name = consumer_pb2.Outcome.Name(outcome)
        rows = list(
            zip(
                np.frombuffer(ids, "<u8").tolist(),
                [uid for part in parts for uid in part.uids],
                np.frombuffer(attempts, "<u4").tolist(),
                [epoch_in(part.epoch) for part in parts for _ in part.uids],
                strict=True,
            )
        )
        settles = not consumer.crowd.broadcast
        group = consumer.crowd.group
        for id64, uid, attempt, row_epoch in rows if settles else ():
            self._history.note(SettleSent, group, id64, uid, attempt, name, delay_ms, row_epoch)
        key = self._wires.number()
        consumer.unanswered[key] = len(rows)
        settle = consumer_pb2.SettleBatch(
            sequence=1,
            group=consumer.crowd.group,
            outcome=outcome,
            delay_ms=delay_ms,
            ids=ids,
            attempts=attempts,
            positions=positions if self._rng.random() < 0.9 else b"",
        )
        if consumer.mixes:
            settle.topics.extend([part.topic for part in parts])
            settle.topic_counts = np.array([len(part.uids) for part in parts], "<u4").tobytes()
            settle.epochs = np.array([part.epoch for part in parts], "<u4").tobytes()
        else:
            settle.topic, settle.epoch = topic, epoch

        def done(receipt: consumer_pb2.SettleReceipt | Failure) -> None:
            self._wires.back(answered, receipt)

        def answered(receipt: consumer_pb2.SettleReceipt | Failure) -> None:
            consumer.unanswered.pop(key, None)
            if isinstance(receipt, Failure) or receipt.settled != len(rows) or not settles:
                return
            for id64, uid, attempt, row_epoch in rows:
                self._history.note(Settled, group, id64, uid, attempt, name, row_epoch)

        def act() -> None:
            session.settle(settle, Reply.either(done))
            session.credit(len(rows))
            self._history.note(CreditGiven, consumer.crowd.group, number, len(rows))

        boot = consumer.boot
        self._world.after(
            self._rng.randrange(100_000, 2 * MS),
            lambda: machine.deliver(act) if machine.boot == boot and machine.process is not None else None,
        )
