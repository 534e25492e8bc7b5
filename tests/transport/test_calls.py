"""gRPC over real sockets: this server with grpc's own client, this client with grpc's own server, and both together."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from tests.transport.served import dialled, serving
from tickwheel.node.certs import make_certificates
from tickwheel.node.tls import PortFiles, peer_context, server_context
from tickwheel.transport import wire
from tickwheel.transport.client import AddressError, CallError, ClientConnection, Names
from tickwheel.transport.limits import Limits
from tickwheel.transport.server import DirectHandler, Opened, Server, StreamHandler, bind

LARGE = bytes(range(256)) * 12_000
LIMITS = Limits(message_bytes_max=4 << 20)
SOON_S = 30.0
DEADLINE_S = 1.0
"""Of calls that are to meet it; long enough for one to reach its server before."""
GRACE_S = 2.0
"""Of a server that stops; long enough for an exchange on an open call."""


class Service(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """The cases of gRPC's interoperability tests, over bytes."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self.over: list[bytes] = []
        """Requests of direct calls that are over."""
        self.waiting: Any = None
        """A direct call without an answer."""

    def service(self, details: Any) -> Any:
        made = {
            "/s/Echo": grpc.unary_unary_rpc_method_handler(self._echo),
            "/s/Fail": grpc.unary_unary_rpc_method_handler(self._fail),
            "/s/Break": grpc.unary_unary_rpc_method_handler(self._break),
            "/s/Metadata": grpc.unary_unary_rpc_method_handler(self._metadata),
            "/s/Join": grpc.stream_unary_rpc_method_handler(self._join),
            "/s/Count": grpc.unary_stream_rpc_method_handler(self._count),
            "/s/Both": grpc.stream_stream_rpc_method_handler(self._both),
            "/s/Wait": grpc.unary_unary_rpc_method_handler(self._wait),
            "/s/Direct": DirectHandler(self._direct),
            "/s/Opened": StreamHandler(self._open),
            "/s/Shut": StreamHandler(self._shut),
        }
        return made.get(details.method)

    async def _echo(self, request: bytes, context: Any) -> bytes:
        return request

    async def _fail(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, request.decode(), (("more-bin", b"\0\xff"),))
        return b""

    async def _break(self, request: bytes, context: Any) -> bytes:
        raise KeyError("a secret")

    async def _metadata(self, request: bytes, context: Any) -> bytes:
        given = dict(context.invocation_metadata())
        await context.send_initial_metadata((("first", given["x-first"]),))
        context.set_trailing_metadata((("last-bin", given["x-last-bin"]),))
        assert context.peer().startswith("ipv4:127.0.0.1:")
        return b""

    async def _join(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def _count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield b"%d" % number

    async def _both(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            if request == b"abort":
                await context.abort(grpc.StatusCode.DATA_LOSS, "as asked")
            await context.write(request)

    def _direct(self, request: bytes, call: Any) -> None:
        self.begun.set()
        call.ended = lambda: self.over.append(request)
        if request == b"break":
            raise KeyError("a secret")
        if request == b"fail":
            call.fail(grpc.StatusCode.NOT_FOUND, "☃", (("more-bin", b"\0\xff"),))
        if request == b"later":
            self.waiting = call
        else:
            call.answer(request)

    def _open(self, call: Any) -> Opened:
        taken: list[bytes] = []

        def take(request: bytes) -> None:
            taken.append(request)
            if request == b"break":
                raise KeyError("a secret")
            if request == b"fail":
                call.fail(grpc.StatusCode.NOT_FOUND, "as asked")
            elif request == b"finish":
                call.finish()
            else:
                assert call.post(request)

        def ended() -> None:
            self.over.append(b"".join(taken))
            self.ended.set()

        return Opened(take, ended)

    def _shut(self, call: Any) -> Opened:
        call.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "not now")
        return Opened(lambda _: pytest.fail("the call is over"), lambda: self.over.append(b"shut"))

    async def _wait(self, request: bytes, context: Any) -> bytes:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        return b""


def ours(service: Service) -> Server:
    server = Server(LIMITS)
    server.add_generic_rpc_handlers([service])
    return server


@asynccontextmanager
async def channel() -> AsyncIterator[tuple[Any, Service]]:
    """grpc's client of this server."""
    service = Service()
    async with serving(ours(service)) as address, grpc.aio.insecure_channel(address) as opened:
        yield opened, service


async def test_every_kind_of_call_from_grpcs_client() -> None:
    async with channel() as (opened, _):
        for message in (b"", b"x", LARGE):
            assert await opened.unary_unary("/s/Echo")(message) == message
        assert await opened.stream_unary("/s/Join")(iter([b"a", LARGE, b"", b"c"])) == b"a" + LARGE + b"c"
        assert await opened.stream_unary("/s/Join")(iter([])) == b""
        assert [one async for one in opened.unary_stream("/s/Count")(b"300")] == [b"%d" % n for n in range(300)]
        both = opened.stream_stream("/s/Both")()
        for message in (b"1", LARGE, b"3"):
            await both.write(message)
            assert await both.read() == message
        await both.done_writing()
        assert await both.read() is grpc.aio.EOF  # type: ignore[attr-defined]
        assert await both.code() is grpc.StatusCode.OK


async def test_many_calls_at_once() -> None:
    async with channel() as (opened, _):
        echo = opened.unary_unary("/s/Echo")
        sent = [b"%d" % number * 999 for number in range(500)]
        assert await asyncio.gather(*map(echo, sent)) == sent


async def test_errors_reach_grpcs_client_as_they_are() -> None:
    async with channel() as (opened, _):
        text = "\t\nnot — found % \r\0 ☃"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await opened.unary_unary("/s/Fail")(text.encode())
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.NOT_FOUND, text)
        assert dict(cast(Any, raised.value.trailing_metadata()))["more-bin"] == b"\0\xff"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await opened.unary_unary("/s/Break")(b"")
        assert raised.value.code() is grpc.StatusCode.UNKNOWN and "secret" not in str(raised.value.details())
        for call in (opened.unary_unary("/s/None")(b""), opened.stream_unary("/s/None")(iter([b"x"]))):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        both = opened.stream_stream("/s/Both")()
        await both.write(b"abort")
        assert await both.code() is grpc.StatusCode.DATA_LOSS and await both.details() == "as asked"


