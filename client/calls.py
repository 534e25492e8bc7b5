"""The unary calls of one service of the API, and listings that a node gives in pages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import Message

from tickwheel.client.cluster import TRY_TIMEOUT_S, Cluster
from tickwheel.client.errors import ClusterUnavailable, Fault, TickwheelError, error_of, fault_of_call
from tickwheel.client.requests import is_read

A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R", bound=Message)
S = TypeVar("S")

Method: TypeAlias = "Callable[[S], grpc.UnaryUnaryMultiCallable[R, A]]"
"""Picks a method of a stub: `lambda stub: stub.Get`. The stub's type is the one for synchronous channels, by which the
generated files name requests and answers."""


def error_at(address: str, error: grpc.aio.AioRpcError, timeout_s: float) -> TickwheelError:
    """What to raise for a call to one node that is not made again: a call that only reads, or may be repeated."""
    fault = fault_of_call(error)
    if fault.reason == "DEADLINE_EXCEEDED":
        return ClusterUnavailable(f"{address} did not answer within {timeout_s:.3g} s", fault.reason, fault.metadata)
    return error_of(fault)


class ServiceCalls(Generic[S]):
    """The base of what offers the calls of a service to users. `_service` is the generated stub."""

    _service: Callable[[grpc.aio.Channel], Any]

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        """`timeout_s`: deadline of a call that names none."""
        self._cluster = cluster
        self._timeout_s = timeout_s

    def _on(self, channel: grpc.aio.Channel, method: Method[S, R, A]) -> Callable[..., Awaitable[A]]:
        return cast(Callable[..., Awaitable[A]], method(self._cluster.stub(self._service, channel)))

    async def _ask(
        self,
        method: Method[S, R, A],
        request: R,
        *,
        timeout_s: float | None = None,
        try_timeout_s: float = TRY_TIMEOUT_S,
        repeatable: bool = True,
        stays: bool = False,
    ) -> A:
        """Call the master, as `Cluster.call`."""

        async def invoke(channel: grpc.aio.Channel, try_s: float) -> A:
            return await self._on(channel, method)(request, timeout=try_s)

        timeout_s = timeout_s or self._timeout_s
        return await self._cluster.call(
            invoke, timeout_s, repeatable=repeatable, try_timeout_s=try_timeout_s, reads=is_read(request), stays=stays
        )

    async def _ask_at(self, address: str, method: Method[S, R, A], request: R, timeout_s: float | None = None) -> A:
        """Call one node once. Raises `error_at`."""
        timeout_s = timeout_s or self._timeout_s
        try:
            return await self._on(self._cluster.channel(address), method)(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_at(address, error, timeout_s) from error

    async def _ask_each(
        self, method: Method[S, R, A], request: R, read: Callable[[A], B], timeout_s: float
    ) -> dict[str, B | Fault]:
        """Call each known node once: what `read` makes of the answers, by address; a Fault for a node without one."""

        async def one(address: str) -> B | Fault:
            try:
                return read(await self._on(self._cluster.channel(address), method)(request, timeout=timeout_s))
            except grpc.aio.AioRpcError as error:
                return fault_of_call(error)

        addresses = self._cluster.addresses
        return dict(zip(addresses, await asyncio.gather(*map(one, addresses)), strict=True))


class Calling(Protocol):
    """A client: `timeout_s` is the deadline of its calls."""

    cluster: Cluster
    timeout_s: float


async def ask(
    client: Calling,
    service: Callable[[grpc.aio.Channel], S],
    method: Callable[[S], Callable[..., Awaitable[A]]],
    request: Message,
    try_timeout_s: float = TRY_TIMEOUT_S,
) -> A:
    """The master's answer to a call of any service, as it travels. Raises TickwheelError."""

    async def invoke(channel: grpc.aio.Channel, try_s: float) -> A:
        return await method(client.cluster.stub(service, channel))(request, timeout=try_s)

    return await client.cluster.call(invoke, client.timeout_s, try_timeout_s=try_timeout_s, reads=is_read(request))


class Page(Protocol):
    """One answer; `more`: further items follow its last one."""

    @property
    def more(self) -> bool: ...


Q = TypeVar("Q", bound=Page, covariant=True)


async def listed(fetch: Callable[[A | None], Awaitable[Q]], items: Callable[[Q], Sequence[A]]) -> tuple[list[A], Q]:
    """(all items, the last page). `fetch` asks for the page behind an item; None: for the first page.

    Raises TickwheelError for a page that is empty and says that more follows: the next question would be the same.
    """
    found: list[A] = []
    while True:
        page = await fetch(found[-1] if found else None)
        shown = items(page)
        found += shown
        if not page.more:
            return found, page
        if not shown:
            raise TickwheelError("a node gave an empty page of a listing and said that more follows", "INTERNAL")
