"""Health for load balancers and supervisors (grpc.health.v1), from the node's status.

The meaning of SERVING:
- `""`: the process takes part. It is past recovery, not read-only and not stopping, and has heard of a master lately;
  a master has answers of a majority.
- `tickwheel.v1.Scheduler`, `tickwheel.v1.Consumer`: this node is the master and holds its lease. So a client whose load
  balancing watches health goes to it straight away. While the nodes' clocks do not agree, the master accepts schedules
  and dispatches nothing: Scheduler serves, Consumer does not.
- `tickwheel.v1.Admin`: always; any node reports its status.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from tickwheel.proto import admin_pb2

WHOLE = ""
SCHEDULER = "tickwheel.v1.Scheduler"
CONSUMER = "tickwheel.v1.Consumer"
ADMIN = "tickwheel.v1.Admin"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health_of(status: admin_pb2.NodeStatus) -> dict[str, bool]:
    """Whether each service serves, by name. Pure."""
    without_time = status.state == admin_pb2.NODE_WITHOUT_TIME
    takes_part = without_time or status.state in (admin_pb2.NODE_SERVING, admin_pb2.NODE_ALIGNING)
    leads = status.role == admin_pb2.MASTER
    master = takes_part and leads and status.lease_held
    return {
        WHOLE: master if leads else takes_part and bool(status.master_id),
        SCHEDULER: master,
        CONSUMER: master and not without_time,
        ADMIN: True,
    }


class _Servicer(HealthServicer):  # type: ignore[misc]  # of a package without types
    """The servicer of grpcio-health-checking, plus `List`, which that package lacks."""

    def __init__(self, told: Mapping[str, bool]) -> None:
        super().__init__()
        self._told = told

    async def List(self, request: health_pb2.HealthListRequest, context: object) -> health_pb2.HealthListResponse:
        """The state of all services."""
        answer = health_pb2.HealthListResponse()
        for service, serves in self._told.items():
            answer.statuses[service].status = _SERVING if serves else _NOT_SERVING
        return answer


class HealthReporter:
    """Keeps the health service in step with the node's status."""

    def __init__(self) -> None:
        self._told: dict[str, bool] = {}
        self.servicer = _Servicer(self._told)

    async def update(self, status: admin_pb2.NodeStatus) -> None:
        """Pass the changes since the last call to the health service."""
        for service, serves in health_of(status).items():
            if self._told.get(service) != serves:
                self._told[service] = serves
                await self.servicer.set(service, _SERVING if serves else _NOT_SERVING)

    async def stop(self) -> None:
        """Set every service to NOT_SERVING, for good."""
        self._told.update(dict.fromkeys(self._told, False))
        await self.servicer.enter_graceful_shutdown()
