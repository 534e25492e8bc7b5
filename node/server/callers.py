"""The callers on the client port, and their rights.

A caller is identified by a token (`authorization: Bearer ...`) or by the common name of its certificate. While the
setting `rights` is off, only the certificate decides (access.py), and all checks in this module pass. While it is on, a
caller must be a user of the replicated state, unless it has a certificate of an administrator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tickwheel.node.core.metas import fitting
from tickwheel.node.failure import Failure, RequestError, refuse, refused
from tickwheel.node.server.access import Access, AuthenticatedContext, Permission
from tickwheel.node.state.rights import NO_QUOTAS, AccessControl, Rights
from tickwheel.proto import access_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.access_pb2 import Right

AUTHORIZATION = "authorization"
BEARER = "bearer "
SECRET_LENGTH_MAX = 256
"""No node issues longer secrets: they are refused without hashing."""
NOTHING = Rights(())


class CallingContext(AuthenticatedContext, Protocol):
    """The part of a servicer context that identifies the caller and its metadata."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...

    def peer(self) -> str: ...


def right_required(right: int, kind: str, name: str) -> Failure:
    """The refusal of a user that lacks `right`. `kind`: topic or group; empty: the whole cluster."""
    shown = Right.Name(Right.ValueType(right)).removeprefix("RIGHT_").lower()
    where = f" {kind} {name[:127]}" if kind and name else " every topic" if kind == "topic" else " the whole cluster"
    text = f"no role of this user allows it to {shown}{where}"
    return Failure(pb.RIGHT_REQUIRED, text, {"field": shown, "value": name[:127], "limit": kind or "*"})


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one call. Its rights are looked up at each check, so that a long stream notices changes."""

    name: str
    by: str
    """The means of identification: certificate, token or none."""
    unrestricted: bool
    """Whether its certificate lets it pass every check."""
    control: AccessControl
    enforced: Callable[[], bool]
    """Tells whether the setting `rights` is on."""
    sha256: bytes = b""
    """Hash of its token; empty without one."""
    now_ms: Callable[[], int] = lambda: 0
    connection: str = ""
    """Address and port of its end of the connection."""

    @property
    def free(self) -> bool:
        """Whether every check passes."""
        return self.unrestricted or not self.enforced()

    @property
    def actor(self) -> str:
        """The user whose quotas count; empty: no quotas."""
        return "" if self.free else self.name

    @property
    def rights(self) -> Rights:
        """The current rights of a caller that is not `free`."""
        user = self.control.bearer(self.sha256, self.now_ms()) if self.sha256 else self.control.user(self.name)
        return NOTHING if user is None else self.control.rights_of(user)

    @property
    def quotas(self) -> access_pb2.UserQuotas:
        """The caller's current quotas."""
        user = None if self.free else self.control.user(self.name)
        return NO_QUOTAS if user is None else user.quotas

    def topic(self, right: int, name: str) -> Failure | None:
        """The refusal if the caller lacks the right to a topic, else None. An empty name means every topic."""
        return self.topics(right, (name,))

    def topics(self, right: int, names: Iterable[str]) -> Failure | None:
        """The first refusal for one of the topics; None: the caller has the right to all. As `topic` for each name."""
        if self.free:
            return None
        rights = self.rights
        for name in names:
            if not (rights.topic(right, name) if name else rights.all_topics(right)):
                return right_required(right, "topic", name)
        return None

    def topic_of_named(self, right: int, name: str) -> Failure | None:
        """As `topic`, for the topic of what the caller named otherwise, as by an id that anybody can guess: the refusal
        does not tell which topic it is."""
        refusal = self.topic(right, name)
        if refusal is None or not name:
            return refusal
        shown = refusal.metadata["field"]
        text = f"no role of this user allows it to {shown} the topic that this belongs to"
        return Failure(pb.RIGHT_REQUIRED, text, {"field": shown, "value": "", "limit": "topic"})

    def group(self, right: int, name: str) -> Failure | None:
        """The refusal if the caller lacks the right to a group, else None."""
        return None if self.free or self.rights.group(right, name) else right_required(right, "group", name)

    def group_and_topics(self, right: int, group: str, topics: Iterable[str]) -> Failure | None:
        """The refusal if the caller lacks the right to a group or to one of the topics, else None."""
        if self.free:
            return None
        rights = self.rights
        if not rights.group(right, group):
            return right_required(right, "group", group)
        topic = rights.topic_without(right, group, topics)
        return None if topic is None else right_required(right, "topic", topic)

    def somewhere(self, right: int) -> Failure | None:
        """The refusal if the caller has the right to no name at all, else None. The service then checks the name."""
        return None if self.free or self.rights.somewhere(right) else right_required(right, "any", "topic or group")

    def everything(self, right: int) -> Failure | None:
        """The refusal if the caller lacks the right to the whole cluster, else None."""
        return None if self.free or self.rights.everything(right) else right_required(right, "", "")

    def message(self) -> access_pb2.Caller:
        """The caller as WhoAmI shows it."""
        grants = [] if self.free else list(self.rights.grants)
        told = fitting(grants, access_pb2.Grant.ByteSize)
        return access_pb2.Caller(
            name=self.name,
            by=self.by,
            unrestricted=self.free,
            grants=told,
            grants_left_out=len(grants) - len(told),
            quotas=self.quotas,
            rights=self.enforced(),
        )


