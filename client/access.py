"""Calls for users, roles, tokens and the audit log. Changes go to the master."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import grpc

from tickwheel.client.cluster import Cluster
from tickwheel.client.errors import Fault, fault_of_call
from tickwheel.client.listing import listed
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


class AccessClient:
    """`AsyncClient.access`."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s

    async def _call(self, name: str, request: Any, *, repeatable: bool = True) -> Any:
        async def invoke(channel: grpc.aio.Channel, try_s: float) -> Any:
            return await getattr(AccessStub(channel), name)(request, timeout=try_s)

        return await self._cluster.call(invoke, self._timeout_s, repeatable=repeatable)

    async def who_am_i(self) -> Caller:
        """The caller as the master identifies this client, with its rights."""
        return caller_of(await self._call("WhoAmI", access_pb2.WhoAmIRequest()))

    async def set_user(self, name: str, roles: Sequence[str], quotas: Quotas = NO_QUOTAS) -> User:
        """Create a user or replace its roles and quotas; its tokens stay."""
        request = request_of(access_pb2.SetUserRequest, name=name, roles=roles, quotas=quotas_message(quotas))
        return user_of(await self._call("SetUser", request))

    async def delete_user(self, name: str) -> None:
        """Delete a user with its tokens."""
        await self._call("DeleteUser", request_of(access_pb2.DeleteUserRequest, name=name))

    async def users(self) -> list[User]:
        """All users."""

        async def fetch(last: access_pb2.User | None) -> access_pb2.ListUsersResponse:
            request = request_of(access_pb2.ListUsersRequest, after=last.name if last else "")
            answer: access_pb2.ListUsersResponse = await self._call("ListUsers", request)
            return answer

        return [user_of(user) for user in (await listed(fetch, lambda page: page.users))[0]]

    async def create_token(self, user: str, *, label: str = "", lifetime: timedelta | None = None) -> NewToken:
        """Create a token. Only the answer holds its secret. Raises OutcomeUnknown if the answer is lost."""
        lifetime_ms = 0 if lifetime is None else span_ms_of("lifetime", lifetime)
        request = request_of(access_pb2.CreateTokenRequest, user=user, label=label, lifetime_ms=lifetime_ms)
        return new_token_of(await self._call("CreateToken", request, repeatable=False))

    async def revoke_token(self, user: str, token_id: str) -> User:
        """Revoke a token; returns its user."""
        request = request_of(access_pb2.RevokeTokenRequest, user=user, token_id=token_id)
        return user_of(await self._call("RevokeToken", request))

    async def set_role(self, name: str, grants: Sequence[Grant]) -> Role:
        """Create a role or replace its grants."""
        request = request_of(
            access_pb2.SetRoleRequest, role=request_of(access_pb2.AccessRole, name=name, grants=grant_messages(grants))
        )
        return role_of(await self._call("SetRole", request))

    async def delete_role(self, name: str) -> None:
        """Delete a role that no user has."""
        await self._call("DeleteRole", request_of(access_pb2.DeleteRoleRequest, name=name))

    async def roles(self) -> list[Role]:
        """All roles, the built-in one first."""

        async def fetch(last: access_pb2.AccessRole | None) -> access_pb2.ListRolesResponse:
            request = request_of(access_pb2.ListRolesRequest, after=last.name if last else "")
            answer: access_pb2.ListRolesResponse = await self._call("ListRoles", request)
            return answer

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

        async def one(address: str) -> list[AuditRecord] | Fault:
            try:
                answer = await AccessStub(self._cluster.channel(address)).ListAudit(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                return fault_of_call(error)
            return [audit_record_of(record) for record in answer.records]

        addresses = self._cluster.addresses
        answers = await asyncio.gather(*map(one, addresses))
        return dict(zip(addresses, answers, strict=True))
