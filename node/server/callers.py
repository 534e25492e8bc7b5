"""Who calls on the client port, and what a caller may do.

A caller is known by a token (`authorization: Bearer ...`) or by the common name of its certificate. While the setting
`rights` is off, what it may do follows from its certificate alone (access.py) and everything else here lets it pass.
While it is on, a caller must be a user of the replicated state; only a certificate of an administrator passes without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tickwheel.node.core.failure import Failure
from tickwheel.node.server.access import Access, AuthenticatedContext, Permission
from tickwheel.node.state.rights import NO_QUOTAS, AccessControl, Quotas, Rights
from tickwheel.proto import access_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.access_pb2 import Right

AUTHORIZATION = "authorization"
BEARER = "bearer "
SECRET_LENGTH_MAX = 256
"""Longer ones are of no node; they are not hashed."""
NOTHING = Rights(())


class CallingContext(AuthenticatedContext, Protocol):
    """The part of a servicer context that says who calls."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def right_required(right: int, kind: str, name: str) -> Failure:
    """The refusal of a user without a right. `kind`: topic or group; empty: everything."""
    shown = Right.Name(Right.ValueType(right)).removeprefix("RIGHT_").lower()
    where = f" {kind} {name[:127]}" if kind and name else " every topic" if kind == "topic" else " the whole cluster"
    text = f"no role of this user allows to {shown}{where}"
    return Failure(pb.RIGHT_REQUIRED, text, {"field": shown, "value": name[:127], "limit": kind or "*"})


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call. What it may do is looked up anew each time, so that a long stream notices changes."""

    name: str
    by: str
    """certificate, token or none."""
    unrestricted: bool
    """By its certificate."""
    control: AccessControl
    enforced: Callable[[], bool]
    """Whether rights are on."""
    sha256: bytes = b""
    """Of its token."""
    now_ms: Callable[[], int] = lambda: 0

    @property
    def free(self) -> bool:
        """Whether nothing needs to be asked."""
        return self.unrestricted or not self.enforced()

    @property
    def actor(self) -> str:
        """The user whose quotas count; empty: nobody's."""
        return "" if self.free else self.name

    @property
    def rights(self) -> Rights:
        """What a caller that is not `free` may do now."""
        user = self.control.bearer(self.sha256, self.now_ms()) if self.sha256 else self.control.user(self.name)
        return NOTHING if user is None else self.control.rights_of(user)

    @property
    def quotas(self) -> Quotas:
        """The caller's quotas."""
        user = None if self.free else self.control.user(self.name)
        return NO_QUOTAS if user is None else user.quotas

    def topic(self, right: int, name: str) -> Failure | None:
        """None if the caller has the right to a topic; the empty name stands for every topic."""
        if self.free:
            return None
        rights = self.rights
        allowed = rights.topic(right, name) if name else rights.all_topics(right)
        return None if allowed else right_required(right, "topic", name)

    def topics(self, right: int, names: Iterable[str]) -> Failure | None:
        """None if it has the right to all of them."""
        if self.free:
            return None
        return next((refusal for name in names if (refusal := self.topic(right, name)) is not None), None)

    def group(self, right: int, name: str) -> Failure | None:
        """None if it has the right to a group."""
        return None if self.free or self.rights.group(right, name) else right_required(right, "group", name)

    def group_and_topics(self, right: int, group: str, topics: Iterable[str]) -> Failure | None:
        """None if it has the right to a group for each of the topics."""
        if self.free:
            return None
        rights = self.rights
        if not rights.group(right, group):
            return right_required(right, "group", group)
        for topic in topics:
            if not rights.group_and_topic(right, group, topic):
                return right_required(right, "topic", topic)
        return None

    def somewhere(self, right: int) -> Failure | None:
        """None if it has the right to any name; who asks for one looks further."""
        return None if self.free or self.rights.somewhere(right) else right_required(right, "any", "topic or group")

    def everything(self, right: int) -> Failure | None:
        """None if it has the right to the whole cluster."""
        return None if self.free or self.rights.everything(right) else right_required(right, "", "")

    def message(self) -> access_pb2.Caller:
        """For WhoAmI."""
        grants = [] if self.free else [grant.message() for grant in self.rights.grants]
        return access_pb2.Caller(
            name=self.name,
            by=self.by,
            unrestricted=self.free,
            grants=grants,
            quotas=self.quotas.message(),
            rights=self.enforced(),
        )


class Callers:
    """Knows callers. One per node."""

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

    @property
    def enforced(self) -> bool:
        """Whether rights are on."""
        return self._enforced()

    def of(self, context: CallingContext, needed: Permission) -> Caller | Failure:
        """Who calls, or why it is refused whatever it asks. `needed` counts while rights are off."""
        control = self._control()
        certified = self._access.name_of(context)
        if not self._enforced():
            refusal = self._access.refusal(context, needed)
            by = "certificate" if certified else "none"
            return refusal or Caller(certified, by, False, control, self._enforced)
        secret = _bearer(context)
        if secret:
            sha256 = hashlib.sha256(secret.encode()).digest() if len(secret) <= SECRET_LENGTH_MAX else b""
            user = control.bearer(sha256, self._now_ms())
            if user is None:
                return unauthenticated("the token is not known, was revoked, or has expired")
            return Caller(user.name, "token", False, control, self._enforced, sha256, self._now_ms)
        if self._access.refusal(context, Permission.ADMIN) is None and self._access.certifies:
            return Caller(certified, "certificate", True, control, self._enforced)
        if certified and control.user(certified) is not None:
            refusal = self._access.refusal(context, Permission.CLIENT)
            return refusal or Caller(certified, "certificate", False, control, self._enforced)
        if certified:
            return unauthenticated(f"no user is named {certified[:127]}, as the certificate is")
        return unauthenticated("this cluster needs a token (authorization: Bearer ...) or a certificate of a user")


def unauthenticated(text: str) -> Failure:
    """The caller is nobody that the cluster knows."""
    return Failure(pb.UNAUTHENTICATED, text, {"field": AUTHORIZATION})


def _bearer(context: CallingContext) -> str:
    metadata: Mapping[str, str | bytes] = dict(context.invocation_metadata() or ())
    value = metadata.get(AUTHORIZATION, "")
    if isinstance(value, str) and value[: len(BEARER)].lower() == BEARER:
        return value[len(BEARER) :].strip()
    return ""
