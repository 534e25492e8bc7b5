"""A simulated machine: one disk, one clock, and at most one running process on its ports.

A `Builder` makes a process from the ports: the node's own composition (`core_process.py`), or its replicated log alone
(`log_process.py`). All input (frames, finished work, client calls) waits in an inbox and is taken in turns, as by an
event loop: first everything that has arrived, then `tick()`.

Invariants: no input of an earlier boot reaches a later one. A frozen machine runs no turn and no worker. An exception
in a process stops it, and is a broken promise unless a fault on this machine explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol

from tickwheel.chaos.sim.clock import SimulatedClock
from tickwheel.chaos.sim.executor import SimulatedExecutor, SyncAnswer, WorkFaults
from tickwheel.chaos.sim.history import History, Record
from tickwheel.chaos.sim.history_machines import Booted, DiskWiped, Stopped
from tickwheel.chaos.sim.network import Callee, Fabric, NetworkPort
from tickwheel.chaos.sim.world import MS, World
from tickwheel.proto.peer_pb2 import CheckpointChunk, PeerFrame
from tickwheel.replication.frames import Refusal
from tickwheel.storage.disk import DiskError
from tickwheel.storage.simulated import PowerLost, SimulatedDisk

P = ParamSpec("P")
TURN_NS = 200_000
INPUT_NS = 20_000
# A process that asks to be called at once, again and again, without input, gets this pause.
IDLE_NS_LEAST = 100_000


class ApplyFailedError(Exception):
    """Stands for a bug of ours in what a log entry does."""


class Process(Callee, Protocol):
    """The software that runs on a machine."""

    def start(self) -> None: ...

    def tick(self, *, woken: bool) -> int:
        """Work; returns the machine's monotonic_ns of the next call at the latest. `woken` False: nothing has come
        since the last call but frames, and answers to syncs of the journal."""
        ...

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        """Take a frame. False: the next `tick` may wait for the time that the last one returned."""
        ...

    def peer_connected(self, peer_id: str) -> None: ...

    def peer_disconnected(self, peer_id: str) -> None: ...

    def stop(self) -> None: ...

    def observe(self) -> None:
        """Record in the history all that an observer could see now."""
        ...


Builder = Callable[["Machine"], Process]


class CopyFault(Protocol):
    """Breaks the copies that a machine makes of peers' checkpoints."""

    def begins(self, chunks: Sequence[CheckpointChunk]) -> int:
        """A copy begins: these chunks are to come, without what the machine holds already. Returns the number of bytes
        that come before the copy breaks."""
        ...

    def broke(self) -> None:
        """A copy broke after some of its chunks."""
        ...


