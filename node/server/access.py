"""The rights of a caller on the client port, by its certificate.

Owns the two roles there: `client` may schedule, consume and look; `admin` may also change the cluster. Peers have a
separate port. Without TLS every caller has both roles: the port is then on loopback, or the operator said --insecure.
With TLS the role comes from the certificate. It must state one, since an authority may sign certificates for much else
than this cluster.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tickwheel.node.failure import Failure
from tickwheel.node.tls import ADMIN_UNIT, CLIENT_UNIT, NODE_UNIT, CertificateIdentity, identity_of
from tickwheel.proto import common_pb2

CACHE_MAX = 1_024
ANY_NAME = "*"
"""In tls.client_names: any certificate that the authority has signed."""


class Permission(enum.Enum):
    """The role that a call needs."""

    CLIENT = "client"
    ADMIN = "admin"


class AuthenticatedContext(Protocol):
    """The part of a servicer context that identifies the caller."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...


class Access:
    """Reads a caller's role and name from its certificate."""

    def __init__(self, *, tls: bool, admin_names: Sequence[str], client_names: Sequence[str] = ()) -> None:
        self.certifies = tls
        """Whether callers show certificates, that is, whether the client port has TLS."""
        self._client_names = frozenset(client_names)
        self._admin_names = frozenset(admin_names)
        self._known: dict[bytes, CertificateIdentity] = {}

    def _is_admin(self, identity: CertificateIdentity) -> bool:
        return ADMIN_UNIT in identity.units or identity.common_name in self._admin_names

    def refusal(self, context: AuthenticatedContext, needed: Permission) -> Failure | None:
        """The refusal of a caller without the needed role; None: it has the role."""
        if not self.certifies:
            return None
        identity = self._identity(context)
        if identity is None:
            if needed is Permission.CLIENT:
                return None
            return self._refuse("a certificate with the admin role is required", needed, "")
        if self._is_admin(identity):
            return None
        if needed is Permission.ADMIN:
            return self._refuse(
                f"{identity.common_name} is not an administrator: its certificate needs the organisational unit "
                f"{ADMIN_UNIT}, or its name in tls.admin_names",
                needed,
                identity.common_name,
            )
        if CLIENT_UNIT in identity.units or identity.common_name in self._client_names:
            return None
        if NODE_UNIT in identity.units:
            return self._refuse(
                f"{identity.common_name} is a node's certificate, which gives no client role",
                needed,
                identity.common_name,
            )
        if ANY_NAME in self._client_names:
            return None
        stated = ", ".join(sorted(identity.units)) or "none"
        return self._refuse(
            f"the certificate of {identity.common_name or 'a caller without a name'} states no role: it needs the "
            f"organisational unit {CLIENT_UNIT} or {ADMIN_UNIT} (it has: {stated}), or its name in tls.client_names",
            needed,
            identity.common_name,
        )

    def name_of(self, context: AuthenticatedContext) -> str:
        """Common name of the caller's certificate; empty without one."""
        identity = self._identity(context) if self.certifies else None
        return "" if identity is None else identity.common_name

    def _identity(self, context: AuthenticatedContext) -> CertificateIdentity | None:
        pem = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
        if not pem:
            return None
        known = self._known.get(pem)
        if known is None:
            if len(self._known) >= CACHE_MAX:
                self._known.clear()
            known = self._known[pem] = identity_of(pem)
        return known

    @staticmethod
    def _refuse(message: str, needed: Permission, name: str) -> Failure:
        return Failure(common_pb2.ROLE_REQUIRED, message, {"field": "role", "value": name, "limit": needed.value})
