"""Runs the application under uvicorn, which asks browsers for a certificate if it is given an authority."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from tickwheel.client.errors import refused
from tickwheel.console.app import application
from tickwheel.console.certificates import TokenFile, certificate_of
from tickwheel.console.door import CERTIFICATE, DoorConfig, cookie_name
from tickwheel.console.limited_http import LimitedHttp, places, tell_faults
from tickwheel.console.reports import Reports
from tickwheel.console.sessions import OpenClient, Sessions

_log = logging.getLogger("tickwheel.console")

STOP_S = 1
"""Calls that are under way are cut after this long when the console ends."""
CONNECTIONS_MAX = 2_000
KEEP_ALIVE_S = 30


@dataclass(frozen=True, slots=True)
class Serving:
    """Where and how the console listens."""

    host: str
    port: int
    """0: any free one."""
    hosts: frozenset[str] = frozenset()
    """As in DoorConfig."""
    read_only: bool = False
    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca: Path | None = None
    """The authority of browsers' certificates. Only with TLS of the console's own."""
    tokens: TokenFile | None = None
    """Of those who log in by certificate."""
    reports: Reports | None = None


class Handshake(ssl.SSLObject):
    """Logs why a browser's certificate is refused: the browser alone is told otherwise."""

    def do_handshake(self) -> None:
        """Of ssl."""
        try:
            super().do_handshake()
        except ssl.SSLCertVerificationError as error:
            _log.warning("refused the certificate of a browser: %s", error.verify_message)
            raise


class CertifiedHttp(LimitedHttp):
    """Gives each request the certificate of its connection. uvicorn itself drops it (ASGI's TLS extension)."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Of asyncio: the handshake is done. Without an authority no certificate is asked for, so none is there."""
        super().connection_made(transport)
        ssl_object = transport.get_extra_info("ssl_object")
        der = None if ssl_object is None else ssl_object.getpeercert(binary_form=True)
        self.app_state = {**self.app_state, CERTIFICATE: certificate_of(der) if der else None}


def listener_at(field: str, host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: any free one. Raises RequestRefused with the field."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that name their protocol. Without it the body of an answer waits until
    # the browser acknowledges its head: 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # only this finds that somebody else listens there
    except (OSError, OverflowError) as error:
        listener.close()
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise refused(field, f"{host}:{port}", f"an address that is free: {why}") from error
    return listener


class EndingPages(uvicorn.Server):
    """Ends open pages before it waits for what is under way: their streams have no end of their own."""

    def __init__(self, config: uvicorn.Config, sessions: Sessions) -> None:
        super().__init__(config)
        self._sessions = sessions

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Of uvicorn: begins to listen."""
        asyncio.get_running_loop().set_exception_handler(tell_faults)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Of uvicorn: ends."""
        await self._sessions.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Of uvicorn: takes the signals that end the server. Its own version raises them again at the end: the second
        of two left the loop as a KeyboardInterrupt before threads had been told to end, and the process hung."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


async def serve(open_client: OpenClient, serving: Serving, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT, SIGTERM or a cancellation; calls `ready` with the address of the first page.

    Raises RequestRefused if the address cannot be listened on.
    """
    with listener_at("--bind", serving.host, serving.port) as listener:
        port = listener.getsockname()[1]
        secure = serving.cert_file is not None
        config = DoorConfig(serving.hosts, cookie_name(port, secure), secure, serving.read_only)
        sessions = Sessions(open_client, serving.tokens)
        told = uvicorn.Config(
            application(sessions, config, serving.reports),
            http=CertifiedHttp,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
            limit_concurrency=places(CONNECTIONS_MAX),
            ssl_certfile=serving.cert_file,
            ssl_keyfile=serving.key_file,
            ssl_ca_certs=str(serving.client_ca) if serving.client_ca is not None else None,
            # A browser without a certificate gets the login by token.
            ssl_cert_reqs=ssl.CERT_NONE if serving.client_ca is None else ssl.CERT_OPTIONAL,
            proxy_headers=False,
            lifespan="off",  # a second signal would cut it off, with a traceback; the sessions are closed below
        )
        told.load()
        if told.ssl is not None:
            told.ssl.sslobject_class = Handshake
        server = EndingPages(told, sessions)
        shown = f"[{serving.host}]" if ":" in serving.host else serving.host
        ready(f"http{'s' if secure else ''}://{shown}:{port}/")
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            server.should_exit = True
            await running
            raise
        finally:
            await sessions.close()
