"""Programs whose batches are near the limits of the cluster, and an operator who makes these limits small and large.

They call through the ports of the nodes, which judge the batches. So batches straddle the changes, and the failovers.
"""

from __future__ import annotations

from typing import Any

from tickwheel.chaos.sim.asking import founding
from tickwheel.chaos.sim.clients import Wires, served
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.history_messages import Row
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.port_calls import Needs, PortClients
from tickwheel.chaos.sim.producers import UID
from tickwheel.chaos.sim.users import ROOT, secret_of
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.client.errors import Fault
from tickwheel.node.failure import Failure
from tickwheel.proto.admin_pb2 import Settings
from tickwheel.proto.common_pb2 import ErrorReason
from tickwheel.proto.log_pb2 import AdminCommand

TOPIC, GROUP = "sizes", "tailors"
LIMITS = {
    "batch_messages_max": (3, 10_000),
    "payload_bytes_max": (20, 4 << 20),
    "delay_ms_max": (2_500, 95_040_000_000),
}
"""Each small and large. No other client that judges a refusal schedules as far ahead as the small one."""
FIELDS = {"messages": "batch_messages_max", "payload": "payload_bytes_max", "records": "payload_bytes_max"}
"""By the field that a refusal names, without its place. All others are times."""
CHANGE_EVERY_NS = 300 * MS
SEND_EVERY_NS = 200 * MS
SIZES = (8, 19, 20, 21, 60)
COUNTS = (1, 1, 2, 3, 4, 6)


class Sizes(PortClients):
    """`clients.Clients`."""

    setting = tuple(founding((TOPIC,), [(GROUP, (TOPIC,))]))
    asks_for = "answers about limits and batches near them"

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "sizes")
        self._members = (Consumers(wires, (Crowd(GROUP, (TOPIC,)),), self._rng),)
        self._large = False

    def _begin(self) -> None:
        self._wires.run(self._limit())
        self._world.after(SECOND, self._keep, SEND_EVERY_NS, self._send)

    def unfinished(self) -> str:
        return super().unfinished() or ("" if self._large else "that limits are large again")

    async def _limit(self) -> None:
        small: set[str] = set()
        while not self._wires.winding_down:
            await self._wires.pause(self._wires.pause_ns(CHANGE_EVERY_NS, self._rng, cheap=True))
            name = self._rng.choice(list(LIMITS))
            await self._set(name, LIMITS[name][name in small])
            small ^= {name}
        for name in sorted(small):
            await self._set(name, LIMITS[name][1])
        self._large = True

    async def _set(self, name: str, value: int) -> None:
        fields: Any = {name: value}
        command = AdminCommand(settings=Settings(**fields))

        async def change(machine: Machine) -> Any:
            answer = await self._wires.answer(machine, served(lambda core: core.parts.requests.admin(command)))
            if isinstance(answer, Failure):
                return Fault(ErrorReason.Name(answer.reason), answer.message, answer.metadata)
            return answer

        await self._change(name, value, change)

    async def _send(self) -> None:
        rng, wall_ms = self._rng, self._world.wall_ms
        rows = tuple(
            Row(self._wires.number(), TOPIC, wall_ms + rng.randrange(4_000), None) for _ in range(rng.choice(COUNTS))
        )
        payloads = [UID.pack(row.uid).ljust(rng.choice(SIZES), b".") for row in rows]
        latest_ms = max(row.due_ms or 0 for row in rows)

        def needs() -> Needs:
            """A time comes nearer while the batch is repeated."""
            return {
                "batch_messages_max": len(rows),
                "payload_bytes_max": max(map(len, payloads)),
                "delay_ms_max": latest_ms - self._world.wall_ms,
            }

        secret = secret_of(ROOT) if self._wires.shape.users else ""
        await self._schedule(rows, payloads, secret, needs, _blamed, (GROUP,))


def _blamed(fault: Fault) -> str:
    if fault.reason != "INVALID_FIELD":
        return ""
    field = fault.metadata.get("field", "").partition("[")[0]
    return FIELDS.get(field, "delay_ms_max")
