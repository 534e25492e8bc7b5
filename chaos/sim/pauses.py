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

    def _begin(self) -> None:
        for place in self._places:
            self._later(SECOND + self._pause_ns(), self._pause_and_resume, place)

    def unfinished(self) -> str:
        for kind, name in sorted(self._paused):
            return f"that {kind} {name} goes on"
        return ""

    def _pause_ns(self) -> int:
        return self._wires.pause_ns(len(self._places) * PAUSE_EVERY_NS, self._rng, cheap=True)

    async def _pause_and_resume(self, place: tuple[str, str]) -> None:
        """Again and again, until faults are over."""
        while not self._wires.winding_down:
            self._paused.add(place)
            await self._set(place, True)
            until_ns = self._world.now_ns + self._rng.randrange(PAUSED_NS_MOST)
            while self._world.now_ns < until_ns and not self._wires.winding_down:
                await self._wires.pause(min(until_ns - self._world.now_ns, 100 * MS))
            await self._set(place, False)
            self._paused.discard(place)
            await self._wires.pause(self._pause_ns())

    async def _set(self, place: tuple[str, str], paused: bool) -> None:
        kind, name = place
        request = SetPausedRequest(name=name, paused=paused)
        command = AdminCommand(set_topic_paused=request) if kind == "topic" else AdminCommand(set_group_paused=request)
        self._history.note(PauseAsked, kind, name, paused)
        await self._asking.admin(command)
        self._history.note(PauseAnswered, kind, name, paused)
