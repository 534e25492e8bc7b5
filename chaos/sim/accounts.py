"""Reads each node's account of the messages that a group has settled, at the end of a run, by the readers' calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.history_messages import SettledSeen
from tickwheel.chaos.sim.node import Machine
from tickwheel.node.failure import Failure
from tickwheel.proto.snapshot_pb2 import (
    PinSettledRequest,
    PinSettledResponse,
    ReadSettledRequest,
    SettledPage,
    SettledTopic,
)


class Accounts:
    """Reads of all nodes; `open` is how many have not ended."""

    def __init__(self) -> None:
        self.open = 0

    def read(self, machine: Machine, groups: Sequence[str]) -> None:
        """Read the settled messages of these groups from one node. Groups that it does not know are left out."""
        for group in groups:
            self.open += 1
            _Reading(machine, group, self._ended).begin()

    def _ended(self) -> None:
        self.open -= 1


class _Reading:
    def __init__(self, machine: Machine, group: str, ended: Callable[[], None]) -> None:
        self._machine = machine
        self._group = group
        self._ended = ended
        self._asked_ns = machine.world.now_ns
        self._pin_id = 0
        self._left: list[tuple[SettledTopic, bool]] = []
        """Topics still to be read; True stands for the retries of the topic."""
        self._settled: dict[int, int] = {}
        """By message: its last settled position."""
        self._retried: dict[int, int] = {}
        """By message: the position of its last retry."""

    def begin(self) -> None:
        process = self._machine.process
        assert isinstance(process, CoreProcess)
        host = process.host

        def pin() -> None:
            core = host.core
            core.serving.start(core.parts.settled_pins.pin(PinSettledRequest(group=self._group)), self._pinned)

        self._machine.deliver(pin)

    def _pinned(self, answer: PinSettledResponse | Failure) -> None:
        if isinstance(answer, Failure):
            self._ended()
            return
        self._pin_id = answer.pin_id
        self._left = [(topic, retries) for topic in answer.topics for retries in (False, True)]
        self._next()

    def _next(self) -> None:
        if not self._left:
            self._end()
            return
        topic, retries = self._left.pop()
        self._page(topic, retries, max(topic.first, topic.began))

    def _page(self, topic: SettledTopic, retries: bool, first: int) -> None:
        process = self._machine.process
        assert isinstance(process, CoreProcess)
        request = ReadSettledRequest(
            pin_id=self._pin_id, topic_id=topic.topic_id, first=first, end=topic.end, retries=retries
        )

        def read(page: SettledPage | Failure) -> None:
            assert not isinstance(page, Failure), page
            into = self._retried if retries else self._settled
            ids = np.frombuffer(page.ids, "<u8").tolist()
            for id64, position in zip(ids, np.frombuffer(page.positions, "<u8").tolist(), strict=True):
                into[id64] = max(position, into.get(id64, -1))
            if page.next:
                self._page(topic, retries, page.next)
            else:
                self._next()

        host = process.host
        self._machine.deliver(lambda: host.core.serving.start(host.core.parts.settled_pins.read(request), read))

    def _end(self) -> None:
        machine = self._machine
        process = machine.process
        assert isinstance(process, CoreProcess)
        done = tuple(sorted(id64 for id64, at in self._settled.items() if at >= self._retried.get(id64, -1)))
        kept_hour = process.host.core.state.hour_min_kept
        machine.history.note(SettledSeen, machine.name, self._group, self._asked_ns, kept_hour, done)
        self._ended()
