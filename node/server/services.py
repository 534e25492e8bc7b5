"""The gRPC server for clients: serves the table of endpoints, health and reflection behind the door (door.py).

process.py binds, starts and stops the server.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import DESCRIPTOR as HEALTH
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from tickwheel.node.config.sections import LimitsSection
from tickwheel.node.core.promise import Reply
from tickwheel.node.server.bounds import request_bytes_max
from tickwheel.node.server.connections import ConnectionLimiter
from tickwheel.node.server.door import Behaviour, DirectBehaviour, Door
from tickwheel.node.server.endpoints import SERVICES, AwaitedEndpoint, DirectEndpoint, Needs
from tickwheel.node.server.gate import Gate
from tickwheel.node.server.handlers import Node
from tickwheel.node.server.health import HealthReporter
from tickwheel.transport.limits import Limits
from tickwheel.transport.server import Server
from tickwheel.transport.server import ServerStream as Context

SERVED = (*SERVICES, HEALTH.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
"""Full names of all services of the port."""


def served(node: Node, gate: Gate, method: str, endpoint: AwaitedEndpoint, *, stream: bool) -> Behaviour:
    """The behaviour of one endpoint behind the door."""
    right, serve, master = endpoint.right, endpoint.serve, endpoint.needs is not Needs.ANY_NODE

    async def unary(request: Any, context: Context) -> Any:
        return await serve(node, request, gate.admit(method, right, request, context, master=master), context)

    async def watched(request: Any, context: Context) -> Any:
        caller = gate.admit(method, right, request, context, master=master)
        place = gate.take_place(caller) if stream else ""
        try:
            answer = serve(node, request, caller, context)
            return await (gate.audited(method, caller, request, context, answer) if right.audited else answer)
        finally:
            gate.give_back(place)

    return watched if stream or right.audited else unary


def begun(node: Node, gate: Gate, method: str, endpoint: DirectEndpoint) -> DirectBehaviour:
    """As `served`, for an endpoint whose calls need no task."""
    right, begin = endpoint.right, endpoint.handler

    def behave(request: Any, context: Context, reply: Reply[Message | bytes]) -> None:
        begin(node, request, gate.admit(method, right, request, context, master=True), reply)

    return behave


def serve_endpoints(door: Door, node: Node, gate: Gate) -> None:
    """Serve every method of the services in the table. Raises KeyError for a method without a row."""
    for service, rows in SERVICES.items():
        handlers: dict[str, Any] = {}
        for method in Default().FindServiceByName(service).methods:
            path, endpoint = f"/{service}/{method.name}", rows[method.name]
            request, serialize = (
                GetMessageClass(method.input_type),
                GetMessageClass(method.output_type).SerializeToString,
            )
            bytes_max = request_bytes_max(path)
            if isinstance(endpoint, DirectEndpoint):
                behave_at_once = begun(node, gate, path, endpoint)
                handlers[method.name] = door.direct(
                    path, request, serialize, behave_at_once, bytes_max, plain=endpoint.plain
                )
                continue
            streams = method.client_streaming, method.server_streaming
            behave = served(node, gate, path, endpoint, stream=any(streams))
            handlers[method.name] = door.handler(
                path, request, serialize, streams, behave, bytes_max, plain=endpoint.plain
            )
        door.register(service, handlers)


def client_server(
    limits: LimitsSection,
    node: Node,
    gate: Gate,
    health: HealthReporter,
    refusals: Counter[str],
    limiter: ConnectionLimiter | None = None,
) -> Server:
    """The server with all services, not yet bound to an address. `refusals` and `limiter` count as in `Door`."""
    server = Server(
        Limits(
            message_bytes_max=limits.request_bytes_max,
            streams_max=limits.connection_streams_max,
            calls_max=limits.calls_max,
            idle_s=limits.connection_idle_ms / 1_000,
        )
    )
    fault = node.calls.fault
    serve_endpoints(Door(server, refusals, fault, limiter), node, gate)
    # Health and reflection, for load balancers and tools, are open to everybody: they show only which services exist
    # and whether they serve. Their requests never enter the log, and their callers follow versions of their own.
    others = Door(server, refusals, fault, limiter, exact=False)
    others.serve(health_pb2_grpc.add_HealthServicer_to_server, health.servicer)
    others.serve(reflection_pb2_grpc.add_ServerReflectionServicer_to_server, ReflectionServicer(SERVED))
    others.shut()
    return server
