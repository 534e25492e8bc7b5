"""Frames between the nodes of a cluster over gRPC streams (asyncio).

Each node dials every other node and writes its frames into that stream. The other node's frames come on the stream
that it dialled itself. A stream begins with a hello. The called side answers it once it has checked the caller's
cluster, node id and format, and (with TLS) that the certificate belongs to that member. Only then is the peer reported
connected. A stream that ends, for any reason, is dialled again after 200 ms. The hello lists the members that the
caller knows (`hello_of`), since the called side may not have read of the caller yet.

One process at a time counts as a peer. A second one with a copy of its data directory has the same identity: it is
refused while the first one is heard. If it came while the first one was silent, it stays, and the first one is told to
end: the two must not take turns.

Checkpoints travel in a separate, rate-limited call on a separate channel, so that they delay no heartbeat.
Implements the Network port, and the node's CheckpointSource.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import google_crc32c
import grpc

from tickwheel.proto.common_pb2 import HeldFile
from tickwheel.proto.peer_pb2 import (
    CheckpointChunk,
    FetchCheckpointRequest,
    Hello,
    MemberShown,
    PeerFrame,
    Refused,
)
from tickwheel.replication.copied_file import COMPARED_BYTES_PER_S, HELD_FILES_MAX, CopiedFile, pieces
from tickwheel.replication.frames import FORMAT_VERSION, Refusal
from tickwheel.replication.log import NO_INTRODUCTION, Introduction, Member
from tickwheel.replication.plausible import INDEX_MAX, ImplausibleFrameError
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.transport.client import AddressError, Call, CallError, ClientConnection, Names, connect
from tickwheel.transport.limits import Limits
from tickwheel.transport.server import Opened
from tickwheel.transport.server import ServerStream as Context

REDIAL_S = 0.2
HELLO_S = 2.0
QUEUE_BYTES_MAX = 64 << 20
"""Bytes of frames queued for one peer. Above it `send` returns False, and the log tries again later."""
BUNDLE_BYTES_MAX = 256 << 10
BUNDLE_FRAMES_MAX = 256
COPY_BYTES_PER_S = 64 << 20
COPY_BEGIN_S = 120.0
"""Until the first chunk of a checkpoint: the peer may have to write the checkpoint first."""
COPY_SILENCE_S = 20.0
"""Between chunks. A machine that loses power ends no connection, so the receiver needs a bound of its own."""
PEER_LIMITS = Limits(
    message_bytes_max=64 << 20,
    stream_window_bytes=8 << 20,
    connection_window_bytes=32 << 20,
    requests_bytes=64 << 20,
    ask_alive_s=5.0,
    dead_s=3.0,
    idle_s=300.0,
)
"""Limits of the connections between nodes, for both sides. A stream is dialled again if the peer, or even its kernel,
has acknowledged nothing for `dead_s`. Without the bound the kernel retransmits after ever longer pauses, up to two
minutes, and the peer hears nothing for as long after its network is back."""
CONNECT_S = 0.6
"""For an attempt to connect: three round trips for TCP and TLS."""
HEARD_S = 2.0
"""A process that has sent nothing for so long may be gone, although its stream is open. Members ask each other for the
time more often than that."""
EARLIER_MAX = 16
LOOK_UP_S = 5.0
"""For the look-up of a name; one that takes longer goes on, and the next attempt finds its answer or waits for it."""
EXCHANGE = "/tickwheel.v1.Peer/Exchange"
FETCH_CHECKPOINT = "/tickwheel.v1.Peer/FetchCheckpoint"


class Inbox(Protocol):
    """The receiver of frames and connection changes: the node's host. After an unexpected error in it the node must not
    go on: its state may be half changed. Ending the stream alone is not enough, for the peer would dial again."""

    def receive(self, peer_id: str, frame: PeerFrame) -> bool:
        """Take a frame. False: the node need not be woken for it. Raises ImplausibleFrameError: the frame had no
        effect, and its link is to be dropped."""
        ...

    def peer_connected(self, peer_id: str) -> None: ...

    def peer_disconnected(self, peer_id: str) -> None: ...


@dataclass(slots=True)
class _Link:
    """The stream this node dials to one peer."""

    address: str
    task: asyncio.Task[None] | None = None
    queue: deque[bytes] = field(default_factory=deque)
    """Serialized frames."""
    queue_bytes: int = 0
    call: Call | None = None
    """The open stream."""
    leaving: bool = False
    """The queue is about to be written, or waits for room in the stream's windows."""
    waiting: asyncio.Task[None] | None = None
    """What waits for that room."""


