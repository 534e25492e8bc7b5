"""Bulk load: brings bundles to single nodes, and has the master take them over.

Repeats are safe: a bundle is sent on from the byte that the node has reached, and `take_over` may be called again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import google_crc32c
import grpc

from tickwheel.client.answers import reader
from tickwheel.client.calls import ServiceCalls, error_at
from tickwheel.client.cold import ColdLoad, load_message
from tickwheel.client.requests import request_of
from tickwheel.proto import bulk_pb2
from tickwheel.proto.bulk_pb2_grpc import BulkStub

PIECE_BYTES = 1 << 20
SEND_TIMEOUT_S = 60.0
"""For the rest of one bundle. The node keeps the bytes that arrived by then."""
TAKE_OVER_TRY_S = 10.0


class Readable(Protocol):
    """The bytes of a bundle."""

    def read_at(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset` on."""
        ...


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load is, by the entries that the master has applied."""

    job_id: str
    load_sha256: str
    """SHA-256, in hexadecimal, of the load's list of bundles; empty: the load is not known."""
    bundles: int
    """Bundles of the load."""
    taken: int
    """Bundles of it that were ingested."""
    units: int
    """Messages in these."""


progress_of = reader(LoadProgress, bulk_pb2.LoadState)


class BulkClient(ServiceCalls[BulkStub]):
    """`AsyncClient.bulk`."""

    _service = BulkStub

    async def send(self, address: str, name: str, total_bytes: int, content: Readable) -> int:
        """Bring a bundle to one node. Returns the number of bytes sent.

        Raises a TickwheelError if the node does not hold the bundle afterwards.
        """
        stub = BulkStub(self._cluster.channel(address))
        timeout_s, sent = self._timeout_s, 0
        try:
            state = await stub.OfferBundle(
                request_of(bulk_pb2.BundleOffer, name=name, bytes=total_bytes), timeout=timeout_s
            )
            timeout_s = SEND_TIMEOUT_S
            while not state.held:
                before = state.bytes
                state = await stub.SendBundle(_pieces(name, total_bytes, before, content), timeout=timeout_s)
                sent += state.bytes - before
                if state.bytes == before and not state.held:
                    break
        except grpc.aio.AioRpcError as error:
            raise error_at(address, error, timeout_s) from error
        return sent

    async def take_over(
        self,
        job_id: str,
        load_sha256: str,
        sequence: int,
        bundles: int,
        name: str,
        topics: Sequence[str],
        timeout_s: float | None = None,
        cold: ColdLoad | None = None,
    ) -> LoadProgress:
        """Have the master take one bundle over. Repeats until the deadline while that can help.

        `sequence`: its place in the load, from 1, of `bundles`. `topics`: by which the bundle names them; they exist.
        `cold`: the messages of the cold tier in it.
        """
        request = bulk_pb2.TakeOverRequest(
            job_id=job_id,
            load_sha256=load_sha256,
            sequence=sequence,
            bundles=bundles,
            name=name,
            topics=topics,
            cold=load_message(cold) if cold is not None else None,
        )
        answer = await self._ask(
            lambda stub: stub.TakeOver, request, timeout_s=timeout_s, try_timeout_s=TAKE_OVER_TRY_S
        )
        return progress_of(answer)

    async def load(self, job_id: str) -> LoadProgress:
        """The progress of a load, by the master's applied entries."""
        return progress_of(
            await self._ask(lambda stub: stub.GetLoad, request_of(bulk_pb2.GetLoadRequest, job_id=job_id))
        )


async def _pieces(name: str, total_bytes: int, offset: int, content: Readable) -> AsyncIterator[bulk_pb2.BundleData]:
    while offset < total_bytes:
        data = content.read_at(offset, PIECE_BYTES)
        yield bulk_pb2.BundleData(
            name=name, total_bytes=total_bytes, offset=offset, data=data, crc32c=google_crc32c.value(data)
        )
        offset += len(data)
