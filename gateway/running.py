"""Runs a gateway: the REST API, the console beside it and a worker for each target, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from tickwheel.client import AsyncClient, TickwheelError, Worker
from tickwheel.client.tasks import start_task
from tickwheel.console.app import STREAMS_MAX, application
from tickwheel.console.certificates import TokenFile
from tickwheel.console.cli import hosts_of, is_loopback
from tickwheel.console.door import DoorConfig, cookie_name
from tickwheel.console.limited_http import places
from tickwheel.console.reports import Reports
from tickwheel.console.serving import CertifiedHttp, EndingPages, Handshake, listener_at
from tickwheel.console.sessions import STRANGER, Sessions
from tickwheel.gateway.api import Api
from tickwheel.gateway.app import make_app
from tickwheel.gateway.clients import Clients
from tickwheel.gateway.config import ConsoleSection, GatewayConfig, Listen, Target
from tickwheel.gateway.posting import Poster, PostMetrics

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from tickwheel.gateway.traces import GatewayTracing

_log = logging.getLogger("tickwheel.gateway")

AGAIN_S = 5.0
"""Pause before a target's worker that the cluster refused is started again."""
READY_S = 2.0
CONNECTIONS_MAX = 1_000
"""Of callers of the REST API; open pages of the console come on top."""


class Gateway:
    """One gateway. `run` returns after `stop`, once running posts have ended."""

    def __init__(
        self,
        config: GatewayConfig,
        make_client: Callable[[str | None], AsyncClient],
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        """`make_client`: gets a caller's token, or None for the gateway's own client.

        `tracer_provider`: for a configuration with traces; by default that of the process.
        """
        self._config = config
        self._make = make_client
        self._tracing = _tracing(tracer_provider) if config.traces else None
        self._registry = CollectorRegistry()
        self._metrics = PostMetrics(self._registry)
        self._stopping = asyncio.Event()
        self._workers: set[Worker] = set()
        self._server: uvicorn.Server | None = None
        self._listening: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

    def _make_client(self, token: str | None) -> AsyncClient:
        client = self._make(token)
        client.tracing = self._tracing
        return client

    def stop(self) -> None:
        """Take nothing more; the second call cancels what runs."""
        again = self._stopping.is_set()
        self._stopping.set()
        for worker in self._workers:
            worker.stop(now=again)
        if self._server is not None:
            self._server.should_exit = True
            self._server.force_exit = again

    async def listening(self) -> tuple[str, int]:
        """Host and port of the REST API, once it listens."""
        return await asyncio.shield(self._listening)

    async def run(self) -> None:
        """Serve and deliver until `stop`. Raises RequestRefused, before anything is delivered, if the REST API cannot
        listen; and the error of a target that can be posted to no more."""
        loop, listen = asyncio.get_running_loop(), self._config.listen
        with contextlib.ExitStack() as closing:
            listener = None
            if listen is not None:
                listener = closing.enter_context(listener_at("listen.bind", listen.host, listen.port))
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(ValueError, NotImplementedError):  # not the main thread: its owner stops us
                    loop.add_signal_handler(number, self.stop)
            async with self._make_client(None) as client:
                tasks = [
                    start_task(self._deliver(client, name, target), f"target {name}", lambda _: self.stop())
                    for name, target in self._config.targets.items()
                ]
                try:
                    if listen is not None and listener is not None:
                        await self._serve(client, listen, listener)
                    else:
                        await self._stopping.wait()
                finally:
                    self._stopping.set()
                    for worker in self._workers:
                        worker.stop()
                    ended = await asyncio.gather(*tasks, return_exceptions=True)
                for error in filter(None, ended):
                    raise error

    async def _serve(self, client: AsyncClient, listen: Listen, listener: socket.socket) -> None:
        own = listen.credentials == "own"
        # Without any token a cluster with rights would take each caller for the holder of the gateway's certificate.
        clients = Clients(lambda token: self._make_client(None if own else token or STRANGER))

        async def ready() -> bool:
            try:
                await client.admin.master_status(timeout_s=READY_S)
            except TickwheelError:
                return False
            return True

        console = self._config.console
        tokens = console.tokens if console is not None else None
        authority = console.client_ca if console is not None else None
        sessions = Sessions(self._make, None if tokens is None else TokenFile(tokens, "console.tokens"))
        names = [*listen.host_names, *(console.host_names if console is not None else ())]
        # Elsewhere callers have names for the gateway that it cannot know.
        hosts = hosts_of(listen.host, names) if is_loopback(listen.host) or listen.host_names else frozenset()
        rest = make_app(Api(clients, self._registry, own, ready, self._tracing, hosts=hosts))
        told = uvicorn.Config(
            rest if console is None else _with_console(rest, console, listen, sessions),
            http=CertifiedHttp,
            ws="none",
            ssl_certfile=listen.cert_file,
            ssl_keyfile=listen.key_file,
            ssl_ca_certs=None if authority is None else str(authority),
            # For the console's login alone: nobody needs a certificate, and the REST API looks at none.
            ssl_cert_reqs=ssl.CERT_NONE if authority is None else ssl.CERT_OPTIONAL,
            log_config=None,
            access_log=False,
            lifespan="off",
            limit_concurrency=places(CONNECTIONS_MAX + (STREAMS_MAX if console is not None else 0)),
            timeout_keep_alive=60,
            timeout_graceful_shutdown=20,
            server_header=False,
            proxy_headers=False,
        )
        told.load()
        if told.ssl is not None:
            told.ssl.sslobject_class = Handshake
        self._server = _Server(told, sessions, self._listening)
        if self._stopping.is_set():
            return

        try:
            await self._server.serve(sockets=[listener])
        finally:
            await sessions.close()
            await clients.close()

    async def _deliver(self, client: AsyncClient, name: str, target: Target) -> None:
        """Post the messages of one target until `stop`. A refusal of the cluster is logged, and tried again."""
        poster = Poster(name, target, self._config.source, self._metrics, self._tracing)
        try:
            while not self._stopping.is_set():
                worker = Worker(
                    client,
                    target.group,
                    dict.fromkeys(target.topics, poster),
                    concurrency=target.concurrency,
                    name=f"gateway {name}",
                    filter=target.filter,
                    signals=(),
                    unavailable_s_max=math.inf,
                )
                self._workers.add(worker)
                try:
                    await worker.run()
                except Exception as error:  # also a mistake of ours: a target must not stand still unnoticed
                    shown = None if isinstance(error, TickwheelError) else error
                    _log.error("target %s: %s; tried again in %g s", name, error, AGAIN_S, exc_info=shown)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._stopping.wait(), AGAIN_S)
                finally:
                    self._workers.discard(worker)
        finally:
            await poster.close()


