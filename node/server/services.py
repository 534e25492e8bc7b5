"""The gRPC server for clients: serves the table of endpoints, health and reflection behind the door (door.py).

process.py binds, starts and stops the server.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import grpc
from google.protobuf.descriptor_pool import Default
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import DESCRIPTOR as HEALTH
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from tickwheel.node.config.sections import LimitsSection
from tickwheel.node.server.connections import ConnectionGuard
from tickwheel.node.server.door import Behaviour, Context, Door
from tickwheel.node.server.endpoints import SERVICES, Endpoint
from tickwheel.node.server.gate import Gate
from tickwheel.node.server.handlers import Node
from tickwheel.node.server.health import HealthReporter

HANDSHAKE_MS = 10_000
"""A connection that has not finished its handshake (TLS, HTTP/2) by then is closed."""
ASK_ALIVE_MS = 60_000
DEAD_MS = 20_000
"""A connection that was silent for ASK_ALIVE_MS gets a ping, and is closed after this long without an answer."""


def connection_options(idle_ms: int) -> list[tuple[str, int]]:
    """Options of a server that close idle connections and those whose other side is gone."""
    return [
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", idle_ms),
        ("grpc.keepalive_time_ms", ASK_ALIVE_MS),
        ("grpc.keepalive_timeout_ms", DEAD_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


SERVED = (*SERVICES, HEALTH.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
"""Full names of all services of the port."""


def served(node: Node, gate: Gate, method: str, endpoint: Endpoint, *, stream: bool) -> Behaviour:
    """What a call of one endpoint does behind the door."""
    right, serve = endpoint.right, endpoint.serve

    async def unary(request: Any, context: Context) -> Any:
        return await serve(node, request, gate.admit(method, right, request, context), context)

    async def watched(request: Any, context: Context) -> Any:
        caller = gate.admit(method, right, request, context)
        place = gate.take_place(caller) if stream else ""
        try:
            answer = serve(node, request, caller, context)
            return await (gate.audited(method, caller, request, context, answer) if right.audited else answer)
        finally:
            gate.give_back(place)

    return watched if stream or right.audited else unary


def serve_endpoints(door: Door, node: Node, gate: Gate) -> None:
    """Serve every method of the services in the table. Raises KeyError for a method without a row."""
    for service, rows in SERVICES.items():
        handlers = {}
        for method in Default().FindServiceByName(service).methods:
            path, endpoint = f"/{service}/{method.name}", rows[method.name]
            streams = method.client_streaming, method.server_streaming
            behave = served(node, gate, path, endpoint, stream=any(streams))
            handlers[method.name] = door.handler(
                path, endpoint.request, endpoint.response.SerializeToString, streams, behave
            )
        door.register(service, handlers)


def client_server(
    limits: LimitsSection,
    node: Node,
    gate: Gate,
    health: HealthReporter,
    refusals: Counter[str],
    guard: ConnectionGuard | None = None,
) -> grpc.aio.Server:
    """The server with all services, not yet bound to an address. `refusals` and `guard` count as in `Door`."""
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limits.request_bytes_max),
            ("grpc.max_send_message_length", limits.request_bytes_max),
            # Clients may ping this node often while they wait for deliveries.
            ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
            ("grpc.http2.max_ping_strikes", 0),
            *connection_options(limits.connection_idle_ms),
            ("grpc.max_concurrent_streams", limits.connection_streams_max),
        ],
        maximum_concurrent_rpcs=limits.calls_max,
    )
    fault = node.calls.fault
    serve_endpoints(Door(server, refusals, fault, guard), node, gate)
    # Health and reflection, for load balancers and tools, are open to everybody: they show only which services exist
    # and whether they serve. Their requests never enter the log, and their callers follow versions of their own.
    others = Door(server, refusals, fault, guard, exact=False)
    others.serve(health_pb2_grpc.add_HealthServicer_to_server, health.servicer)
    others.serve(reflection_pb2_grpc.add_ServerReflectionServicer_to_server, ReflectionServicer(SERVED))
    others.shut()
    return server
