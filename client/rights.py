"""Users, roles, tokens and the records of the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from tickwheel.client.errors import refused
from tickwheel.client.moments import moment_if, moment_of
from tickwheel.client.states import enum_of
from tickwheel.proto import access_pb2


class Right(StrEnum):
    """What a role may allow."""

    SCHEDULE = "schedule"
    """Schedule messages, directly or staged."""
    CANCEL = "cancel"
    """Cancel and reschedule, one by one or in bulk."""
    READ = "read"
    """Look at messages: get, list, count, trace, snapshots, dead letters."""
    CONSUME = "consume"
    """Consume, settle and extend; needs the topic and the group."""
    ADMINISTER = "administer"
    """Topics, groups and dead letters within the patterns. Members, settings, users, handover, backup and bulk load
    need `*` for both."""
    UNKNOWN = "unknown"
    """Of a node of a later version; cannot be granted."""


class KnownBy(StrEnum):
    """How a node knows a caller."""

    CERTIFICATE = "certificate"
    TOKEN = "token"
    NONE = "none"
    """The caller shows nothing."""
    UNKNOWN = "unknown"
    """Of a node of a later version."""


@dataclass(frozen=True, slots=True)
class Grant:
    """All of `rights`, for topics and groups whose names match. `*` in a pattern stands for any characters."""

    rights: tuple[Right, ...] = ()
    topics: tuple[str, ...] = ()
    """Empty: no topic."""
    groups: tuple[str, ...] = ()
    """Empty: no group. Only `CONSUME`, `READ` (dead letters, settled messages) and `ADMINISTER` ask for groups."""


@dataclass(frozen=True, slots=True)
class Role:
    """A named list of grants."""

    name: str
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Limits of a user; 0: no limit."""

    messages_per_s: int = 0
    """Messages that it schedules a second, by the master."""
    bytes_per_s: int = 0
    """Bytes that it schedules a second, by the master."""
    pending_max: int = 0
    """Messages pending in all topics that the user may schedule to, whoever scheduled them."""
    topics_max: int = 0
    """Topics that the user created and that exist."""
    groups_max: int = 0
    """Groups that the user created and that exist."""
    streams_max: int = 0
    """Calls that stay open at one node: consumers, streams of messages and of status."""
    connections_max: int = 0
    """Connections to one node over which the user has made calls."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token, without its secret."""

    id: str
    """The first 12 hexadecimal digits of the secret's SHA-256."""
    created: datetime
    """In UTC."""
    expires: datetime | None
    """In UTC; None: never."""
    label: str


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that was just made. Nodes keep only a hash of its secret."""

    token: Token
    secret: str = field(repr=False)
    """For `AsyncClient(addresses, token=secret)`."""


@dataclass(frozen=True, slots=True)
class User:
    """A user. A client's certificate with this common name is this user's."""

    name: str
    roles: tuple[str, ...]
    quotas: Quotas
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a client is to the cluster, and what it may do."""

    name: str
    """Empty: rights are off, and the client shows neither a certificate nor a token."""
    by: KnownBy
    unrestricted: bool
    """It has every right: by its certificate, or because rights are off."""
    grants: tuple[Grant, ...]
    grants_left_out: int
    """Grants that did not fit the answer."""
    quotas: Quotas
    rights: bool
    """Whether rights are on."""


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """A call that changes the cluster, or one that was refused for a lack of rights."""

    at: datetime
    """By the node's wall clock, in UTC."""
    node_id: str
    """The node that answered the call."""
    user: str
    """Empty: nobody that the node knows."""
    by: KnownBy
    peer: str
    """Network address of the caller."""
    method: str
    """As `Admin/DeleteTopic`."""
    request: str
    """The request as JSON, shortened."""
    result: str
    """`OK`, or the reason and the message of the refusal."""
    left_out: int
    """Refusals between the record before and this one that were too many to be noted."""


