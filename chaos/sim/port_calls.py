"""Clients that call nodes through their client ports (doors.py), as programs do over the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from tickwheel.chaos.sim.asking import PAUSE_NS, AskingClients
from tickwheel.chaos.sim.clients import NO_ANSWER
from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.doors import Door
from tickwheel.chaos.sim.history_messages import Row, ScheduleAcknowledged, ScheduleSent
from tickwheel.chaos.sim.history_ports import CallAccepted, CallRefused, ValueAnswered, ValueAsked
from tickwheel.chaos.sim.node import Machine
from tickwheel.client.errors import Fault
from tickwheel.client.lanes import Doubt
from tickwheel.node.core.core import NodeCore
from tickwheel.node.server.callers import AUTHORIZATION
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.testing.channel import MetadataPairs

SCHEDULE_MANY = "/tickwheel.v1.Scheduler/ScheduleMany"
LOST = ("OUTCOME_UNKNOWN", "UNAVAILABLE", "NODE_FAULT")
LOST_SHARE = 0.15
"""Of the answers about batches."""
M = TypeVar("M", bound=Message)
Needs = dict[str, int]
"""What a batch needs: by what decides about it, the least value."""


def metadata_of(secret: str) -> MetadataPairs:
    """What a call with a token carries."""
    return ((AUTHORIZATION, f"Bearer {secret}"),) if secret else ()


def door_of(machine: Machine) -> Door:
    """Of the process that runs there."""
    process = machine.process
    assert isinstance(process, CoreProcess) and process.door is not None
    return process.door


class PortClients(AskingClients):
    """The base of clients that call through ports."""

    async def _try(
        self, machine: Machine, method: str, request: Message, kind: type[M], secret: str, lost: float = 0.0
    ) -> Any:
        """The answer of a node as a message or a Fault, or NO_ANSWER. `lost`: share of the answers that do not
        arrive."""

        def call(core: NodeCore, answer: Callable[[Any], None]) -> None:
            door_of(machine).ask(method, request, metadata_of(secret), answer)

        answer = await self._wires.answer(machine, call, heard=lambda: not lost or self._rng.random() >= lost)
        return kind.FromString(answer) if isinstance(answer, bytes) else answer

    async def _change(self, what: str, value: int, change: Callable[[Machine], Any]) -> None:
        """Give something another value: `change` is the answer to one try."""
        self._history.note(ValueAsked, what, value)
        self._asking.open += 1
        target, lost = self._rng.randrange(3), False
        while True:
            answer = await change(self._wires.machine(target))
            if answer is NO_ANSWER:
                target, lost = target + 1, True
            elif isinstance(answer, Fault):
                lost = lost or answer.reason in LOST
                target = self._elsewhere(answer, target)
                await self._wires.pause(PAUSE_NS)
            else:
                break
        self._asking.open -= 1
        self._history.note(ValueAnswered, what, value, lost)

    def _elsewhere(self, fault: Fault, target: int) -> int:
        return self._wires.redirect(fault, target)  # type: ignore[arg-type]  # both have metadata

    async def _schedule(
        self,
        rows: tuple[Row, ...],
        payloads: Sequence[bytes],
        secret: str,
        needs: Callable[[], Needs],
        blames: Callable[[Fault], str],
        groups: tuple[str, ...],
    ) -> None:
        """Send a batch until it is accepted, or refused because of what it needs. `blames`: what a refusal blames;
        empty: something else."""
        producer, world, wires = f"port-{self._wires.number()}", self._world, self._wires
        messages = [
            common_pb2.Message(topic=row.topic, payload=payload, due_ms=row.due_ms or 0)
            for row, payload in zip(rows, payloads, strict=True)
        ]
        request = scheduler_pb2.ScheduleBatch(
            producer_id=producer, sequence=1, rows=scheduler_pb2.RowBatch(messages=messages)
        )
        uids = tuple(row.uid for row in rows)
        doubt, target, first_ns, needed = Doubt(1), self._rng.randrange(3), world.now_ns, needs()
        self._asking.open += 1
        while True:
            machine, asked_ns = wires.machine(target), world.now_ns
            self._history.note(ScheduleSent, producer, 1, machine.name, rows)
            doubt.sending()
            answer = await self._try(machine, SCHEDULE_MANY, request, scheduler_pb2.BatchReceipt, secret, LOST_SHARE)
            if answer is NO_ANSWER:
                target += 1
                continue
            if not isinstance(answer, Fault):
                break
            doubt.refused(answer)
            blamed = blames(answer)
            if blamed:
                certain = not doubt.exists
                self._history.note(CallRefused, blamed, machine.name, asked_ns, uids, needs()[blamed], certain)
                self._asking.open -= 1
                return
            target = self._elsewhere(answer, target)
            await wires.pause(self._rng.randrange(20, 150) * 1_000_000)
        self._asking.open -= 1
        ids = tuple(np.frombuffer(answer.ids, "<u8").tolist())
        due_ms = tuple(np.frombuffer(answer.due_ms, "<i8").tolist()) or tuple(row.due_ms or 0 for row in rows)
        self._history.note(ScheduleAcknowledged, producer, 1, uids, ids, due_ms, answer.repeated, groups)
        for what, least in needed.items():
            self._history.note(CallAccepted, what, first_ns, uids, least)
