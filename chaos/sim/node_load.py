"""The load of a run of whole nodes: the processes on the machines, and all clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tickwheel.chaos.sim import (
    cold,
    couriers,
    lines,
    listeners,
    loads,
    parcels,
    sizes,
    sweeps,
    tight,
    timetables,
    writes,
)
from tickwheel.chaos.sim.accounts import Accounts, asked
from tickwheel.chaos.sim.changes import Changes
from tickwheel.chaos.sim.checkers.p1_no_loss import NoLoss
from tickwheel.chaos.sim.claims import Claims
from tickwheel.chaos.sim.clerks import Clerks
from tickwheel.chaos.sim.clients import Clients, Wires
from tickwheel.chaos.sim.cold import Cold
from tickwheel.chaos.sim.consumers import GROUPS, Consumers
from tickwheel.chaos.sim.core_process import CoreProcess, note_digest, small_config
from tickwheel.chaos.sim.couriers import Couriers
from tickwheel.chaos.sim.doors import Door
from tickwheel.chaos.sim.floods import Floods
from tickwheel.chaos.sim.history_messages import Looked
from tickwheel.chaos.sim.lines import Lines
from tickwheel.chaos.sim.listeners import Listeners
from tickwheel.chaos.sim.loads import Loads
from tickwheel.chaos.sim.log_watch import Census
from tickwheel.chaos.sim.mutation_table import Patches
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.operators import Operators
from tickwheel.chaos.sim.parcels import Parcels
from tickwheel.chaos.sim.pauses import Pauses
from tickwheel.chaos.sim.producers import TOPICS, Producers
from tickwheel.chaos.sim.rolled import Rolled
from tickwheel.chaos.sim.setup import Stage
from tickwheel.chaos.sim.shape import Shape
from tickwheel.chaos.sim.sizes import Sizes
from tickwheel.chaos.sim.stewards import Stewards
from tickwheel.chaos.sim.sweeps import Sweeps
from tickwheel.chaos.sim.timetables import Timetables
from tickwheel.chaos.sim.twins import Twins
from tickwheel.chaos.sim.users import Users
from tickwheel.chaos.sim.world import MS
from tickwheel.chaos.sim.writes import Writes
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.delivery import channel, channels, delivery, heard_leases, inherited, lease_feed, leases
from tickwheel.node.core.schedule import dispatcher
from tickwheel.node.failure import Failure
from tickwheel.node.state import settings, unique_keys
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.wheel import window

LOOKED_FOR = 40
LOOK_NS = 500 * MS
READ_NS_MOST = 5_000 * MS
HANDED_GAP_US = 2_000
"""Of small turns, each hands out once more for so much time that a node's loop waits between two."""
TOLD_MAX = 64
"""Lease ranges kept for slaves, where turns are small; half as many go with a sync."""
SMALL_BLOCKS = 2
KEY_SHARDS = 2
"""Shards of the table of unique keys: few, so that each of them is pruned many times in a run."""
NEVER_RESET = (
    *GROUPS,
    lines.GROUP,
    couriers.GROUP,
    sweeps.GROUP,
    *loads.GROUPS,
    *writes.GROUPS,
    parcels.GROUP,
    cold.GROUP,
    timetables.GROUP,
)
"""Groups whose settlements are compared with their receipts."""


