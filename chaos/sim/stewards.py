"""Operators who change settings, and make topics and groups that they fill, consume and delete again.

Of their messages only this is judged: a deletion cancels what is pending, and nothing comes after it. The general
promises judge whether nodes survive these changes and agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tickwheel.chaos.sim.asking import AskingClients, founding, succeeded
from tickwheel.chaos.sim.clients import TIMEOUT_NS, Call, Wires, served
from tickwheel.chaos.sim.history_messages import Row
from tickwheel.chaos.sim.history_operators import (
    Administered,
    DeletionAnswered,
    DeletionAsked,
    PassingAccepted,
    PassingDelivered,
)
from tickwheel.chaos.sim.producers import UID, labelled_batch
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.node.core.core import NodeCore, serve
from tickwheel.node.core.promise import UNHEARD, Reply
from tickwheel.node.core.schedule import intake
from tickwheel.node.core.schedule.joining import RowCaller
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.failure import Failure
from tickwheel.proto import consumer_pb2
from tickwheel.proto.admin_pb2 import DeleteGroupRequest, DeleteTopicRequest, Settings
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.proto.scheduler_pb2 import SWEEP_FINISHED, Sweep

EVERY_NS = 1_200 * MS
LIVES_NS_MOST = 2_500 * MS
FEW = 5
"""This many messages come in calls of their own."""
SETTINGS = (
    Settings(attempts_max=32),
    Settings(attempts_max=200),
    Settings(delay_levels="1s 2s 5s"),
    Settings(delay_levels="1s 5s 10s 30s 1m"),
    Settings(window_messages_max=1_000_000),
    Settings(window_messages_max=2_000),
    Settings(producer_window_batches=128),
    Settings(staging_memory_ms=3_600_000),
)
"""None that makes another promise than those that the checkers know."""
IN_FLIGHT_MAX = (Settings(group_in_flight_max=50), Settings(group_in_flight_max=0))
"""Further ones, in runs without a limit that holds for the whole run."""


class Stewards(AskingClients):
    """`clients.Clients`."""

    asks_for = "answers about settings, topics or groups"

    def __init__(self, wires: Wires, name: str = "stewards") -> None:
        super().__init__(wires, name)
        self._made = 0
        self._settings = SETTINGS if wires.shape.in_flight_max else SETTINGS + IN_FLIGHT_MAX

    def _begin(self) -> None:
        self._world.after(SECOND, self._keep, EVERY_NS, self._act)

    async def _act(self) -> None:
        if self._rng.random() < 0.4:
            command = AdminCommand(settings=self._rng.choice(self._settings))
            await self._ask("settings", served(lambda core: core.parts.requests.admin(command)))
        else:
            await self._found()

    async def _ask(self, what: str, call: Call) -> None:
        """Until it is done or refused by name: a repeat of a deletion that was done finds nothing."""
        answer = await self._asking.ask(call, lambda answer: succeeded(answer) or "field" in answer.metadata)
        self._history.note(Administered, what, succeeded(answer))

    async def _delete(self, kind: str, name: str, request: Call) -> None:
        self._history.note(DeletionAsked, kind, name)

        def call(core: NodeCore, answer: Callable[[Any], None]) -> None:
            def left(outcome: Sweep | Failure) -> None:
                if not isinstance(outcome, Failure) and outcome.state == SWEEP_FINISHED:
                    error_ms = core.clock.error_ns() / MS
                    self._history.note(DeletionAnswered, kind, name, outcome.done, error_ms)
                answer(outcome)

            request(core, left)

        await self._ask(f"delete {kind}", call)

    async def _found(self) -> None:
        """A topic and its group, for a while; one of both goes first."""
        self._made += 1
        topic, group = f"passing-{self._made}", f"guests-{self._made}"
        await self._asking.admin(*founding((topic,), [(group, (topic,))]))
        for _ in range(self._rng.randint(1, 3)):
            self._fill(topic)
            self._world.after(self._rng.randrange(LIVES_NS_MOST), self._pull, topic, group)
        topic_request = DeleteTopicRequest(name=topic, cancel_pending=True)
        group_request = DeleteGroupRequest(name=group, discard=True)
        ends = (
            ("topic", topic, served(lambda core: core.parts.deleter.topic(topic_request))),
            ("group", group, served(lambda core: core.parts.deleter.group(group_request))),
        )
        for kind, name, request in ends:
            self._later(self._rng.randrange(LIVES_NS_MOST), self._delete, kind, name, request)

    def _fill(self, topic: str) -> None:
        """Some messages, once: nobody asks what became of them."""
        wall_ms = self._world.wall_ms
        rows = tuple(
            Row(self._wires.number(), topic, wall_ms + self._rng.randrange(4_000), None)
            for _ in range(self._rng.choice((1, FEW, 20)))
        )
        batch = labelled_batch(f"steward-{self._wires.number()}", 1, rows)
        batch.connection = "steward"
        machine = self._wires.machine(self._rng.randrange(3))

        def accepted(ids: Sequence[int], due_ms: Sequence[int]) -> None:
            self._history.note(PassingAccepted, topic, tuple(ids), tuple(due_ms))

        def answered(outcome: BatchOutcome | Failure) -> None:
            if not isinstance(outcome, Failure):
                accepted(outcome.ids.tolist(), outcome.due_ms.tolist())

        if len(rows) == FEW:
            self._wires.call(machine, lambda core: one_by_one(core, rows, accepted))
        else:
            self._wires.call(machine, lambda core: core.parts.publisher.schedule(batch, Reply.either(answered)))

    def _pull(self, topic: str, group: str, outcome: consumer_pb2.Outcome.ValueType = consumer_pb2.RETRY) -> None:
        """Pull messages that are in flight when the topic or group is deleted. Half of the pulls are answered so."""
        request = consumer_pb2.PullRequest(group=group, topics=[topic], messages_max=5, wait_ms=200, lease_ms=1_000)
        machine = self._wires.machine(self._rng.randrange(3))

        def answered(answer: consumer_pb2.DeliverBatch | Failure) -> None:
            if isinstance(answer, Failure) or not answer.ids or self._rng.random() < 0.5:
                return
            settle = consumer_pb2.SettleBatch(
                sequence=1,
                group=group,
                topic=topic,
                outcome=outcome,
                delay_ms=300 if outcome == consumer_pb2.RETRY else 0,
                ids=answer.ids,
                attempts=answer.attempts,
                positions=answer.positions,
                epoch=answer.epoch,
            )
            self._world.after(
                self._rng.randrange(TIMEOUT_NS),
                self._wires.call,
                machine,
                lambda core: core.parts.consumers.settle(settle, UNHEARD),
            )

        def left(answer: consumer_pb2.DeliverBatch | Failure) -> None:
            if not isinstance(answer, Failure) and answer.ids:
                ids = tuple(np.frombuffer(answer.ids, "<u8").tolist())
                self._history.note(PassingDelivered, machine.name, topic, ids)
            self._wires.back(answered, answer)

        self._wires.call(machine, lambda core: serve(core, core.parts.consumers.pull(request), left))


def one_by_one(core: NodeCore, rows: Sequence[Row], accepted: Callable[[Sequence[int], Sequence[int]], None]) -> None:
    """Schedule rows as calls of their own, which the node joins. Each is told once; `accepted` gets id and due time."""
    told: set[int] = set()

    def note(uid: int) -> None:
        assert uid not in told, "a caller was told twice"
        told.add(uid)

    def placed(uid: int, id64: int, due_ms: int, *_: int) -> None:
        note(uid)
        accepted((id64,), (due_ms,))

    def failed(uid: int, _: Failure) -> None:
        note(uid)

    for row in rows:
        message = intake.Row(row.topic, intake.KIND_DUE, row.due_ms or 0, UID.pack(row.uid))
        caller = RowCaller(partial(placed, row.uid), partial(failed, row.uid), "steward")
        core.parts.publisher.schedule_row(message, "", "", caller)