def _next_message(link: _Link) -> bytes:
    """Take the next message from a queue that is not empty: several small frames go as one bundle."""
    queue = link.queue
    frame = queue.popleft()
    size = len(frame)
    frames = [frame]
    while queue and len(frames) < BUNDLE_FRAMES_MAX and size + len(queue[0]) <= BUNDLE_BYTES_MAX:
        frame = queue.popleft()
        size += len(frame)
        frames.append(frame)
    link.queue_bytes -= size
    return frame if len(frames) == 1 else bundled(frames)


_BUNDLE, _FRAME = b"\x82\x02", b"\x0a"
"""Tags of `PeerFrame.bundle` and `FrameBundle.frames`."""


def bundled(frames: Sequence[bytes]) -> bytes:
    """A serialized PeerFrame that bundles serialized frames. To make it of messages would copy each frame twice."""
    parts, size = list[bytes](), 0
    for frame in frames:
        head = _FRAME + _varint(len(frame))
        size += len(head) + len(frame)
        parts += head, frame
    return b"".join((_BUNDLE, _varint(size), *parts))


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


class GrpcNetwork:
    """The calling side: a stream to each peer. All methods are called on one event loop."""

    def __init__(
        self,
        node_id: str,
        cluster_id: str,
        disk_uuid: str,
        peer_address: str,
        *,
        secured: Callable[[], ssl.SSLContext | None],
        warn: Callable[[str, str], None],
        unforeseen: Callable[[str, Exception], None],
        refused: Callable[[Refusal], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`secured()` gives the TLS context, and is called before each dial, since certificates are renewed.

        `warn(peer_id, text)`: a peer cannot be reached, for the operator. `unforeseen(peer_id, error)`: the same, for
        an unexpected exception. `refused(why)`: a peer will never accept this node as it is. `failed(error)`: the node
        raised an exception while it took a change of a connection or a copied checkpoint; this ends the process.
        """
        self._node_id = node_id
        self._cluster_id = cluster_id
        self._disk_uuid = disk_uuid
        self._peer_address = peer_address
        self._boot_id = secrets.randbits(64) | 1
        self._secured = secured
        self._names = Names()
        self._warn = warn
        self._unforeseen = unforeseen
        self._refused = refused
        self._failed = failed
        self._links: dict[str, _Link] = {}
        self._up: dict[str, _Link] = {}
        """The links reported as connected. A replaced link may end only after its successor has begun."""
        self._inbox: Inbox | None = None
        self._wake: Callable[[], None] = lambda: None
        self._introduction: Callable[[], Introduction] = lambda: NO_INTRODUCTION
        self._copies: set[asyncio.Task[None]] = set()
        self._stopped = False

    def attach(self, inbox: Inbox, wake: Callable[[], None], introduction: Callable[[], Introduction]) -> None:
        """Start dialling. `wake` is called after each piece of input; `introduction` gives the members for a hello."""
        self._inbox = inbox
        self._wake = wake
        self._introduction = introduction
        for peer_id, link in self._links.items():
            if link.task is None:
                link.task = asyncio.get_running_loop().create_task(self._dial(peer_id, link))

    async def stop(self) -> None:
        """End all streams and copies. Idempotent."""
        self._stopped = True
        tasks = [link.task for link in self._links.values() if link.task is not None] + list(self._copies)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- Network port

    def set_peers(self, addresses: dict[str, str]) -> None:
        for peer_id in [peer for peer in self._links if addresses.get(peer) != self._links[peer].address]:
            link = self._links.pop(peer_id)
            if link.task is not None:
                link.task.cancel()
        for peer_id, address in addresses.items():
            if peer_id not in self._links:
                link = self._links[peer_id] = _Link(address)
                if self._inbox is not None and not self._stopped:
                    link.task = asyncio.get_running_loop().create_task(self._dial(peer_id, link))

    def send(self, peer_id: str, frame: PeerFrame) -> bool:
        link = self._links.get(peer_id)
        if link is None or self._up.get(peer_id) is not link or link.queue_bytes > QUEUE_BYTES_MAX:
            return False
        data = frame.SerializeToString()
        link.queue.append(data)
        link.queue_bytes += len(data)
        if not link.leaving:
            link.leaving = True
            asyncio.get_running_loop().call_soon(self._write, peer_id, link)
        return True

    def _write(self, peer_id: str, link: _Link) -> None:
        """Write what was queued in a pass of the loop."""
        call = link.call
        try:
            while call is not None and link.queue:
                message = _next_message(link)
                if not call.write_now(message):
                    late = self._write_late(peer_id, link, call, message)
                    link.waiting = asyncio.get_running_loop().create_task(late)
                    return
        except Exception as error:
            self._unwritten(peer_id, call, error)
            return
        link.leaving = False

    async def _write_late(self, peer_id: str, link: _Link, call: Call, message: bytes) -> None:
        try:
            await call.write(message)
        except CallError:
            return  # `_talk` hears of it
        except Exception as error:
            self._unwritten(peer_id, call, error)
            return
        self._write(peer_id, link)

    def _unwritten(self, peer_id: str, call: Call | None, error: Exception) -> None:
        """Tell of an unexpected exception, and dial anew: on this stream nothing more would be written."""
        self._unforeseen(peer_id, error)
        if call is not None:
            call.cancel()

    def _hello(self, peer_id: str) -> bytes:
        hello = PeerFrame(
            cluster_id=self._cluster_id,
            sender_id=self._node_id,
            receiver_id=peer_id,
            boot_id=self._boot_id,
            format_version=FORMAT_VERSION,
            disk_uuid=self._disk_uuid,
            hello=hello_of(self._peer_address, self._introduction()),
        )
        return hello.SerializeToString()

    def learn(self, peer_id: str, address: str) -> None:
        """A member has called this node: dial it back if it is unknown here, as before this node knows its members."""
        if peer_id not in self._links and address:
            self.set_peers({**{known: link.address for known, link in self._links.items()}, peer_id: address})

    async def _connect(self, peer_id: str, address: str) -> ClientConnection:
        """Raises OSError, TimeoutError."""
        async with asyncio.timeout(LOOK_UP_S):
            places = await self._names.find(address)
        problem: Exception = OSError(f"{address} has no address")
        for place in places:
            try:
                async with asyncio.timeout(CONNECT_S):
                    return await connect(
                        place,
                        PEER_LIMITS,
                        secured=self._secured(),
                        server_name=peer_id,
                        silence_ms=int(PEER_LIMITS.dead_s * 1_000),
                    )
            except OSError as error:  # TimeoutError is one
                problem = error
        raise problem

    async def _dial(self, peer_id: str, link: _Link) -> None:
        """Keep a stream to one peer open, until another link takes its place."""
        # The condition does not rely on cancellation alone: that can get lost during the clean-up of a broken stream.
        while not self._stopped and self._links.get(peer_id) is link:
            try:
                async with await self._connect(peer_id, link.address) as connection:
                    await self._talk(peer_id, link, connection)
            except CallError as error:
                if error.code is not grpc.StatusCode.UNAVAILABLE:
                    self._warn(peer_id, f"stream to {link.address} ended: {error.details}")
            except TimeoutError:
                self._warn(peer_id, f"{link.address} does not answer")
            except AddressError as error:
                self._warn(peer_id, str(error))
            except ssl.SSLError as error:
                self._warn(peer_id, f"no TLS with {link.address}: {error}")
            except OSError:
                pass  # nobody listens there, or the connection broke: the status shows who is missing
            except Exception as error:  # else the task would end with it unheard, and this peer never be called again
                self._unforeseen(peer_id, error)
            finally:
                self._down(peer_id, link)
            await asyncio.sleep(REDIAL_S)

    def _down(self, peer_id: str, link: _Link) -> None:
        link.queue.clear()
        link.queue_bytes, link.leaving = 0, False
        if self._up.get(peer_id) is link:
            del self._up[peer_id]
            if self._inbox is not None and not self._stopped:
                self._tell(self._inbox.peer_disconnected, peer_id)

    def _tell(self, changed: Callable[[str], None], peer_id: str) -> None:
        try:
            changed(peer_id)
        except Exception as error:
            self._failed(error)
        self._wake()

    async def _talk(self, peer_id: str, link: _Link, connection: ClientConnection) -> None:
        call = connection.call(EXCHANGE, bytes, PeerFrame.FromString)  # frames are serialized as they are queued
        async with asyncio.timeout(HELLO_S):
            await call.write(self._hello(peer_id))
            answer = await call.read()
        if answer is None:
            return
        if answer.WhichOneof("body") == "refused":
            self._warn(peer_id, f"{link.address} refuses this node: {answer.refused.reason}")
            if answer.refused.final:
                reason = f"{peer_id} refuses this node: {answer.refused.reason}"
                self._refused(Refusal(reason, final=True, removed=answer.refused.removed))
            return
        assert self._inbox is not None
        if peer_id in self._up:
            self._down(peer_id, self._up[peer_id])
        self._up[peer_id], link.call = link, call
        self._tell(self._inbox.peer_connected, peer_id)
        try:
            await call.read()  # the called side says nothing more: this is the end
        finally:
            link.call = None
            if link.waiting is not None:
                link.waiting.cancel()
            call.cancel()

    # -- CheckpointSource

    def fetch(
        self,
        peer_id: str,
        held: Sequence[HeldFile],
        chunk: Callable[[CheckpointChunk], bool | None],
        done: Callable[[str | None], None],
    ) -> None:
        link = self._links.get(peer_id)
        if link is None:
            done(f"{peer_id} is not known")
            return
        request = FetchCheckpointRequest(cluster_id=self._cluster_id, node_id=self._node_id, held=held[:HELD_FILES_MAX])
        task = asyncio.get_running_loop().create_task(self._copy(peer_id, link.address, request, chunk, done))
        self._copies.add(task)
        task.add_done_callback(self._copy_ended)

    def _copy_ended(self, task: asyncio.Task[None]) -> None:
        self._copies.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._stopped:
            self._failed(error)

    async def _copy(
        self,
        peer_id: str,
        address: str,
        request: FetchCheckpointRequest,
        chunk: Callable[[CheckpointChunk], bool | None],
        done: Callable[[str | None], None],
    ) -> None:
        problem: str | None = "the copy ended early"
        wanted = True
        patience_s = COPY_BEGIN_S
        try:
            async with await self._connect(peer_id, address) as connection:
                call = connection.call(
                    FETCH_CHECKPOINT, FetchCheckpointRequest.SerializeToString, CheckpointChunk.FromString
                )
                await call.write(request)
                call.end()
                while True:
                    async with asyncio.timeout(patience_s):
                        received = await call.read()
                    if received is None:
                        break
                    patience_s = COPY_SILENCE_S
                    if received.comparing:
                        continue
                    wanted = chunk(received) is not False
                    if not wanted:
                        break
                    if received.last:
                        problem = None
        except CallError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"nothing came for {patience_s:.0f} s"
        except OSError as error:
            problem = str(error)
        if problem is not None and wanted:
            self._warn(peer_id, f"the checkpoint of {address} could not be copied: {problem}")
        done(problem)
        self._wake()


@dataclass(slots=True)
class _Caller:
    """A process that was accepted as a peer."""

    boot_id: int
    """0: of a version that does not send it."""
    heard_s: float = 0.0
    """When it sent something last, by the loop's clock."""
    streams: int = 0
    earlier: deque[int] = field(default_factory=lambda: deque(maxlen=EARLIER_MAX))
    """Those that counted before."""


@dataclass(slots=True)
class _Stream:
    """A stream that a peer has dialled."""

    context: Context
    hello: PeerFrame | None = None
    """Its first frame, if it was accepted."""
    caller: _Caller | None = None
    """Once it has sent something after that."""


class PeerService:
    """The called side: receives the frames of accepted peers, and sends them checkpoints."""

    def __init__(
        self,
        network_of: tuple[str, str],
        inbox: Inbox,
        wake: Callable[[], None],
        *,
        disk: Disk,
        refusal: Callable[[str, str, Introduction, Context], Refusal | None],
        removed: Callable[[str], bool],
        greeted: Callable[[str, str], None],
        checkpoint: Callable[[], Awaitable[Sequence[CopiedFile] | str]],
        progressed: Callable[[Sequence[CopiedFile]], bool],
        copied: Callable[[Sequence[CopiedFile]], None],
        dropped: Callable[[str, str], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`network_of`: (node id, cluster id).

        `refusal(sender_id, disk_uuid, shown, context)`: why a peer that shows these members may not connect; None: it
        may. `removed(peer_id)`: whether a peer is no member any more. `greeted(peer_id, address)`: an accepted peer has
        called. `progressed(files)`: called with each chunk of a copy; False: the files are no longer kept for it.
        `dropped(peer_id, text)`: a peer's link was dropped. `failed(error)`: the node raised an exception while it took
        a frame; this ends the process.
        """
        self._dropped = dropped
        self._failed = failed
        self._node_id, self._cluster_id = network_of
        self._inbox = inbox
        self._wake = wake
        self._disk = disk
        self._refusal = refusal
        self._removed = removed
        self._greeted = greeted
        self._checkpoint = checkpoint
        self._progressed = progressed
        self._copied = copied
        self._callers: dict[str, _Caller] = {}

    def _refuses(self, hello: PeerFrame, context: Context) -> Refusal | None:
        if hello.WhichOneof("body") != "hello":
            return Refusal("a stream begins with a hello")
        if hello.cluster_id != self._cluster_id:
            text = f"this is cluster {self._cluster_id}, not {hello.cluster_id}: check cluster.id and the addresses"
            return Refusal(text)
        if hello.receiver_id != self._node_id:
            text = f"this is node {self._node_id}, not {hello.receiver_id}: check the addresses of the members"
            return Refusal(text)
        if not FORMAT_VERSION - 1 <= hello.format_version <= FORMAT_VERSION + 1:
            text = f"formats {hello.format_version} and {FORMAT_VERSION} are not compatible: upgrade one step at a time"
            return Refusal(text)
        if hello.sender_id == self._node_id:
            return Refusal(f"two nodes are named {self._node_id}")
        refusal = self._refusal(hello.sender_id, hello.disk_uuid, shown_in(hello.hello), context)
        return refusal or self._refuses_process(hello)

    def _refuses_process(self, hello: PeerFrame) -> Refusal | None:
        """Why this process does not count as the peer: another one does. Nodes of earlier versions send no boot id."""
        caller = self._callers.get(hello.sender_id)
        if caller is None or hello.boot_id in (0, caller.boot_id):
            return None
        if hello.boot_id in caller.earlier:
            return Refusal(
                f"another process runs as {hello.sender_id}, with a copy of this node's data directory, and came while "
                "this one was away: stop the one that does not belong here, then start the other one again",
                final=True,
            )
        if caller.streams and asyncio.get_running_loop().time() - caller.heard_s < HEARD_S:
            return Refusal(
                f"another process runs as {hello.sender_id}, with a copy of this node's data directory: stop the one "
                "that does not belong here. A new member needs an id of its own and an empty directory"
            )
        return None

    def _came(self, hello: PeerFrame) -> _Caller:
        """The process, which counts from here on: it has sent something after the answer to its hello, so it runs. A
        hello may be read long after its process has ended, and what another one sent meanwhile only after it."""
        before = self._callers.get(hello.sender_id)
        if before is not None and before.boot_id == hello.boot_id:
            return before
        caller = _Caller(hello.boot_id)
        if before is not None:
            caller.earlier.extend((*before.earlier, before.boot_id))
        if hello.boot_id:
            self._callers[hello.sender_id] = caller
        return caller

    def _replaced(self, peer_id: str, caller: _Caller) -> bool:
        """Whether another process counts as the peer by now."""
        return bool(caller.boot_id) and self._callers[peer_id] is not caller

    def Exchange(self, context: Context) -> Opened:
        """Open a stream of a peer's frames. They reach the inbox in the pass of the loop that has read them."""
        stream = _Stream(context)
        return Opened(partial(self._take, stream), partial(self._ended, stream))

    def _take(self, stream: _Stream, message: PeerFrame) -> None:
        hello, context = stream.hello, stream.context
        if hello is None:
            self._greet(stream, message)
            return
        peer_id, caller = hello.sender_id, stream.caller
        if caller is None:
            if self._refuses_process(hello):
                context.finish()  # it calls again, and is told: the other process was heard after all
                return
            caller = stream.caller = self._came(hello)
            caller.streams += 1
        if self._removed(peer_id) or self._replaced(peer_id, caller):
            context.finish()  # it calls again, and is told
            return
        caller.heard_s = asyncio.get_running_loop().time()
        try:
            for frame in message.bundle.frames if message.HasField("bundle") else (message,):
                if self._inbox.receive(peer_id, frame):
                    self._wake()
        except ImplausibleFrameError as error:
            self._dropped(peer_id, f"its frames cannot be true: {error}")
            context.fail(grpc.StatusCode.INVALID_ARGUMENT, f"{self._node_id} drops this link: {error}")
        except Exception as error:
            self._failed(error)

    def _greet(self, stream: _Stream, hello: PeerFrame) -> None:
        refusal, context = self._refuses(hello, stream.context), stream.context
        answer = PeerFrame(cluster_id=self._cluster_id, sender_id=self._node_id)
        if refusal is not None:
            answer.refused.CopyFrom(Refused(reason=refusal.reason, final=refusal.final, removed=refusal.removed))
            context.post(answer.SerializeToString())
            context.finish()
            return
        stream.hello = hello
        self._greeted(hello.sender_id, hello.hello.peer_address)
        answer.hello.CopyFrom(Hello())
        context.post(answer.SerializeToString())

    def _ended(self, stream: _Stream) -> None:
        if stream.caller is not None:
            stream.caller.streams -= 1

    async def FetchCheckpoint(
        self, request: FetchCheckpointRequest, context: Context
    ) -> AsyncIterator[CheckpointChunk]:
        if request.cluster_id != self._cluster_id:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this is cluster {self._cluster_id}")
        refusal = self._refusal(request.node_id, "", NO_INTRODUCTION, context)
        if refusal is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal.reason)
        if len(request.held) > HELD_FILES_MAX:
            text = f"held names {len(request.held)} files, {HELD_FILES_MAX} are allowed"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        held = {file.path: file for file in request.held}
        files = await self._checkpoint()
        if isinstance(files, str):
            await context.abort(grpc.StatusCode.UNAVAILABLE, files)
            return
        try:
            total_bytes = sum(file.bytes for file in files)
            for number, file in enumerate(files):
                async for chunk in self._sent(
                    file, held.get(file.path), total_bytes, last_file=number == len(files) - 1
                ):
                    # Checked after the read: the file was there, unchanged, until then.
                    if not self._progressed(files):
                        raise DiskError("the copy stood still for too long: a later checkpoint replaces this one")
                    yield chunk
        except DiskError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            self._copied(files)

    async def _sent(
        self, copied: CopiedFile, held: HeldFile | None, total_bytes: int, *, last_file: bool
    ) -> AsyncIterator[CheckpointChunk]:
        """The chunks of a file: all, or, if the receiver holds its first bytes, those behind them."""
        async for piece in pieces(copied, held, lambda offset, size: self._piece(copied.path, offset, size)):
            if piece.compared:  # or the receiver thinks that nothing comes
                yield CheckpointChunk(path=copied.path, comparing=True)
                await asyncio.sleep(len(piece.data) / COMPARED_BYTES_PER_S)
                continue
            end = piece.offset + len(piece.data)
            yield CheckpointChunk(
                path=copied.path,
                offset=piece.offset,
                data=piece.data,
                crc32c=google_crc32c.value(piece.data),
                file_bytes=copied.bytes,
                total_bytes=total_bytes,
                last=last_file and end >= copied.bytes,
            )
            if end < copied.bytes:
                await asyncio.sleep(len(piece.data) / COPY_BYTES_PER_S)

    async def _piece(self, path: str, offset: int, size: int) -> bytes:
        """Raises DiskError, also if there are fewer bytes."""

        def read() -> bytes:
            file = self._disk.open(path)
            try:
                return file.read_at(offset, size)
            finally:
                file.close()

        data = await asyncio.to_thread(read)
        if len(data) < size:
            raise DiskError(f"{path} was removed while it was copied")
        return data


MEMBERS_MAX = 64
"""No cluster has more members: a longer list is ignored."""


def hello_of(peer_address: str, introduction: Introduction) -> Hello:
    """The body of a stream's first frame, with the members that this node shows to a peer that may be behind.

    A node lets in and dials the members by its applied entries. A node that is far behind does not know the members
    added since. If all members that it knows are gone or down, nobody could reach it. So each caller lists the members
    by its own applied entries and its applied index, or the list that it was shown itself if that is newer.
    node/core/membership.py decides whether a node takes such a list; the log keeps it (ReplicatedLog.introduce) and
    connects to its members. docs/architecture/members.md says why this is safe.
    """
    shown = [
        MemberShown(node_id=member.node_id, peer_address=member.peer_address, disk_uuid=member.disk_uuid)
        for member in introduction.members
    ]
    return Hello(peer_address=peer_address, applied_index=introduction.applied_index, members=shown)


def shown_in(hello: Hello) -> Introduction:
    """The members in a hello; none if an older version sent it, or if its numbers are out of bounds."""
    if len(hello.members) > MEMBERS_MAX or hello.applied_index > INDEX_MAX:
        return NO_INTRODUCTION
    members = tuple(Member(shown.node_id, shown.peer_address, "", shown.disk_uuid) for shown in hello.members)
    return Introduction(hello.applied_index, members)
