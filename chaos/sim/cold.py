"""Freezers of the cold tier: they register parts whose content they keep, and load them when their time is near.

They stand for a job on Spark (docs/PIPELINE.md), as far as the cluster sees it: parts are registered and listed, their
messages cancelled, moved and looked up by cold ids before, while and after their part is loaded. Moved messages come
in bundles of their own, by the list of those that wait. Registrations and loads are repeated, and loaders die and
start over.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial

import numpy as np

from tickwheel.chaos.sim.asking import AskingClients, founding, succeeded
from tickwheel.chaos.sim.carriers import Bundle, Carrier, Load, bundle_data
from tickwheel.chaos.sim.changes import moving, note_moved
from tickwheel.chaos.sim.clients import Wires
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.history_bulk import ColdListed, ColdLoaded, ColdLooked, ColdParked
from tickwheel.chaos.sim.history_messages import RescheduleSent, Row, ScheduleSent
from tickwheel.chaos.sim.world import HOUR_MS, MS, SECOND
from tickwheel.node.core.promise import Promise
from tickwheel.node.state.cold_parts import cold_id
from tickwheel.proto import cold_pb2, common_pb2, scheduler_pb2
from tickwheel.proto.admin_pb2 import Settings
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

    setting = (AdminCommand(settings=Settings(cold_lead_ms=0)), *founding((TOPIC,), [(GROUP, (TOPIC,))]))
    asks_for = "answers about cold messages"

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "cold")
        self._members = (Consumers(wires, CROWDS, self._rng),)
        self._carrier = Carrier(wires, self._rng, TOPIC)
        self._jobs = 0
        self._parts: list[_Part] = []
        self._by_id: dict[int, Row] = {}
        self._moved_left = True

    def _begin(self) -> None:
        self._world.after(0, self._keep, JOB_EVERY_NS, self._register, False)
        self._later(MOVED_EVERY_NS, self._bring_moved)

    def unfinished(self) -> str:
        if any(not part.loaded for part in self._parts) or self._moved_left:
            return "that cold parts are loaded"
        return super().unfinished()

    # -- parts

    async def _register(self) -> None:
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
            self._history.note(ScheduleSent, job, place + 1, "", part.rows)

        answer = await self._asking.served(lambda core: core.parts.cold.register(request))
        for place, part in enumerate(parts):
            part.number = answer.first_part + place
            ids = tuple(cold_id(part.number, row) for row in range(len(part.rows)))
            self._by_id.update(zip(ids, part.rows, strict=True))
            uids = tuple(row.uid for row in part.rows)
            times = tuple(row.due_ms or 0 for row in part.rows)
            self._history.note(ColdParked, GROUP, part.number, uids, times)
            self._change_some(part)
            wait_ns = 0 if self._wires.winding_down else self._rng.randrange(LOAD_AFTER_NS_MOST)
            self._world.after(wait_ns, self._load, part)

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
            self._history.note(ColdLoaded, part.number)

        load = Load(f"cold-{part.number}", [Bundle.of(part.rows, part.data)], cold, loaded)
        self._carrier.begin(load)
        load.repeats = self._rng.random() < 0.3
        if self._rng.random() < 0.3:
            self._carrier.dies(load)

    # -- single messages

    def _change_some(self, part: _Part) -> None:
        """Cancel, move or look up some messages, soon or late."""
        rng = self._rng
        for row in rng.sample(range(len(part.rows)), min(len(part.rows), rng.randrange(CHANGES_MOST + 1))):
            uid, number = part.rows[row].uid, cold_id(part.number, row)
            cancels = rng.random() < 0.5
            self._later(rng.randrange(5 * SECOND), self._change, uid, number, cancels)
        row = rng.randrange(len(part.rows))
        self._later(rng.randrange(5 * SECOND), self._look, part.rows[row].uid, cold_id(part.number, row))
        self._later(rng.randrange(5 * SECOND), self._list)

    async def _look(self, uid: int, number: int) -> None:
        answer = await self._asking.served(
            lambda core: core.parts.requests.get(number, False),
            lambda answer: succeeded(answer) or answer.reason == common_pb2.UNKNOWN_NAME,
        )
        state = scheduler_pb2.MessageState.Name(answer.state) if succeeded(answer) else "NOT_FOUND"
        self._history.note(ColdLooked, uid, state)

    async def _list(self) -> None:
        asked_ns = self._world.now_ns
        page = await self._asking.served(lambda core: core.parts.cold.parts(cold_pb2.ListColdPartsRequest()))
        waiting = tuple(part.number for part in page.parts if not part.loaded)
        self._history.note(ColdListed, asked_ns, tuple(part.number for part in page.parts), waiting)

    async def _change(self, uid: int, number: int, cancels: bool) -> None:
        """Cancel, or ask for a move once. If its answer is lost, the list of moved messages shows its effect."""
        if self._wires.winding_down:
            return
        if cancels:
            await self._cancel(uid, number)
            return
        due_ms = self._world.wall_ms + self._rng.randrange(500, 4_000)
        self._history.note(RescheduleSent, uid, number, due_ms)
        told = partial(self._wires.back, note_moved, self._history, uid, number, due_ms)
        self._wires.call(self._wires.machine(self._rng.randrange(3)), lambda core: moving(number, due_ms)(core, told))

    async def _bring_moved(self) -> None:
        """Load the moved messages that wait, as one bundle, and repeat. At the end of a run, stop once none waits."""
        calm_ns = 0  # by when every move has arrived: CALM_NS after winding down began; 0 while that is unknown
        while True:
            winding_down = self._wires.winding_down
            if winding_down and not calm_ns:
                calm_ns = self._world.now_ns + CALM_NS
            last = winding_down and self._world.now_ns >= calm_ns
            below_ms = self._world.wall_ms + (DAY_MS if winding_down else 2_000)
            rows = await self._moved(below_ms)
            if rows:
                await self._load_moved(rows)
            elif last:
                self._moved_left = False
                return
            await self._wires.pause(MOVED_EVERY_NS // 4 if winding_down else MOVED_EVERY_NS)

    async def _moved(self, below_ms: int) -> list[tuple[int, int]]:
        """(due time, id) of the moved messages that wait."""
        request = cold_pb2.ListColdMovedRequest(due_below_ms=below_ms)
        page = await self._asking.served(lambda core: core.parts.cold.moved(request))
        ids, due = np.frombuffer(page.ids, "<u8").tolist(), np.frombuffer(page.due_ms, "<i8").tolist()
        return sorted((due_ms, number) for due_ms, number in zip(due, ids, strict=True) if number in self._by_id)

    async def _load_moved(self, rows: list[tuple[int, int]]) -> None:
        moved = tuple(Row(self._by_id[number].uid, TOPIC, due_ms, None) for due_ms, number in rows)
        cold = cold_pb2.ColdLoad(
            ids=np.array([number for _, number in rows], "<u8").tobytes(),
            due_ms=np.array([due_ms for due_ms, _ in rows], "<i8").tobytes(),
        )
        bundle = Bundle.of(moved, bundle_data(moved))
        loaded: Promise[None] = Promise()
        self._carrier.begin(Load(f"moved-{bundle.name[:16]}", [bundle], cold, lambda: loaded.keep(None)))
        await loaded