async def test_metadata_goes_both_ways() -> None:
    async with channel() as (opened, _):
        call = opened.unary_unary("/s/Metadata")(b"", metadata=(("x-first", "1"), ("x-last-bin", b"\1\2,\xff")))
        assert dict(await call.initial_metadata())["first"] == "1"
        assert dict(await call.trailing_metadata())["last-bin"] == b"\1\2,\xff"


async def test_large_and_compressed_messages_are_refused() -> None:
    async with channel() as (opened, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await opened.unary_unary("/s/Echo")(bytes(LIMITS.message_bytes_max + 1))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await opened.unary_unary("/s/Echo")(bytes(9_999), compression=grpc.Compression.Gzip)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await opened.unary_unary("/s/Echo")(b"still there") == b"still there"


async def test_direct_calls_from_grpcs_client() -> None:
    """Answers of any size, also larger than the windows; errors and mistakes end the call alone."""
    async with channel() as (opened, service):
        direct = opened.unary_unary("/s/Direct")
        sent = [b"", b"x", bytes(wire.FRAME_BYTES - 5), bytes(wire.FRAME_BYTES - 4), LARGE]
        assert await asyncio.gather(*map(direct, sent)) == sent
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await direct(b"fail")
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.NOT_FOUND, "☃")
        assert dict(cast(Any, raised.value.trailing_metadata()))["more-bin"] == b"\0\xff"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await direct(b"break")
        assert raised.value.code() is grpc.StatusCode.UNKNOWN and "secret" not in str(raised.value.details())
        assert await direct(b"still there") == b"still there"
        assert sorted(service.over) == sorted([*sent, b"fail", b"break", b"still there"]), "each is over once"


@pytest.mark.parametrize("how", ["cancelled", "deadline", "connection"])
async def test_a_direct_call_ends_with_its_caller(how: str) -> None:
    """It is over at once, and an answer that comes later goes nowhere."""
    async with channel() as (opened, service):
        assert await opened.unary_unary("/s/Echo")(b"") == b""  # connected: the deadline is for the call alone
        call = opened.unary_unary("/s/Direct")(b"later", timeout=DEADLINE_S if how == "deadline" else None)
        await service.begun.wait()
        if how != "deadline":
            await (opened.close() if how == "connection" else asyncio.sleep(0))
            call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await call
        async with asyncio.timeout(SOON_S):
            await service.waiting.until_over()
        assert service.over == [b"later"]
        service.waiting.answer(b"too late")
        service.waiting.fail(grpc.StatusCode.ABORTED, "too late")


