"""Users of recurring schedules: they put, replace, pause, resume, trigger, backfill and delete them beside the faults.
Some repeat a trigger or backfill that was answered.

Each run that a node applies becomes a message of the history, as if a producer had sent it and had its receipt, and
each one that a change cancels becomes a cancel. So all checkers of messages judge runs too.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import numpy as np

from tickwheel.chaos.sim.asking import AskingClients, founding, succeeded
from tickwheel.chaos.sim.clients import Wires
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_messages import CancelAnswered, CancelSent, Row, ScheduleAcknowledged, ScheduleSent
from tickwheel.chaos.sim.history_operators import RunSeen
from tickwheel.chaos.sim.world import HOUR_MS, MS, SECOND
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.requests import everybody
from tickwheel.proto import consumer_pb2, schedules_pb2
from tickwheel.proto.common_pb2 import UNKNOWN_NAME, WRONG_STATE

TOPIC = "rota"
GROUP = "crew"
NAMES = ("dawn", "noon", "dusk")
ACT_EVERY_NS = 700 * MS
CHANGES = ("put", "put", "put", "pause", "resume", "trigger", "backfill", "delete")
REPEATED = 0.5
"""Part of the triggers and backfills that are sent once more when they are answered."""
MESSAGES = ("RUN_MADE", "RUN_TRIGGERED", "RUN_BACKFILLED")


class _Crew(Consumers):
    """Consumers who know a run by its id: all runs of a schedule have the same payload."""

    uids: dict[int, int]

    def _uids(self, batch: consumer_pb2.DeliverBatch) -> list[int]:
        return [self.uids.get(number, 0) for number in np.frombuffer(batch.ids, "<u8").tolist()]


class Timetables(AskingClients):
    """`clients.Clients`."""

    setting = founding((TOPIC,), [(GROUP, (TOPIC,))])
    asks_for = "answers about schedules"

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "timetables")
        crew = _Crew(wires, (Crowd(GROUP, (TOPIC,)),), self._rng)
        self._members = (crew,)
        self._uids: dict[int, int] = {}
        crew.uids = self._uids
        self._cancelled: set[int] = set()
        self._requests = 0
        self._left: set[str] = set(NAMES)
        """Schedules that are to be deleted at the end."""
        wires.history.subscribe((RunSeen,), self._observe)

    def unfinished(self) -> str:
        return super().unfinished() or (f"that schedule {min(self._left)} is deleted" if self._left else "")

    def _observe(self, record: Record) -> None:
        """Tell of runs as of messages."""
        assert isinstance(record, RunSeen)
        history = self._history
        if record.outcome in MESSAGES and record.id not in self._uids:
            uid = self._uids[record.id] = self._wires.number()
            # What is planned is what must not come early.
            row = Row(uid, TOPIC, record.planned_ms, None)
            name = f"{record.name}-{uid}"
            history.note(ScheduleSent, name, 1, record.node, (row,))
            due = (record.at_ms,)
            history.note(ScheduleAcknowledged, name, 1, (uid,), (record.id,), due, False, (GROUP,))
        elif record.outcome == "RUN_CANCELLED" and record.id not in self._cancelled:
            self._cancelled.add(record.id)
            uid = self._uids[record.id]
            history.note(CancelSent, uid, record.id)
            history.note(CancelAnswered, uid, record.id, "CANCELLED")

    # -- changes

    def _begin(self) -> None:
        if self._wires.winding_down:
            self._world.after(3 * SECOND, self._delete_all)
            return
        self._world.after(self._wires.pause_ns(ACT_EVERY_NS, self._rng, cheap=True), self._begin)
        if self._asking.open <= 2:
            self._change_one()

    def _change_one(self) -> None:
        rng = self._rng
        name, change = rng.choice(NAMES), rng.choice(CHANGES)
        self._requests += 1
        request_id = f"r{self._requests}"
        again = rng.random() < REPEATED
        request: object
        match change:
            case "put":
                request = self._put(name)
            case "pause":
                request = schedules_pb2.PauseScheduleRequest(name=name)
            case "resume":
                request = schedules_pb2.ResumeScheduleRequest(name=name)
            case "trigger":
                request = schedules_pb2.TriggerScheduleRequest(name=name, request_id=request_id)
            case "backfill":
                until_ms = self._world.wall_ms - 2 * HOUR_MS
                from_ms = until_ms - rng.randrange(1, 20_000)
                request = schedules_pb2.BackfillScheduleRequest(
                    name=name, request_id=request_id, from_ms=from_ms, until_ms=until_ms
                )
            case _:
                request = schedules_pb2.DeleteScheduleRequest(name=name)
        self._wires.run(self._ask(change, request, again and change in ("trigger", "backfill")))

    def _put(self, name: str) -> schedules_pb2.PutScheduleRequest:
        rng = self._rng
        missed = rng.choice((schedules_pb2.MISSED_SKIP, schedules_pb2.MISSED_LAST, schedules_pb2.MISSED_ALL))
        all_missed = missed == schedules_pb2.MISSED_ALL
        return schedules_pb2.PutScheduleRequest(
            definition=schedules_pb2.ScheduleDefinition(
                name=name,
                spec=schedules_pb2.ScheduleSpec(
                    interval_ms=rng.choice((1_000, 1_000, 1_500, 2_500)), jitter_ms=rng.choice((0, 0, 0, 700))
                ),
                topic=TOPIC,
                payload=b"%08d" % self._requests,
                missed=missed,
                missed_window_ms=rng.randrange(1, 5_000) if all_missed else 0,
                late_ms_max=rng.choice((1_000, 3_000, 0)),
                overlap=rng.choice((schedules_pb2.OVERLAP_ALLOW,) * 3 + (schedules_pb2.OVERLAP_SKIP,)),
            ),
            paused=rng.choice((False, False, False, True)),
        )

    async def _ask(self, method: str, request: object, again: bool) -> None:
        """Until it is done, or refused as a schedule that is not there or changes all the time. `again`: once more."""

        def asked(core: NodeCore) -> Coroutine[Any, Any, Any]:
            part: Any = core.parts.schedules
            more = ("", everybody) if method == "put" else (everybody,)
            coroutine: Coroutine[Any, Any, Any] = getattr(part, method)(request, *more)
            return coroutine

        for _ in range(1 + again):
            await self._asking.served(
                asked, lambda answer: succeeded(answer) or answer.reason in (UNKNOWN_NAME, WRONG_STATE)
            )

    def _delete_all(self) -> None:
        for name in NAMES:
            self._wires.run(self._delete(name))

    async def _delete(self, name: str) -> None:
        request = schedules_pb2.DeleteScheduleRequest(name=name)
        await self._asking.served(lambda core: core.parts.schedules.delete(request, everybody))
        self._left.discard(name)
