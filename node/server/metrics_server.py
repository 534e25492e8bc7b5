"""Serves the metrics page over plain HTTP, on the node's loop so that the numbers can be read without a lock.

Owns one listening socket. Answers GET /metrics (Prometheus text or OpenMetrics), and GET / with a pointer to it;
anything else gets 404. Each connection serves one request of bounded size.
"""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from tickwheel.node.config.fields import parse_address

REQUEST_BYTES_MAX = 16 << 10
REQUEST_SECONDS_MAX = 5.0
CONNECTIONS_MAX = 32


class MetricsServer:
    """The HTTP server of the metrics page."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._connections = 0

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
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > CONNECTIONS_MAX:
                return
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            return  # the caller has gone or sent no valid request: no answer
        finally:
            self._connections -= 1
            writer.close()

    def _response(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        if len(parts) != 3 or parts[0] not in ("GET", "HEAD"):
            return self._page(405, "text/plain", b"only GET\n")
        path = parts[1].partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(headers.get("accept", ""))
            return self._page(200, content_type, encode(self._registry), body_wanted=parts[0] == "GET")
        if path == "/":
            return self._page(200, "text/plain", b"tickwheel: see /metrics\n", body_wanted=parts[0] == "GET")
        return self._page(404, "text/plain", b"only /metrics\n")

    @staticmethod
    def _page(code: int, content_type: str, body: bytes, *, body_wanted: bool = True) -> bytes:
        reason = {200: "OK", 404: "Not Found", 405: "Method Not Allowed"}[code]
        head = (
            f"HTTP/1.1 {code} {reason}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode("latin-1") + (body if body_wanted else b"")