async def test_streams_without_a_task_from_grpcs_client() -> None:
    """Each message is taken in order; the stream ends with its caller, or as its handler says, and that once."""
    async with channel() as (opened, service):
        stream = opened.stream_stream("/s/Opened")
        assert [answer async for answer in stream(iter([b"a", b"", b"b" * wire.FRAME_BYTES, b"c"]))] == [
            b"a",
            b"",
            b"b" * wire.FRAME_BYTES,
            b"c",
        ]
        assert [answer async for answer in stream(iter([]))] == []
        assert [answer async for answer in stream(iter([b"x", b"finish"]))] == [b"x"]
        for how, code in ((b"fail", grpc.StatusCode.NOT_FOUND), (b"break", grpc.StatusCode.UNKNOWN)):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                [answer async for answer in stream(iter([how]))]
            assert raised.value.code() is code and "secret" not in str(raised.value.details())
        call = stream()
        await call.write(b"goes away")
        assert await call.read() == b"goes away"
        service.ended.clear()
        call.cancel()
        async with asyncio.timeout(SOON_S):
            await service.ended.wait()
    assert service.over == [b"a" + b"b" * wire.FRAME_BYTES + b"c", b"xfinish", b"fail", b"break", b"goes away"]


async def test_a_stream_that_ends_as_it_opens_is_told_so() -> None:
    """What counted it counts it out again."""
    async with channel() as (opened, service):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            [answer async for answer in opened.stream_stream("/s/Shut")(iter([b"x"]))]
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert service.over == [b"shut"]


async def test_a_server_that_stops_waits_for_direct_calls() -> None:
    """As for calls with a task: they are answered if that comes in time."""
    service = Service()
    server = ours(service)
    async with serving(server) as address, grpc.aio.insecure_channel(address) as opened:
        any_opened: Any = opened
        call = any_opened.unary_unary("/s/Direct")(b"later")
        await service.begun.wait()
        stopping = asyncio.ensure_future(server.stop(5.0))
        await asyncio.sleep(0)
        service.waiting.answer(b"in time")
        assert await call == b"in time"
        await stopping


@pytest.mark.parametrize("how", ["cancelled", "deadline", "connection"])
async def test_a_handler_ends_with_its_caller(how: str) -> None:
    async with channel() as (opened, service):
        assert await opened.unary_unary("/s/Echo")(b"") == b""  # connected: the deadline is for the call alone
        call = opened.unary_unary("/s/Wait")(b"", timeout=DEADLINE_S if how == "deadline" else None)
        if how != "deadline":
            await service.begun.wait()
            await (opened.close() if how == "connection" else asyncio.sleep(0))
            call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await call
        async with asyncio.timeout(SOON_S):
            await service.ended.wait()


async def test_a_server_that_stops_lets_calls_end() -> None:
    """For as long as it was told; then they end with UNAVAILABLE, which callers try elsewhere."""
    service = Service()
    server = ours(service)
    async with serving(server) as address, grpc.aio.insecure_channel(address) as opened:
        any_opened: Any = opened
        both, waits = any_opened.stream_stream("/s/Both")(), any_opened.unary_unary("/s/Wait")(b"")
        await both.write(b"1")
        assert await both.read() == b"1"
        await service.begun.wait()
        stopping = asyncio.ensure_future(server.stop(GRACE_S))
        await asyncio.sleep(0)
        await both.write(b"2")
        assert await both.read() == b"2"
        await both.done_writing()
        assert await both.code() is grpc.StatusCode.OK
        assert await waits.code() is grpc.StatusCode.UNAVAILABLE
        await stopping
        assert not server.calls and service.ended.is_set()


# -- this client