class NodeLoad:
    """`setup.Load` of the whole node. `parts` are the clients: more of them go at the end."""

    groups: tuple[str, ...] = GROUPS

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._world = stage.world
        self._census = Census()
        self._rolled = Rolled()
        self._doors: list[Door] = []
        """Of all processes so far, ended ones too: an end must not depend on when garbage is collected."""
        self._wires = Wires(stage)
        self._producers = Producers(self._wires)
        self._operators = Operators(self._wires, stage)
        self.parts: list[Clients] = [
            self._producers,
            Consumers(self._wires),
            Changes(self._wires, self._producers.known),
            self._operators,
        ]
        self._draw_more(stage.shape)

    def _draw_more(self, shape: Shape) -> None:
        """Clients that not every run has, by its shape, and what of theirs is paused."""
        paused = [("topic", TOPICS[0]), ("group", GROUPS[0])]
        kinds: tuple[tuple[int, Callable[[Wires], Clients], tuple[tuple[str, str], ...]], ...] = (
            (shape.lines, Lines, (("topic", lines.TOPIC), ("group", lines.GROUP))),
            (shape.sweeps, Sweeps, (("group", sweeps.GROUP),)),
            (shape.listeners, Listeners, (("topic", listeners.TOPIC), ("group", listeners.FILTERED))),
            (shape.couriers, Couriers, (("topic", couriers.TOPICS[0]), ("topic", couriers.TOPICS[1]))),
            (shape.writes, Writes, ()),
            (shape.loads, Loads, ()),
            (shape.parcels, Parcels, ()),
            (shape.stewards, Stewards, ()),
            (shape.clerks, Clerks, ()),
            (shape.twins, Twins, ()),
            (shape.cold, Cold, ()),
            (shape.schedules, Timetables, ()),
            (shape.keys, Claims, ()),
            (shape.users, Users, ()),
            (shape.producers_max, Floods, ()),
            (shape.sizes, Sizes, (("topic", sizes.TOPIC),)),
        )
        for wanted, kind, places in kinds:
            if wanted:
                self.parts.append(kind(self._wires))
                paused += places
        if shape.pauses:
            self.parts.append(Pauses(self._wires, paused))

    @contextmanager
    def small(self) -> Iterator[None]:
        shape = self._stage.shape
        turn = shape.turn
        # Coarse loops have few turns a second, and must keep up.
        handed = turn * max(1, max(shape.loop_gap_us, shape.rest_gap_us) // HANDED_GAP_US)
        bounds = (
            (delivery, "HANDED_MAX", handed),
            (delivery, "SLICE_TOPICS_MAX", handed),
            (delivery, "TURN_LEASES", handed),
            (channels, "TURN_CHANNELS", turn),
            (inherited, "TURN_LEASES", handed),
            (leases, "TURN_CHANNELS", turn),
            (heard_leases, "TURN_LEASES", turn),
            (heard_leases, "TURN_CHANNELS", turn),
            (heard_leases, "TURN_RANGES", turn),
            (lease_feed, "GIVEN_MAX", turn),
            (lease_feed, "EVENTS_MAX", TOLD_MAX),
            (lease_feed, "RANGES_PER_SYNC_MAX", TOLD_MAX // 2),
            (lease_feed, "TABLE_RANGES_PER_SYNC_MAX", TOLD_MAX // 4),
            (channel, "SCANNED_MAX", handed),
            (channel, "CLAIMED_LEAST", turn),
            (dispatcher, "FEW_TOPICS", 0),
            (dispatcher, "DISPATCH_TOPICS_MAX", turn),
            (window, "SORTED_UNITS_MAX", turn),
            (window, "SMALL_BLOCKS_MAX", SMALL_BLOCKS),
        )
        patches = Patches()
        try:
            patches.put(unique_keys, "SHARDS", KEY_SHARDS)
            wider: dict[str, tuple[int, int]] = {}
            if shape.retention_ms:
                wider["retention_ms"] = (1, settings.DAY_MS)
            if shape.window_messages:
                wider["window_messages_max"] = (1, 1_000_000)
            patches.put(settings, "BOUNDS", settings.BOUNDS | wider)
            for module, name, bound in (*(bounds if turn else ()), *(tight.BOUNDS if shape.tight else ())):
                patches.put(module, name, bound)
            yield
        finally:
            patches.undo()
            for door in self._doors:
                door.close()

    def node_config(self) -> CoreConfig:
        """Of every node."""
        return small_config(self._stage.world.seed, self._stage.shape)

    def build(self, machine: Machine) -> CoreProcess:
        """A whole node."""
        stage = self._stage
        guards, shape = stage.config.guards, stage.shape
        process = CoreProcess(machine, stage.founders, guards, self.node_config(), shape, self._census, self._rolled)
        if shape.has_ports:
            self._doors.append(process.open_door())
        return process

    def start(self) -> None:
        for part in self.parts:
            part.start()

    def wind_down(self) -> None:
        self._wires.winding_down = True

    def unfinished(self) -> str:
        positions = {}
        for machine in self._stage.machines:
            if not isinstance(machine.process, CoreProcess):
                return f"{machine.name} does not run"
            positions[machine.name] = machine.process.position
        for checker in self._stage.checkers:
            if open_still := checker.missing(self._world.now_ns):
                return open_still
        if waiting := self._came_back():
            return f"{waiting} messages that came back and that nobody gets"
        for part in self.parts:
            if open_still := part.unfinished():
                return open_still
        return "" if len(set(positions.values())) == 1 else f"equal applied indexes: {positions}"

    def _came_back(self) -> int:
        """Number of returned messages still open, FIFO topics left out. Consumers with credit should have got them."""
        cores = [m.process.host.core for m in self._stage.machines if isinstance(m.process, CoreProcess)]
        states = [core.state for core in cores if core.leading]
        return sum(
            subscription.returned_count
            for state in states
            for subscription in state.groups.subscriptions()
            if not state.topic_fifo(subscription.topic_id)  # a retry in place has a pause
        )

    def finish(self) -> None:
        """Look for what is not due yet on every node, and take digests of all of them."""
        known = self._producers.known
        no_loss = next(checker for checker in self._stage.checkers if isinstance(checker, NoLoss))
        waiting = [uid for uid in no_loss.not_due(self._world.now_ns) if uid in known][:LOOKED_FOR]
        for machine in self._stage.machines:
            for uid in waiting:
                self._wires.run(self._look(machine, uid, known[uid]))
        accounts = Accounts(self._wires)
        for machine in self._stage.machines:
            accounts.read(machine, NEVER_RESET)
        self._world.run_until(self._world.now_ns + LOOK_NS)
        end_ns = self._world.now_ns + READ_NS_MOST
        while accounts.open and self._world.now_ns < end_ns:
            self._world.run_until(self._world.now_ns + LOOK_NS)
        assert not accounts.open, "what groups have settled was not read to its end"
        for machine in self._stage.machines:
            assert isinstance(machine.process, CoreProcess)
            note_digest(machine, machine.process.host.core)

    async def _look(self, machine: Machine, uid: int, id64: int) -> None:
        answer = await asked(machine, lambda core: core.parts.requests.get(id64, False))
        if not isinstance(answer, Failure):
            state = scheduler_pb2.MessageState.Name(answer.state)
        elif answer.reason == common_pb2.UNKNOWN_NAME:
            state = "NOT_FOUND"
        else:
            return  # not the master: it names who is
        self._wires.history.note(Looked, uid, id64, state)

    @property
    def operators(self) -> Operators:
        """The operators, who add and remove members."""
        return self._operators

    def hand_over(self, machine: Machine, target: str, done: Callable[[bool], None]) -> None:
        """Planned handover from this machine."""
        process = machine.process
        assert isinstance(process, CoreProcess)
        machine.deliver(
            process.host.core.parts.mastership.start_transfer, target, lambda failure: done(failure is None)
        )

    def commands(self) -> dict[str, tuple[int, int]]:
        """Commands of the log by name: how many, and how many beside a change of master."""
        return {name: (times, self._rolled.beside[name]) for name, times in self._rolled.times.items()}
