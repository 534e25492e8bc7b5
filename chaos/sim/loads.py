"""Bulk loaders: bundles of messages that were built outside go to all nodes piece by piece and are taken over in order.

A loader sends a bundle to every node that answers, and asks the master to take it over until it is. Some die on the
way and begin anew with the same load; some repeat a load that is done. Some of what was loaded is cancelled, before or
after it is due.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from random import Random

import google_crc32c
import numpy as np

from tickwheel.chaos.sim.asking import Asking
from tickwheel.chaos.sim.clients import TIMEOUT_NS, Wires
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.history_bulk import LoadAnswered, TakeOverAsked
from tickwheel.chaos.sim.history_messages import CancelAnswered, CancelSent, Row, ScheduleSent
from tickwheel.chaos.sim.producers import UID
from tickwheel.chaos.sim.world import HOUR_MS, MS, SECOND
from tickwheel.node.core.bundle_store import Held
from tickwheel.node.core.face import CoreFace
from tickwheel.node.core.failure import Failure
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.admin_pb2 import CreateGroupRequest, CreateTopicRequest
from tickwheel.proto.bulk_pb2 import LoadState, TakeOverRequest
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.storage import bundle
from tickwheel.storage.unit import UNIT

TOPIC = "catalogue"
GROUPS = ("shelves", "mirrors")
CROWDS = tuple(Crowd(group, (TOPIC,), consumers=1) for group in GROUPS)
SLOT_MS = 1_000
PIECE_BYTES = 1_500
LOAD_EVERY_NS = 900 * MS
OPEN_MOST = 2
SEND_AGAIN_NS = 120 * MS
TAKE_AGAIN_NS = 150 * MS
CANCELS_MOST = 6


@dataclass(slots=True)
class _Bundle:
    rows: tuple[Row, ...]
    data: bytes
    name: str
    asked: bool = False
    """Somebody has asked to have it taken over."""


@dataclass(slots=True)
class _Load:
    job: str
    bundles: list[_Bundle]
    sha: str
    life: int = 0
    """Number of the loader that is at work; what an earlier one still hears does not count."""
    dies: bool = False
    repeats: bool = False
    place: int = 0
    """Of the bundle under way."""
    sending: set[int] = field(default_factory=set)
    """Nodes to which it is on its way."""


class Loads:
    """`clients.Clients`."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._world = wires.world
        self._history = wires.history
        self._rng: Random = wires.world.stream("clients/loads")
        self._asking = Asking(wires, self._rng)
        self._consumers = Consumers(wires, CROWDS, self._rng)
        self._open: list[_Load] = []
        self._jobs = 0
        self._began = False
        self._cancelled: set[int] = set()
        """That somebody has asked for."""

    def start(self) -> None:
        """See Clients: once topic and groups are there."""
        commands = [
            AdminCommand(create_topic=CreateTopicRequest(name=TOPIC)),
            *(AdminCommand(create_group=CreateGroupRequest(name=group, topics=[TOPIC])) for group in reversed(GROUPS)),
        ]

        def begin() -> None:
            self._began = True
            self._consumers.start()
            self._world.after(0, self._begin_some)

        self._asking.set_up(commands, begin)

    def unfinished(self) -> str:
        """See Clients."""
        if not self._began:
            return "that loaders begin"
        for load in self._open:
            return f"the end of load {load.job}"
        if self._asking.open:
            return "answers about loaded messages"
        return self._consumers.unfinished()

    # -- loads

    def _begin_some(self) -> None:
        if self._wires.winding_down:
            return
        rng = self._rng
        self._world.after(self._wires.pause_ns(LOAD_EVERY_NS, rng), self._begin_some)
        if len(self._open) >= OPEN_MOST:
            return
        self._jobs += 1
        bundles = [self._build() for _ in range(rng.choice((1, 1, 2, 3)))]
        sha = hashlib.sha256("".join(built.name for built in bundles).encode()).hexdigest()
        load = _Load(f"load-{self._jobs}", bundles, sha, dies=rng.random() < 0.25, repeats=rng.random() < 0.2)
        self._open.append(load)
        if load.dies:
            self._world.after(rng.randrange(600 * MS), self._die, load)
        self._take(load, 0, load.life)

    def _build(self) -> _Bundle:
        rng = self._rng
        wall_ms = self._world.wall_ms
        rows = []
        for _ in range(rng.choice((3, 12, 40))):
            dice = rng.random()
            due_ms = wall_ms + rng.randrange(3_500)
            if dice < 0.1:
                due_ms = wall_ms - rng.randrange(2 * HOUR_MS)
            elif dice < 0.25:
                due_ms += HOUR_MS * rng.randrange(1, 30)
            elif dice > 0.6:
                due_ms = due_ms // 500 * 500
            rows.append(Row(self._wires.number(), TOPIC, due_ms, None))
        rows.sort(key=lambda row: row.due_ms or 0)
        records = [UID.pack(row.uid) + b"#" * (row.uid * 7919 % 90) for row in rows]
        units = np.zeros(len(rows), UNIT)
        units["due_requested_ms"] = [row.due_ms for row in rows]
        units["size"] = [len(record) for record in records]
        data = b"".join(bundle.build(units, b"".join(records), slot_ms=SLOT_MS, topics=1))
        return _Bundle(tuple(rows), data, hashlib.sha256(data).hexdigest())

    def _die(self, load: _Load) -> None:
        """The loader is gone; somebody starts the same load again."""
        if load not in self._open:
            return
        load.life += 1
        load.sending.clear()
        self._world.after(self._rng.randrange(SECOND), self._take, load, 0, load.life)

    def _take(self, load: _Load, place: int, life: int) -> None:
        """Bring one bundle to the nodes and have it taken over, then the next."""
        if load.life != life:
            return
        if place == len(load.bundles):
            if load.repeats:
                load.repeats = False
                self._world.after(self._rng.randrange(SECOND), self._take, load, 0, life)
            else:
                self._open.remove(load)
            return
        load.place = place
        load.sending.clear()
        for target in range(self._wires.shape.nodes):
            self._bring(load, target)
        self._world.after(self._rng.randrange(20 * MS, 400 * MS), self._ask, load, place, life, self._rng.randrange(3))

    # -- to the nodes

    def _bring(self, load: _Load, target: int) -> None:
        """Send the bundle under way to a node, until it has it or the next one is under way."""
        if target not in load.sending:
            load.sending.add(target)
            self._exchange(load, load.life, load.place, target, -1)

    def _exchange(self, load: _Load, life: int, place: int, target: int, offset: int) -> None:
        """The piece from there on, or below 0 the question how much the node has; and what follows from the answer."""
        built = load.bundles[place]
        over: list[bool] = []

        def go_on(offset: int) -> None:
            if (load.life, load.place) == (life, place) and load in self._open:
                self._exchange(load, life, place, target, offset)

        def heard(state: Held | Failure) -> None:
            if over:
                return
            over.append(True)
            if isinstance(state, Failure):
                self._world.after(SEND_AGAIN_NS, go_on, -1)
            elif not state.held:
                go_on(state.bytes)
            elif (load.life, load.place) == (life, place):
                load.sending.discard(target)

        def timed_out() -> None:
            if not over:
                over.append(True)
                go_on(-1)

        def call(face: CoreFace) -> None:
            if offset < 0:
                self._wires.back(heard, face.bulk.offer(built.name, len(built.data)))
                return
            piece = built.data[offset : offset + PIECE_BYTES]
            crc = google_crc32c.value(piece)
            face.bulk.take(
                built.name, len(built.data), offset, piece, crc, lambda state: self._wires.back(heard, state)
            )

        self._wires.call(self._wires.machine(target), call)
        self._world.after(TIMEOUT_NS, timed_out)

    # -- to the master

    def _ask(self, load: _Load, place: int, life: int, target: int) -> None:
        if load.life != life:
            return
        built, sequence = load.bundles[place], place + 1
        now_ns = self._world.now_ns
        if not built.asked:
            built.asked = True
            # As the promises of what is delivered see it, somebody schedules this now.
            self._history.add(ScheduleSent(now_ns, load.job, sequence, "", built.rows))
            uids = tuple(row.uid for row in built.rows)
            self._history.add(TakeOverAsked(now_ns, load.job, sequence, len(load.bundles), uids))
        request = TakeOverRequest(
            job_id=load.job,
            load_sha256=load.sha,
            sequence=sequence,
            bundles=len(load.bundles),
            name=built.name,
            topics=[TOPIC],
        )
        over: list[bool] = []

        def heard(state: LoadState | Failure) -> None:
            if over:
                return
            over.append(True)
            if isinstance(state, LoadState):
                self._history.add(LoadAnswered(self._world.now_ns, load.job, sequence, state.taken, state.units))
                if load.life == life:
                    self._taken(load, place, life)
                return
            if state.reason == common_pb2.WRONG_STATE and load.life == life:
                # Some lack it; who was replaced or lost it has to be sent it again.
                for other in range(max(self._wires.shape.nodes + 1, self._wires.machine_count)):
                    self._bring(load, other)
            turn = self._wires.redirect(state, target) if state.reason == common_pb2.NOT_MASTER else target
            self._world.after(TAKE_AGAIN_NS, self._ask, load, place, life, turn)

        def timed_out() -> None:
            if not over:
                over.append(True)
                self._ask(load, place, life, target + 1)

        def answered(state: LoadState | Failure) -> None:
            if self._rng.random() < 0.95:  # else it is lost on its way
                self._wires.back(heard, state)

        self._wires.call(self._wires.machine(target), lambda face: face.bulk.take_over(request, answered))
        self._world.after(4 * TIMEOUT_NS, timed_out)

    def _taken(self, load: _Load, place: int, life: int) -> None:
        if self._rng.random() < 0.3:
            self._world.after(self._rng.randrange(300 * MS), self._look_for_some, load.bundles[place])
        self._take(load, place + 1, life)

    # -- cancels

    def _look_for_some(self, built: _Bundle) -> None:
        """Some of what was loaded, by the list of what is pending; each is cancelled a little later."""
        if self._wires.winding_down:
            return
        request = scheduler_pb2.ListPendingRequest(topic=TOPIC, page_size=100, content=True)
        wanted = {row.uid for row in built.rows}

        def told(answer: scheduler_pb2.ListPendingResponse) -> None:
            # Not the retries among them: these were delivered, and are cancelled for one group.
            first = (message for message in answer.messages if not message.group)
            found = [(UID.unpack_from(message.payload)[0], message.id) for message in first]
            mine = [(uid, id_) for uid, id_ in found if uid in wanted and uid not in self._cancelled]
            for uid, id_ in self._rng.sample(mine, min(len(mine), CANCELS_MOST)):
                self._cancelled.add(uid)
                wait_ns = self._rng.randrange(3 * SECOND)
                self._world.after(wait_ns, self._cancel, uid, id_.hour << 32 | id_.index)

        self._asking.command(lambda face, answer: face.list_pending(request, answer), told)

    def _cancel(self, uid: int, id64: int) -> None:
        self._history.add(CancelSent(self._world.now_ns, uid, id64))

        def told(answer: scheduler_pb2.CancelResponse) -> None:
            name = scheduler_pb2.CancelOutcome.Name(answer.outcome)
            self._history.add(CancelAnswered(self._world.now_ns, uid, id64, name))

        self._asking.command(lambda face, answer: face.cancel(id64, answer), told)
