"""How fine a machine's loop is: in long runs coarse, but for a spell of each period, at any time of it.

Every machine has spells of its own, so that mostly one is quick among slow ones. What falls between coarse turns is
met in the spells; a run that were fine throughout would take several times as long.
"""

from __future__ import annotations

from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.shape import Shape
from tickwheel.chaos.sim.world import MS, SECOND, World

PERIOD_NS = 10 * SECOND
SPELL_NS = 500 * MS


class Pace:
    """Sets the least time between turns of the machines of a run."""

    def __init__(self, world: World, shape: Shape) -> None:
        self._world = world
        self._spell_ns = shape.loop_gap_us * MS // 1_000
        self._rest_ns = max(self._spell_ns, shape.rest_gap_us * MS // 1_000)

    def start(self, machine: Machine) -> None:
        """From now on."""
        machine.turn_ns = self._rest_ns
        if self._rest_ns > self._spell_ns:
            rng = self._world.stream(f"pace/{machine.name}")

            def period() -> None:
                begin_ns = rng.randrange(PERIOD_NS - SPELL_NS)
                self._world.after(begin_ns, set_gap, self._spell_ns)
                self._world.after(begin_ns + SPELL_NS, set_gap, self._rest_ns)
                self._world.after(PERIOD_NS, period)

            def set_gap(turn_ns: int) -> None:
                machine.turn_ns = turn_ns

            period()