def _tracing(tracer_provider: TracerProvider | None) -> GatewayTracing:
    from tickwheel.gateway.traces import GatewayTracing, is_provided

    if tracer_provider is None and not is_provided():
        _log.warning(
            "traces = true, and this process has no tracer provider: traces are passed on, and there are no spans "
            "(opentelemetry-instrument sets one up)"
        )
    return GatewayTracing(tracer_provider)


REST_PATHS = ("/v1", "/openapi.json", "/metrics", "/livez", "/readyz")
"""What they begin with; all others are the console's."""


def of_rest(path: str) -> bool:
    """Whether the REST API answers this path."""
    return any(path == begin or path.startswith(f"{begin}/") for begin in REST_PATHS)


def beside(rest: ASGIApp, console: ASGIApp) -> ASGIApp:
    """Both as one application at one address, without a lifespan. A path belongs to one of them, and neither knows of
    the other: the REST API takes no cookie, the console no token of a header."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (rest if of_rest(scope["path"]) else console)(scope, receive, send)

    return app


def _with_console(rest: ASGIApp, section: ConsoleSection, listen: Listen, sessions: Sessions) -> ASGIApp:
    secure = listen.cert_file is not None
    hosts = hosts_of(listen.host, list(section.host_names))
    config = DoorConfig(hosts, cookie_name(listen.port, secure), secure, section.read_only)
    reports = Reports(section.reports) if section.reports is not None else None
    return beside(rest, application(sessions, config, reports))


class _Server(EndingPages):
    """Leaves signals to the gateway, and says when it listens."""

    def __init__(self, config: uvicorn.Config, sessions: Sessions, listening: asyncio.Future[tuple[str, int]]) -> None:
        super().__init__(config, sessions)
        self._listening = listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Of uvicorn: takes the signals for itself."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Of uvicorn: begins to listen."""
        await super().startup(sockets)
        if self.started and not self._listening.done():
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self._listening.set_result((host, port))
