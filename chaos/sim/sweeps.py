"""Bulk cancels and moves: a producer that writes series of messages with keys and tags, and operators who sweep them.

Each series is moved by one sweep at most, so that the effect of a move can be counted. Cancels overlap with all. At
the end every message that may have been swept and never came is looked up.
"""

from __future__ import annotations

from tickwheel.chaos.sim.asking import AskingClients, founding
from tickwheel.chaos.sim.clients import Wires
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_messages import Delivered, Label, RescheduleSent, Row, ScheduleSent
from tickwheel.chaos.sim.history_operators import Selected, SweepAsked, SweepBegan, SweepEnded, SweptSeen
from tickwheel.chaos.sim.producers import Producers
from tickwheel.chaos.sim.world import HOUR_MS, MS, SECOND
from tickwheel.node.core.message_ids import id_of
from tickwheel.proto import scheduler_pb2

TOPIC = "notes"
GROUP = "readers"
TAGS = ("urgent", "daily", "late")
SWEEP_EVERY_NS = 700 * MS
LOOK_EVERY_NS = 100 * MS
LOOKED_AT_ONCE = 20
SERIES_NEWEST = 6


class Sweeps(AskingClients):
    """`clients.Clients`."""

    setting = founding((), [(GROUP, (TOPIC,))])

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "sweeps")
        self._producers = Producers(wires, ("bulk",), self._rows, (GROUP,), self._rng)
        self._members = (self._producers, Consumers(wires, (Crowd(GROUP, (TOPIC,)),), self._rng))
        self._series = 0
        self._moved: set[int] = set()
        self._rows_of: dict[int, Row] = {}
        self._due_ms: dict[int, int] = {}
        """Due time as asked for; a delay counts from the first try."""
        self._undelivered: set[int] = set()
        self._jobs: dict[str, Selected] = {}
        self._running: set[str] = set()
        self._told: set[int] = set()
        """Messages whose fate is known."""
        wires.history.subscribe((Delivered, ScheduleSent), self._observe)

    def _begin(self) -> None:
        self._world.after(SECOND, self._keep, SWEEP_EVERY_NS, self._sweep)
        self._world.after(SECOND, self._look)

    def unfinished(self) -> str:
        if self._running:
            return f"the end of sweep {min(self._running)}"
        if in_doubt := self._in_doubt():
            return f"what became of {len(in_doubt)} messages that were to be swept"
        return super().unfinished()

    def _observe(self, record: Record) -> None:
        match record:
            case Delivered():
                self._undelivered.discard(record.uid)
            case ScheduleSent(producer="bulk"):
                for row in record.rows:
                    if row.uid not in self._rows_of:
                        self._rows_of[row.uid] = row
                        due_ms = row.due_ms if row.due_ms is not None else self._world.wall_ms + (row.delay_ms or 0)
                        self._due_ms[row.uid] = due_ms
                        self._undelivered.add(row.uid)
                        for job in sorted(self._running):
                            self._may_move(self._jobs[job], row)

    def _rows(self) -> tuple[Row, ...]:
        rng = self._rng
        wall_ms = self._world.wall_ms
        self._series += 1
        rows = []
        for number in range(rng.choice((3, 10, 25))):
            due_ms: int | None = wall_ms + rng.randrange(300, 4_000)
            delay_ms = None
            dice = rng.random()
            if dice < 0.25 and not self._wires.winding_down:
                due_ms = wall_ms + HOUR_MS * rng.randrange(1, 40) + rng.randrange(5_000)
            elif dice < 0.35:
                due_ms, delay_ms = None, rng.randrange(200, 3_000)
            tags = tuple(tag for tag in TAGS if rng.random() < 0.3)
            label = Label(tags=tags, key=f"s{self._series}-{number}")
            rows.append(Row(self._wires.number(), TOPIC, due_ms, delay_ms, label))
        return tuple(rows)

    # -- sweeps

    async def _sweep(self) -> None:
        if not self._series or len(self._running) > 4:
            return
        job = f"sweep-{len(self._jobs) + 1}"
        selected = self._selected()
        self._jobs[job] = selected
        self._running.add(job)
        self._history.note(SweepAsked, job, selected)
        for uid in sorted(self._undelivered):
            self._may_move(selected, self._rows_of[uid])
        request = request_of(job, selected)
        await self._asking.served(lambda core: core.parts.sweeper.begin_sweep(request))
        self._history.note(SweepBegan, job)
        stops = self._rng.random() < 0.1
        await self._wires.pause(self._rng.randrange(20 * MS) if stops else 50 * MS)
        if stops:
            answer = await self._asking.served(lambda core: core.parts.sweeper.stop(job))
        else:
            answer = await self._asking.served(lambda core: core.parts.sweeper.get(job))
        while answer.state == scheduler_pb2.SWEEP_RUNNING:
            await self._wires.pause(100 * MS)
            answer = await self._asking.served(lambda core: core.parts.sweeper.get(job))
        finished = answer.state == scheduler_pb2.SWEEP_FINISHED
        self._history.note(SweepEnded, job, finished, answer.done, answer.too_late, answer.gone, answer.too_far)
        self._running.discard(job)

    def _selected(self) -> Selected:
        rng = self._rng
        wall_ms = self._world.wall_ms
        series = rng.randint(max(1, self._series - SERIES_NEWEST), self._series)
        dice = rng.random()
        if dice < 0.4 and series not in self._moved:
            self._moved.add(series)
            if rng.random() < 0.5:
                return Selected(TOPIC, key_prefix=f"s{series}-", due_ms=wall_ms + rng.randrange(-1_000, 4_000))
            return Selected(TOPIC, key_prefix=f"s{series}-", shift_ms=rng.randrange(-2_000, 3_000))
        if dice < 0.6:
            return Selected(TOPIC, key=f"s{series}-{rng.randrange(5)}", cancel=True)
        if dice < 0.8:
            return Selected(key_prefix=f"s{series}-", cancel=True)
        from_ms = wall_ms + rng.randrange(-1_000, 3_000)
        return Selected(TOPIC, tag=rng.choice(TAGS), due_ms_min=from_ms, due_ms_max=from_ms + 1_500, cancel=True)

    def _may_move(self, selected: Selected, row: Row) -> None:
        """Announce each message that a sweep may move to the checkers that judge by due times."""
        if selected.cancel or row.label is None or not selected.by_text(row.topic, row.label):
            return
        target_ms = selected.target_ms(self._due_ms[row.uid])
        self._history.note(RescheduleSent, row.uid, 0, target_ms)

    # -- what became of them

    def _in_doubt(self) -> list[int]:
        known = self._producers.known
        found = []
        for uid in sorted(self._undelivered - self._told):
            row = self._rows_of[uid]
            if uid in known and row.label is not None:
                label = row.label
                if any(job.by_text(row.topic, label) for job in self._jobs.values()):
                    found.append(uid)
        return found

    def _look(self) -> None:
        self._world.after(LOOK_EVERY_NS, self._look)
        if not self._wires.winding_down or self._running or self._asking.open:
            return
        for uid in self._in_doubt()[:LOOKED_AT_ONCE]:
            self._wires.run(self._look_up(uid, self._producers.known[uid]))

    async def _look_up(self, uid: int, id64: int) -> None:
        answer = await self._asking.served(lambda core: core.parts.requests.get(id64, False))
        state = scheduler_pb2.MessageState.Name(answer.state)
        self._history.note(SweptSeen, uid, id_of(answer.message.id, 0), state, answer.message.due_ms)
        self._told.add(uid)


def request_of(job: str, selected: Selected) -> scheduler_pb2.BeginSweepRequest:
    """A sweep as it is asked for."""
    request = scheduler_pb2.BeginSweepRequest(
        job_id=job,
        selection=scheduler_pb2.Selection(
            topic=selected.topic,
            tag=selected.tag,
            key=selected.key,
            key_prefix=selected.key_prefix,
            due_ms_min=selected.due_ms_min,
            due_ms_max=selected.due_ms_max,
        ),
    )
    if selected.cancel:
        request.cancel = True
    elif selected.due_ms is not None:
        request.due_ms = selected.due_ms
    else:
        request.shift_ms = selected.shift_ms or 0
    return request
