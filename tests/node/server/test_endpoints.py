"""The table of endpoints: every method that the client port serves stands in it, with the right that it needs."""

from __future__ import annotations

from typing import Any, cast

import pytest
from grpc_reflection.v1alpha import reflection_pb2

from tickwheel.node.server.audit import AuditLog
from tickwheel.node.server.callers import Callers
from tickwheel.node.server.endpoints import ENDPOINTS
from tickwheel.node.server.gate import Gate
from tickwheel.node.server.services import SERVICES

LOOKS = ("Get", "List", "Count", "Watch", "Read", "WhoAmI", "Trace", "Check", "ServerReflectionInfo", "Pin", "Unpin")
"""How methods that change nothing begin."""
OF_CLIENTS = {
    *("Schedule", "ScheduleStream", "Cancel", "Reschedule", "Consume", "Pull", "Settle", "Extend"),
    *("Stage", "Commit", "Abort", "OfferBundle", "SendBundle", "AgreePin"),
}
"""Changes that are traffic, not administration: too many for an audit log."""


def served() -> set[str]:
    """Paths of all methods that the client port has, by the descriptors."""
    services = [module.DESCRIPTOR.services_by_name[name] for module, name in SERVICES]
    services.append(reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"])
    return {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}


def test_every_method_stands_in_the_table_and_nothing_else() -> None:
    """A new RPC without a line in the table fails here, and its node does not start."""
    assert set(ENDPOINTS) == served()


def test_only_health_and_reflection_are_open_to_everybody() -> None:
    """Whatever else is called without a user is refused while rights are on."""
    open_to_all = {path.split("/")[1] for path, endpoint in ENDPOINTS.items() if endpoint.check is None}
    assert open_to_all == {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def test_what_changes_the_cluster_is_audited() -> None:
    """Methods that neither look nor carry messages are in the audit log."""
    for path, endpoint in ENDPOINTS.items():
        name = path.rpartition("/")[2]
        changes = not name.startswith(LOOKS) and name not in OF_CLIENTS
        assert endpoint.audited == changes, path


def test_a_method_without_a_line_is_not_served() -> None:
    """The gate refuses it when it is registered."""
    gate = Gate(cast(Callers, None), cast(Any, None), cast(AuditLog, None), cast(Any, None))
    with pytest.raises(KeyError):
        gate.guarded("/tickwheel.v1.Admin/New", None, generator=False, streams=False)
