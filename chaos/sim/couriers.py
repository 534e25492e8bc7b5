"""Groups of many topics: what is due together belongs to several of them, and one topic at a time is reset."""

from __future__ import annotations

from tickwheel.chaos.sim.asking import AskingClients, founding
from tickwheel.chaos.sim.clients import Wires
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.history_messages import Label, Row
from tickwheel.chaos.sim.producers import Producers
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.proto.admin_pb2 import ResetGroupRequest
from tickwheel.proto.consumer_pb2 import LATEST, TIME

TOPICS = ("north", "east", "south", "west", "harbour", "airport")
GROUP, RESET = "riders", "depots"
PRODUCER = "dispatch-office"
RESET_EVERY_NS = 1_000 * MS
CALM = Crowd(RESET, TOPICS, consumers=1, nacks=0, deaths=0)
ROUGH = Crowd(RESET, TOPICS)
"""The group that is reset, and so where Shape.resets says so."""


class Couriers(AskingClients):
    """`clients.Clients`. One reset is under way at a time."""

    setting = founding(TOPICS, [(GROUP, TOPICS), (RESET, TOPICS)])
    asks_for = "a reset of one topic"

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "couriers")
        self._members = (
            Producers(wires, (PRODUCER,), self._rows, (GROUP,), self._rng),
            Consumers(wires, (Crowd(GROUP, TOPICS), ROUGH if wires.shape.resets else CALM), self._rng),
        )

    def _begin(self) -> None:
        self._world.after(2 * SECOND, self._every, RESET_EVERY_NS, self._reset)

    def _rows(self) -> tuple[Row, ...]:
        """Messages of several topics, most of them due in the same moment."""
        rng = self._rng
        wall_ms = self._world.wall_ms
        same_ms = wall_ms + rng.randrange(-200, 2_500)
        rows = []
        for _ in range(rng.choice((2, 6, 12))):
            due_ms = same_ms if rng.random() < 0.8 else wall_ms + rng.randrange(3_000)
            rows.append(Row(self._wires.number(), rng.choice(TOPICS), due_ms, None, Label()))
        return tuple(rows)

    async def _reset(self) -> None:
        topic = self._rng.choice(TOPICS)
        request = ResetGroupRequest(name=RESET, topics=[topic])
        if self._rng.random() < 0.3:
            request.start_from, from_ms = LATEST, -1
        else:
            from_ms = self._world.wall_ms + self._rng.randrange(-4_000, 500)
            request.start_from, request.start_ms = TIME, from_ms
        await self._reset_group(request, from_ms)
