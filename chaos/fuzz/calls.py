"""One call of a fuzzed batch: which method, which bytes, how it is cut off; and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import Default

from tickwheel.chaos.fuzz.messages import UNKNOWN_FIELD, Maker, nested, spoilt, varint
from tickwheel.node.server.services import SERVED

RARE = {"TransferMaster": 0.03, "UpdateSettings": 0.3, "Backup": 0.1, "GetDigest": 0.2}
"""Share of their turns in which methods are really called that cost the cluster much."""
OFTEN = {"Extend": 4, "Settle": 4}
"""Methods with more turns than one: their requests may be long, and each length is another case."""
BIG_BYTES = (1 << 20, 4 << 20, 9 << 20)
DEADLINES_S = (0.02, 0.2, 1.0, 2.0)
RESPONSES_READ_MAX = 8
OWN_ERROR = "Internal error from Core"
"""The text of the caller's own gRPC library when it could not send; no node sends it."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call to send. `cancel_s`: the caller goes away after this time; `cut`: with its whole connection."""

    node: int
    path: str
    client_streams: bool
    server_streams: bool
    bodies: tuple[bytes, ...]
    deadline_s: float
    cancel_s: float | None = None
    cut: bool = False
    holds_open: bool = False
    """The stream of requests is not ended by the caller."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a call. `code` is the name of a status, or CUT if the caller went away."""

    call: Call
    code: str
    details: str = ""
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def bytes(self) -> int:
        """Of its requests."""
        return sum(map(len, self.call.bodies))


def services() -> list[ServiceDescriptor]:
    """All that a node serves to clients."""
    return [Default().FindServiceByName(name) for name in SERVED]


def methods() -> list[tuple[str, MethodDescriptor]]:
    """Their methods by path."""
    return [(f"/{service.full_name}/{method.name}", method) for service in services() for method in service.methods]


class Caller:
    """Makes the calls of a batch by chance. `kept`: ids of members that must stay."""

    def __init__(self, rng: Random, maker: Maker, nodes: int, kept: frozenset[str]) -> None:
        self._rng = rng
        self._maker = maker
        self._nodes = nodes
        self._kept = kept
        self._methods = [(path, method) for path, method in methods() for _ in range(OFTEN.get(method.name, 1))]

    def call(self) -> Call:
        """The next one."""
        rng = self._rng
        path, method = rng.choice(self._methods)
        while rng.random() > RARE.get(method.name, 1.0):
            path, method = rng.choice(self._methods)
        if rng.random() < 0.02:
            path = rng.choice((path + "x", "/nothing", "/tickwheel.v1.Admin/", "/" + "a" * 500))
        streams = method.client_streaming
        count = rng.choice((0, 1, 1, 2, 4)) if streams else 1
        bodies = tuple(self._body(method) for _ in range(count))
        goes = rng.random() < 0.15
        return Call(
            MASTER if rng.random() < 0.6 else rng.randrange(self._nodes),
            path,
            streams,
            method.server_streaming,
            bodies,
            rng.choice(DEADLINES_S),
            cancel_s=rng.choice((0.0, 0.001, 0.01, 0.1)) if goes else None,
            cut=goes and rng.random() < 0.2,
            holds_open=streams and rng.random() < 0.2,
        )

    def _body(self, method: MethodDescriptor) -> bytes:
        rng = self._rng
        message: Any = self._maker.message(method.input_type)
        while method.name == "RemoveMember" and message.node_id in self._kept:
            message = self._maker.message(method.input_type)
        data: bytes = message.SerializeToString()
        kind = rng.random()
        if method.name == "RemoveMember":
            return data  # what is spoilt might name another
        if kind < 0.65:
            return data
        if kind < 0.97:
            return spoilt(rng, data)
        size = rng.choice(BIG_BYTES)
        if rng.random() < 0.5:
            return data + varint(UNKNOWN_FIELD << 3 | 2) + varint(size) + bytes(size)
        return data + nested(rng.choice((100, 1_000, 100_000)))


async def make(call: Call, address: str, channel: grpc.aio.Channel) -> Ended:
    """Make a call; raises nothing that a node can cause."""
    own = grpc.aio.insecure_channel(address, options=OPTIONS) if call.cut else None
    began_s = time.monotonic()
    code, details = "OK", ""
    try:
        await _make(call, own or channel)
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        code = "LOCAL" if details == OWN_ERROR else error.code().name
    except asyncio.CancelledError:
        code = "CUT"
    finally:
        if own is not None:
            await own.close(grace=None)
    return Ended(call, code, details, began_s, time.monotonic())


MASTER = -1
"""In place of a node's number: the master when the batch begins."""
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


async def _make(call: Call, channel: Any) -> None:
    async def bodies() -> AsyncIterator[bytes]:
        for body in call.bodies:
            yield body
        if call.holds_open:
            await asyncio.sleep(call.deadline_s)

    kind = ("stream" if call.client_streams else "unary") + "_" + ("stream" if call.server_streams else "unary")
    multi = getattr(channel, kind)(call.path)
    going = multi(bodies() if call.client_streams else call.bodies[0], timeout=call.deadline_s)
    leaving: asyncio.TimerHandle | None = None
    if call.cancel_s is not None:
        leaving = asyncio.get_running_loop().call_later(call.cancel_s, going.cancel)
    try:
        if not call.server_streams:
            await going
            return
        read = 0
        async for _ in going:
            read += 1
            if read >= RESPONSES_READ_MAX:
                return
    finally:
        if leaving is not None:
            leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            going.cancel()
