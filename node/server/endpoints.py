"""The table of all methods of the client port: the right that each needs, and whether the audit log notes its calls.

A node does not start if a method of a service is missing here (gate.py), and a test compares the table with the
descriptors.

A check gets the caller, the request and the state, and returns the refusal or None. For a stream of requests the
request is None, and the service checks each one. If a request names a message by its id, the code that looks the
message up checks the right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tickwheel.node.core.failure import Failure
from tickwheel.node.server.access import Permission
from tickwheel.node.server.callers import Caller
from tickwheel.node.state.view import StateView
from tickwheel.proto.access_pb2 import RIGHT_ADMINISTER, RIGHT_CANCEL, RIGHT_CONSUME, RIGHT_READ, RIGHT_SCHEDULE

Check = Callable[[Caller, Any, StateView], Failure | None]
CLIENT, ADMIN = Permission.CLIENT, Permission.ADMIN


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method. `check` None: everybody may call it, even an unknown caller."""

    check: Check | None
    needed: Permission = CLIENT
    """The role needed while the setting `rights` is off."""
    audited: bool = False


def known(caller: Caller, request: Any, state: StateView) -> Failure | None:
    """Allows every known caller: the answer shows no messages, or only those that the caller may see."""
    return None


def somewhere(right: int) -> Check:
    """Needs the right to at least one name; the service checks which."""
    return lambda caller, request, state: caller.somewhere(right)


def topic(right: int, named: Callable[[Any], str]) -> Check:
    """Needs the right to the topic that the request names; without a name, to every topic."""
    return lambda caller, request, state: caller.topic(right, named(request))


def group(right: int, named: Callable[[Any], str]) -> Check:
    """Needs the right to the group that the request names."""
    return lambda caller, request, state: caller.group(right, named(request))


def cluster(caller: Caller, request: Any, state: StateView) -> Failure | None:
    """Needs the right to administer the whole cluster."""
    return caller.everything(RIGHT_ADMINISTER)


def _pinned(caller: Caller, request: Any, state: StateView) -> Failure | None:
    if request.pin_id:  # an existing pin; the service checks its owner
        return caller.somewhere(RIGHT_READ)
    return caller.topics(RIGHT_READ, request.topics or [""])


def _settled(caller: Caller, request: Any, state: StateView) -> Failure | None:
    return caller.group_and_topics(RIGHT_READ, request.group, topics_of(state, request.group))


def _job(caller: Caller, request: Any, state: StateView) -> Failure | None:
    job = state.sweeps.get(request.job_id)
    return caller.somewhere(RIGHT_CANCEL) if job is None else caller.topic(RIGHT_CANCEL, job.selection.topic)


def consuming(caller: Caller, request: Any, state: StateView) -> Failure | None:
    """To open a consumer: needs the right to its group, and to the topics of the request and of the group."""
    named = [*request.topics, *([request.topic] if "topic" in request.DESCRIPTOR.fields_by_name else [])]
    topics = {name for name in (*named, *topics_of(state, request.group)) if name}
    return caller.group_and_topics(RIGHT_CONSUME, request.group, sorted(topics))


def settling(caller: Caller, request: Any, state: StateView) -> Failure | None:
    """To settle or extend deliveries: needs the right to the group, and to the topic if the request names one."""
    return caller.group_and_topics(RIGHT_CONSUME, request.group, [request.topic] if request.topic else [])


def _creating_group(caller: Caller, request: Any, state: StateView) -> Failure | None:
    return caller.group_and_topics(RIGHT_ADMINISTER, request.name, request.topics)


def topics_of(state: StateView, name: str) -> Iterable[str]:
    """Topics of a group; none if there is no such group."""
    group_id = state.group_id(name)
    return [] if group_id is None else [state.topic_name(topic_id) for topic_id in state.group_topics(group_id)]


def _name(request: Any) -> str:
    return str(request.name)


def _group(request: Any) -> str:
    return str(request.group)


def _topic(request: Any) -> str:
    return str(request.topic)


OPEN = Endpoint(None)
KNOWN = Endpoint(known)
CHANGES = Endpoint(cluster, ADMIN, audited=True)
ONE_TOPIC = Endpoint(topic(RIGHT_ADMINISTER, _name), ADMIN, audited=True)
ONE_GROUP = Endpoint(group(RIGHT_ADMINISTER, _name), ADMIN, audited=True)
STAGES = Endpoint(somewhere(RIGHT_SCHEDULE))