class Callers:
    """Identifies callers by certificate and token."""

    def __init__(
        self,
        access: Access,
        control: Callable[[], AccessControl],
        enforced: Callable[[], bool],
        now_ms: Callable[[], int],
    ) -> None:
        self._access = access
        self._control = control
        self._enforced = enforced
        self._now_ms = now_ms
        self._last: Caller | None = None
        """The caller of the last call while rights were off: mostly that of the next one too."""

    @property
    def enforced(self) -> bool:
        """Whether the setting `rights` is on."""
        return self._enforced()

    def of(self, context: CallingContext, needed: Permission) -> Caller:
        """The caller. Raises RequestError: every call of it is refused. `needed` is checked only while rights are
        off."""
        control, connection, access = self._control(), context.peer(), self._access
        certified = access.name_of(context) if access.certifies else ""
        if not self._enforced():
            if access.certifies:
                refuse(access.refusal(context, needed))
            last = self._last
            if last is None or last.connection != connection or last.name != certified or last.control is not control:
                by = "certificate" if certified else "none"
                last = Caller(certified, by, False, control, self._enforced, connection=connection)
                self._last = last
            return last
        secret = _bearer(context)
        if secret:
            sha256 = hashlib.sha256(secret.encode()).digest() if len(secret) <= SECRET_LENGTH_MAX else b""
            user = control.bearer(sha256, self._now_ms())
            if user is None:
                raise unauthenticated("the token is not known, was revoked, or has expired")
            return Caller(user.name, "token", False, control, self._enforced, sha256, self._now_ms, connection)
        if access.certifies and access.refusal(context, Permission.ADMIN) is None:
            return Caller(certified, "certificate", True, control, self._enforced, connection=connection)
        if certified and control.user(certified) is not None:
            refuse(access.refusal(context, Permission.CLIENT))
            return Caller(certified, "certificate", False, control, self._enforced, connection=connection)
        if certified:
            raise unauthenticated(f"no user is named {certified[:127]}, as the certificate is")
        raise unauthenticated("this cluster needs a token (authorization: Bearer ...) or a certificate of a user")


EVERYBODY = Caller("", "none", True, AccessControl(), lambda: False)
"""A caller that passes every check: one that drives a core without a port."""


def unauthenticated(text: str) -> RequestError:
    """The refusal of a caller that the cluster does not know."""
    return refused(pb.UNAUTHENTICATED, text, field=AUTHORIZATION)


def _bearer(context: CallingContext) -> str:
    metadata: Mapping[str, str | bytes] = dict(context.invocation_metadata() or ())
    value = metadata.get(AUTHORIZATION, "")
    if isinstance(value, str) and value[: len(BEARER)].lower() == BEARER:
        return value[len(BEARER) :].strip()
    return ""