@asynccontextmanager
async def grpcs_server(service: Service) -> AsyncIterator[str]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_mistake_in_a_look_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would notice that the peer is gone."""
    async with serving(ours(Service())) as address, await dialled(address, LIMITS) as connection:

        def broken() -> None:
            raise ValueError("a mistake")

        monkeypatch.setattr(connection, "ping", broken)
        call = connection.call("/s/Both", bytes, bytes)
        connection.heard_s -= 2 * LIMITS.ask_alive_s
        with pytest.raises(ValueError, match="a mistake"):
            connection._look()
        with pytest.raises(CallError):
            async with asyncio.timeout(SOON_S):
                await call.read()


@pytest.mark.parametrize("served", [lambda service: serving(ours(service)), grpcs_server], ids=["ours", "grpc's"])
async def test_streams_of_this_client(served: Callable[[Service], Any]) -> None:
    async with served(Service()) as address, asyncio.timeout(SOON_S):
        connection = await dialled(address, LIMITS)
        async with connection:
            call = connection.call("/s/Both", bytes, bytes)
            for message in (b"1", LARGE, b""):
                await call.write(message)
                assert await call.read() == message
            call.end()
            assert await call.read() is None
            assert await once(connection, "/s/Echo", LARGE) == LARGE
            with pytest.raises(CallError, match="NOT_FOUND: näh"):
                await once(connection, "/s/Fail", "näh".encode())
            with pytest.raises(CallError, match="UNIMPLEMENTED"):
                await once(connection, "/s/None", b"")
            call = connection.call("/s/Both", bytes, bytes)
            await call.write(b"1")
            call.cancel()
            with pytest.raises(CallError, match="CANCELLED"):
                await call.read()
            assert not connection.streams and not connection.unread_bytes


async def once(connection: ClientConnection, path: str, message: bytes) -> Any:
    call = connection.call(path, bytes, bytes)
    await call.write(message)
    call.end()
    return await call.read()


async def test_a_lost_connection_ends_the_calls_of_this_client() -> None:
    server = ours(Service())
    async with serving(server) as address:
        connection = await dialled(address, LIMITS)
        call = connection.call("/s/Both", bytes, bytes)
        await call.write(b"1")
        assert await call.read() == b"1"
        for one in server.connections:
            one.cut_off()
        with pytest.raises(CallError, match="UNAVAILABLE"):
            await call.read()
        with pytest.raises(CallError, match="UNAVAILABLE"):
            await call.write(b"2")
        with pytest.raises(CallError, match="UNAVAILABLE"):
            connection.call("/s/Both", bytes, bytes)


@pytest.mark.parametrize(
    "address",
    ["", "nobody", "host:", ":1", "host:port", "%DLQ%g", "[::1]:70000", "a..b:1", "\0:1", "x" * 300 + ":1"],
)
async def test_what_is_no_address_is_refused(address: str) -> None:
    """Addresses of members come from administrators."""
    with pytest.raises(AddressError):
        await Names().find(address)


async def test_a_look_up_is_shared_and_outlives_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's resolver has few threads, and each stays with its name until the network gives up."""
    loop, asked, answers = asyncio.get_running_loop(), [], asyncio.Event()

    async def slow(host: str, port: int, **_: object) -> list[Any]:
        asked.append(host)
        await answers.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(loop, "getaddrinfo", slow)
    names = Names()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await names.find("hanging:1")
    waiting = asyncio.ensure_future(names.find("hanging:1"))
    await asyncio.sleep(0)
    assert asked == ["hanging"]
    answers.set()
    assert await waiting == [(socket.AF_INET, ("127.0.0.1", 1))]
    assert await names.find("hanging:1") and asked == ["hanging"] * 2, "a later one asks anew: names move"


async def test_an_answer_that_cannot_be_read_ends_its_call() -> None:
    """Its bytes are the other side's: no error of this side's decoder gets out."""
    async with serving(ours(Service())) as address, await dialled(address, LIMITS) as connection:
        call = connection.call("/s/Both", bytes, bytes.decode)
        await call.write(b"\xff")
        with pytest.raises(CallError, match="INTERNAL: an answer that cannot be read"):
            await call.read()
        assert not connection.streams and not connection.unread_bytes


async def test_an_answer_above_the_limit_ends_its_call_and_says_so() -> None:
    async with serving(ours(Service())) as address, await dialled(address, Limits(message_bytes_max=9)) as connection:
        call = connection.call("/s/Both", bytes, bytes)
        await call.write(b"123456789")
        assert await call.read() == b"123456789"
        await call.write(b"1234567890")
        with pytest.raises(CallError, match="RESOURCE_EXHAUSTED: an answer of 10 bytes, 9 are allowed"):
            await call.read()


