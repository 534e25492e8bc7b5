"""Serves metrics and probes over plain HTTP, on the node's loop so that the numbers can be read without a lock.

Owns one listening socket. Answers GET /metrics (Prometheus text or OpenMetrics), the probes' paths, and GET / with a
pointer to them; anything else gets 404. Each connection serves one request of bounded size, for a bounded time.

Callers cannot hurt the node or each other:
- Of too many connections the oldest is ended, so callers that hold theirs do not keep a probe out.
- Metrics pages are built one after the other and take a tenth of the loop's time at most; probes do not wait for them.
- A caller that does not read its answer is ended, and the answer with it.
"""

from __future__ import annotations

import asyncio
from asyncio import sleep
from collections.abc import Callable, Mapping
from time import monotonic

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from tickwheel.node.config.fields import parse_address
from tickwheel.node.server.probes import Answer

REQUEST_BYTES_MAX = 16 << 10
REQUEST_SECONDS_MAX = 5.0
CONNECTIONS_MAX = 32
PAGES_SHARE_MAX = 0.1
"""Of the loop's time."""
_REASONS = {
    200: "OK",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """The HTTP server of metrics and probes.

    `probes`: what answers a path such as /readyz; called on the loop, must be quick. `failed` is told of a mistake of
    the node in a page; the caller gets 500.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        probes: Mapping[str, Callable[[], Answer]],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._registry = registry
        self._probes = probes
        self._failed = failed
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}
        """Connections, the oldest first."""
        self._building = asyncio.Lock()
        self._next_page_s = 0.0
        self._about = f"tickwheel: see {', '.join(['/metrics', *probes])}\n".encode()

    async def start(self, bind: str) -> int:
        """Listen on host:port; returns the port. Raises OSError."""
        host, port = parse_address(bind, port_min=0)
        self._server = await asyncio.start_server(self._serve, host, port, limit=REQUEST_BYTES_MAX)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the socket and open connections. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for writer in list(self._open):
                writer.transport.abort()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > CONNECTIONS_MAX:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        # `drain` then waits until the last byte has been taken, so the time limit holds for the answer, too.
        writer.transport.set_write_buffer_limits(high=0)
        try:
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._response(head))
                await writer.drain()
            writer.close()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            writer.transport.abort()  # the caller has gone, does not read, or sent no valid request: no answer
        except Exception as error:
            writer.transport.abort()
            self._failed(error)
        finally:
            self._open.pop(writer, None)

    async def _response(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        if len(parts) != 3 or parts[0] not in ("GET", "HEAD"):
            return _page(405, _TEXT, b"only GET\n")
        try:
            code, content_type, body = await self._answer(parts[1].partition("?")[0], headers.get("accept", ""))
        except Exception as error:  # a mistake of the node: this caller learns of it, and the log; the node goes on
            self._failed(error)
            code, content_type, body = 500, _TEXT, b"a mistake of this node; see its log\n"
        return _page(code, content_type, body, body_wanted=parts[0] == "GET")

    async def _answer(self, path: str, accepts: str) -> tuple[int, str, bytes]:
        if path in self._probes:
            answer = self._probes[path]()
            return (200 if answer.well else 503), _TEXT, answer.text.encode()
        if path == "/metrics":
            return await self._metrics(accepts)
        if path == "/":
            return 200, _TEXT, self._about
        return 404, _TEXT, self._about

    async def _metrics(self, accepts: str) -> tuple[int, str, bytes]:
        try:
            encode, content_type = choose_encoder(accepts)
        except (TypeError, ValueError):  # the library cannot read each version that a caller may write
            encode, content_type = choose_encoder("")
        async with self._building:
            wait_s = self._next_page_s - monotonic()
            if wait_s > 0:
                await sleep(wait_s)
            began_s = monotonic()
            try:
                return 200, content_type, encode(self._registry)
            finally:
                ended_s = monotonic()
                self._next_page_s = ended_s + (ended_s - began_s) * (1 / PAGES_SHARE_MAX - 1)


def _page(code: int, content_type: str, body: bytes, *, body_wanted: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if body_wanted else b"")
