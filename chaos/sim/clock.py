"""The clock of one simulated machine.

The monotonic reading starts at another value on every machine, as it does on real ones, so that
comparing two machines' readings shows as a bug. Faults set `skew_ms` (what the wall clock is off by)
and the drift (both readings run fast or slow, or jump ahead); `heal` is NTP finding its way back.
"""

from __future__ import annotations

from tickwheel.chaos.sim.world import MS, SECOND, World


class SimulatedClock:
    """`replication.ports.Clock` on true time with faults."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._origin_ns = world.stream(f"clock/{name}").randrange(1, 1_000_000) * SECOND
        self.skew_ms = 0
        self._drift_ppm = 0
        self._drift_since_ns = 0
        self._drifted_ns = 0
        self._healed_ns = 0
        self.faults = 0
        """Number of faults on this clock now or a moment ago."""
        self.wrong_readings = 0
        """Number of readings of the wall clock while it was off."""

    def monotonic_ns(self) -> int:
        """This machine's CLOCK_BOOTTIME; asked for ten times a turn."""
        if self._drift_ppm:
            return self._origin_ns + self._world.now_ns + self._drift_ns()
        return self._origin_ns + self._world.now_ns + self._drifted_ns

    def wall_ms(self) -> int:
        """This machine's idea of the time of day."""
        true_ns = self._world.now_ns
        own_ns = true_ns + self._drift_ns() - self._healed_ns
        if self.skew_ms or own_ns != true_ns:
            self.wrong_readings += 1
        return self._world.start_wall_ms + own_ns // MS + self.skew_ms

    def true_ns(self, monotonic_ns: int) -> int:
        """The true time at which this machine's monotonic clock shows `monotonic_ns`, in the future or the past."""
        ahead_ns = monotonic_ns - self.monotonic_ns()
        if not self._drift_ppm:
            return self._world.now_ns + ahead_ns
        return self._world.now_ns + ahead_ns * 1_000_000 // (1_000_000 + self._drift_ppm)

    def set_drift(self, ppm: int) -> None:
        """From now on run fast (above 0) or slow; what has drifted so far stays."""
        self._drifted_ns = self._drift_ns()
        self._drift_since_ns = self._world.now_ns
        self._drift_ppm = ppm

    def jump(self, by_ms: int) -> None:
        """The machine counts time that has not passed: both readings are ahead from now on."""
        self._drifted_ns += by_ms * MS

    def heal(self) -> None:
        """The wall clock is set right, and both keep time from now on. The monotonic one stays where it is."""
        self.skew_ms = 0
        self.set_drift(0)
        self._healed_ns = self._drift_ns()

    def _drift_ns(self) -> int:
        if not self._drift_ppm:
            return self._drifted_ns
        return self._drifted_ns + (self._world.now_ns - self._drift_since_ns) * self._drift_ppm // 1_000_000
