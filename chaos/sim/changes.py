"""Clients that cancel and move messages of others, often just when they are dispatched."""

from __future__ import annotations

from itertools import islice
from typing import Any

from tickwheel.chaos.sim.clients import NO_ANSWER, Call, Wires, served
from tickwheel.chaos.sim.history import History
from tickwheel.chaos.sim.history_messages import (
    CancelAnswered,
    CancelSent,
    RescheduleAnswered,
    RescheduleRefused,
    RescheduleSent,
)
from tickwheel.chaos.sim.world import HOUR_MS, MS, SECOND
from tickwheel.node.core.message_ids import id_of, message_id_of
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
        self._past_rng = wires.world.stream("clients/past moves")
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
            self._wires.run(self._cancel(uid, id64, rng.randrange(3)))
        else:
            due_ms = self._world.wall_ms + rng.randrange(100, 4_000)
            if self._wires.shape.past_moves and self._past_rng.random() < 0.3:
                due_ms -= self._past_rng.randrange(5_000, 3 * HOUR_MS)
            self._wires.run(self._move(uid, id64, due_ms, rng.randrange(3)))

    async def _cancel(self, uid: int, id64: int, target: int) -> None:
        wires = self._wires
        while True:
            self._history.note(CancelSent, uid, id64)
            call = served(lambda core: core.parts.requests.cancel(id64))
            outcome = await wires.answer(wires.machine(target), call)
            if outcome is NO_ANSWER:
                target += 1
            elif isinstance(outcome, Failure):
                target = wires.redirect(outcome, target)
                await wires.pause(100 * MS)
            else:
                break
        self._open -= 1
        self._history.note(CancelAnswered, uid, id64, scheduler_pb2.CancelOutcome.Name(outcome))

    async def _move(self, uid: int, id64: int, due_ms: int, target: int) -> None:
        """One try: a repeat could move it twice, which is allowed and would prove nothing."""
        self._history.note(RescheduleSent, uid, id64, due_ms)
        answer = await self._wires.answer(self._wires.machine(target), moving(id64, due_ms))
        self._open -= 1
        note_moved(self._history, uid, id64, due_ms, answer)


def moving(id64: int, due_ms: int) -> Call:
    """The call that moves a message."""
    request = scheduler_pb2.RescheduleRequest(id=message_id_of(id64, 0), due_ms=due_ms)
    return served(lambda core: handlers.reschedule(core, request, EVERYBODY))


def note_moved(history: History, uid: int, id64: int, due_ms: int, answer: Any) -> None:
    """Write down the answer to a move, if it is definite."""
    if isinstance(answer, scheduler_pb2.RescheduleResponse):
        name = scheduler_pb2.RescheduleOutcome.Name(answer.outcome)
        history.note(RescheduleAnswered, uid, id64, name, id_of(answer.id, 0), answer.due_ms)
    elif isinstance(answer, Failure) and answer.reason != common_pb2.OUTCOME_UNKNOWN:
        history.note(RescheduleRefused, uid, due_ms)
