"""The gRPC server that clients call: which services it has, and how their methods are found.

Owns the list of services, for the server and for reflection alike. Binding, starting and stopping it is the process's.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tickwheel.node.config.sections import LimitsSection
from tickwheel.node.server.admin_service import AdminService
from tickwheel.node.server.bulk_service import BulkService
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.cold_service import ColdService
from tickwheel.node.server.consumer_service import ConsumerService
from tickwheel.node.server.dead_service import DeadService
from tickwheel.node.server.health import HealthReporter
from tickwheel.node.server.scheduler_service import SchedulerService
from tickwheel.node.server.snapshot_service import SnapshotService
from tickwheel.node.server.staging_service import StagingService
from tickwheel.proto import (
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

_SERVICES = (
    (scheduler_pb2, "Scheduler"),
    (consumer_pb2, "Consumer"),
    (admin_pb2, "Admin"),
    (staging_pb2, "Staging"),
    (bulk_pb2, "Bulk"),
    (cold_pb2, "Cold"),
    (dead_pb2, "DeadLetters"),
    (snapshot_pb2, "Snapshot"),
    (health_pb2, "Health"),
)


def client_server(
    limits: LimitsSection,
    calls: Calls,
    scheduler: SchedulerService,
    consumer: ConsumerService,
    admin: AdminService,
    health: HealthReporter,
) -> grpc.aio.Server:
    """The server with all services, not yet bound to an address."""
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", limits.request_bytes_max),
            ("grpc.max_send_message_length", limits.request_bytes_max),
            # Clients ask whether this node is there while they wait for deliveries, as often as they like.
            ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
            ("grpc.http2.max_ping_strikes", 0),
        ],
        maximum_concurrent_rpcs=limits.calls_max,
    )
    look_methods_up(server)
    # Methods are looked for in this order.
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)
    consumer_pb2_grpc.add_ConsumerServicer_to_server(consumer, server)
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    staging_pb2_grpc.add_StagingServicer_to_server(StagingService(calls), server)
    snapshot_pb2_grpc.add_SnapshotServicer_to_server(SnapshotService(calls), server)
    bulk_pb2_grpc.add_BulkServicer_to_server(BulkService(calls), server)
    cold_pb2_grpc.add_ColdServicer_to_server(ColdService(calls), server)
    dead_pb2_grpc.add_DeadLettersServicer_to_server(DeadService(calls), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    names = [module.DESCRIPTOR.services_by_name[name].full_name for module, name in _SERVICES]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    return server


def look_methods_up(server: Any) -> None:
    """Have a server look each method up when it is called, instead of registering all of them beforehand.

    Generated code does both. Of a registered method grpc.aio keeps a task that waits for its next call, and with every
    call of any method it waits anew for all of these tasks: the price of a call grows with the number of methods.
    """
    server.add_registered_method_handlers = lambda service_name, method_handlers: None
