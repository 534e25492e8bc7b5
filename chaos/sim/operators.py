"""The operators of the cluster: they add and remove members by the same calls as `tickwheel member`.

A change is asked for again until any master gives a definite answer. Every newcomer counts before the run is over.
Where extra members do not stay, a member leaves once a newcomer counts. A removed node is stopped a moment later:
until then it may not know of its removal.
"""

from __future__ import annotations

from collections.abc import Callable

from tickwheel.chaos.sim.asking import Asking, succeeded
from tickwheel.chaos.sim.clients import Wires
from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.history_machines import MemberRemoved
from tickwheel.chaos.sim.log_process import members_of
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.setup import Stage
from tickwheel.chaos.sim.world import MS
from tickwheel.node.failure import Failure
from tickwheel.proto import common_pb2
from tickwheel.proto.admin_pb2 import Member, RemoveMemberRequest
from tickwheel.proto.log_pb2 import AdminCommand

LOOK_NS = 100 * MS
STOPPED_NS_MOST = 1_500 * MS
EXTRA_NS_MOST = 4_000 * MS
"""Most time from a newcomer's promotion until a member leaves, where extra members do not stay (Shape.extra_stay)."""


class Operators:
    """`clients.Clients`. `promoted` and `removed` are evidence for the faults that ask for changes."""

    def __init__(self, wires: Wires, stage: Stage) -> None:
        self._wires = wires
        self._stage = stage
        self._asking = Asking(wires, wires.rng)
        self._leave_rng = wires.world.stream("operators/leave")
        self._asked: set[tuple[str, str]] = set()
        """(change, member) of each request without an answer."""
        self._learning: set[str] = set()
        self.lost: str = ""
        """A member whose disk was wiped, until it is removed. It cannot vote, so nobody else is removed meanwhile."""
        self.promoted: set[str] = set()
        self.removed: set[str] = set()

    def start(self) -> None:
        """Nothing to start: faults call the operators."""

    def unfinished(self) -> str:
        for what, name in sorted(self._asked):
            return f"an answer to: {what} {name}"
        return f"that {', '.join(sorted(self._learning))} counts" if self._learning else ""

    def add(self, machine: Machine) -> None:
        """Make a machine that runs a member; it counts some time later."""
        [member] = members_of([machine.name])
        asked = Member(node_id=member.node_id, peer_address=member.peer_address, client_address=member.client_address)
        self._learning.add(machine.name)
        self._ask("add", machine.name, AdminCommand(add_member=asked), lambda: self._look(machine))

    def can_lose(self, machine: Machine) -> bool:
        """Whether nothing is changed now, and all members know the disk of this one for good."""
        processes = [one.process for one in self._stage.machines]
        return not (self.lost or self.unfinished()) and all(
            isinstance(process, CoreProcess) and process.knows_disk_of(machine.name) for process in processes
        )

    def replace_lost(self, machine: Machine, by: Machine) -> None:
        """The disk of a member was wiped: another one takes its place."""
        self.lost = machine.name
        self.add(by)
        self.remove(machine)

    def remove(self, machine: Machine) -> None:
        """Remove a member, and stop its machine once that is certain."""
        if machine.name in self.removed or self.lost not in ("", machine.name):
            return
        command = AdminCommand(remove_member=RemoveMemberRequest(node_id=machine.name))

        def gone() -> None:
            self.removed.add(machine.name)
            if self.lost == machine.name:
                self.lost = ""
            self._learning.discard(machine.name)
            self._wires.history.note(MemberRemoved, machine.name)
            self._wires.world.after(self._wires.rng.randrange(STOPPED_NS_MOST), machine.retire)
            self._stage.leave(machine)

        self._ask("remove", machine.name, command, gone)

    def _look(self, machine: Machine) -> None:
        """Until the newcomer counts, by its own log."""
        process = machine.process
        if machine.name not in self._learning:
            return
        if isinstance(process, CoreProcess) and machine.name in process.log.voters:
            self._learning.discard(machine.name)
            self.promoted.add(machine.name)
            self._wires.world.tell(machine.name, "counts")
            if not self._wires.shape.extra_stay:
                self._wires.world.after(self._leave_rng.randrange(EXTRA_NS_MOST), self._let_one_leave)
            return
        self._wires.world.after(LOOK_NS, self._look, machine)

    def _let_one_leave(self) -> None:
        """Anyone, if more members count than the cluster was founded with and none is leaving already."""
        leaving = {name for what, name in self._asked if what == "remove"}
        counts = [m for m in self._stage.machines if m.name in self._stage.founders or m.name in self.promoted]
        if not self._wires.winding_down and len(counts) - len(leaving) > len(self._stage.founders):
            self.remove(self._leave_rng.choice([machine for machine in counts if machine.name not in leaving]))

    def _ask(self, what: str, name: str, command: AdminCommand, then: Callable[[], None]) -> None:
        if (what, name) not in self._asked:  # else the same change is being asked for already
            self._asked.add((what, name))
            self._wires.world.tell("run", f"asks to {what} {name}")
            self._wires.run(self._until_done(what, name, command, then))

    async def _until_done(self, what: str, name: str, command: AdminCommand, then: Callable[[], None]) -> None:
        def definite(answer: object) -> bool:
            lost_before = what == "remove" and isinstance(answer, Failure) and answer.reason == common_pb2.UNKNOWN_NAME
            return succeeded(answer) or lost_before or self._left_since(what, name)

        await self._asking.served(lambda core: core.parts.requests.admin(command), definite)
        self._asked.remove((what, name))
        self._wires.world.tell("run", f"{name}: {what} is done")
        if not self._left_since(what, name):
            then()

    def _left_since(self, what: str, name: str) -> bool:
        return what == "add" and name in self.removed
