"""Users of a cluster with rights: one schedules, one consumes over a stream, and an administrator who takes the rights
of both and gives them back.

All of them call through the ports of the nodes, with tokens. The changes of the administrator are in the audit logs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tickwheel.chaos.sim.asking import founding, succeeded
from tickwheel.chaos.sim.clients import NO_ANSWER, TIMEOUT_NS, Wires, served
from tickwheel.chaos.sim.consumers import Rows, by_topic, note_delivered, uids_of
from tickwheel.chaos.sim.core_process import CoreProcess
from tickwheel.chaos.sim.history_messages import (
    CreditGiven,
    Row,
    SessionClosed,
    SessionOpened,
    SessionOver,
    Settled,
    SettleSent,
    epoch_in,
)
from tickwheel.chaos.sim.history_ports import AuditedAnswer, AuditedCall, AuditSeen
from tickwheel.chaos.sim.node import Machine
from tickwheel.chaos.sim.port_calls import PortClients, door_of, metadata_of
from tickwheel.chaos.sim.producers import UID
from tickwheel.chaos.sim.world import MS, SECOND
from tickwheel.client.errors import Fault
from tickwheel.node.core.core import NodeCore
from tickwheel.node.state.rights import ADMINISTRATOR, id_of_token
from tickwheel.proto import access_pb2, consumer_pb2
from tickwheel.proto.access_pb2 import (
    RIGHT_CONSUME,
    RIGHT_SCHEDULE,
    AccessCommand,
    AccessRole,
    AddToken,
    Grant,
    StoredToken,
    StoredUser,
    Token,
)
from tickwheel.proto.admin_pb2 import Settings
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.testing.channel import ServerCall

TOPIC, GROUP = "permits", "wardens"
ROOT, SENDER, TAKER = "root", "ann-of-port", "bob-of-port"
SENDS, TAKES = "port-sender", "port-taker"
ROLES = {SENDER: SENDS, TAKER: TAKES}
CHANGE_EVERY_NS = 500 * MS
SEND_EVERY_NS = 350 * MS
CREDITS = 50
QUOTA = 1 << 40
"""A quota that nobody reaches. A change adds its number, by which its line in the audit log is known."""
READ_EVERY_NS = 200 * MS
SET_USER, LIST_AUDIT, CONSUME = (
    f"/tickwheel.v1.{method}" for method in ("Access/SetUser", "Access/ListAudit", "Consumer/Consume")
)


def secret_of(user: str) -> str:
    """The token of a user."""
    return f"tw_{user}"


def may(user: str) -> str:
    """By this name the checker knows whether a user has the right: 1 or 0."""
    return f"the right of {user}"


def _setting() -> Sequence[AdminCommand]:
    grants = {
        SENDS: Grant(rights=[RIGHT_SCHEDULE], topics=[TOPIC], groups=["*"]),
        TAKES: Grant(rights=[RIGHT_CONSUME], topics=[TOPIC], groups=[GROUP]),
    }
    roles = [AccessRole(name=name, grants=[grant]) for name, grant in grants.items()]
    users = {ROOT: ADMINISTRATOR, **ROLES}
    access = [
        *(AccessCommand(set_role=role) for role in roles),
        *(AccessCommand(set_user=StoredUser(name=user, roles=[role])) for user, role in users.items()),
    ]
    for user in users:
        sha256 = hashlib.sha256(secret_of(user).encode()).digest()
        stored = StoredToken(token=Token(id=id_of_token(sha256), label="port"), sha256=sha256)
        access.append(AccessCommand(add_token=AddToken(user=user, token=stored)))
    return [
        *founding((TOPIC,), [(GROUP, (TOPIC,))]),
        *(AdminCommand(access=command) for command in access),
        AdminCommand(settings=Settings(rights=True)),
    ]


@dataclass(eq=False)
class _Stream:
    """One stream of the consumer."""

    number: int
    machine: Machine
    boot: int
    call: ServerCall | None = None
    open: bool = False
    over: bool = False
    sequence: int = 0
    unanswered: dict[int, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    """By sequence of the settlement: (id, uid, attempt, epoch) of each row."""


class Users(PortClients):
    """`clients.Clients`."""

    setting = _setting()
    asks_for = "answers to users"

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "users")
        self._stream: _Stream | None = None
        self._target = 0
        self._restored = False
        self._read = False

    async def _set_up(self) -> None:
        for command in self.setting:
            call = served(partial(_administering, command))
            # A token that a lost try has added is refused when it is added again.
            await self._asking.ask(call, _is_done if command.HasField("access") else succeeded)
        self._begin()

    def _begin(self) -> None:
        self._wires.run(self._govern())
        self._world.after(SECOND, self._keep, SEND_EVERY_NS, self._send)
        self._keep_open()

    def unfinished(self) -> str:
        if not self._read:
            return "that rights are given back, and audit logs read"
        held = len(self._stream.unanswered) if self._stream is not None else 0
        return super().unfinished() or (f"{held} settlements of a stream" if held else "")

    # -- the administrator

    async def _govern(self) -> None:
        while not self._wires.winding_down:
            await self._wires.pause(self._wires.pause_ns(CHANGE_EVERY_NS, self._rng, cheap=True))
            await self._set(self._rng.choice((SENDER, TAKER)), self._rng.random() < 0.6)
        for user in ROLES:
            await self._set(user, True)
        self._restored = True
        for machine in list(self._wires.machines):
            await self._read_audit(machine)
        self._read = True

    async def _set(self, user: str, held: bool) -> None:
        calls: list[tuple[int, str]] = []

        async def change(machine: Machine) -> Any:
            number = self._wires.number()
            quotas = access_pb2.UserQuotas(messages_per_s=QUOTA + number)
            request = access_pb2.SetUserRequest(name=user, roles=[ROLES[user]] if held else [], quotas=quotas)
            calls.append((number, machine.name))
            self._history.note(AuditedCall, number, machine.name)
            return await self._try(machine, SET_USER, request, access_pb2.User, secret_of(ROOT))

        await self._change(may(user), int(held), change)
        self._history.note(AuditedAnswer, *calls[-1])

    async def _read_audit(self, machine: Machine) -> None:
        request = access_pb2.ListAuditRequest(limit=1_000)
        while not machine.retired and machine in self._wires.machines:
            answer = await self._try(machine, LIST_AUDIT, request, access_pb2.ListAuditResponse, secret_of(ROOT))
            if not isinstance(answer, Fault) and answer is not NO_ANSWER:
                found = [_number_in(record.request) for record in answer.records]
                self._history.note(AuditSeen, machine.name, tuple(sorted(number for number in found if number)))
                return
            await self._wires.pause(READ_EVERY_NS)

    # -- the sender

    async def _send(self) -> None:
        rng, wall_ms = self._rng, self._world.wall_ms
        rows = tuple(
            Row(self._wires.number(), TOPIC, wall_ms + rng.randrange(-200, 2_000), None)
            for _ in range(rng.choice((1, 1, 3)))
        )
        payloads = [UID.pack(row.uid) for row in rows]
        await self._schedule(rows, payloads, secret_of(SENDER), lambda: {may(SENDER): 1}, _blames_right, (GROUP,))

    # -- the consumer

    def _keep_open(self) -> None:
        stream = self._stream
        if stream is not None and (stream.machine.boot != stream.boot or stream.machine.process is None):
            self._leave(stream)
        if self._stream is None:
            self._open()
        elif not self._wires.winding_down and self._rng.random() < 0.02:
            self._die(self._stream)
        self._world.after(200 * MS, self._keep_open)

    def _open(self) -> None:
        machine = self._wires.machine(self._target)
        stream = self._stream = _Stream(self._wires.session(), machine, machine.boot)
        first = consumer_pb2.OpenConsumer(
            group=GROUP, topics=[TOPIC], credits=CREDITS, lease_ms=self._wires.shape.lease_ms, batch_messages_max=8
        )
        request = consumer_pb2.ConsumeRequest(open=first).SerializeToString()

        def begin(core: NodeCore) -> None:
            door = door_of(machine)
            stream.call = door.open(CONSUME, metadata_of(secret_of(TAKER)), took, over)
            door.take(stream.call, request)

        def took(data: bytes) -> None:
            self._took(stream, consumer_pb2.ConsumeResponse.FromString(data))

        def over(fault: Fault | None) -> None:
            if not stream.over:
                # A user that may consume no more leaves: what it had is given back.
                refused = fault is not None and _blames_right(fault) != ""
                self._history.note(SessionClosed, GROUP, stream.number, by_node=not refused)
            self._wires.back(self._ended, stream, fault)

        def give_up() -> None:
            if self._stream is stream and not stream.open:
                self._target += 1
                self._die(stream)

        self._wires.call(machine, begin)
        self._world.after(TIMEOUT_NS, give_up)

    def _ended(self, stream: _Stream, fault: Fault | None) -> None:
        if self._stream is stream:
            if fault is not None:
                self._target = self._elsewhere(fault, self._target)
            else:
                self._target += 1
            self._leave(stream)

    def _leave(self, stream: _Stream) -> None:
        """The consumer knows that its stream is over."""
        stream.over = True
        if stream.open:
            self._history.note(SessionOver, GROUP, stream.number)
        stream.unanswered.clear()
        self._stream = None

    def _die(self, stream: _Stream) -> None:
        """The consumer goes away."""
        self._leave(stream)

        def cut() -> None:
            if stream.machine.boot == stream.boot and stream.call is not None:
                self._history.note(SessionClosed, GROUP, stream.number)
                door_of(stream.machine).cut(stream.call)

        stream.machine.deliver(cut)

    def _took(self, stream: _Stream, response: consumer_pb2.ConsumeResponse) -> None:
        """A response leaves the node."""
        machine, process = stream.machine, stream.machine.process
        content = response.WhichOneof("content")
        if content == "deliver":
            assert isinstance(process, CoreProcess)
            process.observe_lease()
            batch = response.deliver
            parts = by_topic(batch, uids_of(batch))
            note_delivered(machine, stream.number, batch, parts, process.host.core.clock.error_ns() / MS)
            self._wires.back(self._work, stream, parts)
        elif content == "opened":
            self._wires.back(self._opened, stream)
        elif content == "settled":
            self._wires.back(self._settled, stream, response.settled)

    def _opened(self, stream: _Stream) -> None:
        if self._stream is stream:
            stream.open = True
            self._history.note(SessionOpened, GROUP, stream.number, CREDITS)

    def _work(self, stream: _Stream, parts: list[Rows]) -> None:
        if self._stream is not stream:
            return
        fate = 0.0 if self._wires.winding_down else self._rng.random()
        if fate > 0.97:
            return  # forgotten: the lease will run out
        think_ns = self._rng.randrange(MS, 40 * MS) if fate < 0.9 else self._rng.randrange(500 * MS, 2_000 * MS)
        for part in parts:
            self._world.after(think_ns, self._settle, stream, part)

    def _settle(self, stream: _Stream, part: Rows) -> None:
        if self._stream is not stream:
            return
        epoch = epoch_in(part.epoch)
        attempts = np.frombuffer(part.attempts, "<u4").tolist()
        rows = [
            (id64, uid, attempt, epoch)
            for id64, uid, attempt in zip(np.frombuffer(part.ids, "<u8").tolist(), part.uids, attempts, strict=True)
        ]
        for id64, uid, attempt, _ in rows:
            self._history.note(SettleSent, GROUP, id64, uid, attempt, "ACK", 0, epoch)
        stream.sequence += 1
        stream.unanswered[stream.sequence] = rows
        settle = consumer_pb2.SettleBatch(
            sequence=stream.sequence,
            group=GROUP,
            topic=TOPIC,
            outcome=consumer_pb2.ACK,
            ids=part.ids,
            attempts=part.attempts,
            positions=part.positions,
            epoch=part.epoch,
        )
        requests = (
            consumer_pb2.ConsumeRequest(settle=settle).SerializeToString(),
            consumer_pb2.ConsumeRequest(credits=len(rows)).SerializeToString(),
        )

        def act() -> None:
            if stream.call is not None:
                for request in requests:
                    door_of(stream.machine).take(stream.call, request)
                self._history.note(CreditGiven, GROUP, stream.number, len(rows))

        def arrive() -> None:
            if stream.machine.boot == stream.boot and stream.machine.process is not None:
                stream.machine.deliver(act)

        self._world.after(self._rng.randrange(100_000, 2 * MS), arrive)

    def _settled(self, stream: _Stream, receipt: consumer_pb2.SettleReceipt) -> None:
        rows = stream.unanswered.pop(receipt.sequence, [])
        if receipt.error or receipt.settled != len(rows):
            return
        for id64, uid, attempt, epoch in rows:
            self._history.note(Settled, GROUP, id64, uid, attempt, "ACK", epoch)


def _administering(command: AdminCommand, core: NodeCore) -> Coroutine[Any, Any, Any]:
    return core.parts.requests.admin(command)


def _is_done(answer: Any) -> bool:
    return succeeded(answer) or "field" in answer.metadata


def _blames_right(fault: Fault) -> str:
    return may(SENDER) if fault.reason in ("RIGHT_REQUIRED", "UNAUTHENTICATED") else ""


def _number_in(request: str) -> int:
    """The number of a change in its line of the audit log; 0: it is none."""
    _, found, rest = request.partition('"messages_per_s": "')
    return int(rest.partition('"')[0]) - QUOTA if found else 0
