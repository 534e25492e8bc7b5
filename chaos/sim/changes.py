"""Clients that cancel and move messages of others, often just when they are dispatched."""

from __future__ import annotations

from itertools import islice

from tickwheel.chaos.sim.clients import TIMEOUT_NS, Wires
from tickwheel.chaos.sim.history_messages import CancelAnswered, CancelSent, RescheduleAnswered, RescheduleSent
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.node.core.core import serve
from tickwheel.node.failure import Failure
from tickwheel.node.server import handlers
from tickwheel.node.server.callers import EVERYBODY
from tickwheel.proto import common_pb2, scheduler_pb2

CHANGED_NEWEST = 300
"""Cancels and moves pick one of this many messages acknowledged last."""


class Changes:
    """`clients.Clients`. Takes messages out of `known`: none is changed twice."""

    def __init__(self, wires: Wires, known: dict[int, int]) -> None:
        self._wires = wires
        self._world = wires.world
        self._history = wires.history
        self._rng = wires.rng
        self._known = known
        self._open = 0

    def start(self) -> None:
        self._world.after(SECOND, self._change_one)

    def unfinished(self) -> str:
        return "answers to cancels or moves" if self._open else ""

    def _change_one(self) -> None:
        if self._wires.winding_down:
            return
        rng = self._rng
        self._world.after(self._wires.pause_ns(250 * MS, rng, cheap=True), self._change_one)
        if not self._known:
            return
        newest = list(islice(reversed(self._known.items()), CHANGED_NEWEST))
        uid, id64 = rng.choice(newest)
        del self._known[uid]
        self._open += 1
        if rng.random() < 0.6:
            self._cancel(uid, id64, rng.randrange(3), 0)
        else:
            due_ms = self._world.wall_ms + rng.randrange(100, 4_000)
            self._move(uid, id64, due_ms, rng.randrange(3))

    def _cancel(self, uid: int, id64: int, target: int, attempt: int) -> None:
        machine = self._wires.machine(target)
        answered: list[bool] = []
        self._history.add(CancelSent(self._world.now_ns, uid, id64))

        def done(outcome: scheduler_pb2.CancelOutcome.ValueType | Failure) -> None:
            self._wires.back(answer, outcome)

        def answer(outcome: scheduler_pb2.CancelOutcome.ValueType | Failure) -> None:
            if answered:
                return
            answered.append(True)
            if isinstance(outcome, Failure):
                self._world.after(100 * MS, self._cancel, uid, id64, self._wires.redirect(outcome, target), attempt + 1)
                return
            self._open -= 1
            name = scheduler_pb2.CancelOutcome.Name(outcome)
            self._history.add(CancelAnswered(self._world.now_ns, uid, id64, name))

        def timed_out() -> None:
            if not answered:
                answered.append(True)
                self._cancel(uid, id64, target + 1, attempt + 1)

        self._wires.call(machine, lambda core: serve(core, core.parts.requests.cancel(id64), done))
        self._world.after(TIMEOUT_NS, timed_out)

    def _move(self, uid: int, id64: int, due_ms: int, target: int) -> None:
        """One try: a repeat could move it twice, which is allowed and would prove nothing."""
        machine = self._wires.machine(target)
        self._history.add(RescheduleSent(self._world.now_ns, uid, id64, due_ms))
        request = scheduler_pb2.RescheduleRequest(
            id=common_pb2.MessageId(hour=id64 >> 32, index=id64 & 0xFFFF_FFFF), due_ms=due_ms
        )
        ended: list[bool] = []

        def done(outcome: scheduler_pb2.RescheduleResponse | Failure) -> None:
            self._wires.back(answer, outcome)

        def answer(outcome: scheduler_pb2.RescheduleResponse | Failure) -> None:
            if ended:
                return
            if isinstance(outcome, Failure):
                end()
                return
            ended.append(True)
            self._open -= 1
            name = scheduler_pb2.RescheduleOutcome.Name(outcome.outcome)
            number = outcome.id.hour << 32 | outcome.id.index
            self._history.add(RescheduleAnswered(self._world.now_ns, uid, id64, name, number, outcome.due_ms))

        def end() -> None:
            if not ended:
                ended.append(True)
                self._open -= 1

        self._wires.call(machine, lambda core: serve(core, handlers.reschedule(core, request, EVERYBODY), done))
        self._world.after(TIMEOUT_NS, end)