def _known_by(text: str) -> KnownBy:
    try:
        return KnownBy(text)
    except ValueError:
        return KnownBy.UNKNOWN


def grant_of(wire: access_pb2.Grant) -> Grant:
    """A grant from its protobuf message."""
    return Grant(
        rights=tuple(enum_of(Right, access_pb2.Right.DESCRIPTOR, right, "RIGHT_") for right in wire.rights),
        topics=tuple(wire.topics),
        groups=tuple(wire.groups),
    )


def role_of(wire: access_pb2.AccessRole) -> Role:
    """A role from its protobuf message."""
    return Role(name=wire.name, grants=tuple(map(grant_of, wire.grants)))


def quotas_of(wire: access_pb2.UserQuotas) -> Quotas:
    """Quotas from their protobuf message."""
    return Quotas(
        messages_per_s=wire.messages_per_s,
        bytes_per_s=wire.bytes_per_s,
        pending_max=wire.pending_max,
        topics_max=wire.topics_max,
        groups_max=wire.groups_max,
        streams_max=wire.streams_max,
        connections_max=wire.connections_max,
    )


def token_of(wire: access_pb2.Token) -> Token:
    """A token from its protobuf message."""
    return Token(id=wire.id, created=moment_of(wire.created_ms), expires=moment_if(wire.expires_ms), label=wire.label)


def new_token_of(wire: access_pb2.CreateTokenResponse) -> NewToken:
    """A new token from its protobuf message."""
    return NewToken(token=token_of(wire.token), secret=wire.secret)


def user_of(wire: access_pb2.User) -> User:
    """A user from its protobuf message."""
    return User(
        name=wire.name,
        roles=tuple(wire.roles),
        quotas=quotas_of(wire.quotas),
        tokens=tuple(map(token_of, wire.tokens)),
    )


def caller_of(wire: access_pb2.Caller) -> Caller:
    """A caller from its protobuf message."""
    return Caller(
        name=wire.name,
        by=_known_by(wire.by),
        unrestricted=wire.unrestricted,
        grants=tuple(map(grant_of, wire.grants)),
        grants_left_out=wire.grants_left_out,
        quotas=quotas_of(wire.quotas),
        rights=wire.rights,
    )


def audit_record_of(wire: access_pb2.AuditRecord) -> AuditRecord:
    """A record from its protobuf message."""
    return AuditRecord(
        at=moment_of(wire.at_ms),
        node_id=wire.node_id,
        user=wire.user,
        by=_known_by(wire.by),
        peer=wire.peer,
        method=wire.method,
        request=wire.request,
        result=wire.result,
        left_out=wire.left_out,
    )


def grant_messages(grants: Sequence[Grant]) -> list[access_pb2.Grant]:
    """Grants for a node. Raises RequestRefused for a right that cannot be granted, or a text in place of a list."""
    for grant in grants:
        for name, patterns in (("topics", grant.topics), ("groups", grant.groups), ("rights", grant.rights)):
            if isinstance(patterns, str):
                raise refused(name, patterns, "a list of texts")
    return [
        access_pb2.Grant(rights=[_number_of(right) for right in grant.rights], topics=grant.topics, groups=grant.groups)
        for grant in grants
    ]


def _number_of(right: Right) -> access_pb2.Right.ValueType:
    if right not in _GRANTABLE:
        raise refused("rights", right, ", ".join(_GRANTABLE))
    return access_pb2.Right.Value(f"RIGHT_{right.upper()}")


_GRANTABLE = tuple(right for right in Right if right is not Right.UNKNOWN)


def quotas_message(quotas: Quotas) -> access_pb2.UserQuotas:
    """Quotas for a node."""
    return access_pb2.UserQuotas(
        messages_per_s=quotas.messages_per_s,
        bytes_per_s=quotas.bytes_per_s,
        pending_max=quotas.pending_max,
        topics_max=quotas.topics_max,
        groups_max=quotas.groups_max,
        streams_max=quotas.streams_max,
        connections_max=quotas.connections_max,
    )
