"""The gRPC server for clients, with all its services behind the door (door.py).

Owns the list of services, for the server and for reflection. process.py binds, starts and stops the server.
"""

from __future__ import annotations

from collections import Counter

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from tickwheel.node.config.sections import LimitsSection
from tickwheel.node.server.access_service import AccessService
from tickwheel.node.server.admin_service import AdminService
from tickwheel.node.server.bulk_service import BulkService
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.cold_service import ColdService
from tickwheel.node.server.connections import ConnectionGuard
from tickwheel.node.server.consumer_service import ConsumerService
from tickwheel.node.server.dead_service import DeadService
from tickwheel.node.server.door import Door
from tickwheel.node.server.gate import Gate
from tickwheel.node.server.health import HealthReporter
from tickwheel.node.server.scheduler_service import SchedulerService
from tickwheel.node.server.snapshot_service import SnapshotService
from tickwheel.node.server.staging_service import StagingService
from tickwheel.proto import (
    access_pb2,
    access_pb2_grpc,
    admin_pb2,
    admin_pb2_grpc,
    bulk_pb2,
    bulk_pb2_grpc,
    cold_pb2,
    cold_pb2_grpc,
    consumer_pb2,
    consumer_pb2_grpc,
    dead_pb2,
    dead_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    snapshot_pb2,
    snapshot_pb2_grpc,
    staging_pb2,
    staging_pb2_grpc,
)

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


SERVICES = (
    (scheduler_pb2, "Scheduler"),
    (consumer_pb2, "Consumer"),
    (admin_pb2, "Admin"),
    (staging_pb2, "Staging"),
    (bulk_pb2, "Bulk"),
    (cold_pb2, "Cold"),
    (dead_pb2, "DeadLetters"),
    (snapshot_pb2, "Snapshot"),
    (access_pb2, "Access"),
    (health_pb2, "Health"),
)


def client_server(
    limits: LimitsSection,
    calls: Calls,
    scheduler: SchedulerService,
    consumer: ConsumerService,
    admin: AdminService,
    health: HealthReporter,
    access: AccessService,
    gate: Gate,
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
    door = Door(server, refusals, gate, calls.fault, guard)
    # A method is looked up in this order.
    door.serve(scheduler_pb2_grpc.add_SchedulerServicer_to_server, scheduler)
    door.serve(consumer_pb2_grpc.add_ConsumerServicer_to_server, consumer)
    door.serve(admin_pb2_grpc.add_AdminServicer_to_server, admin)
    door.serve(staging_pb2_grpc.add_StagingServicer_to_server, StagingService(calls))
    door.serve(snapshot_pb2_grpc.add_SnapshotServicer_to_server, SnapshotService(calls))
    door.serve(bulk_pb2_grpc.add_BulkServicer_to_server, BulkService(calls))
    door.serve(cold_pb2_grpc.add_ColdServicer_to_server, ColdService(calls))
    door.serve(dead_pb2_grpc.add_DeadLettersServicer_to_server, DeadService(calls))
    door.serve(access_pb2_grpc.add_AccessServicer_to_server, access)
    # Requests of these two never enter the log, and their callers follow versions of their own.
    others = Door(server, refusals, gate, calls.fault, guard, exact=False)
    others.serve(health_pb2_grpc.add_HealthServicer_to_server, health.servicer)
    names = [module.DESCRIPTOR.services_by_name[name].full_name for module, name in SERVICES]
    servicer = ReflectionServicer([*names, reflection.SERVICE_NAME])
    others.serve(reflection_pb2_grpc.add_ServerReflectionServicer_to_server, servicer)
    door.shut()
    return server
