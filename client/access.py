"""Calls for users, roles, tokens and the audit log.

The answers are the messages of access.proto, which documents their fields. Changes go to the master.
"""

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
from tickwheel.proto import access_pb2
from tickwheel.proto.access_pb2_grpc import AccessStub


class AccessClient:
    """`AsyncClient.access`."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s

    async def _call(self, name: str, request: Any, *, repeatable: bool = True) -> Any:
        async def invoke(channel: grpc.aio.Channel, try_s: float) -> Any:
            return await getattr(AccessStub(channel), name)(request, timeout=try_s)

        return await self._cluster.call(invoke, self._timeout_s, repeatable=repeatable)

    async def who_am_i(self) -> access_pb2.Caller:
        """The caller as the master identifies this client, with its rights."""
        caller: access_pb2.Caller = await self._call("WhoAmI", access_pb2.WhoAmIRequest())
        return caller

    async def set_user(
        self, name: str, roles: Sequence[str], quotas: access_pb2.UserQuotas | None = None
    ) -> access_pb2.User:
        """Create a user or replace its roles and quotas; its tokens stay."""
        request = access_pb2.SetUserRequest(name=name, roles=roles, quotas=quotas)
        user: access_pb2.User = await self._call("SetUser", request)
        return user

    async def delete_user(self, name: str) -> None:
        """Delete a user with its tokens."""
        await self._call("DeleteUser", access_pb2.DeleteUserRequest(name=name))

    async def users(self) -> list[access_pb2.User]:
        """All users."""

        async def fetch(last: access_pb2.User | None) -> access_pb2.ListUsersResponse:
            request = access_pb2.ListUsersRequest(after=last.name if last else "")
            answer: access_pb2.ListUsersResponse = await self._call("ListUsers", request)
            return answer

        return (await listed(fetch, lambda page: page.users))[0]

    async def create_token(
        self, user: str, *, label: str = "", lifetime: timedelta | None = None
    ) -> access_pb2.CreateTokenResponse:
        """Create a token. Only the answer holds its secret. Raises OutcomeUnknown if the answer is lost."""
        lifetime_ms = 0 if lifetime is None else span_ms_of("lifetime", lifetime)
        request = access_pb2.CreateTokenRequest(user=user, label=label, lifetime_ms=lifetime_ms)
        created: access_pb2.CreateTokenResponse = await self._call("CreateToken", request, repeatable=False)
        return created

    async def revoke_token(self, user: str, token_id: str) -> access_pb2.User:
        """Revoke a token; returns its user."""
        request = access_pb2.RevokeTokenRequest(user=user, token_id=token_id)
        changed: access_pb2.User = await self._call("RevokeToken", request)
        return changed

    async def set_role(self, name: str, grants: Sequence[access_pb2.Grant]) -> access_pb2.AccessRole:
        """Create a role or replace its grants."""
        request = access_pb2.SetRoleRequest(role=access_pb2.AccessRole(name=name, grants=grants))
        role: access_pb2.AccessRole = await self._call("SetRole", request)
        return role

    async def delete_role(self, name: str) -> None:
        """Delete a role that no user has."""
        await self._call("DeleteRole", access_pb2.DeleteRoleRequest(name=name))

    async def roles(self) -> list[access_pb2.AccessRole]:
        """All roles, the built-in one first."""

        async def fetch(last: access_pb2.AccessRole | None) -> access_pb2.ListRolesResponse:
            request = access_pb2.ListRolesRequest(after=last.name if last else "")
            answer: access_pb2.ListRolesResponse = await self._call("ListRoles", request)
            return answer

        return (await listed(fetch, lambda page: page.roles))[0]

    async def audit(
        self, limit: int = 100, before_ms: int = 0, timeout_s: float = 10.0, *, before: datetime | None = None
    ) -> dict[str, list[access_pb2.AuditRecord] | Fault]:
        """The newest records of every known node, by address; a Fault for one that does not answer.

        `before`: only those made before this time; `before_ms` says the same in milliseconds since the Unix epoch.
        """
        if before is not None:
            before_ms = ms_of("before", before)
        request = access_pb2.ListAuditRequest(limit=limit, before_ms=before_ms)

        async def one(address: str) -> list[access_pb2.AuditRecord] | Fault:
            try:
                answer = await AccessStub(self._cluster.channel(address)).ListAudit(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                return fault_of_call(error)
            return list(answer.records)

        addresses = self._cluster.addresses
        answers = await asyncio.gather(*map(one, addresses))
        return dict(zip(addresses, answers, strict=True))
