"""Brings bundles to all nodes piece by piece and has them taken over in order: the shared part of all loaders.

A bundle goes to every node that answers, and the master is asked to take it over until it is. After a loader dies,
another starts the same load from the beginning. A finished load may be repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import google_crc32c
import numpy as np

from tickwheel.chaos.sim.clients import NO_ANSWER, TIMEOUT_NS, Call, Wires, served
from tickwheel.chaos.sim.history_bulk import LoadAnswered, TakeOverAsked
from tickwheel.chaos.sim.history_messages import Row, ScheduleSent
from tickwheel.chaos.sim.producers import UID
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.promise import Reply
from tickwheel.node.failure import Failure, RequestError
from tickwheel.proto import common_pb2
from tickwheel.proto.bulk_pb2 import BundleState, LoadState, TakeOverRequest
from tickwheel.proto.cold_pb2 import ColdLoad
from tickwheel.storage import bundle
from tickwheel.storage.unit import UNIT

SLOT_MS = 1_000
PIECE_BYTES = 1_500
SEND_AGAIN_NS = 120 * MS
TAKE_AGAIN_NS = 150 * MS


def bundle_data(rows: Sequence[Row]) -> bytes:
    """Messages of one topic, by rising due time, as a bundle."""
    records = [UID.pack(row.uid) + b"#" * (row.uid * 7919 % 90) for row in rows]
    units = np.zeros(len(rows), UNIT)
    units["due_requested_ms"] = [row.due_ms for row in rows]
    units["size"] = [len(record) for record in records]
    return b"".join(bundle.build(units, b"".join(records), slot_ms=SLOT_MS, topics=1))


@dataclass(slots=True)
class Bundle:
    """A bundle and its messages. `name`: the SHA-256 of its data."""

    rows: tuple[Row, ...]
    data: bytes
    name: str
    asked: bool = False
    """Whether a take-over of it was asked for."""

    @classmethod
    def of(cls, rows: tuple[Row, ...], data: bytes) -> Bundle:
        """Not asked for yet."""
        return cls(rows, data, hashlib.sha256(data).hexdigest())


@dataclass(slots=True, eq=False)
class Load:
    """Bundles that are taken over one after the other. `cold`: the one bundle brings this of the cold tier."""

    job: str
    bundles: list[Bundle]
    cold: ColdLoad | None = None
    done: Callable[[], None] = lambda: None
    """Told once all of it was taken over, and repeated if that is to be."""
    life: int = 0
    """Number of the loader at work. Answers that reach an earlier loader do not count."""
    repeats: bool = False
    place: int = 0
    """Index in `bundles` of the bundle under way."""
    sending: set[int] = field(default_factory=set)
    """Nodes to which it is on its way."""

    @property
    def sha(self) -> str:
        """Names its content."""
        return hashlib.sha256("".join(built.name for built in self.bundles).encode()).hexdigest()


class Carrier:
    """The loads of one kind of clients. `taken` is told of each bundle that was taken over."""

    def __init__(
        self, wires: Wires, rng: Random, topic: str, taken: Callable[[Bundle], None] = lambda bundle: None
    ) -> None:
        self._wires = wires
        self._world = wires.world
        self._history = wires.history
        self._rng = rng
        self._topic = topic
        self._told = taken
        self.open: list[Load] = []

    def begin(self, load: Load) -> None:
        """A loader begins with a load."""
        self.open.append(load)
        self._wires.run(self._carry(load, load.life))

    def dies(self, load: Load) -> None:
        """Kill the loader of `load` soon. Another one starts over."""
        self._world.after(self._rng.randrange(600 * MS), self._die, load)

    def _die(self, load: Load) -> None:
        if load not in self.open:
            return
        load.life += 1
        load.sending.clear()
        self._world.after(self._rng.randrange(SECOND), self._follow, load, load.life)

    def _follow(self, load: Load, life: int) -> None:
        """The next loader starts the same load again."""
        self._wires.run(self._carry(load, life))

    async def _carry(self, load: Load, life: int) -> None:
        """One loader: each bundle goes to the nodes and is taken over, then the next."""
        while load.life == life:
            for place in range(len(load.bundles)):
                load.place = place
                load.sending.clear()
                for target in range(self._wires.shape.nodes):
                    self._bring(load, target)
                wait_ns, target = self._rng.randrange(20 * MS, 400 * MS), self._rng.randrange(3)
                await self._wires.pause(wait_ns)
                if not await self._take_over(load, place, life, target):
                    return
            if not load.repeats:
                self.open.remove(load)
                load.done()
                return
            load.repeats = False
            await self._wires.pause(self._rng.randrange(SECOND))

    # -- to the nodes

    def _bring(self, load: Load, target: int) -> None:
        """Send the bundle under way to a node, until it has it or the next one is under way."""
        if target not in load.sending:
            load.sending.add(target)
            self._wires.run(self._send(load, target))

    async def _send(self, load: Load, target: int) -> None:
        life, place, offset = load.life, load.place, -1
        while True:
            call = _sending(load.bundles[place], offset)
            state = await self._wires.answer(self._wires.machine(target), call)
            if state is NO_ANSWER:
                offset = -1
            elif isinstance(state, Failure):
                offset = -1
                await self._wires.pause(SEND_AGAIN_NS)
            elif not state.held:
                offset = state.bytes
            if (load.life, load.place) != (life, place):
                return
            if isinstance(state, BundleState) and state.held:
                load.sending.discard(target)
                return
            if load not in self.open:
                return

    # -- to the master

    async def _take_over(self, load: Load, place: int, life: int, target: int) -> bool:
        """Ask until the bundle is taken over; False: another loader is at work."""
        built, sequence = load.bundles[place], place + 1
        request = TakeOverRequest(
            job_id=load.job,
            load_sha256=load.sha,
            sequence=sequence,
            bundles=len(load.bundles),
            name=built.name,
            topics=[self._topic],
            cold=load.cold,
        )
        call = served(lambda core: core.parts.bulk.take_over(request))
        while load.life == life:
            if not built.asked and load.cold is None:
                built.asked = True
                # The checkers of deliveries count this as a schedule request made now.
                self._history.note(ScheduleSent, load.job, sequence, "", built.rows)
                uids = tuple(row.uid for row in built.rows)
                self._history.note(TakeOverAsked, load.job, sequence, len(load.bundles), uids)
            machine = self._wires.machine(target)
            state = await self._wires.answer(machine, call, 4 * TIMEOUT_NS, lambda: self._rng.random() < 0.95)
            if state is NO_ANSWER:
                target += 1
                continue
            if isinstance(state, LoadState):
                if load.cold is None:
                    self._history.note(LoadAnswered, load.job, sequence, state.taken, state.units)
                if load.life == life:
                    self._told(built)
                return load.life == life
            if state.reason == common_pb2.WRONG_STATE and load.life == life:
                # Some lack it: send it again to a node that was replaced or lost it.
                for other in range(max(self._wires.shape.nodes + 1, self._wires.machine_count)):
                    self._bring(load, other)
            if state.reason == common_pb2.NOT_MASTER:
                target = self._wires.redirect(state, target)
            await self._wires.pause(TAKE_AGAIN_NS)
        return False


def _sending(built: Bundle, offset: int) -> Call:
    """Brings the piece from there on; below 0 it asks how much the node has."""

    def send(core: NodeCore, answer: Callable[[BundleState | Failure], None]) -> None:
        bulk, size = core.parts.bulk, len(built.data)
        if offset >= 0:
            piece = built.data[offset : offset + PIECE_BYTES]
            bulk.take(built.name, size, offset, piece, google_crc32c.value(piece), Reply.either(answer))
            return
        try:
            held: BundleState | Failure = bulk.offer(built.name, size)
        except RequestError as error:
            held = error.failure
        answer(held)

    return send
