"""Connections to the nodes of one cluster, and which of them is the master.

Owns the channels, the list of known addresses and the master's address. The master is learnt from what nodes say:
their status, and the address in a NOT_MASTER. While anybody watches (streams do), all nodes are asked every
WATCH_PERIOD_S, so that a master that hangs without closing its connections is noticed once another one has a
higher term.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from tickwheel.client.backoff import Backoff, Deadline
from tickwheel.client.bearer import BearerChannel
from tickwheel.client.errors import ClusterUnavailable, Fault, OutcomeUnknown, RequestRefused, error_of, fault_of_call
from tickwheel.proto import admin_pb2
from tickwheel.proto.admin_pb2_grpc import AdminStub

A = TypeVar("A")
S = TypeVar("S")

END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]
"""What `read` of a stream returns when the node has ended it without an error."""


MESSAGE_BYTES_MAX = 64 << 20
WATCH_PERIOD_S = 0.2
STATUS_TIMEOUT_S = 1.0
TRY_TIMEOUT_S = 3.0
"""One try of a call; a master that hangs is left after this."""
ADDRESSES_MAX = 64
REFUSALS = frozenset({"UNAUTHENTICATED", "RIGHT_REQUIRED", "ROLE_REQUIRED"})
"""Another try, or another node, will not let this caller in."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A node that comes back is found again within these, however long it was away. The second bounds an attempt, too:
    # three ways there and back for TCP and TLS.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_500),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Who does not answer is connected to anew: TCP alone repeats what was lost after pauses of up to two minutes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # Repeating is decided here, where it is known what is safe.
    ("grpc.enable_retries", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: who signs the nodes' certificates, and the caller's own certificate and key if nodes want one."""

    ca_file: str | Path
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None
    """Name to expect in the nodes' certificates instead of the host that is dialled."""

    def credentials(self) -> grpc.ChannelCredentials:
        """What a channel needs. RequestRefused when a file cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca_file, "ca_file"),
            private_key=_read(self.key_file, "key_file") if self.key_file else None,
            certificate_chain=_read(self.cert_file, "cert_file") if self.cert_file else None,
        )


def _read(path: str | Path, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        limit = f"cannot be read: {error.strerror}"
        metadata = {"field": f"tls.{field}", "value": str(path), "limit": limit}
        raise RequestRefused(f"tls.{field}: {path}: {limit}", "INVALID_FIELD", metadata) from error


def _checked(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65_536):
        metadata = {"field": "addresses", "value": address, "limit": "host:port"}
        raise RequestRefused(f"addresses: {address!r}: host:port", "INVALID_FIELD", metadata)
    return address


async def unless_left(work: asyncio.Task[A]) -> A | None:
    """What the work over one stream returns; None if it was left: cancelled, by whoever hears of another master.

    To cancel the call instead is not enough. One that is still being connected leaves who writes to it waiting for
    ever, and who reads from it is told of a cancellation that the call does not know of yet. The caller's own
    cancellation ends the work and is raised.
    """
    try:
        await asyncio.wait({work})
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
    return None if work.cancelled() else work.result()


class Cluster:
    """One per client."""

    def __init__(self, addresses: Sequence[str], tls: TlsFiles | None = None, token: str = "") -> None:
        if not addresses:
            raise RequestRefused("addresses: at least one", "INVALID_FIELD", {"field": "addresses", "limit": "1"})
        self._addresses = list(dict.fromkeys(map(_checked, addresses)))
        self._credentials = tls.credentials() if tls else None
        self._options: tuple[tuple[str, int | str], ...] = CHANNEL_OPTIONS
        if tls and tls.server_name:
            self._options += (("grpc.ssl_target_name_override", tls.server_name),)
        self._token = token
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[tuple[object, grpc.aio.Channel], Any] = {}
        self._master: str | None = None
        self._term = 0
        self._finding: asyncio.Task[str | None] | None = None
        self._refused: Fault | None = None
        """Why the node that answered last does not let this client ask for its status."""
        self._watchers: dict[object, Callable[[str], None]] = {}
        self._watch: asyncio.Task[None] | None = None

    @property
    def addresses(self) -> list[str]:
        """Those given and those learnt."""
        return list(self._addresses)

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to a node; made on first use."""
        found = self._channels.get(address)
        if found is None:
            if self._credentials is None:
                found = grpc.aio.insecure_channel(address, options=self._options)
            else:
                found = grpc.aio.secure_channel(address, self._credentials, options=self._options)
            if self._token:
                found = cast(grpc.aio.Channel, BearerChannel(found, self._token))
            self._channels[address] = found
        return found

    def stub(self, kind: Callable[[grpc.aio.Channel], S], channel: grpc.aio.Channel) -> S:
        """A service's stub on a channel, made on first use: it makes each of its methods anew, called or not."""
        found: S | None = self._stubs.get((kind, channel))
        if found is None:
            found = self._stubs[kind, channel] = kind(channel)
        return found

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        tasks = [task for task in (self._watch, self._finding) if task is not None]
        self._watch = self._finding = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        channels, self._channels = list(self._channels.values()), {}
        self._stubs.clear()
        await asyncio.gather(*(channel.close(None) for channel in channels))

    # -- who is the master

    def learn(self, address: str, term: int = 0) -> None:
        """Somebody named the master."""
        if not address or term < self._term:
            return
        self._term = term or self._term
        if address not in self._addresses and len(self._addresses) < ADDRESSES_MAX:
            self._addresses.append(address)
        if self._master != address:
            self._master = address
            for moved in list(self._watchers.values()):
                moved(address)

    def add(self, address: str) -> None:
        """Another node of the cluster is known by this address."""
        if address not in self._addresses and len(self._addresses) < ADDRESSES_MAX:
            self._addresses.append(_checked(address))

    def forget(self, address: str) -> None:
        """This node did not answer as master."""
        if self._master == address:
            self._master = None

    async def master(self, deadline: Deadline) -> str:
        """The master's address, found if it is not known. ClusterUnavailable at the deadline."""
        backoff = Backoff(max_s=WATCH_PERIOD_S)
        while self._master is None:
            if self._finding is None:
                self._finding = asyncio.ensure_future(self._find())
            finding = self._finding
            await asyncio.wait({finding}, timeout=deadline.left_s)
            if finding.done() and self._finding is finding:
                self._finding = None
            if self._master is None:
                if self._refused is not None:
                    raise error_of(self._refused)
                if deadline.over:
                    nodes = ", ".join(self._addresses)
                    raise ClusterUnavailable(
                        f"no master answered within {deadline.timeout_s:g} s; asked {nodes}", "NO_MASTER"
                    )
                await backoff.pause(deadline)
        return self._master

    async def statuses(self, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, admin_pb2.NodeStatus | Fault]:
        """What each known node says of itself."""
        addresses = list(self._addresses)
        answers = await asyncio.gather(*(self._status(address, timeout_s) for address in addresses))
        return dict(zip(addresses, answers, strict=True))

    async def _status(self, address: str, timeout_s: float) -> admin_pb2.NodeStatus | Fault:
        try:
            stub = self.stub(AdminStub, self.channel(address))
            return await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return fault_of_call(error)

    async def _find(self) -> str | None:
        asked = {asyncio.ensure_future(self._ask(address)): address for address in self._addresses}
        try:
            for done in asyncio.as_completed(asked):
                await done
                if self._master is not None:
                    return self._master
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return None

    async def _ask(self, address: str) -> None:
        status = await self._status(address, STATUS_TIMEOUT_S)
        if isinstance(status, Fault):
            if status.reason in REFUSALS:
                self._refused = status
            return
        self._refused = None
        if status.role == admin_pb2.MASTER:
            self.learn(address, status.term)
        elif status.master_address and status.term > self._term:
            self.learn(status.master_address, status.term)

    # -- watching, for streams

    def watch(self, key: object, moved: Callable[[str], None]) -> None:
        """Call `moved(address)` whenever another node has become master, until `unwatch`."""
        self._watchers[key] = moved
        if self._watch is None:
            self._watch = asyncio.ensure_future(self._keep_watching())

    def unwatch(self, key: object) -> None:
        """No more calls. Idempotent."""
        self._watchers.pop(key, None)
        if not self._watchers and self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _keep_watching(self) -> None:
        asking: dict[str, asyncio.Future[None]] = {}
        try:
            while True:
                await asyncio.sleep(WATCH_PERIOD_S)
                for address in self._addresses:
                    # A node that hangs keeps only its own question waiting: the new master is asked all the same.
                    if address not in asking or asking[address].done():
                        asking[address] = asyncio.ensure_future(self._ask(address))
        finally:
            for question in asking.values():
                question.cancel()
            await asyncio.gather(*asking.values(), return_exceptions=True)

    # -- one call at the master

    async def call(
        self,
        invoke: Callable[[grpc.aio.Channel, float], Awaitable[A]],
        timeout_s: float,
        *,
        repeatable: bool = True,
        try_timeout_s: float = TRY_TIMEOUT_S,
    ) -> A:
        """Run a unary call at the master, repeating it while that is safe and makes sense.

        Not repeatable: once it may have been carried out, OutcomeUnknown is raised instead.
        """
        deadline = Deadline(timeout_s)
        backoff = Backoff()
        uncertain: Fault | None = None
        while True:
            try:
                address = await self.master(deadline)
            except ClusterUnavailable as error:
                if uncertain is None:
                    raise
                raise OutcomeUnknown(uncertain.message, "OUTCOME_UNKNOWN", uncertain.metadata) from error
            try:
                return await invoke(self.channel(address), max(0.001, min(deadline.left_s, try_timeout_s)))
            except grpc.aio.AioRpcError as error:
                fault = fault_of_call(error)
            if not (fault.elsewhere or fault.later):
                raise error_of(fault)
            if fault.elsewhere:
                if fault.reason not in {"NOT_MASTER", "NO_MASTER", "RECOVERING"}:
                    uncertain = fault
                self.forget(address)
                self.learn(fault.master_address)
            if uncertain is not None and (deadline.over or not repeatable):
                raise OutcomeUnknown(uncertain.message, "OUTCOME_UNKNOWN", uncertain.metadata)
            if deadline.over:
                raise error_of(fault)
            if not backoff.follows(fault.master_address):
                await backoff.pause(deadline, fault.retry_after_s)