_OF_SERVICES: dict[str, dict[str, Endpoint]] = {
    "tickwheel.v1.Scheduler": {
        "Schedule": Endpoint(topic(RIGHT_SCHEDULE, lambda request: request.message.topic or "(none)")),
        "ScheduleStream": Endpoint(somewhere(RIGHT_SCHEDULE)),
        "Cancel": Endpoint(somewhere(RIGHT_CANCEL)),
        "Reschedule": Endpoint(somewhere(RIGHT_CANCEL)),
        "Get": Endpoint(somewhere(RIGHT_READ)),
        "ListPending": Endpoint(topic(RIGHT_READ, _topic)),
        "CountPending": Endpoint(topic(RIGHT_READ, _topic)),
        "BeginSweep": Endpoint(topic(RIGHT_CANCEL, lambda request: request.selection.topic), audited=True),
        "GetSweep": Endpoint(_job),
        "ListSweeps": Endpoint(somewhere(RIGHT_CANCEL)),
        "StopSweep": Endpoint(_job, audited=True),
    },
    "tickwheel.v1.Consumer": {
        "Consume": Endpoint(somewhere(RIGHT_CONSUME)),
        "Pull": Endpoint(consuming),
        "Settle": Endpoint(settling),
        "Extend": Endpoint(settling),
    },
    "tickwheel.v1.Admin": {
        "GetStatus": KNOWN,
        "WatchStatus": KNOWN,
        "TransferMaster": CHANGES,
        "AddMember": CHANGES,
        "RemoveMember": CHANGES,
        "CreateTopic": ONE_TOPIC,
        "DeleteTopic": ONE_TOPIC,
        "ListTopics": KNOWN,
        "CreateGroup": Endpoint(_creating_group, ADMIN, audited=True),
        "UpdateGroup": ONE_GROUP,
        "DeleteGroup": ONE_GROUP,
        "SetGroupFilter": ONE_GROUP,
        "SetTopicPaused": ONE_TOPIC,
        "SetGroupPaused": ONE_GROUP,
        "ResetGroup": ONE_GROUP,
        "ListGroups": KNOWN,
        "GetSettings": KNOWN,
        "UpdateSettings": CHANGES,
        "GetDiskUse": Endpoint(cluster),
        "Backup": Endpoint(cluster, ADMIN, audited=True),
        "Trace": Endpoint(somewhere(RIGHT_READ)),
        "GetDigest": Endpoint(cluster),
    },
    "tickwheel.v1.Staging": {
        "Stage": Endpoint(topic(RIGHT_SCHEDULE, lambda request: request.columns.topic or "(none)")),
        "Commit": STAGES,
        "Abort": STAGES,
        "GetStagedJob": STAGES,
    },
    "tickwheel.v1.Bulk": {
        "OfferBundle": Endpoint(cluster, ADMIN),
        "SendBundle": Endpoint(cluster, ADMIN),
        "TakeOver": CHANGES,
        "GetLoad": Endpoint(cluster, ADMIN),
    },
    "tickwheel.v1.Cold": {
        "RegisterCold": CHANGES,
        "ListColdParts": Endpoint(cluster, ADMIN),
        "ListColdMoved": Endpoint(cluster, ADMIN),
    },
    "tickwheel.v1.DeadLetters": {
        "ListDead": Endpoint(group(RIGHT_READ, _group)),
        "GetDead": Endpoint(group(RIGHT_READ, _group)),
        "ReplayDead": Endpoint(group(RIGHT_ADMINISTER, _group), ADMIN, audited=True),
        "PurgeDead": Endpoint(group(RIGHT_ADMINISTER, _group), ADMIN, audited=True),
    },
    "tickwheel.v1.Snapshot": {
        "Pin": Endpoint(_pinned),
        "ReadPinned": Endpoint(somewhere(RIGHT_READ)),
        "Unpin": Endpoint(somewhere(RIGHT_READ)),
        "AgreePin": Endpoint(somewhere(RIGHT_READ)),
        "PinSettled": Endpoint(_settled),
        "ReadSettled": Endpoint(somewhere(RIGHT_READ)),
    },
    "tickwheel.v1.Access": {
        "WhoAmI": KNOWN,
        "SetUser": CHANGES,
        "DeleteUser": CHANGES,
        "ListUsers": Endpoint(cluster, ADMIN),
        "CreateToken": CHANGES,
        "RevokeToken": CHANGES,
        "SetRole": CHANGES,
        "DeleteRole": CHANGES,
        "ListRoles": Endpoint(cluster, ADMIN),
        "ListAudit": Endpoint(cluster, ADMIN),
    },
    # For load balancers and tools; they show only which services exist and whether they serve.
    "grpc.health.v1.Health": {"Check": OPEN, "Watch": OPEN, "List": OPEN},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": OPEN},
}

ENDPOINTS = {
    f"/{service}/{method}": endpoint
    for service, methods in _OF_SERVICES.items()
    for method, endpoint in methods.items()
}
"""By gRPC's path of the method, /service/method."""
