"""Clients of a FIFO topic: a producer that writes for a few message groups, and consumers that nack a good deal. Where
Shape.resets says so, a second group is reset again and again."""

from __future__ import annotations

from tickwheel.chaos.sim.asking import AskingClients
from tickwheel.chaos.sim.clients import Wires
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.history_messages import Label, Row
from tickwheel.chaos.sim.producers import Producers
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.proto.admin_pb2 import CreateGroupRequest, CreateTopicRequest, ExponentialBackoff, RetryPolicy
from tickwheel.proto.log_pb2 import AdminCommand

TOPIC = "steps"
GROUP, RESET = "assembly", "inspection"
RESET_EVERY_NS = 1_200 * MS
LANES = ("", "red", "green", "blue", "grey")
POLICY = RetryPolicy(exponential=ExponentialBackoff(initial_ms=200, factor=2, max_ms=1_000, jitter=0.2))


class Lines(AskingClients):
    """`clients.Clients`. Topic and group exist before: no schedule or consumer may create them implicitly. One reset is
    under way at a time."""

    asks_for = "a reset of a FIFO topic"
    setting: tuple[AdminCommand, ...] = (
        AdminCommand(create_topic=CreateTopicRequest(name=TOPIC, fifo=True)),
        AdminCommand(create_group=CreateGroupRequest(name=GROUP, topics=[TOPIC], retry=POLICY)),
    )

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "lines")
        groups = (GROUP, RESET) if wires.shape.resets else (GROUP,)
        if wires.shape.resets:
            group = CreateGroupRequest(name=RESET, topics=[TOPIC], retry=POLICY)
            self.setting = (*self.setting, AdminCommand(create_group=group))
        self._members = (
            Producers(wires, ("fifo",), self._rows, (GROUP,), self._rng),
            Consumers(wires, [Crowd(name, (TOPIC,), nacks=0.1, deaths=0.01) for name in groups], self._rng),
        )

    def _begin(self) -> None:
        if self._wires.shape.resets:
            self._world.after(2 * SECOND, self._every, RESET_EVERY_NS, self._reset)

    async def _reset(self) -> None:
        await self._reset_anywhere(RESET, TOPIC)

    def _rows(self) -> tuple[Row, ...]:
        rng = self._rng
        wall_ms = self._world.wall_ms
        same_ms = wall_ms + rng.randrange(100, 2_500)
        rows = []
        for _ in range(rng.choice((1, 2, 3, 8))):
            dice = rng.random()
            due_ms: int | None = same_ms
            delay_ms = None
            if dice < 0.1:
                due_ms = wall_ms - rng.randrange(5_000)
            elif dice < 0.2:
                due_ms, delay_ms = None, rng.randrange(2_000)
            elif dice < 0.7:
                due_ms = wall_ms + rng.randrange(3_000)
            rows.append(Row(self._wires.number(), TOPIC, due_ms, delay_ms, Label(rng.choice(LANES))))
        return tuple(rows)
