"""Reads each node's account of the messages that a group has settled, at the end of a run, by the readers' calls."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import numpy as np

from tickwheel.chaos.sim.clients import Wires
from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.history_messages import SettledSeen
from tickwheel.chaos.sim.node import Machine
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.promise import Promise
from tickwheel.node.failure import Failure
from tickwheel.proto.snapshot_pb2 import PinSettledRequest, ReadSettledRequest, SettledPage, SettledTopic

Request = Callable[[NodeCore], Coroutine[Any, Any, Any]]


async def asked(machine: Machine, request: Request) -> Any:
    """The answer of this node to a request, master or not, in one of its next turns."""
    process = machine.process
    assert isinstance(process, CoreProcess)
    host, answer = process.host, Promise[Any]()
    machine.deliver(lambda: host.core.serving.start(request(host.core), answer.keep))
    return await answer


class Accounts:
    """Reads of all nodes; `open` is how many have not ended."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self.open = 0

    def read(self, machine: Machine, groups: Sequence[str]) -> None:
        """Read the settled messages of these groups from one node. Groups that it does not know are left out."""
        for group in groups:
            self.open += 1
            self._wires.run(self._read(machine, group))

    async def _read(self, machine: Machine, group: str) -> None:
        asked_ns = machine.world.now_ns
        pin = await asked(machine, lambda core: core.parts.settled_pins.pin(PinSettledRequest(group=group)))
        if not isinstance(pin, Failure):
            settled: dict[int, int] = {}
            retried: dict[int, int] = {}
            for topic in reversed(pin.topics):
                await self._positions(machine, pin.pin_id, topic, True, retried)
                await self._positions(machine, pin.pin_id, topic, False, settled)
            process = machine.process
            assert isinstance(process, CoreProcess)
            done = tuple(sorted(id64 for id64, at in settled.items() if at >= retried.get(id64, -1)))
            kept_hour = process.host.core.state.hour_min_kept
            machine.history.note(SettledSeen, machine.name, group, asked_ns, kept_hour, done)
        self.open -= 1

    async def _positions(
        self, machine: Machine, pin_id: int, topic: SettledTopic, retries: bool, into: dict[int, int]
    ) -> None:
        """By message: the last position of it in a topic, or of its retries."""
        following = max(topic.first, topic.began)
        while True:
            request = ReadSettledRequest(
                pin_id=pin_id, topic_id=topic.topic_id, first=following, end=topic.end, retries=retries
            )
            page = await asked(machine, partial(_reading, request))
            assert isinstance(page, SettledPage), page
            ids = np.frombuffer(page.ids, "<u8").tolist()
            for id64, position in zip(ids, np.frombuffer(page.positions, "<u8").tolist(), strict=True):
                into[id64] = max(position, into.get(id64, -1))
            if not page.next:
                return
            following = page.next


def _reading(request: ReadSettledRequest, core: NodeCore) -> Coroutine[Any, Any, SettledPage]:
    return core.parts.settled_pins.read(request)
