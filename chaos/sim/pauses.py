"""Operators who pause topics and groups for a moment, in the middle of everything."""

from __future__ import annotations

from collections.abc import Sequence

from tickwheel.chaos.sim.asking import AskingClients
from tickwheel.chaos.sim.clients import Wires
from tickwheel.chaos.sim.history_operators import PauseAnswered, PauseAsked
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.proto.admin_pb2 import SetPausedRequest
from tickwheel.proto.log_pb2 import AdminCommand

PAUSE_EVERY_NS = 1_200 * MS
"""Mean time between two pauses, over all topics and groups."""
PAUSED_NS_MOST = 2_500 * MS


class Pauses(AskingClients):
    """`clients.Clients`. `places` are ("topic" or "group", name); all of them go on at the end."""

    def __init__(self, wires: Wires, places: Sequence[tuple[str, str]]) -> None:
        super().__init__(wires, "pauses")
        self._places = places
        self._paused: set[tuple[str, str]] = set()
        """Paused, or asked for."""

    def start(self) -> None:
        for place in self._places:
            self._world.after(SECOND + self._pause_ns(), self._pause, place)

    def unfinished(self) -> str:
        for kind, name in sorted(self._paused):
            return f"that {kind} {name} goes on"
        return ""

    def _pause_ns(self) -> int:
        return self._wires.pause_ns(len(self._places) * PAUSE_EVERY_NS, self._rng, cheap=True)

    def _pause(self, place: tuple[str, str]) -> None:
        if self._wires.winding_down:
            return
        self._paused.add(place)
        self._set(place, True)

    def _set(self, place: tuple[str, str], paused: bool) -> None:
        kind, name = place
        request = SetPausedRequest(name=name, paused=paused)
        command = AdminCommand(set_topic_paused=request) if kind == "topic" else AdminCommand(set_group_paused=request)
        self._history.add(PauseAsked(self._world.now_ns, kind, name, paused))

        def done(_: object) -> None:
            self._history.add(PauseAnswered(self._world.now_ns, kind, name, paused))
            if paused:
                self._go_on_at(place, self._world.now_ns + self._rng.randrange(PAUSED_NS_MOST))
            else:
                self._paused.discard(place)
                self._world.after(self._pause_ns(), self._pause, place)

        self._asking.admin(command, done)

    def _go_on_at(self, place: tuple[str, str], at_ns: int) -> None:
        """Resume the place at `at_ns`, or once the faults are over."""
        if self._world.now_ns >= at_ns or self._wires.winding_down:
            self._set(place, False)
        else:
            self._world.at(min(at_ns, self._world.now_ns + 100 * MS), self._go_on_at, place, at_ns)
