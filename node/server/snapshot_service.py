"""The Snapshot service: the pending messages, and those that a group has settled, as of one applied index.

This node answers itself, whatever its role.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import grpc

from tickwheel.node.server.calls import Calls
from tickwheel.node.server.errors import abort
from tickwheel.node.server.gate import caller
from tickwheel.proto import snapshot_pb2
from tickwheel.proto.access_pb2 import RIGHT_READ
from tickwheel.proto.snapshot_pb2_grpc import SnapshotServicer

Context = grpc.aio.ServicerContext[Any, Any]

OWNERS_MAX = 10_000
"""Pins whose owners are kept; more than can be open at a time."""


class PinOwners:
    """The user of each pin. A pin holds what its owner may read, and its number can be guessed."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, str] = OrderedDict()

    def take(self, pin_id: int) -> None:
        """Note that the current caller made this pin."""
        self._names[pin_id] = caller().name
        if len(self._names) > OWNERS_MAX:
            self._names.popitem(last=False)

    async def check(self, pin_id: int, context: Context) -> None:
        """Return if the current caller may read a pin; otherwise end the call with RIGHT_REQUIRED."""
        who = caller()
        if who.free or self._names.get(pin_id) == who.name:
            return
        refusal = who.everything(RIGHT_READ)
        if refusal is not None:
            await abort(context, refusal)


class SnapshotService(SnapshotServicer):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._pins = PinOwners()
        self._settled_pins = PinOwners()

    async def Pin(self, request: snapshot_pb2.PinRequest, context: Context) -> snapshot_pb2.PinResponse:
        calls = self._calls
        if request.pin_id:
            await self._pins.check(request.pin_id, context)
            return await calls.answer(context, lambda done: calls.core.pin(request, done))
        pinned: snapshot_pb2.PinResponse = await calls.answer(context, lambda done: calls.core.pin(request, done))
        self._pins.take(pinned.pin_id)
        return pinned

    async def ReadPinned(self, request: snapshot_pb2.ReadPinnedRequest, context: Context) -> snapshot_pb2.PinnedPage:
        calls = self._calls
        await self._pins.check(request.pin_id, context)
        return await calls.answer(context, lambda done: calls.core.read_pinned(request, done))

    async def AgreePin(self, request: snapshot_pb2.AgreePinRequest, context: Context) -> snapshot_pb2.AgreePinResponse:
        calls = self._calls
        return await calls.answer(context, lambda done: calls.core.agree_pin(request, done))

    async def Unpin(self, request: snapshot_pb2.UnpinRequest, context: Context) -> snapshot_pb2.UnpinResponse:
        await self._pins.check(request.pin_id, context)
        self._calls.core.unpin(request.pin_id)
        return snapshot_pb2.UnpinResponse()

    async def PinSettled(
        self, request: snapshot_pb2.PinSettledRequest, context: Context
    ) -> snapshot_pb2.PinSettledResponse:
        calls = self._calls
        pinned: snapshot_pb2.PinSettledResponse = await calls.answer(
            context, lambda done: calls.core.pin_settled(request, done)
        )
        self._settled_pins.take(pinned.pin_id)
        return pinned

    async def ReadSettled(self, request: snapshot_pb2.ReadSettledRequest, context: Context) -> snapshot_pb2.SettledPage:
        calls = self._calls
        await self._settled_pins.check(request.pin_id, context)
        return await calls.answer(context, lambda done: calls.core.read_settled(request, done))
