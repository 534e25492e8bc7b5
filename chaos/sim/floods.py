"""A user who floods the cluster with producer ids, and two who keep to their part and repeat what was accepted.

The cluster remembers few producers (Shape.producers_max). The flood is forgotten first: what the others repeat gets its
first receipt. That is so once the owners have shares, which needs the version of every member: until then the flood
leaves room for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tickwheel.chaos.sim.asking import AskingClients, founding
from tickwheel.chaos.sim.clients import NO_ANSWER, Call, Wires
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.history_messages import Row, ScheduleAcknowledged, ScheduleSent
from tickwheel.chaos.sim.history_ports import RepeatAnswered
from tickwheel.chaos.sim.producers import plain_batch
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.failure import Failure
from tickwheel.node.server.calls import owner_of
from tickwheel.proto.common_pb2 import ErrorReason

TOPIC, GROUP = "floods", "dams"
FLOODING = "flooding"
TIDY = ("tidy-1", "tidy-2")
IDS = 3
"""Producer ids of each tidy user: less than its part."""
FLOOD_EVERY_NS = 60 * MS
FLOOD_IDS = 3
"""At a time: within little more than a second there are more than the cluster remembers."""
FLOOD_IDS_BEFORE = 30
"""In all, before owners have shares."""
SEND_EVERY_NS = 500 * MS
REPEATED_NS_MOST = 4 * SECOND
ENDS = ("SEQUENCE_GAP", "SEQUENCE_FORGOTTEN", "SEQUENCE_TAKEN")


@dataclass(eq=False)
class _Sequences:
    """A producer id of a user."""

    user: str
    id: str
    last: int = 0
    busy: bool = False


class Floods(AskingClients):
    """`clients.Clients`."""

    setting = tuple(founding((TOPIC,), [(GROUP, (TOPIC,))]))
    asks_for = "receipts of users with producer ids"

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "floods")
        self._members = (Consumers(wires, (Crowd(GROUP, (TOPIC,), nacks=0),), self._rng),)
        self._tidy = [_Sequences(user, f"{user}.{number}") for user in TIDY for number in range(IDS)]
        self._repeats = 0
        self._flooded = 0
        self._target = 0
        """The machine that the flood calls."""

    def unfinished(self) -> str:
        return super().unfinished() or (f"{self._repeats} repeats" if self._repeats else "")

    def _begin(self) -> None:
        self._keep(FLOOD_EVERY_NS, self._flood)
        self._world.after(SECOND, self._keep, SEND_EVERY_NS, self._send)

    def _rows(self) -> tuple[Row, ...]:
        rng, wall_ms = self._rng, self._world.wall_ms
        count = rng.choice((1, 1, 2, 5))
        return tuple(Row(self._wires.number(), TOPIC, wall_ms + rng.randrange(-200, 2_000), None) for _ in range(count))

    async def _flood(self) -> None:
        for _ in range(FLOOD_IDS):
            if self._flooded < FLOOD_IDS_BEFORE or self._owners_have_shares():
                self._flooded += 1
                self._wires.run(self._flooding())

    def _owners_have_shares(self) -> bool:
        processes = (machine.process for machine in self._wires.machines)
        return any(isinstance(one, CoreProcess) and one.host.core.state.producers.by_owner for one in processes)

    async def _flooding(self) -> None:
        """One try under an id: it may be forgotten before another."""
        producer, rows = f"{FLOODING}.{self._wires.number()}", self._rows()[:1]
        machine = self._wires.machine(self._target)
        self._history.note(ScheduleSent, producer, 1, machine.name, rows)
        answer = await self._wires.answer(machine, _call(FLOODING, producer, 1, rows))
        if answer is NO_ANSWER:
            self._target += 1
        elif isinstance(answer, Failure):
            self._target = self._wires.redirect(answer, self._target)

    async def _send(self) -> None:
        free = [one for one in self._tidy if not one.busy]
        if not free:
            return
        one, rows = self._rng.choice(free), self._rows()
        one.busy = True
        one.last += 1
        sequence = one.last
        first = await self._accepted(one.user, one.id, sequence, rows)
        one.busy = False
        if isinstance(first, BatchOutcome) and self._rng.random() < 0.7:
            self._repeats += 1
            self._later(self._rng.randrange(REPEATED_NS_MOST), self._again, one, sequence, rows, first.ids.tolist())

    async def _accepted(self, user: str, producer: str, sequence: int, rows: tuple[Row, ...]) -> Any:
        """The outcome of a batch."""
        self._history.note(ScheduleSent, producer, sequence, "any", rows)
        outcome = await self._asking.ask(_call(user, producer, sequence, rows), _is_definite)
        if isinstance(outcome, Failure):
            reason = ErrorReason.Name(outcome.reason)
            self._history.note(RepeatAnswered, producer, sequence, (), (), reason)
        else:
            ids, due_ms = tuple(outcome.ids.tolist()), tuple(outcome.due_ms.tolist())
            uids = tuple(row.uid for row in rows)
            self._history.note(ScheduleAcknowledged, producer, sequence, uids, ids, due_ms, outcome.repeated, (GROUP,))
        return outcome

    async def _again(self, one: _Sequences, sequence: int, rows: tuple[Row, ...], first: list[int]) -> None:
        outcome = await self._asking.ask(_call(one.user, one.id, sequence, rows), _is_definite)
        again = () if isinstance(outcome, Failure) else tuple(outcome.ids.tolist())
        reason = ErrorReason.Name(outcome.reason) if isinstance(outcome, Failure) else ""
        self._repeats -= 1
        self._history.note(RepeatAnswered, one.id, sequence, tuple(first), again, reason)


def _is_definite(answer: Any) -> bool:
    return not isinstance(answer, Failure) or ErrorReason.Name(answer.reason) in ENDS


def _call(user: str, producer: str, sequence: int, rows: tuple[Row, ...]) -> Call:
    def call(core: NodeCore, answer: Any) -> None:
        batch = plain_batch(producer, sequence, rows)
        batch.owner, batch.connection = owner_of(user, ""), user
        core.parts.publisher.schedule(batch, Reply.either(answer))

    return call
