"""Cluster clocks that ask each other over links with chosen delays, without a log between them.

True time starts at zero of `now_ns`; each machine's wall clock and oscillator may be off.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from tickwheel.proto.peer_pb2 import PeerFrame
from tickwheel.replication.cluster_clock import ClockSettings, ClusterClock, TimeState

MS = 1_000_000
SECOND = 1_000 * MS
HOUR_MS = 3_600_000
EPOCH_MS = 1_800_000_000_000
LINK_NS = 200_000


class Machine:
    """A `Clock` with faults, and the cluster clock that runs on it."""

    def __init__(self, world: ClockWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.skew_ms = 0
        self.drift_ppm = 0
        self._origin_ns = (len(world.machines) + 1) * 1_000 * SECOND
        self._since_ns = 0
        self._own_ns = 0
        self.up = True
        self.lies: Callable[[PeerFrame], None] = lambda frame: None
        """Spoils what it answers."""
        self.start()

    def start(self) -> None:
        """A new process on the same machine."""
        self.time = ClusterClock(self, self.name, self.world.settings)

    def set_drift(self, ppm: int) -> None:
        """From now on the oscillator is off by so much."""
        self._own_ns, self._since_ns, self.drift_ppm = self._passed_ns(), self.world.now_ns, ppm

    def jump(self, by_ms: int) -> None:
        """The oscillator counts time that has not passed: both clocks are ahead from now on."""
        self._own_ns += by_ms * MS

    def _passed_ns(self) -> int:
        passed_ns = self.world.now_ns - self._since_ns
        return self._own_ns + passed_ns + passed_ns * self.drift_ppm // 1_000_000

    def monotonic_ns(self) -> int:
        return self._origin_ns + self._passed_ns()

    def wall_ms(self) -> int:
        return EPOCH_MS + self._passed_ns() // MS + self.skew_ms

    @property
    def off_ms(self) -> float:
        """The cluster's time here against the true time; now_ms() cuts up to a millisecond."""
        return self.time.now_ms() + 0.5 - (EPOCH_MS + self.world.now_ns / MS)

    def state(self) -> TimeState:
        """Where the agreement stands here."""
        return self.time.state()


class ClockWorld:
    """True time, machines, links."""

    def __init__(self, names: str = "abc", settings: ClockSettings | None = None) -> None:
        self.settings = settings or ClockSettings()
        self.now_ns = 0
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.delays_ns: dict[tuple[str, str], int] = {}
        self.cut: set[frozenset[str]] = set()
        self.machines: dict[str, Machine] = {}
        self.members = list(names)
        for name in names:
            self.add(name)

    def add(self, name: str) -> Machine:
        """A machine more; `members` says whether it counts."""
        machine = self.machines[name] = Machine(self, name)
        return machine

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def _later(self, delay_ns: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now_ns + delay_ns, next(self._order), action))

    def _send(self, sender: str, receiver: str, frame: PeerFrame) -> bool:
        target = self.machines[receiver]
        if not target.up or frozenset((sender, receiver)) in self.cut:
            return False
        data = frame.SerializeToString()

        def arrive() -> None:
            if not target.up or frozenset((sender, receiver)) in self.cut:
                return
            answer = target.time.receive(sender, PeerFrame.FromString(data))
            if answer is not None:
                target.lies(answer)
                self._send(receiver, sender, answer)

        self._later(self.delays_ns.get((sender, receiver), LINK_NS), arrive)
        return True

    def run(self, seconds: float, look: Callable[[], None] = lambda: None) -> None:
        """Let true time pass, ticking everybody every 10 ms; `look` is called as often."""
        end_ns = self.now_ns + int(seconds * SECOND)
        while self.now_ns < end_ns:
            step_ns = min(self.now_ns + 10 * MS, end_ns)
            while self._agenda and self._agenda[0][0] <= step_ns:
                self.now_ns, _, action = heapq.heappop(self._agenda)
                action()
            self.now_ns = step_ns
            for name, machine in self.machines.items():
                if machine.up:
                    machine.time.tick(
                        machine.monotonic_ns(),
                        lambda: self.members,
                        lambda to, frame, name=name: self._send(name, to, frame),  # type: ignore[misc]
                    )
            look()
