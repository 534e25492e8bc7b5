"""Clients of the replicated log alone: they propose numbered commands of many sizes to the presumed master."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tickwheel.chaos.sim.history_log import ProposalEnded, Proposed
from tickwheel.chaos.sim.log_process import COMMAND, LogProcess, with_shape
from tickwheel.chaos.sim.log_watch import Census
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.setup import Stage
from tickwheel.chaos.sim.world import MS
from tickwheel.replication.config import RaftConfig
from tickwheel.replication.log import ProposalOutcome, ProposalResult, Role

CLIENTS = 3
COMMAND_BYTES_MOST = 300_000
PROBE_NS = 100 * MS
PROBES = 10


class LogLoad:
    """`setup.Load` of the log alone."""

    groups: tuple[str, ...] = ()

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._world = stage.world
        self._history = stage.history
        self._rng = stage.world.stream("log-clients")
        self._census = Census()
        self._number = 0
        self._padding = bytes(COMMAND_BYTES_MOST)
        self._winding_down = False
        self._probes_left = PROBES
        self.committed = 0
        self.committed_late = 0

    def small(self) -> AbstractContextManager[None]:
        return nullcontext()

    def build(self, machine: Machine) -> LogProcess:
        """A RaftLog with a listener that remembers only its position."""
        stage = self._stage
        shape = stage.shape
        config = with_shape(RaftConfig(), shape)
        return LogProcess(machine, stage.founders, config, stage.config.guards, shape.checkpoint_every, self._census)

    def start(self) -> None:
        for _ in range(CLIENTS):
            self._world.after(self._rng.randrange(500 * MS), self._propose)

    def wind_down(self) -> None:
        self._winding_down = True
        self._world.after(PROBE_NS, self._probe)

    def unfinished(self) -> str:
        applied = {m.name: m.process.position[0] for m in self._stage.machines if isinstance(m.process, LogProcess)}
        if len(applied) < len(self._stage.machines):
            return "machines that do not run"
        if self.committed_late == 0:
            return "the first commit after the heal"
        if self._probes_left:
            return "the last probe"
        return "" if len(set(applied.values())) == 1 else f"equal applied indexes: {applied}"

    @property
    def operators(self) -> None:
        """Nobody: the log alone has no members to change."""
        return

    def finish(self) -> None:
        """Nothing to look up."""

    def hand_over(self, machine: Machine, target: str, done: Callable[[bool], None]) -> None:
        """Planned handover from this machine."""
        process = machine.process
        assert isinstance(process, LogProcess)
        machine.deliver(process.log.transfer, target, lambda problem: done(problem is None))

    def commands(self) -> dict[str, tuple[int, int]]:
        """None that a node would know."""
        return {}

    def _probe(self) -> None:
        """A few proposals after the heal show that the log is alive, then silence lets it come to rest."""
        if self._probes_left:
            if self.committed_late:
                self._probes_left -= 1
            self._send(self._target())
            self._world.after(PROBE_NS, self._probe)

    def _propose(self) -> None:
        if self._winding_down:
            return
        rng = self._rng
        machine = self._target()
        burst = 1 if rng.random() < 0.95 else rng.randint(5, 60)
        for _ in range(burst):
            self._send(machine)
        self._world.after(
            int(rng.expovariate(1.0 / (self._stage.shape.log_pause_ms * self._stage.shape.thin * MS))), self._propose
        )

    def _target(self) -> Machine:
        rng = self._rng
        masters = [m for m in self._stage.machines if m.running and _is_master(m)]
        if masters and rng.random() < 0.95:
            return rng.choice(masters)
        return rng.choice(list(self._stage.machines))

    def _send(self, machine: Machine) -> None:
        rng = self._rng
        self._number += 1
        size = rng.randint(0, 300) if rng.random() < 0.97 else rng.randint(0, len(self._padding))
        command = COMMAND.pack(self._number) + self._padding[:size]
        self._world.after(rng.randrange(100_000, 2 * MS), self._arrive, machine, self._number, command)

    def _arrive(self, machine: Machine, number: int, command: bytes) -> None:
        machine.deliver(self._hand_over, machine, number, command)

    def _hand_over(self, machine: Machine, number: int, command: bytes) -> None:
        process = machine.process
        if not isinstance(process, LogProcess):
            return
        self._history.note(Proposed, machine.name, number)
        process.log.propose(command, self._ended(machine, number))

    def _ended(self, machine: Machine, number: int) -> Callable[[ProposalResult], None]:
        answered: list[ProposalOutcome] = []

        def done(result: ProposalResult) -> None:
            assert not answered, f"{machine.name}: proposal {number} ended twice"
            answered.append(result.outcome)
            if result.outcome.name == "COMMITTED":
                self.committed += 1
                self.committed_late += self._winding_down
            self._history.note(ProposalEnded, machine.name, number, result.outcome.name, result.index)

        return done


def _is_master(machine: Machine) -> bool:
    process = machine.process
    return isinstance(process, LogProcess) and process.log.status().role is Role.MASTER
