"""Clients that pull one batch at a time, extend its lease while they work on it, and operators of the dead letters.

They declare many messages dead; operators replay some of these and purge others. No number is named by both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tickwheel.chaos.sim.asking import AskingClients, founding
from tickwheel.chaos.sim.clients import NO_ANSWER, TIMEOUT_NS, Call, Wires
from tickwheel.chaos.sim.consumers import by_topic, note_delivered, uids_of
from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.history_messages import (
    DeadPurged,
    DeadReplayAsked,
    DeadReplayed,
    Extended,
    Row,
    Settled,
    SettleSent,
    epoch_in,
)
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.producers import Producers
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.node.core.core import NodeCore, serve
from tickwheel.node.core.message_ids import id_of
from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure, RequestError
from tickwheel.proto import consumer_pb2, dead_pb2

TOPIC = "parcels"
GROUP = "couriers"
PULLERS = 2
PULL_MOST = 8
WAIT_MS = 300
LEASE_MS = 1_500
DEAD_EVERY_NS = 1_500 * MS
LETTERS_MOST = 5


@dataclass(eq=False)
class _Puller:
    target: int = 0
    open: set[int] = field(default_factory=set)
    """Batches that it works on."""


class Parcels(AskingClients):
    """`clients.Clients`."""

    setting = founding((TOPIC,), [(GROUP, (TOPIC,))])
    asks_for = "answers about dead letters"

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "parcels")
        self._members = (Producers(wires, ("depot",), self._rows, (GROUP,), self._rng),)
        self._pullers = [_Puller(target=number) for number in range(PULLERS)]
        self._last: dict[int, tuple[int, int]] = {}
        """By message id: the uid and the last attempt that came."""
        self._named: set[int] = set()
        """Dead letters that were replayed or purged, or may have been."""

    def _begin(self) -> None:
        for puller in self._pullers:
            self._later(self._rng.randrange(SECOND), self._pull, puller)
        self._later(2 * SECOND, self._look_at_dead)

    def unfinished(self) -> str:
        held = sum(len(puller.open) for puller in self._pullers)
        return super().unfinished() or (f"{held} pulled batches" if held else "")

    def _rows(self) -> tuple[Row, ...]:
        rng = self._rng
        wall_ms = self._world.wall_ms
        return tuple(
            Row(self._wires.number(), TOPIC, wall_ms + rng.randrange(-500, 2_500), None)
            for _ in range(rng.choice((1, 3, 6)))
        )

    # -- pulling

    async def _pull(self, puller: _Puller) -> None:
        """Pull for ever."""
        wires = self._wires
        request = consumer_pb2.PullRequest(
            group=GROUP, messages_max=PULL_MOST, wait_ms=WAIT_MS, lease_ms=LEASE_MS, topics=[TOPIC]
        )
        while True:
            machine = wires.machine(puller.target)
            number = wires.number()
            call = self._pulling(machine, wires.session(), request)
            answer = await wires.answer(machine, call, TIMEOUT_NS + WAIT_MS * MS)
            if answer is NO_ANSWER:
                puller.target += 1
                await wires.pause(0)
            elif isinstance(answer, Failure):
                puller.target = wires.redirect(answer, puller.target)
                await wires.pause(100 * MS)
            else:
                if answer.ids:
                    puller.open.add(number)
                    self._work(puller, number, answer, self._rng.choice((0, 0, 1, 3)))
                await wires.pause(wires.pause_ns(20 * MS, self._rng))

    def _pulling(self, machine: Machine, session: int, request: consumer_pb2.PullRequest) -> Call:
        """Pulls one batch, and writes down that it leaves the node."""

        def pull(core: NodeCore, answer: Callable[[Any], None]) -> None:
            def left(batch: consumer_pb2.DeliverBatch | Failure) -> None:
                process = machine.process
                if not isinstance(batch, Failure) and batch.ids and isinstance(process, CoreProcess):
                    process.observe_lease()
                    uids = uids_of(batch)
                    for uid, (id64, attempt) in zip(uids, _rows_of(batch), strict=True):
                        self._last[id64] = (uid, attempt)
                    clock_error_ms = process.host.core.clock.error_ns() / MS
                    note_delivered(machine, session, batch, by_topic(batch, uids), clock_error_ms)
                answer(batch)

            serve(core, core.parts.consumers.pull(request), left)

        return pull

    def _work(self, puller: _Puller, number: int, batch: consumer_pb2.DeliverBatch, extensions: int) -> None:
        """Think, and extend the lease meanwhile; then settle, or forget."""
        rng = self._rng
        if extensions:
            self._world.after(rng.randrange(LEASE_MS * MS * 2 // 3), self._extend, puller, number, batch, extensions)
            return
        fate = 0.0 if self._wires.winding_down else rng.random()
        if fate > 0.9:
            puller.open.discard(number)
            return  # its lease will run out
        outcome = consumer_pb2.DEAD if fate > 0.65 else consumer_pb2.ACK
        self._world.after(rng.randrange(MS, 60 * MS), self._settle, puller, number, batch, outcome)

    def _extend(self, puller: _Puller, number: int, batch: consumer_pb2.DeliverBatch, extensions: int) -> None:
        request = consumer_pb2.ExtendBatch(
            sequence=1,
            group=GROUP,
            topic=batch.topic,
            ids=batch.ids,
            attempts=batch.attempts,
            positions=batch.positions,
            lease_ms=LEASE_MS,
            epoch=batch.epoch,
        )
        rows = _rows_of(batch)
        machine = self._wires.machine(puller.target)

        def extend(core: NodeCore) -> None:
            with suppress(RequestError):
                answer = core.parts.consumers.extend(request)
                if answer.extended != len(rows):
                    return
                by = (machine.name, machine.boot, core.term, answer.lease_until_ms, core.clock.error_ns() / MS)
                self._wires.back(arrived, by, core.log.lease_held())

        def arrived(by: tuple[str, int, int, int, float], leased: bool) -> None:
            for id64, attempt in rows:
                uid = self._last[id64][0]
                self._history.note(Extended, GROUP, uid, attempt, *by, epoch_in(batch.epoch), leased)

        self._wires.call(machine, extend)
        self._work(puller, number, batch, extensions - 1)

    def _settle(
        self, puller: _Puller, number: int, batch: consumer_pb2.DeliverBatch, outcome: consumer_pb2.Outcome.ValueType
    ) -> None:
        name = consumer_pb2.Outcome.Name(outcome)
        rows = [(id64, self._last[id64][0], attempt) for id64, attempt in _rows_of(batch)]
        for id64, uid, attempt in rows:
            self._history.note(SettleSent, GROUP, id64, uid, attempt, name, 0, epoch_in(batch.epoch))
        request = consumer_pb2.SettleBatch(
            sequence=1,
            group=GROUP,
            topic=batch.topic,
            outcome=outcome,
            ids=batch.ids,
            attempts=batch.attempts,
            positions=batch.positions,
            epoch=batch.epoch,
        )

        def answered(answer: consumer_pb2.SettleReceipt | Failure) -> None:
            puller.open.discard(number)
            if not isinstance(answer, Failure) and answer.settled == len(rows):
                for id64, uid, attempt in rows:
                    self._history.note(Settled, GROUP, id64, uid, attempt, name, epoch_in(batch.epoch))

        def timed_out() -> None:
            puller.open.discard(number)

        self._wires.call(
            self._wires.machine(puller.target),
            lambda core: core.parts.consumers.settle(
                request, Reply.either(lambda answer: self._wires.back(answered, answer))
            ),
        )
        self._world.after(TIMEOUT_NS, timed_out)

    # -- dead letters

    async def _look_at_dead(self) -> None:
        if self._wires.winding_down:
            return
        request = dead_pb2.ListDeadRequest(group=GROUP, page_size=50)
        answer = await self._asking.served(lambda core: core.parts.dead.list(request))
        self._later(self._wires.pause_ns(DEAD_EVERY_NS, self._rng, cheap=True), self._look_at_dead)
        letters = [letter for letter in answer.letters if letter.number not in self._named]
        if self._wires.winding_down or not letters:
            return
        chosen = self._rng.sample(letters, min(len(letters), self._rng.randint(1, LETTERS_MOST)))
        self._named.update(letter.number for letter in chosen)
        self._wires.run((self._replay if self._rng.random() < 0.7 else self._purge)(chosen))

    async def _replay(self, letters: list[dead_pb2.DeadLetter]) -> None:
        known = [(id64, *self._last[id64]) for id64 in map(_id_of, letters)]
        uids = tuple(uid for _, uid, _ in known)
        self._history.note(DeadReplayAsked, GROUP, uids)
        for id64, uid, attempt in known:
            # The checkers of deliveries count this as a consumer handing the message back.
            self._history.note(SettleSent, GROUP, id64, uid, attempt, "RETRY")
        request = dead_pb2.ReplayDeadRequest(group=GROUP, numbers=[letter.number for letter in letters])
        answer = await self._asking.served(lambda core: core.parts.dead.replay(request))
        if not answer.kept and not answer.more:
            self._history.note(DeadReplayed, GROUP, uids)

    async def _purge(self, letters: list[dead_pb2.DeadLetter]) -> None:
        uids = tuple(self._last[_id_of(letter)][0] for letter in letters)
        request = dead_pb2.PurgeDeadRequest(group=GROUP, numbers=[letter.number for letter in letters])
        await self._asking.served(lambda core: core.parts.dead.purge(request))
        self._history.note(DeadPurged, GROUP, uids)


def _rows_of(batch: consumer_pb2.DeliverBatch) -> list[tuple[int, int]]:
    """(id, attempt) of each message."""
    ids, attempts = np.frombuffer(batch.ids, "<u8").tolist(), np.frombuffer(batch.attempts, "<u4").tolist()
    return list(zip(ids, attempts, strict=True))


def _id_of(letter: dead_pb2.DeadLetter) -> int:
    return id_of(letter.id, 0)