async def test_a_status_that_is_no_status_ends_its_call() -> None:
    closed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(wire.PREFACE))
        block = wire.STATUS_200 + wire.fields([(b"content-type", b"application/grpc"), (b"grpc-status", b"9" * 5_000)])
        writer.write(wire.settings({}) + wire.header_frames(1, block, end_stream=True))
        await writer.drain()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        closed.set()

    served = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = served.sockets[0].getsockname()[1]
    async with served:
        async with await dialled(f"127.0.0.1:{port}", LIMITS) as connection:
            with pytest.raises(CallError, match="UNKNOWN"):
                await once(connection, "/s/Echo", b"")
        await closed.wait()


def test_two_cannot_listen_at_one_address() -> None:
    """The second is told when it binds, not when it starts to serve."""
    with bind("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", first.getsockname()[1])


# -- TLS


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    make_certificates(tmp_path, {"n1": ["127.0.0.1"], "n2": ["127.0.0.1"]}, ["app"], ["ops"], 30)
    return tmp_path


def files(directory: Path, name: str) -> PortFiles:
    return PortFiles(*((directory / f).read_bytes() for f in (f"{name}.key", f"{name}.crt", "ca.crt")))


async def test_tls_shows_certificates_both_ways(certificates: Path) -> None:
    seen: list[bytes] = []

    class Shown(Service):
        async def _echo(self, request: bytes, context: Any) -> bytes:
            seen.extend(context.auth_context()["x509_pem_cert"])
            return request

    secured = server_context(files(certificates, "n1"), required=True)
    async with serving(ours(Shown()), secured) as address:
        tls = peer_context(files(certificates, "n2"))
        async with await dialled(address, LIMITS, secured=tls, server_name="n1") as connection:
            assert await once(connection, "/s/Echo", LARGE) == LARGE
        assert seen[0].split() == (certificates / "n2.crt").read_bytes().split()
        with pytest.raises(ssl.SSLCertVerificationError):
            await dialled(address, LIMITS, secured=tls, server_name="n3")
        nobody = ssl.create_default_context(cadata=(certificates / "ca.crt").read_text())
        nobody.set_alpn_protocols(["h2"])
        with pytest.raises((OSError, CallError)):  # TLS 1.3 refuses after the handshake
            async with await dialled(address, LIMITS, secured=nobody, server_name="n1") as connection:
                await once(connection, "/s/Echo", b"")


async def test_no_session_of_tls_is_resumed(certificates: Path) -> None:
    """A caller whose certificate had expired, or whose authority was removed, came in by a session of TLS 1.2."""
    tls = ssl.create_default_context(cadata=(certificates / "ca.crt").read_text())
    tls.load_cert_chain(certificates / "n2.crt", certificates / "n2.key")
    tls.set_alpn_protocols(["h2"])
    tls.maximum_version = ssl.TLSVersion.TLSv1_2

    def greeted(port: int, session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool, bytes]:
        """The session, whether it was resumed, and what the server says first."""
        with (
            socket.create_connection(("127.0.0.1", port), 20) as plain,
            tls.wrap_socket(plain, server_hostname="n1", session=session) as secured,
        ):
            said = b""
            with contextlib.suppress(OSError):
                said = secured.recv(9)
                secured.unwrap()  # without its goodbye the server forgets the session
            return secured.session, bool(secured.session_reused), said

    async with serving(ours(Service()), server_context(files(certificates, "n1"), required=True)) as address:
        port = int(address.rpartition(":")[2])
        session, resumed, said = await asyncio.to_thread(greeted, port, None)
        assert session is not None and not resumed and said
        assert (await asyncio.to_thread(greeted, port, session))[1:] == (True, b"")
        _, resumed, said = await asyncio.to_thread(greeted, port, session)
        assert not resumed and said, "the next one is a whole handshake"


async def test_tls_without_http2_is_closed(certificates: Path) -> None:
    async with serving(ours(Service()), server_context(files(certificates, "n1"), required=False)) as address:
        host, _, port = address.rpartition(":")
        tls = ssl.create_default_context(cadata=(certificates / "ca.crt").read_text())
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls, server_hostname="n1")
        assert b"ALPN" in await reader.read()
        writer.close()