class Machine:
    """One machine through all its boots."""

    def __init__(self, world: World, fabric: Fabric[Machine], history: History, name: str, builder: Builder) -> None:
        self.world = world
        self.name = name
        self.history = history
        self.fabric = fabric
        self.boot = 0
        self.joining = False
        """The machine came later: its process starts without knowing the others, and waits to be added."""
        self.retired = False
        """Its node was removed: it never starts again."""
        self.wiped = False
        """Its disk was replaced: the promises of its node are forgotten."""
        self.disk_uuid = f"disk of {name}"
        self.turned_away = 0
        """Processes that stopped themselves because a peer knows another disk of theirs."""
        self.process: Process | None = None
        self.frozen = False
        self.work_faults = WorkFaults()
        self.excuses = 0
        """Faults on this machine that make a process stop itself."""
        self.fail_applies = 0
        self.applies_failed = 0
        self.copies_fail = 0
        """Faults by which no copy of a peer's checkpoint arrives."""
        self.copies_failed = 0
        self.copy_fault: CopyFault | None = None
        self.powers_lost = 0
        """Number of power losses in the middle of a write."""
        self.unread = 0
        """Inputs that the turn being taken leaves for the next."""
        self.late_ns = 0
        """How much later than wanted the tick of the turn being taken comes; 0 or less: it is not late."""
        self._wanted_ns = 0
        """The machine's monotonic_ns at which the process wants its next tick."""
        self.last_syncs: dict[str, int] = {}
        """When the newest sync left, by slave."""
        self.syncs_sent: dict[tuple[str, int], tuple[int, int]] = {}
        """By slave and `sent_ns`: the true times at which a sync and the one before it left."""
        self.clock = SimulatedClock(world, name)
        self.disk = SimulatedDisk(world.stream(f"disk/{name}"))
        self.network: NetworkPort = NetworkPort(fabric, name)
        self.executor: SimulatedExecutor = SimulatedExecutor(world, self, world.stream("unused"))
        self.fatal_reason: str | None = None
        self.turns = 0
        self.turn_ns = TURN_NS
        self.inbox_most = 0
        self.restart_after_fatal_ns = 500 * MS
        self._builder = builder
        self._inbox: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._thaw: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._timers_first = False
        self._thaw_rng = world.stream(f"thaw/{name}")
        self._wake_ns = 0
        self._wake_number = 0
        self._busy_until_ns = 0

    @property
    def running(self) -> bool:
        return self.process is not None and not self.frozen

    @property
    def excused(self) -> bool:
        """A fault that makes a process stop itself is on this machine, or was a moment ago."""
        return self.excuses > 0

    @property
    def waiting(self) -> int:
        """Inputs that no turn has taken yet."""
        return len(self._inbox) + len(self._thaw)

    def note(self, kind: Callable[Concatenate[int, str, int, P], Record], *args: P.args, **named: P.kwargs) -> None:
        """Add a record of this boot, of now, to the history."""
        self.history.add(kind(self.world.now_ns, self.name, self.boot, *args, **named))

    # -- the process and its end

    def start(self) -> None:
        """Boot; no effect while a process runs."""
        if self.process is not None or self.retired:
            return
        self.boot += 1
        self.fatal_reason = None
        self._inbox.clear()
        self._wake_ns = 0
        self._wanted_ns = self.clock.monotonic_ns()
        self.executor = SimulatedExecutor(self.world, self, self.world.stream(f"executor/{self.name}/{self.boot}"))
        self.network = NetworkPort(self.fabric, self.name)
        self.note(Booted)
        self.world.tell(self.name, f"boots, number {self.boot}")
        try:
            self.process = self._builder(self)
            self.process.start()
        except PowerLost:
            self.power_lost()
            return
        except DiskError as error:
            if not self.excused:
                raise
            self._die(f"does not start: {error}")
            return
        self._wake(self.world.now_ns)

    def kill(self) -> None:
        """SIGKILL: the process is gone, its page cache stays."""
        if self.process is not None:
            self._end("kill", silent=False)

    def lose_power(self) -> None:
        """The process is gone and the disk forgets what was not fsynced."""
        if self.process is not None:
            self._end("power", silent=True)
        self.disk.crash(self.world.stream(f"power/{self.name}/{self.boot}/{self.world.now_ns}"))

    def wipe(self) -> None:
        """The process is gone, and its disk: from now on there is another one, empty. Whatever it does is excused."""
        self.kill()
        self.disk.wipe()
        self.wiped = True
        self.disk_uuid += ", another one"
        self.excuses += 1
        self.history.note(DiskWiped, self.name)
        self.world.tell(self.name, "has an empty disk")

    def turn_away(self, refusal: Refusal) -> None:
        """A peer will never let the process take part as it is: stop it. A removed node is left to the operator that
        removed it."""
        if not refusal.removed and self.process is not None:
            self.turned_away += 1
            self._die(refusal.reason)

    def power_lost(self) -> None:
        """Lose power now: the disk just failed in the middle of an operation, as told. The power comes back soon."""
        self.lose_power()
        self.powers_lost += 1
        self.world.after(self._thaw_rng.randrange(10 * MS, 400 * MS), self.start)

    def stop(self) -> None:
        """A clean end of the process."""
        if self.process is not None:
            self.process.stop()
            self._end("stop", silent=False)

    def retire(self) -> None:
        """Stop the machine for good, as its operator does once its node is no longer a member."""
        self.retired = True
        if self.frozen:
            self.kill()
        else:
            self.stop()

    def freeze(self) -> None:
        """SIGSTOP: clocks go on, connections stay, nothing runs."""
        self.frozen = True
        self.world.tell(self.name, "is frozen")

    def thaw(self) -> None:
        self.frozen = False
        self._timers_first = self._thaw_rng.random() < 0.5
        self.world.tell(self.name, "wakes")
        waiting, self._thaw = self._thaw, []
        for function, args in waiting:
            self.world.at(self.world.now_ns, function, *args)
        if self.process is not None:
            self._wake(self.world.now_ns + TURN_NS)

    def fatal(self, reason: str) -> None:
        """The process asks to be stopped: at the end of its turn."""
        self.fatal_reason = self.fatal_reason or reason

    def may_apply(self) -> None:
        """Called by a process before it applies an entry. Raises what a bug of ours would."""
        if self.fail_applies:
            self.fail_applies -= 1
            self.applies_failed += 1
            raise ApplyFailedError(f"{self.name} was told to fail")

    # -- input

    def deliver(self, function: Callable[..., object], *args: Any) -> None:
        """A call that the process gets in its next turn."""
        if self.process is None:
            return
        self._inbox.append((function, args))
        if not self.frozen:
            self._wake(max(self.world.now_ns, self._busy_until_ns))

    def when_thawed(self, function: Callable[..., None], *args: Any) -> None:
        """An event of this machine's own that waits for the end of its pause."""
        self._thaw.append((function, args))

    def frame(self, peer: str, data: bytes) -> None:
        self.deliver(self._receive, peer, data)

    def peer_up(self, peer: str) -> None:
        if self.process is not None:
            self.deliver(self.process.peer_connected, peer)

    def peer_down(self, peer: str) -> None:
        if self.process is not None:
            self.deliver(self.process.peer_disconnected, peer)

    def _receive(self, peer: str, data: bytes) -> bool:
        return self.process is not None and self.process.receive(peer, PeerFrame.FromString(data))

    # -- turns

    def _wake(self, when_ns: int) -> None:
        if self._wake_ns and self._wake_ns <= when_ns:
            return
        self._wake_ns = max(when_ns, self.world.now_ns, 1)
        self._wake_number += 1
        self.world.at(self._wake_ns, self._turn, self._wake_number)

    def _turn(self, number: int) -> None:
        if number != self._wake_number or not self._wake_ns:
            return
        self._wake_ns = 0
        process = self.process
        if process is None or self.frozen:
            return
        inbox, self._inbox = self._inbox, []
        if self._timers_first:
            # After a pause a loop may run its timers when it has read a part of what waits, or nothing.
            self._timers_first = False
            read = self._thaw_rng.randint(0, len(inbox))
            inbox, self._inbox = inbox[:read], inbox[read:]
        self.unread = len(self._inbox)
        self.turns += 1
        wanted = woken = False
        if len(inbox) > self.inbox_most:
            self.inbox_most = len(inbox)
        try:
            for function, args in inbox:
                result, framed = function(*args), function == self._receive
                wanted |= bool(result) or not framed
                woken |= not (framed or isinstance(function, SyncAnswer))
                if self.fatal_reason is not None:
                    break
            self.late_ns = self.clock.monotonic_ns() - self._wanted_ns
            if self.fatal_reason is None and (wanted or not inbox or self.late_ns >= 0):
                self._wanted_ns = process.tick(woken=woken)
        except PowerLost:
            self.power_lost()
            return
        except DiskError as error:
            if not self.excused:
                raise
            self._die(f"disk: {error}")
            return
        if self.fatal_reason is not None:
            self._die(self.fatal_reason)
            return
        process.observe()
        now_ns = self.world.now_ns
        self._busy_until_ns = now_ns + self.turn_ns + INPUT_NS * len(inbox)
        sleep_ns = self.clock.true_ns(self._wanted_ns) - now_ns
        if self._inbox:
            self._wake(self._busy_until_ns)
        else:
            self._wake(max(self._busy_until_ns, now_ns + max(sleep_ns, IDLE_NS_LEAST)))

    def _die(self, reason: str) -> None:
        self.note(Stopped, "fatal", reason, self.excused)
        self.world.tell(self.name, f"stops itself: {reason}")
        self._end("", silent=False)
        if self.restart_after_fatal_ns:
            self.world.after(self.restart_after_fatal_ns, self.start)

    def _end(self, why: str, silent: bool) -> None:
        if why:
            self.note(Stopped, why, "", self.excused)
            self.world.tell(self.name, f"is gone: {why}")
        self.process = None
        self.disk.kill()
        self.frozen = False
        self._inbox.clear()
        self._thaw.clear()
        self._wake_ns = 0
        self.fabric.machine_stopped(self.name, silent)
