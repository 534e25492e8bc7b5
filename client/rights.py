"""Users, roles, tokens and the records of the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum

from tickwheel.client.answers import reader
from tickwheel.client.errors import refused
from tickwheel.client.requests import request_of
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


def _known_by(wire: access_pb2.Caller | access_pb2.AuditRecord) -> KnownBy:
    try:
        return KnownBy(wire.by)
    except ValueError:
        return KnownBy.UNKNOWN


role_of = reader(Role, access_pb2.AccessRole)
new_token_of = reader(NewToken, access_pb2.CreateTokenResponse)
user_of = reader(User, access_pb2.User)
caller_of = reader(Caller, access_pb2.Caller, by=_known_by)
audit_record_of = reader(AuditRecord, access_pb2.AuditRecord, by=_known_by)


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
    """Quotas for a node. Raises RequestRefused."""
    return request_of(access_pb2.UserQuotas, **asdict(quotas))
