"""Users of recurring schedules: they put, replace, pause, resume, trigger, backfill and delete them beside the faults.
Some repeat a trigger or backfill that was answered.

Each run that a node applies becomes a message of the history, as if a producer had sent it and had its receipt, and
each one that a change cancels becomes a cancel. So all checkers of messages judge runs too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tickwheel.chaos.sim.asking import AskingClients
from tickwheel.chaos.sim.clients import Wires
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_messages import CancelAnswered, CancelSent, Row, ScheduleAcknowledged, ScheduleSent
from tickwheel.chaos.sim.history_schedules import RunSeen
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.node.core.core import NodeCore, serve
from tickwheel.node.core.requests import everybody
from tickwheel.node.failure import Failure
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


def _deleting(request: schedules_pb2.DeleteScheduleRequest, core: NodeCore, answer: Callable[[Any], None]) -> None:
    serve(core, core.parts.schedules.delete(request, everybody), answer)


class _Crew(Consumers):
    """Consumers who know a run by its id: all runs of a schedule have the same payload."""

    uids: dict[int, int]

    def _uids(self, batch: consumer_pb2.DeliverBatch) -> list[int]:
        return [self.uids.get(number, 0) for number in np.frombuffer(batch.ids, "<u8").tolist()]


class Timetables(AskingClients):
    """`clients.Clients`."""

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "timetables")
        self._crew = _Crew(wires, (Crowd(GROUP, (TOPIC,)),), self._rng)
        self._uids: dict[int, int] = {}
        self._crew.uids = self._uids
        self._cancelled: set[int] = set()
        self._requests = 0
        self._began = False
        self._left: set[str] = set(NAMES)
        """Schedules that are to be deleted at the end."""
        wires.history.subscribe((RunSeen,), self._observe)

    def start(self) -> None:
        """Start once topic and group exist."""

        def begin() -> None:
            self._began = True
            self._crew.start()
            self._act()

        self._asking.found((TOPIC,), [(GROUP, (TOPIC,))], begin)

    def unfinished(self) -> str:
        if not self._began or self._asking.open:
            return "answers about schedules"
        if self._left:
            return f"that schedule {min(self._left)} is deleted"
        return self._crew.unfinished()

    def _observe(self, record: Record) -> None:
        """Tell of runs as of messages."""
        assert isinstance(record, RunSeen)
        history, now_ns = self._wires.history, self._world.now_ns
        if record.outcome in MESSAGES and record.id not in self._uids:
            uid = self._uids[record.id] = self._wires.number()
            # What is planned is what must not come early.
            row = Row(uid, TOPIC, record.planned_ms, None)
            name = f"{record.name}-{uid}"
            history.add(ScheduleSent(now_ns, name, 1, record.node, (row,)))
            due = (record.at_ms,)
            history.add(ScheduleAcknowledged(now_ns, name, 1, (uid,), (record.id,), due, False, (GROUP,)))
        elif record.outcome == "RUN_CANCELLED" and record.id not in self._cancelled:
            self._cancelled.add(record.id)
            uid = self._uids[record.id]
            history.add(CancelSent(now_ns, uid, record.id))
            history.add(CancelAnswered(now_ns, uid, record.id, "CANCELLED"))

    # -- changes

    def _act(self) -> None:
        rng = self._rng
        if self._wires.winding_down:
            self._world.after(3 * SECOND, self._delete_all)
            return
        self._world.after(self._wires.pause_ns(ACT_EVERY_NS, rng, cheap=True), self._act)
        if self._asking.open > 2:
            return
        name, change = rng.choice(NAMES), rng.choice(CHANGES)
        self._requests += 1
        request_id = f"r{self._requests}"
        again = rng.random() < REPEATED
        if change == "put":
            self._ask("put", self._put(name))
        elif change == "pause":
            self._ask("pause", schedules_pb2.PauseScheduleRequest(name=name))
        elif change == "resume":
            self._ask("resume", schedules_pb2.ResumeScheduleRequest(name=name))
        elif change == "trigger":
            self._ask("trigger", schedules_pb2.TriggerScheduleRequest(name=name, request_id=request_id), again=again)
        elif change == "backfill":
            until_ms = self._world.wall_ms - 2 * 3_600_000
            request = schedules_pb2.BackfillScheduleRequest(
                name=name, request_id=request_id, from_ms=until_ms - rng.randrange(1, 20_000), until_ms=until_ms
            )
            self._ask("backfill", request, again=again)
        else:
            self._ask("delete", schedules_pb2.DeleteScheduleRequest(name=name))

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

    def _ask(self, method: str, request: object, *, again: bool = False) -> None:
        def taken(answer: object) -> bool:
            # A schedule that is not there, or one that changes all the time, is an answer too.
            definite = not isinstance(answer, Failure) or answer.reason in (UNKNOWN_NAME, WRONG_STATE)
            if definite and again:
                self._ask(method, request)
            return definite

        def call(core, answer):  # type: ignore[no-untyped-def]
            part = core.parts.schedules
            asked = part.put(request, "", everybody) if method == "put" else getattr(part, method)(request, everybody)
            serve(core, asked, answer)

        self._asking.ask(call, taken)

    def _delete_all(self) -> None:
        for name in NAMES:
            request = schedules_pb2.DeleteScheduleRequest(name=name)

            def deleted(_: object, name: str = name) -> None:
                self._left.discard(name)

            self._asking.command(partial(_deleting, request), deleted)
