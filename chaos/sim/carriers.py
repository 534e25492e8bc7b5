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

from tickwheel.chaos.sim.clients import TIMEOUT_NS, Wires
from tickwheel.chaos.sim.history_bulk import LoadAnswered, TakeOverAsked
from tickwheel.chaos.sim.history_messages import Row, ScheduleSent
from tickwheel.chaos.sim.producers import UID
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.node.core.core import NodeCore, serve
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
    sha: str
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

    def load(self, job: str, bundles: list[Bundle], cold: ColdLoad | None, done: Callable[[], None]) -> Load:
        """Begin a load."""
        sha = hashlib.sha256("".join(built.name for built in bundles).encode()).hexdigest()
        load = Load(job, bundles, sha, cold, done)
        self.begin(load)
        return load

    def begin(self, load: Load) -> None:
        """A loader begins with a load."""
        self.open.append(load)
        self._take(load, 0, load.life)

    def dies(self, load: Load) -> None:
        """Kill the loader of `load` soon. Another one starts over."""
        self._world.after(self._rng.randrange(600 * MS), self._die, load)

    def _die(self, load: Load) -> None:
        """Remove the loader and start the same load again with the next one."""
        if load not in self.open:
            return
        load.life += 1
        load.sending.clear()
        self._world.after(self._rng.randrange(SECOND), self._take, load, 0, load.life)

    def _take(self, load: Load, place: int, life: int) -> None:
        """Bring one bundle to the nodes and have it taken over, then the next."""
        if load.life != life:
            return
        if place == len(load.bundles):
            if load.repeats:
                load.repeats = False
                self._world.after(self._rng.randrange(SECOND), self._take, load, 0, life)
            else:
                self.open.remove(load)
                load.done()
            return
        load.place = place
        load.sending.clear()
        for target in range(self._wires.shape.nodes):
            self._bring(load, target)
        self._world.after(self._rng.randrange(20 * MS, 400 * MS), self._ask, load, place, life, self._rng.randrange(3))

    # -- to the nodes

    def _bring(self, load: Load, target: int) -> None:
        """Send the bundle under way to a node, until it has it or the next one is under way."""
        if target not in load.sending:
            load.sending.add(target)
            self._exchange(load, load.life, load.place, target, -1)

    def _exchange(self, load: Load, life: int, place: int, target: int, offset: int) -> None:
        """The piece from there on, or below 0 the question how much the node has; and what follows from the answer."""
        built = load.bundles[place]
        over: list[bool] = []

        def go_on(offset: int) -> None:
            if (load.life, load.place) == (life, place) and load in self.open:
                self._exchange(load, life, place, target, offset)

        def heard(state: BundleState | Failure) -> None:
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

        def call(core: NodeCore) -> None:
            if offset < 0:
                try:
                    self._wires.back(heard, core.parts.bulk.offer(built.name, len(built.data)))
                except RequestError as error:
                    self._wires.back(heard, error.failure)
                return
            piece = built.data[offset : offset + PIECE_BYTES]
            crc = google_crc32c.value(piece)
            core.parts.bulk.take(
                built.name,
                len(built.data),
                offset,
                piece,
                crc,
                Reply.either(lambda state: self._wires.back(heard, state)),
            )

        self._wires.call(self._wires.machine(target), call)
        self._world.after(TIMEOUT_NS, timed_out)

    # -- to the master

    def _ask(self, load: Load, place: int, life: int, target: int) -> None:
        if load.life != life:
            return
        built, sequence = load.bundles[place], place + 1
        now_ns = self._world.now_ns
        if not built.asked and load.cold is None:
            built.asked = True
            # The checkers of deliveries count this as a schedule request made now.
            self._history.add(ScheduleSent(now_ns, load.job, sequence, "", built.rows))
            uids = tuple(row.uid for row in built.rows)
            self._history.add(TakeOverAsked(now_ns, load.job, sequence, len(load.bundles), uids))
        request = TakeOverRequest(
            job_id=load.job,
            load_sha256=load.sha,
            sequence=sequence,
            bundles=len(load.bundles),
            name=built.name,
            topics=[self._topic],
            cold=load.cold,
        )
        over: list[bool] = []

        def heard(state: LoadState | Failure) -> None:
            if over:
                return
            over.append(True)
            if isinstance(state, LoadState):
                if load.cold is None:
                    self._history.add(LoadAnswered(self._world.now_ns, load.job, sequence, state.taken, state.units))
                if load.life == life:
                    self._taken(load, place, life)
                return
            if state.reason == common_pb2.WRONG_STATE and load.life == life:
                # Some lack it: send it again to a node that was replaced or lost it.
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

        def call(core: NodeCore) -> None:
            serve(core, core.parts.bulk.take_over(request), answered)

        self._wires.call(self._wires.machine(target), call)
        self._world.after(4 * TIMEOUT_NS, timed_out)

    def _taken(self, load: Load, place: int, life: int) -> None:
        self._told(load.bundles[place])
        self._take(load, place + 1, life)
