"""Three groups of one topic with tags: one has a filter that changes, one is broadcasting, one is reset."""

from __future__ import annotations

from tickwheel.chaos.sim.asking import AskingClients
from tickwheel.chaos.sim.clients import Wires
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.history_messages import Label, Row
from tickwheel.chaos.sim.history_operators import FilterAnswered, FilterAsked
from tickwheel.chaos.sim.producers import Producers
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.proto.admin_pb2 import CreateGroupRequest, SetGroupFilterRequest
from tickwheel.proto.log_pb2 import AdminCommand

TOPIC = "news"
FILTERED, BROADCAST, RESET = "editors", "screens", "archivists"
TAGS = ("sport", "weather", "culture", "trade")
FIRST = TAGS[:2]
"""Tags of the first filter."""
CHANGE_EVERY_NS = 1_500 * MS

CROWDS = (
    Crowd(FILTERED, (TOPIC,), nacks=0, deaths=0, skips=0.05),
    Crowd(BROADCAST, (TOPIC,), broadcast=True),
)
CALM = Crowd(RESET, (TOPIC,), consumers=1, nacks=0, deaths=0)
ROUGH = Crowd(RESET, (TOPIC,))
"""The group that is reset, and so where Shape.resets says so."""


class Listeners(AskingClients):
    """`clients.Clients`. One change of the filter, and one reset, is under way at a time."""

    setting = tuple(
        AdminCommand(create_group=group)
        for group in (
            CreateGroupRequest(name=RESET, topics=[TOPIC]),
            CreateGroupRequest(name=BROADCAST, topics=[TOPIC], broadcasting=True),
            CreateGroupRequest(name=FILTERED, topics=[TOPIC], filter=" || ".join(FIRST)),
        )
    )
    asks_for = "a filter or a reset"

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "listeners")
        self._members = (
            Producers(wires, ("news",), self._rows, (BROADCAST,), self._rng),
            Consumers(wires, (*CROWDS, ROUGH if wires.shape.resets else CALM), self._rng),
        )

    def start(self) -> None:
        self._history.note(FilterAsked, FILTERED, FIRST, TOPIC)
        super().start()

    def _begin(self) -> None:
        self._history.note(FilterAnswered, FILTERED, FIRST)
        self._world.after(2 * SECOND, self._every, CHANGE_EVERY_NS, self._filter)
        self._world.after(2 * SECOND, self._every, CHANGE_EVERY_NS, self._reset)

    def _rows(self) -> tuple[Row, ...]:
        rng = self._rng
        wall_ms = self._world.wall_ms
        rows = []
        for _ in range(rng.choice((1, 3, 8))):
            due_ms: int | None = wall_ms + rng.randrange(-500, 3_000)
            delay_ms = None
            if rng.random() < 0.1:
                due_ms, delay_ms = None, rng.randrange(2_000)
            tags = tuple(tag for tag in TAGS if rng.random() < 0.35)
            rows.append(Row(self._wires.number(), TOPIC, due_ms, delay_ms, Label(tags=tags)))
        return tuple(rows)

    async def _filter(self) -> None:
        tags = tuple(tag for tag in TAGS if self._rng.random() < 0.5)
        request = SetGroupFilterRequest(name=FILTERED, filter=" || ".join(tags) or "*")
        self._history.note(FilterAsked, FILTERED, tags, TOPIC)
        await self._asking.admin(AdminCommand(set_group_filter=request))
        self._history.note(FilterAnswered, FILTERED, tags)

    async def _reset(self) -> None:
        await self._reset_anywhere(RESET, TOPIC)
