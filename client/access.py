"""Calls for users, roles, tokens and the audit log. Changes go to the master."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from tickwheel.client.calls import ServiceCalls, listed
from tickwheel.client.errors import Fault
from tickwheel.client.moments import ms_of, span_ms_of
from tickwheel.client.requests import request_of
from tickwheel.client.rights import (
    AuditRecord,
    Caller,
    Grant,
    NewToken,
    Quotas,
    Role,
    User,
    audit_record_of,
    caller_of,
    grant_messages,
    new_token_of,
    quotas_message,
    role_of,
    user_of,
)
from tickwheel.proto import access_pb2
from tickwheel.proto.access_pb2_grpc import AccessStub

NO_QUOTAS = Quotas()


class AccessClient(ServiceCalls[AccessStub]):
    """`AsyncClient.access`."""

    _service = AccessStub

    async def who_am_i(self) -> Caller:
        """The caller as the master identifies this client, with its rights."""
        return caller_of(await self._ask(lambda stub: stub.WhoAmI, access_pb2.WhoAmIRequest()))

    async def set_user(self, name: str, roles: Sequence[str], quotas: Quotas = NO_QUOTAS) -> User:
        """Create a user or replace its roles and quotas; its tokens stay."""
        request = request_of(access_pb2.SetUserRequest, name=name, roles=roles, quotas=quotas_message(quotas))
        return user_of(await self._ask(lambda stub: stub.SetUser, request))

    async def delete_user(self, name: str) -> None:
        """Delete a user with its tokens."""
        await self._ask(lambda stub: stub.DeleteUser, request_of(access_pb2.DeleteUserRequest, name=name))

    async def users(self) -> list[User]:
        """All users."""

        async def fetch(last: access_pb2.User | None) -> access_pb2.ListUsersResponse:
            request = request_of(access_pb2.ListUsersRequest, after=last.name if last else "")
            return await self._ask(lambda stub: stub.ListUsers, request)

        return [user_of(user) for user in (await listed(fetch, lambda page: page.users))[0]]

    async def create_token(self, user: str, *, label: str = "", lifetime: timedelta | None = None) -> NewToken:
        """Create a token. Only the answer holds its secret. Raises OutcomeUnknown if the answer is lost."""
        lifetime_ms = 0 if lifetime is None else span_ms_of("lifetime", lifetime)
        request = request_of(access_pb2.CreateTokenRequest, user=user, label=label, lifetime_ms=lifetime_ms)
        return new_token_of(await self._ask(lambda stub: stub.CreateToken, request, repeatable=False))

    async def revoke_token(self, user: str, token_id: str) -> User:
        """Revoke a token; returns its user."""
        request = request_of(access_pb2.RevokeTokenRequest, user=user, token_id=token_id)
        return user_of(await self._ask(lambda stub: stub.RevokeToken, request))

    async def set_role(self, name: str, grants: Sequence[Grant]) -> Role:
        """Create a role or replace its grants."""
        request = request_of(
            access_pb2.SetRoleRequest, role=request_of(access_pb2.AccessRole, name=name, grants=grant_messages(grants))
        )
        return role_of(await self._ask(lambda stub: stub.SetRole, request))

    async def delete_role(self, name: str) -> None:
        """Delete a role that no user has."""
        await self._ask(lambda stub: stub.DeleteRole, request_of(access_pb2.DeleteRoleRequest, name=name))

    async def roles(self) -> list[Role]:
        """All roles, the built-in one first."""

        async def fetch(last: access_pb2.AccessRole | None) -> access_pb2.ListRolesResponse:
            request = request_of(access_pb2.ListRolesRequest, after=last.name if last else "")
            return await self._ask(lambda stub: stub.ListRoles, request)

        return [role_of(role) for role in (await listed(fetch, lambda page: page.roles))[0]]

    async def audit(
        self, limit: int = 100, before_ms: int = 0, timeout_s: float = 10.0, *, before: datetime | None = None
    ) -> dict[str, list[AuditRecord] | Fault]:
        """The newest records of every known node, by address; a Fault for one that does not answer.

        `before`: only those made before this time; `before_ms` says the same in milliseconds since the Unix epoch.
        """
        if before is not None:
            before_ms = ms_of("before", before)
        request = request_of(access_pb2.ListAuditRequest, limit=limit, before_ms=before_ms)

        def read(answer: access_pb2.ListAuditResponse) -> list[AuditRecord]:
            return [audit_record_of(record) for record in answer.records]

        return await self._ask_each(lambda stub: stub.ListAudit, request, read, timeout_s)
