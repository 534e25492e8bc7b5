"""Connections to the nodes of one cluster, and the search for its master.

Owns the channels, the list of known addresses and the master's address. The client learns the master from the status of
nodes and from the address in a NOT_MASTER. While someone watches (streams, and calls that take long), each node has a
question open that it answers once it knows another master. So a master that hangs without closing its connections is
replaced as soon as another node leads in a higher term, and watching costs nothing while nothing changes. A known
master is only replaced by one of a higher term. If no master is known, any leader is accepted, even in a lower term
than before: the cluster may have been restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from tickwheel.client.backoff import TRY_S_MIN, Backoff, Deadline, OwnTime
from tickwheel.client.connecting import timed_out, why_not, will_not_pass
from tickwheel.client.errors import (
    NOT_YET,
    ClientClosed,
    ClusterUnavailable,
    Fault,
    OutcomeUnknown,
    RequestRefused,
    error_of,
    fault_of_call,
    refused,
)
from tickwheel.client.in_process import found as found_in_process
from tickwheel.client.lanes import Doubt
from tickwheel.client.requests import TIMEOUT_S_MAX
from tickwheel.client.timing import REAL, Time
from tickwheel.client.tries import Tries, TryFailedError, TryLeftError
from tickwheel.client.versions import OlderNodes
from tickwheel.proto import admin_pb2
from tickwheel.proto.admin_pb2_grpc import AdminStub
from tickwheel.transport.channel import Channel
from tickwheel.transport.limits import Limits

_log = logging.getLogger("tickwheel.client")

A = TypeVar("A")
S = TypeVar("S")


MESSAGE_BYTES_MAX = 64 << 20
WATCH_PERIOD_S = 0.2
"""Pause before a node that did not answer is asked again, and between two questions to a node of an older version."""
AWAIT_S = 60.0
"""Each node leaves a question for another master open for this long; its answer may allow more."""
STATUS_TIMEOUT_S = 1.0
CONNECT_S = 1.5
"""A client that has reached no node by then raises an error with the reasons, unless the host of one answers and TLS or
the node's settings are awaited. Exceeds the time-out of a status call."""
CONNECT_PART_S = 0.1
"""A pause of this process counts for so much of CONNECT_S at most."""
NO_MASTER_S = 5.0
"""A stream that has found no master by then says so in the log: an election takes a second or two."""
TOLD_AGAIN_S = 60.0
"""Pause between two warnings that no node can be reached, or none knows a master."""
TRY_TIMEOUT_S = 3.0
"""Time-out of one try of a call: a hanging master is abandoned after this."""
ADDRESSES_MAX = 64
REFUSALS = frozenset({"UNAUTHENTICATED", "RIGHT_REQUIRED", "ROLE_REQUIRED"})
"""Reasons for which no other try and no other node will accept this caller."""
TLS_LOOK_S = 5.0
"""Pause between two checks whether certificate files were replaced."""

