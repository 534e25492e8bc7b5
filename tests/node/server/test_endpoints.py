"""The table of endpoints: every method that the client port serves has a row, with its types, right and handler."""

from __future__ import annotations

import inspect
import json
from base64 import b64encode
from collections import Counter
from typing import Any, cast, get_args, get_type_hints

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass

from tickwheel import proto
from tickwheel.node.core.schedule.intake import Row
from tickwheel.node.server import handlers
from tickwheel.node.server.door import Door
from tickwheel.node.server.endpoints import ANY_NODE, SERVICES, Endpoint
from tickwheel.node.server.gate import shown
from tickwheel.node.server.services import SERVED, serve_endpoints
from tickwheel.proto import schedules_pb2
from tickwheel.proto.common_pb2 import MessageMeta
from tickwheel.transport.server import Server

LOOKS = ("Get", "Await", "List", "Count", "Watch", "Read", "WhoAmI", "Trace", "Pin", "Unpin", "Preview")
"""How methods that change nothing begin."""
OF_CLIENTS = {
    *("Schedule", "ScheduleStream", "ScheduleMany", "Cancel", "CancelMany", "Reschedule", "RescheduleMany"),
    *("Consume", "Pull", "Settle", "Extend"),
    *("Stage", "Commit", "Abort", "OfferBundle", "SendBundle", "AgreePin"),
}
"""Changes that are traffic, not administration: too many for an audit log."""
OF_ANY_NODE = {
    *("GetStatus", "AwaitMaster", "WatchStatus", "GetServerInfo", "ListTopics", "ListGroups", "GetSettings"),
    *("GetDiskUse", "GetDigest", "Backup", "Trace", "WhoAmI", "ListUsers", "ListRoles", "ListAudit"),
    *("OfferBundle", "SendBundle", "GetLoad", "Pin", "ReadPinned", "Unpin", "PinSettled", "ReadSettled"),
}
"""Methods about the node itself, and those that may show what this node has applied so far."""
OF_PEERS = {"tickwheel.v1.Peer"}
SECRET = "card 4111"


def rows() -> list[tuple[MethodDescriptor, Endpoint]]:
    """Every row with its method."""
    return [
        (Default().FindServiceByName(service).methods_by_name[name], endpoint)
        for service, methods in SERVICES.items()
        for name, endpoint in methods.items()
    ]


def test_every_method_has_a_row_and_every_row_a_method() -> None:
    """A new RPC without a row fails here, and its node does not start; so does a service that nobody serves."""
    for service, methods in SERVICES.items():
        assert list(methods) == [method.name for method in Default().FindServiceByName(service).methods]
    declared = {
        service.full_name
        for module in vars(proto).values()
        if inspect.ismodule(module) and hasattr(module, "DESCRIPTOR")
        for service in module.DESCRIPTOR.services_by_name.values()
    }
    assert set(SERVICES) | OF_PEERS == declared


def test_handlers_have_the_types_of_their_methods() -> None:
    """Requests and responses are made by the descriptors: what a handler says of its own must be the same."""
    checked = 0
    for method, endpoint in rows():
        if endpoint.handler.__module__ != handlers.__name__:
            continue
        types = get_type_hints(endpoint.handler)
        message = GetMessageClass(method.input_type)
        assert types["request"] == (message if endpoint.plain is None else message | Row), method.full_name
        answer = get_args(types["reply"])[0] if "reply" in types else types["return"]
        message = GetMessageClass(method.output_type)
        assert answer in (message, message | bytes), method.full_name
        checked += 1
    assert checked > 30


def test_every_handler_is_used() -> None:
    """A coroutine of the handlers' module that no row runs is dead."""
    text = inspect.getsource(inspect.getmodule(Endpoint) or handlers)
    for name, function in inspect.getmembers(handlers, inspect.iscoroutinefunction):
        if function.__module__ == handlers.__name__:
            source = inspect.getsource(handlers)
            assert f"handlers.{name}" in text or source.count(f"{name}(") + source.count(f"({name}") > 1, name


def test_only_health_and_reflection_are_open_to_everybody() -> None:
    """Whatever else is called without a user is refused while rights are on: a row has a right."""
    assert set(SERVED) - set(SERVICES) == {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def test_what_changes_the_cluster_is_audited() -> None:
    """Methods that neither look nor carry messages are in the audit log."""
    for method, endpoint in rows():
        changes = not method.name.startswith(LOOKS) and method.name not in OF_CLIENTS
        assert endpoint.right.audited == changes, method.full_name


def fill(message: Any, depth: int = 0) -> None:
    """Put SECRET wherever content of messages of users may stand."""
    for field in message.DESCRIPTOR.fields:
        own = field.message_type is MessageMeta.DESCRIPTOR
        if own:
            meta = MessageMeta(key=SECRET, unique_key=SECRET, tags=[SECRET], headers={SECRET: SECRET})
            (getattr(message, field.name).add() if field.is_repeated else getattr(message, field.name)).CopyFrom(meta)
        elif field.type == field.TYPE_BYTES:
            setattr(message, field.name, [SECRET.encode()] if field.is_repeated else SECRET.encode())
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry and depth < 4:
            part = getattr(message, field.name)
            fill(part.add() if field.is_repeated else part, depth + 1)


def test_the_audit_log_has_no_content_of_messages() -> None:
    """Neither payloads nor what goes with them, in any request that is noted; the rest of it is there."""
    hidden = 0
    for method, endpoint in rows():
        if endpoint.right.audited:
            request = GetMessageClass(method.input_type)()
            fill(request)
            before = request.SerializeToString()
            noted = shown(request)
            assert SECRET not in noted and b64encode(SECRET.encode()).decode() not in noted, method.full_name
            assert request.SerializeToString() == before
            hidden += SECRET.encode() in before
    assert hidden
    put = schedules_pb2.PutScheduleRequest(definition=schedules_pb2.ScheduleDefinition(name="daily", payload=b"x"))
    assert json.loads(shown(put)) == {"definition": {"name": "daily"}}


def test_each_other_method_needs_the_master() -> None:
    """A slave that answered would show what is no longer so. A method that each node may answer is named here."""
    assert {method.name for method, endpoint in rows() if endpoint.needs is ANY_NODE} == OF_ANY_NODE


class Registry:
    """Takes what is registered."""

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Of one service."""


def test_a_method_without_a_row_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node does not start."""
    door = Door(cast(Server, Registry()), Counter())
    serve_endpoints(door, cast(Any, None), cast(Any, None))
    monkeypatch.delitem(SERVICES["tickwheel.v1.Admin"], "GetDigest")
    with pytest.raises(KeyError):
        serve_endpoints(door, cast(Any, None), cast(Any, None))
