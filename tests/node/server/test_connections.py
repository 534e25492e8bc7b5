"""More connections than there may be: which go, and that those that work stay."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Any

import grpc
import pytest

from tests.transport.served import started
from tickwheel.client.errors import fault_of_call
from tickwheel.node.server.connections import Connection, ConnectionLimiter, too_many
from tickwheel.node.server.door import Door
from tickwheel.proto import admin_pb2_grpc
from tickwheel.storage.descriptors import DescriptorReserve
from tickwheel.transport.server import Server, caller_of

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
STATUS = "/tickwheel.v1.Admin/GetStatus"


def connections(*hosts: str) -> list[Connection]:
    """One of each host, rising in time."""
    return [Connection(n, 100 + n, 1, host, f"{host}#{n}") for n, host in enumerate(hosts)]


def alike(caller: str) -> int:
    """Nobody is worth more than another."""
    return 0


def test_the_address_with_the_most_gives_up_its_newest() -> None:
    """Nobody else loses one before it has no more than the others."""
    found = connections("a", "b", "a", "a", "b", "a")
    assert [c.descriptor for c in too_many(found, alike, 5)] == [5]
    assert [c.descriptor for c in too_many(found, alike, 4)] == [5, 3]
    assert {c.host for c in found if c not in too_many(found, alike, 2)} == {"a", "b"}
    assert too_many(found, alike, 6) == []
    assert len(too_many(found, alike, 0)) == 6


def test_idle_connections_go_before_those_with_calls() -> None:
    """However old they are; and before both of them those that never had a call."""
    found = connections("a", "a", "a")
    worth = {"a#1": 1, "a#2": 2}
    assert [c.descriptor for c in too_many(found, lambda caller: worth.get(caller, 0), 1)] == [0, 1]


def test_callers_are_named_as_grpc_does() -> None:
    """Else calls would be counted for nobody's connection."""
    assert caller_of(("1.2.3.4", 5)) == caller_of(("::ffff:1.2.3.4", 5)) == "ipv4:1.2.3.4:5"
    assert caller_of(("::1", 5)) == "ipv6:%5B::1%5D:5"


class Waiting:
    """A service whose calls last until they are let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = asyncio.Event()
        self.changed = asyncio.Event()

    async def wait_for(self, count: int) -> None:
        """Until so many calls have begun."""
        while self.begun < count:
            self.changed.clear()
            await self.changed.wait()

    def __getattr__(self, name: str) -> Any:
        async def behave(request: object, context: object) -> None:
            self.begun += 1
            self.changed.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()

        return behave


async def serving(limiter: ConnectionLimiter) -> tuple[Server, int, Waiting]:
    """A server behind the limiter."""
    server, service = Server(), Waiting()
    Door(server, Counter(), limiter=limiter).serve(admin_pb2_grpc.add_AdminServicer_to_server, service)
    port = await started(server)
    limiter.watch(port, 0)
    return server, port, service


async def test_idle_connections_are_shut_and_a_call_goes_on() -> None:
    """A client with a call keeps its connection, though it came last of all."""
    limiter = ConnectionLimiter(DescriptorReserve(), 10, 100)
    server, port, service = await serving(limiter)
    idle = []
    for _ in range(30):
        idle.append(socket.create_connection(("127.0.0.1", port)))
        idle[-1].sendall(PREFACE)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened, asyncio.timeout(30):
        channel: Any = opened
        call = channel.unary_unary(STATUS)(b"")
        await service.wait_for(1)
        while limiter.open < 31:  # gRPC accepts in a thread of its own
            limiter.look()
            await asyncio.sleep(0)
        while limiter.open > limiter.most:
            limiter.look()
            await asyncio.sleep(0)
        assert (limiter.most, limiter.open) == (10, 10) and limiter.shut >= 21
        assert not call.done(), "the one with a call is not among those that went"
        call.cancel()
    for connection in idle:
        connection.close()
    await server.stop()


def test_a_user_has_no_more_connections_than_its_quota() -> None:
    """Known ones go on, another user is not touched, and what is closed counts no more after the next look."""
    limiter = ConnectionLimiter(DescriptorReserve(), 100, 100)
    limiter.look()  # nothing changes for the process: a new connection has taken the descriptor of one that closed
    assert [limiter.admit("ann", f"ipv4:1.2.3.4:{port}", 2) for port in (1, 2, 1, 2)] == [None] * 4
    refusal = limiter.admit("ann", "ipv4:1.2.3.4:3", 2)
    assert refusal is not None and refusal.metadata["field"] == "quotas.connections_max"
    assert limiter.admit("bob", "ipv4:1.2.3.4:3", 2) is None
    limiter.look()
    assert limiter.admit("ann", "ipv4:1.2.3.4:3", 2) is None


async def test_one_address_has_no_more_calls_than_allowed() -> None:
    """The next is refused and told when to try again; when one ends there is room."""
    limiter = ConnectionLimiter(DescriptorReserve(), 100, 3)
    server, port, service = await serving(limiter)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened, asyncio.timeout(30):
        channel: Any = opened
        calls = [channel.unary_unary(STATUS)(b"") for _ in range(3)]
        await service.wait_for(3)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary(STATUS)(b"")
        fault = fault_of_call(raised.value)
        assert (fault.reason, fault.metadata["field"]) == ("LIMIT_REACHED", "limits.caller_calls_max")
        assert fault.retry_after_s > 0
        calls[0].cancel()
        await service.ended.wait()
        calls.append(channel.unary_unary(STATUS)(b""))
        await service.wait_for(4)
        for call in calls:
            call.cancel()
    await server.stop()