TLS_FILE_BYTES_MAX = 16 << 20
"""Of a file in PEM; all the authorities of a system take 1 MiB."""
TOKEN_LENGTH_MAX = 4_096
_TOKEN = re.compile(rf"[!-~]{{0,{TOKEN_LENGTH_MAX}}}")
CHANNEL_LIMITS = Limits(
    message_bytes_max=MESSAGE_BYTES_MAX,
    stream_window_bytes=8 << 20,
    connection_window_bytes=32 << 20,
    requests_bytes=MESSAGE_BYTES_MAX,
    # TCP alone would wait for a silent node for minutes.
    ask_alive_s=10.0,
    dead_s=3.0,
)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the authority of the nodes' certificates, and the client's own certificate and key if nodes ask."""

    ca_file: str | Path
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None
    """The name expected in the nodes' certificates, instead of the dialled host."""

    def stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Values that change when a file is replaced."""
        return tuple(_stamp(path) for path in (self.ca_file, self.cert_file, self.key_file))

    def context(self) -> ssl.SSLContext:
        """The context of a connection. Raises RequestRefused if files are missing, unreadable or do not match."""
        if self.cert_file and not self.key_file:
            raise _refused_file("key_file", "", f"the key of {self.cert_file}")
        if self.key_file and not self.cert_file:
            raise _refused_file("cert_file", "", f"the certificate of {self.key_file}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["h2"])
        try:
            # Only what is ASCII can be a certificate in PEM; text beside it may be anything.
            context.load_verify_locations(cadata=_read(self.ca_file, "ca_file").decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError) as error:
            raise _refused_file("ca_file", self.ca_file, f"certificates in PEM: {error}") from error
        if self.cert_file and self.key_file:
            _read(self.cert_file, "cert_file")
            _read(self.key_file, "key_file")
            try:
                context.load_cert_chain(self.cert_file, self.key_file, password=lambda: "")
            except (ssl.SSLError, ValueError) as error:
                allowed = f"a certificate and its key without a password, in PEM: {error}"
                raise _refused_file("cert_file", self.cert_file, allowed) from error
        return context


def _refused_file(field: str, value: object, limit: str) -> RequestRefused:
    metadata = {"field": f"tls.{field}", "value": str(value), "limit": limit}
    return RequestRefused(f"tls.{field}: {value or 'absent'}: {limit}", "INVALID_FIELD", metadata)


def _stamp(path: str | Path | None) -> tuple[int, int, int] | None:
    if not path:
        return None
    try:
        found = Path(path).stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _read(path: str | Path, field: str) -> bytes:
    try:
        with Path(path).open("rb") as opened:
            data = opened.read(TLS_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _refused_file(field, path, f"cannot be read: {error.strerror}") from error
    if len(data) > TLS_FILE_BYTES_MAX:
        raise _refused_file(field, path, f"at most {TLS_FILE_BYTES_MAX:,} bytes")
    return data


def checked_address(address: str) -> str:
    """The address, if it is host:port. Raises RequestRefused."""
    if not isinstance(address, str) or not _is_address(address):
        limit = "host:port, a port from 1 to 65535"
        metadata = {"field": "addresses", "value": str(address), "limit": limit}
        raise RequestRefused(f"addresses: {address!r}: {limit}", "INVALID_FIELD", metadata)
    return address


def checked_token(token: str) -> str:
    """The token, if it can be sent; empty for none. Raises RequestRefused, which does not show it."""
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        shown = f"{len(token)} characters" if isinstance(token, str) else type(token).__name__
        raise refused("token", shown, f"up to {TOKEN_LENGTH_MAX} printable characters of ASCII, without blanks")
    return token


def _is_address(address: str) -> bool:
    host, colon, port = address.rpartition(":")
    return bool(colon and host and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65_536)


def _unread(fault: Fault, timeout_s: float) -> ClusterUnavailable:
    """Of a call that only reads: nobody has to know whether a node has done it."""
    text = f"no answer within {timeout_s:.3g} s ({fault.message}); the call only reads, so it can be repeated"
    return ClusterUnavailable(text, "DEADLINE_EXCEEDED", fault.metadata)


class Cluster:
    """The nodes of one cluster, for one client."""

    def __init__(self, addresses: Sequence[str], tls: TlsFiles | None = None, token: str = "") -> None:
        if not addresses:
            raise RequestRefused("addresses: at least one", "INVALID_FIELD", {"field": "addresses", "limit": "1"})
        self._addresses = list(dict.fromkeys(map(checked_address, addresses)))
        self._tls = tls
        self._stamps = self._seen = tls.stamps() if tls else ()
        self._secured = tls.context() if tls else None
        self._looked_s = time.monotonic()
        self._retired: list[grpc.aio.Channel] = []
        """Channels with former credentials, kept for the calls still open on them."""
        self._token = checked_token(token)
        in_process = found_in_process(self._addresses[0])
        self.time: Time = REAL if in_process is None else in_process.time
        """By which leases and time-outs of handlers pass."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[tuple[object, grpc.aio.Channel], Any] = {}
        self._master: str | None = None
        self._term = 0
        self._finding: asyncio.Task[None] | None = None
        self._refused: Fault | None = None
        """The last answer's refusal to show this client a status; None if it was shown."""
        self._watchers: dict[object, Callable[[str], None]] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        """By address: what keeps a question for the master open."""
        self._older = OlderNodes()
        self._tries = Tries(WATCH_PERIOD_S, lambda: self._master, self.watch, self.unwatch)
        self._faults: dict[str, Fault] = {}
        """The last fault of each node whose status could not be read."""
        self._reached = False
        """Whether any node has ever answered."""
        self._found = asyncio.Event()
        """Set while a master is known."""
        self._told: Deadline | None = None
        """Set while the log says that no master can be reached: until when that is not said again."""
        self._closed = False

    def check_open(self) -> None:
        """Raises ClientClosed after `close`."""
        if self._closed:
            raise ClientClosed

    @property
    def addresses(self) -> list[str]:
        """The given addresses and those learnt since."""
        return list(self._addresses)

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to a node, made on first use. Raises ClientClosed after `close`."""
        self.check_open()
        self._renew()
        found = self._channels.get(address)
        if found is None:
            in_process = found_in_process(address)
            metadata = (("authorization", f"Bearer {self._token}"),) if self._token else ()
            if in_process is not None:
                found = in_process.channel(metadata)
            else:
                name = (self._tls and self._tls.server_name) or ""
                own = Channel(address, CHANNEL_LIMITS, secured=self._secured, server_name=name, metadata=metadata)
                found = cast(grpc.aio.Channel, own)  # as far as stubs use one
            self._channels[address] = found
        return found

    def _renew(self) -> None:
        """Use replaced certificate files for all later calls."""
        if self._tls is None or time.monotonic() - self._looked_s < TLS_LOOK_S:
            return
        self._looked_s = time.monotonic()
        before, self._seen = self._seen, self._tls.stamps()
        # Two checks must find the same files: a certificate and its key are replaced one after the other.
        if self._seen == self._stamps or self._seen != before:
            return
        try:
            secured = self._tls.context()
        except RequestRefused as error:
            self._stamps = self._seen  # until they change again
            _log.warning("new certificates cannot be used, the old ones stay: %s", error)
            return
        _log.info("the certificates were read again")
        self._stamps, self._secured = self._seen, secured
        for channel in self._channels.values():
            if isinstance(channel, Channel):
                channel.retire()
        self._retired += self._channels.values()
        self._channels = {}
        self._stubs.clear()

    def stub(self, kind: Callable[[grpc.aio.Channel], S], channel: grpc.aio.Channel) -> S:
        """A service's stub on a channel, made once, since a new stub creates all its methods."""
        found: S | None = self._stubs.get((kind, channel))
        if found is None:
            found = self._stubs[kind, channel] = kind(channel)
        return found

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        self._tries.close()
        tasks: list[asyncio.Task[None]] = self._end_following()
        if self._finding is not None:
            self._finding.cancel()
            tasks.append(self._finding)
            self._finding = None
        await asyncio.gather(*tasks, return_exceptions=True)
        channels, self._channels = [*self._channels.values(), *self._retired], {}
        self._retired = []
        self._stubs.clear()
        await asyncio.gather(*(channel.close(None) for channel in channels))

    # -- who is the master

    def learn(self, address: str, term: int = 0) -> None:
        """A node has named the master. Without a term that is a hint, used if no master is known."""
        if not address or self._closed or (term < self._term if term else self._master is not None):
            return
        self._term = term or self._term
        if address not in self._addresses and len(self._addresses) < ADDRESSES_MAX:
            self._addresses.append(address)
            self._follow_all()
        if self._master != address:
            self._master = address
            self._found.set()
            if self._told is not None:
                self._told = None
                _log.info("a master can be reached again: %s", address)
            for moved in list(self._watchers.values()):
                moved(address)

    def add(self, address: str) -> None:
        """Add the address of another node of the cluster, as a node has told it. One that is no address is passed over:
        the other nodes can be reached, and an operator must be able to remove that member."""
        if address in self._addresses or not _is_address(address):
            return
        if len(self._addresses) < ADDRESSES_MAX:
            self._addresses.append(address)
            self._follow_all()

    def forget(self, address: str) -> None:
        """Forget the master if it is this node, which did not answer as one."""
        if self._master == address:
            self._master = None
            self._found.clear()

    @property
    def known_master(self) -> str:
        """The master's address as far as it is known; empty: it is not."""
        return self._master or ""

    async def master(self, deadline: Deadline, *, patient: bool = False) -> str:
        """The master's address, searched for if it is not known. Raises ClusterUnavailable at the deadline.

        If no node was ever reached, it raises after CONNECT_S already; with `patient` only if to wait cannot help.
        With `patient`, the log then says why no node can be reached, after NO_MASTER_S also that none knows a master,
        and says it again every TOLD_AGAIN_S.
        """
        if self._master is not None:
            return self._master
        search = object()
        try:
            return await self._search(search, deadline, patient)
        finally:
            self.unwatch(search)

    async def _search(self, search: object, deadline: Deadline, patient: bool) -> str:
        backoff = Backoff(max_s=WATCH_PERIOD_S)
        connecting, electing = OwnTime(CONNECT_S), Deadline(NO_MASTER_S)
        while self._master is None:
            self.check_open()
            if self._finding is None:
                self._finding = asyncio.ensure_future(self._find())
            finding = self._finding
            left_s = deadline.left_s
            if (patient or not self._reached) and not connecting.over:
                left_s = min(left_s, connecting.left_s, CONNECT_PART_S)
            await asyncio.wait({finding}, timeout=left_s)
            connecting.count(left_s)
            if finding.done() and self._finding is finding:
                self._finding = None
                if not finding.cancelled():
                    finding.result()
            if self._master is None:
                if self._refused is not None:
                    raise error_of(self._refused)
                if deadline.over:
                    raise self._unavailable(f"no master answered within {deadline.timeout_s:.3g} s")
                if connecting.over and self._unreachable(patient):
                    raise self._unavailable("no node can be reached")
                if patient and connecting.over:
                    self._tell_unreachable(electing.over)
                if finding.done():
                    # While nodes are followed, each says at once who the new master is.
                    self.watch(search, lambda _: None)
                    pause_s = min(backoff.next_s(), deadline.left_s)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await self._found.wait()
                    connecting.count(pause_s)
        return self._master

    def _tell_unreachable(self, no_master: bool) -> None:
        """Say in the log that no known node answers, or with `no_master` that none knows a master, and why, unless that
        was said a short time ago."""
        silent = all(address in self._faults for address in self._addresses)
        if (silent or no_master) and (self._told is None or self._told.over):
            self._told = Deadline(TOLD_AGAIN_S)
            what = "no node can be reached" if silent else "no node knows a master"
            _log.warning("%s", self._unavailable(f"{what}, the client keeps trying"))

    def _unreachable(self, patient: bool) -> bool:
        """Whether no node was ever reached, and each has a fault that cannot pass, or (not `patient`) of connecting."""
        faults = [self._faults.get(address) for address in self._addresses]
        return not self._reached and all(
            fault is not None and (will_not_pass(fault) or (fault.not_sent and not patient)) for fault in faults
        )

    def _unavailable(self, what: str) -> ClusterUnavailable:
        by_reason: dict[str, list[str]] = {}
        for address in self._addresses:
            fault = self._faults.get(address)
            why = "answers, and knows no master" if fault is None else self.why(fault)
            by_reason.setdefault(why, []).append(address)
        said = "; ".join(f"{', '.join(addresses)}: {why}" for why, addresses in by_reason.items())
        return ClusterUnavailable(f"{what}: {said}", "NO_MASTER")

    def with_faults(self, text: str) -> str:
        """A text about a call, with what is wrong with each node that could not be asked last."""
        faults = [
            f"{address}: {self.why(self._faults[address])}" for address in self._addresses if address in self._faults
        ]
        return f"{text} ({'; '.join(faults)})" if faults else text

    def why(self, fault: Fault) -> str:
        """The reason, for the user, why a node did not answer a question about its status."""
        return why_not(fault, tls=self._secured is not None)

    async def statuses(self, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, admin_pb2.NodeStatus | Fault]:
        """The status of each known node, by address; a Fault for a node without an answer."""
        addresses = list(self._addresses)
        answers = await asyncio.gather(*(self._status(address, timeout_s) for address in addresses))
        return dict(zip(addresses, answers, strict=True))

    async def _status(self, address: str, timeout_s: float) -> admin_pb2.NodeStatus | Fault:
        channel = self.channel(address)
        try:
            return await self.stub(AdminStub, channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            fault = fault_of_call(error)
        unheard = channel.get_state() is grpc.ChannelConnectivity.IDLE
        return timed_out() if fault.reason == "DEADLINE_EXCEEDED" and unheard else fault

    async def _find(self) -> None:
        """Ask all nodes; returns as soon as a master is known."""
        asked = {asyncio.create_task(self._ask(address)) for address in self._addresses}
        claims: list[tuple[int, str]] = []
        try:
            for done in asyncio.as_completed(asked):
                claims += await done
                if self._master is not None:
                    return
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        claims = [claim for claim in claims if claim[1] not in self._faults]
        if claims:
            # All nodes are in lower terms than the one known here: the cluster was restored or founded anew.
            self._term, address = max(claims)
            self.learn(address, self._term)

    async def _ask(self, address: str) -> list[tuple[int, str]]:
        """Learn the master from one node. Returns its claims, (term, address), that are not accepted at once."""
        status = await self._status(address, STATUS_TIMEOUT_S)
        if isinstance(status, Fault):
            self._faults[address] = status
            if status.reason in REFUSALS:
                self._refused = status
            return []
        self._refused = None
        self._faults.pop(address, None)
        self._reached = True
        for peer in status.peers:
            if peer.client_address:  # so the loss of the only node that the caller named is borne
                self.add(peer.client_address)
        leads = status.role == admin_pb2.MASTER
        named = address if leads else status.master_address
        self._heard(named, status.term, leads=leads)
        return [(status.term, named)] if named else []

    def _heard(self, named: str, term: int, *, leads: bool) -> None:
        """A node has named the master of a term. `leads`: itself."""
        if named and term > self._term - leads:
            self.learn(named, term)

    # -- watching, for streams

    def watch(self, key: object, moved: Callable[[str], None]) -> None:
        """Call `moved(address)` whenever another node has become master, until `unwatch`."""
        self._watchers[key] = moved
        self._follow_all()

    def unwatch(self, key: object) -> None:
        """End the calls for `key`. Idempotent."""
        self._watchers.pop(key, None)
        if not self._watchers:
            self._end_following()

    def _follow_all(self) -> None:
        """While someone watches, follow each known node."""
        for address in self._addresses if self._watchers and not self._closed else ():
            if address not in self._following:
                self._following[address] = asyncio.ensure_future(self._follow(address))

    def _end_following(self) -> list[asyncio.Task[None]]:
        ended, self._following = list(self._following.values()), {}
        for task in ended:
            task.cancel()
        return ended

    async def _follow(self, address: str) -> None:
        """Keep a question for the master open at a node. A node that fails is asked again soon."""
        said = admin_pb2.AwaitMasterResponse()
        while True:
            # Not all clients at the same moment.
            wait_s = max(AWAIT_S, said.wait_ms_max / 1_000) * random.uniform(0.5, 1.0)
            try:
                channel = self.channel(address)
                if self._older.lacks(channel):
                    await self._ask(address)
                else:
                    request = admin_pb2.AwaitMasterRequest(
                        term=said.term, master_address=said.master_address, wait_ms=round(wait_s * 1_000)
                    )
                    # Without gRPC's own time limit, which differs each time: the server need not decode the header.
                    async with asyncio.timeout(wait_s + STATUS_TIMEOUT_S):
                        answer = await self.stub(AdminStub, channel).AwaitMaster(request)
                    news, said = answer != said, answer
                    named = address if said.leads else said.master_address
                    self._heard(named, said.term, leads=said.leads)
                    if news:
                        continue
            except grpc.aio.AioRpcError as error:
                said = admin_pb2.AwaitMasterResponse()
                if self._older.note(channel, error):
                    continue
            except TimeoutError:
                said = admin_pb2.AwaitMasterResponse()
            except Exception:  # a mistake of this client: the others are still asked, and this node again
                _log.exception("a question for the master at %s failed; it is repeated in %g s", address, TOLD_AGAIN_S)
                await asyncio.sleep(TOLD_AGAIN_S)
            await asyncio.sleep(WATCH_PERIOD_S)

    # -- one call at the master

    async def call(
        self,
        invoke: Callable[[grpc.aio.Channel, float], Awaitable[A]],
        timeout_s: float,
        *,
        repeatable: bool = True,
        try_timeout_s: float = TRY_TIMEOUT_S,
        doubt: Doubt | None = None,
        divisible: bool = False,
        reads: bool = False,
        stays: bool = False,
    ) -> A:
        """Run a unary call at the master, and repeat it while that is safe and can help.

        `repeatable` False: raises OutcomeUnknown once the call may have been carried out. `reads`: it changes nothing,
        so raises ClusterUnavailable instead. `doubt`: for a numbered request, which counts as refused only if no try
        was accepted; afterwards it tells whether one may have been. `divisible`: the caller can do with less, so it
        gets a refusal for the moment (`Fault.later`) at once, unless an earlier try may have been accepted. `stays`:
        the call makes another node master, so it waits for its answer though one does.
        """
        deadline = Deadline(timeout_s)
        backoff = Backoff()
        numbered, doubt = doubt is not None, doubt or Doubt(0)
        waits: Fault | None = None
        while True:
            try:
                address = await self.master(deadline)
            except (ClusterUnavailable, ClientClosed) as error:
                if reads or not doubt.exists:
                    if waits is None or isinstance(error, ClientClosed):
                        raise
                    raise error_of(replace(waits, message=self.with_faults(waits.message))) from error
                raise OutcomeUnknown(str(error), "OUTCOME_UNKNOWN", error.metadata) from error
            doubt.sending()
            try:
                try_s = max(0.001, min(deadline.left_s, try_timeout_s, TIMEOUT_S_MAX))
                answer = await self._tries.run(address, invoke(self.channel(address), try_s), stays=stays)
            except grpc.aio.AioRpcError as error:
                fault = fault_of_call(error)
                if fault.reason == "DEADLINE_EXCEEDED":
                    fault = Fault(fault.reason, f"{address} did not answer within {try_s:.3g} s")
            except TryFailedError as error:
                fault = error.fault
            except TryLeftError:
                fault = Fault("UNAVAILABLE", f"{address} did not answer, and the master has changed")
            else:
                doubt.accepted()
                return answer
            doubt.refused(fault)
            later = fault.later and not (divisible and not doubt.exists)
            if not (fault.elsewhere or later):
                raise doubt.error(fault) if numbered else error_of(fault)
            waits = fault if fault.reason in NOT_YET else None
            if fault.elsewhere:
                self.forget(address)
                self.learn(fault.master_address, fault.master_term)
            if doubt.exists and not reads and (deadline.over or not repeatable):
                raise OutcomeUnknown(fault.message, "OUTCOME_UNKNOWN", fault.metadata)
            if deadline.over:
                raise _unread(fault, timeout_s) if reads and doubt.exists else error_of(fault)
            if not backoff.follows(fault.master_address):
                await backoff.pause(deadline, fault.retry_after_s)
                if deadline.left_s < TRY_S_MIN and not doubt.exists:
                    raise error_of(fault)
