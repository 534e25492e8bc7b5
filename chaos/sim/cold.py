"""Freezers of the cold tier: they register parts whose content they keep, and load them when their time is near.

They stand for a job on Spark (docs/PIPELINE.md), as far as the cluster sees it: parts are registered and listed, their
messages cancelled, moved and looked up by cold ids before, while and after their part is loaded. Moved messages come
in bundles of their own, by the list of those that wait. Registrations and loads are repeated, and loaders die and
start over.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from tickwheel.chaos.sim.asking import AskingClients
from tickwheel.chaos.sim.carriers import Bundle, Carrier, bundle_data
from tickwheel.chaos.sim.clients import Wires
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.history_bulk import ColdListed, ColdLoaded, ColdLooked, ColdParked
from tickwheel.chaos.sim.history_messages import (
    CancelAnswered,
    CancelSent,
    RescheduleAnswered,
    RescheduleSent,
    Row,
    ScheduleSent,
)
from tickwheel.chaos.sim.world import HOUR_MS, MS, SECOND
from tickwheel.node.core.core import serve
from tickwheel.node.failure import Failure
from tickwheel.node.server import handlers
from tickwheel.node.server.callers import EVERYBODY
from tickwheel.node.state.cold_parts import cold_id
from tickwheel.proto import cold_pb2, common_pb2, scheduler_pb2
from tickwheel.proto.admin_pb2 import CreateGroupRequest, CreateTopicRequest, Settings
from tickwheel.proto.log_pb2 import AdminCommand

TOPIC = "ice"
GROUP = "thaw"
CROWDS = (Crowd(GROUP, (TOPIC,), consumers=1),)
DAY_MS = 24 * HOUR_MS
JOB_EVERY_NS = 2_500 * MS
MOVED_EVERY_NS = 1_000 * MS
LOAD_AFTER_NS_MOST = 3 * SECOND
CHANGES_MOST = 4
CALM_NS = 2 * SECOND
"""How long after the faults a call may still be on its way."""


@dataclass(slots=True, eq=False)
class _Part:
    rows: tuple[Row, ...]
    data: bytes
    number: int = 0
    loaded: bool = False


class Cold(AskingClients):
    """`clients.Clients`."""

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "cold")
        self._consumers = Consumers(wires, CROWDS, self._rng)
        self._carrier = Carrier(wires, self._rng, TOPIC)
        self._began = False
        self._jobs = 0
        self._parts: list[_Part] = []
        self._by_id: dict[int, Row] = {}
        self._calm_ns = 0
        """The time by which every move has arrived: CALM_NS after winding down began. 0 while that is unknown."""
        self._moved_left = True

    def start(self) -> None:
        """Start once topic and group exist."""
        commands = [
            AdminCommand(settings=Settings(cold_lead_ms=0)),
            AdminCommand(create_topic=CreateTopicRequest(name=TOPIC)),
            AdminCommand(create_group=CreateGroupRequest(name=GROUP, topics=[TOPIC])),
        ]

        def begin() -> None:
            self._began = True
            self._consumers.start()
            self._world.after(0, self._register_some)
            self._world.after(MOVED_EVERY_NS, self._bring_moved)

        self._asking.set_up(commands, begin)

    def unfinished(self) -> str:
        if not self._began:
            return "that freezers begin"
        if self._asking.open:
            return "answers about cold messages"
        if any(not part.loaded for part in self._parts) or self._moved_left:
            return "that cold parts are loaded"
        return self._consumers.unfinished()

    # -- parts

    def _register_some(self) -> None:
        if self._wires.winding_down:
            return
        self._world.after(self._wires.pause_ns(JOB_EVERY_NS, self._rng), self._register_some)
        self._jobs += 1
        job = f"freeze-{self._jobs}"
        parts = [self._build() for _ in range(self._rng.choice((1, 1, 2)))]
        self._parts += parts
        due = [[row.due_ms or 0 for row in part.rows] for part in parts]
        columns = cold_pb2.ColdColumns(
            days=np.array([times[0] // DAY_MS for times in due], "<u4").tobytes(),
            rows=np.array([len(times) for times in due], "<u4").tobytes(),
            due_min_ms=np.array([times[0] for times in due], "<i8").tobytes(),
            due_max_ms=np.array([times[-1] for times in due], "<i8").tobytes(),
            sha256=b"".join(hashlib.sha256(part.data).digest() for part in parts),
        )
        sha = hashlib.sha256(columns.SerializeToString(deterministic=True)).hexdigest()
        request = cold_pb2.RegisterColdRequest(job_id=job, sha256=sha, parts=columns)
        for place, part in enumerate(parts):
            # The checkers of deliveries count this as a schedule request made now.
            self._history.add(ScheduleSent(self._world.now_ns, job, place + 1, "", part.rows))

        def told(answer: cold_pb2.ColdJob) -> None:
            for place, part in enumerate(parts):
                part.number = answer.first_part + place
                ids = tuple(cold_id(part.number, row) for row in range(len(part.rows)))
                self._by_id.update(zip(ids, part.rows, strict=True))
                uids = tuple(row.uid for row in part.rows)
                times = tuple(row.due_ms or 0 for row in part.rows)
                self._history.add(ColdParked(self._world.now_ns, GROUP, part.number, uids, times))
                self._change_some(part)
                wait_ns = 0 if self._wires.winding_down else self._rng.randrange(LOAD_AFTER_NS_MOST)
                self._world.after(wait_ns, self._load, part)

        self._asking.served(lambda core: core.parts.cold.register(request), told)

    def _build(self) -> _Part:
        """A part of messages due within the current day, most of them soon."""
        rng, wall_ms = self._rng, self._world.wall_ms
        day_end_ms = (wall_ms // DAY_MS + 1) * DAY_MS
        count = rng.choice((3, 10, 25))
        times = [wall_ms + rng.randrange(500, 5_000) + (HOUR_MS if rng.random() < 0.1 else 0) for _ in range(count)]
        rows = tuple(
            Row(self._wires.number(), TOPIC, due_ms, None) for due_ms in sorted(min(t, day_end_ms - 1) for t in times)
        )
        return _Part(rows, bundle_data(rows))

    def _load(self, part: _Part) -> None:
        late = sum((row.due_ms or 0) < self._world.wall_ms for row in part.rows)
        cold = cold_pb2.ColdLoad(part=part.number)
        if self._rng.random() < 0.8:
            cold.late = late

        def loaded() -> None:
            part.loaded = True
            self._history.add(ColdLoaded(self._world.now_ns, part.number))

        load = self._carrier.load(f"cold-{part.number}", [Bundle.of(part.rows, part.data)], cold, loaded)
        load.repeats = self._rng.random() < 0.3
        if self._rng.random() < 0.3:
            self._carrier.dies(load)

    # -- single messages

    def _change_some(self, part: _Part) -> None:
        """Cancel, move or look up some messages, soon or late."""
        rng = self._rng
        for row in rng.sample(range(len(part.rows)), min(len(part.rows), rng.randrange(CHANGES_MOST + 1))):
            uid, number = part.rows[row].uid, cold_id(part.number, row)
            action = self._cancel if rng.random() < 0.5 else self._move
            self._world.after(rng.randrange(5 * SECOND), action, uid, number)
        row = rng.randrange(len(part.rows))
        self._world.after(rng.randrange(5 * SECOND), self._look, part.rows[row].uid, cold_id(part.number, row))
        self._world.after(rng.randrange(5 * SECOND), self._list)

    def _look(self, uid: int, number: int) -> None:
        def taken(answer: scheduler_pb2.GetResponse | Failure) -> bool:
            if isinstance(answer, Failure) and answer.reason != common_pb2.UNKNOWN_NAME:
                return False
            state = "NOT_FOUND" if isinstance(answer, Failure) else scheduler_pb2.MessageState.Name(answer.state)
            self._history.add(ColdLooked(self._world.now_ns, uid, state))
            return True

        self._asking.ask(lambda core, answer: serve(core, core.parts.requests.get(number, False), answer), taken)

    def _list(self) -> None:
        asked_ns = self._world.now_ns

        def told(page: cold_pb2.ColdParts) -> None:
            waiting = tuple(part.number for part in page.parts if not part.loaded)
            known = tuple(part.number for part in page.parts)
            self._history.add(ColdListed(self._world.now_ns, asked_ns, known, waiting))

        request = cold_pb2.ListColdPartsRequest()
        self._asking.served(lambda core: core.parts.cold.parts(request), told)

    def _cancel(self, uid: int, number: int) -> None:
        if self._wires.winding_down:
            return
        self._history.add(CancelSent(self._world.now_ns, uid, number))

        def told(answer: scheduler_pb2.CancelOutcome.ValueType) -> None:
            name = scheduler_pb2.CancelOutcome.Name(answer)
            self._history.add(CancelAnswered(self._world.now_ns, uid, number, name))

        self._asking.served(lambda core: core.parts.requests.cancel(number), told)

    def _move(self, uid: int, number: int) -> None:
        """Ask for a move once. If the answer is lost, the list of moved messages shows its effect."""
        if self._wires.winding_down:
            return
        due_ms = self._world.wall_ms + self._rng.randrange(500, 4_000)
        self._history.add(RescheduleSent(self._world.now_ns, uid, number, due_ms))
        request = scheduler_pb2.RescheduleRequest(
            id=common_pb2.MessageId(hour=number >> 32, index=number & 0xFFFF_FFFF), due_ms=due_ms
        )

        def told(answer: scheduler_pb2.RescheduleResponse | Failure) -> None:
            if isinstance(answer, Failure):
                return
            name = scheduler_pb2.RescheduleOutcome.Name(answer.outcome)
            new_id = answer.id.hour << 32 | answer.id.index
            self._history.add(RescheduleAnswered(self._world.now_ns, uid, number, name, new_id, answer.due_ms))

        machine = self._wires.machine(self._rng.randrange(3))
        self._wires.call(
            machine,
            lambda core: serve(
                core, handlers.reschedule(core, request, EVERYBODY), lambda answer: self._wires.back(told, answer)
            ),
        )

    def _bring_moved(self) -> None:
        """Load the moved messages that wait, as one bundle, and repeat. At the end of a run, stop once none waits."""
        winding_down = self._wires.winding_down
        if winding_down and not self._calm_ns:
            self._calm_ns = self._world.now_ns + CALM_NS
        last = winding_down and self._world.now_ns >= self._calm_ns

        def again() -> None:
            self._world.after(MOVED_EVERY_NS // 4 if winding_down else MOVED_EVERY_NS, self._bring_moved)

        def listed(page: cold_pb2.ColdMoved) -> None:
            ids, due = np.frombuffer(page.ids, "<u8").tolist(), np.frombuffer(page.due_ms, "<i8").tolist()
            rows = sorted((due_ms, number) for due_ms, number in zip(due, ids, strict=True) if number in self._by_id)
            if not rows:
                if last:
                    self._moved_left = False
                else:
                    again()
                return
            moved = tuple(Row(self._by_id[number].uid, TOPIC, due_ms, None) for due_ms, number in rows)
            cold = cold_pb2.ColdLoad(
                ids=np.array([number for _, number in rows], "<u8").tobytes(),
                due_ms=np.array([due_ms for due_ms, _ in rows], "<i8").tobytes(),
            )
            bundle = Bundle.of(moved, bundle_data(moved))
            self._carrier.load(f"moved-{bundle.name[:16]}", [bundle], cold, again)

        request = cold_pb2.ListColdMovedRequest(due_below_ms=self._world.wall_ms + (DAY_MS if winding_down else 2_000))
        self._asking.served(lambda core: core.parts.cold.moved(request), listed)
