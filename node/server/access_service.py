"""The Access service: users, roles, tokens, who am I, the audit log. The gate has checked the caller's rights."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import grpc

from tickwheel.node.core.failure import Failure, invalid
from tickwheel.node.server.audit import AuditLog
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.errors import abort
from tickwheel.node.server.gate import caller
from tickwheel.node.server.paging import page
from tickwheel.node.state.results import AdminResult
from tickwheel.node.state.rights import LIFETIME_MS_MAX
from tickwheel.proto import access_pb2, common_pb2
from tickwheel.proto.access_pb2_grpc import AccessServicer
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.storage.disk import DiskError

Context = grpc.aio.ServicerContext[Any, Any]

SECRET_PREFIX = "tw_"
"""Prefix of each secret, so that scanners for leaked secrets can recognize it."""
SECRET_BYTES = 32
AUDIT_LIMIT_DEFAULT, AUDIT_LIMIT_MAX = 100, 1_000


class AccessService(AccessServicer):
    """Serves access.proto; changes go to the master."""

    def __init__(self, calls: Calls, audit: AuditLog) -> None:
        self._calls = calls
        self._audit = audit

    async def _change(self, context: Context, command: access_pb2.AccessCommand) -> AdminResult:
        admin = AdminCommand(access=command, actor=caller().actor)
        result: AdminResult = await self._calls.answer(context, lambda done: self._calls.core.admin(admin, done))
        return result

    async def WhoAmI(self, request: access_pb2.WhoAmIRequest, context: Context) -> access_pb2.Caller:
        return caller().message()

    async def SetUser(self, request: access_pb2.SetUserRequest, context: Context) -> access_pb2.User:
        wanted = access_pb2.StoredUser(name=request.name, roles=request.roles, quotas=request.quotas)
        result = await self._change(context, access_pb2.AccessCommand(set_user=wanted))
        assert result.user is not None
        return result.user

    async def DeleteUser(
        self, request: access_pb2.DeleteUserRequest, context: Context
    ) -> access_pb2.DeleteUserResponse:
        await self._change(context, access_pb2.AccessCommand(delete_user=request.name))
        return access_pb2.DeleteUserResponse()

    async def ListUsers(self, request: access_pb2.ListUsersRequest, context: Context) -> access_pb2.ListUsersResponse:
        stored = self._calls.core.state.access.users()
        users, more = await page(user.message() for user in stored if user.name > request.after)
        return access_pb2.ListUsersResponse(users=users, more=more)

    async def CreateToken(
        self, request: access_pb2.CreateTokenRequest, context: Context
    ) -> access_pb2.CreateTokenResponse:
        if not 0 <= request.lifetime_ms <= LIFETIME_MS_MAX:
            await abort(context, invalid("lifetime_ms", request.lifetime_ms, f"0 to {LIFETIME_MS_MAX}").failure)
        secret = SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        sha256 = hashlib.sha256(secret.encode()).digest()
        now_ms = self._calls.core.now_ms()
        expires_ms = now_ms + request.lifetime_ms if request.lifetime_ms else 0
        stored = access_pb2.StoredToken(
            token=access_pb2.Token(label=request.label, expires_ms=expires_ms), sha256=sha256
        )
        command = access_pb2.AddToken(user=request.user, token=stored)
        result = await self._change(context, access_pb2.AccessCommand(add_token=command))
        assert result.user is not None
        return access_pb2.CreateTokenResponse(token=result.user.tokens[-1], secret=secret)

    async def RevokeToken(self, request: access_pb2.RevokeTokenRequest, context: Context) -> access_pb2.User:
        command = access_pb2.RevokeToken(user=request.user, token_id=request.token_id)
        result = await self._change(context, access_pb2.AccessCommand(revoke_token=command))
        assert result.user is not None
        return result.user

    async def SetRole(self, request: access_pb2.SetRoleRequest, context: Context) -> access_pb2.AccessRole:
        grants = [
            access_pb2.Grant(rights=grant.rights, topics=grant.topics, groups=grant.groups)
            for grant in request.role.grants
        ]
        role = access_pb2.AccessRole(name=request.role.name, grants=grants)
        result = await self._change(context, access_pb2.AccessCommand(set_role=role))
        assert result.role is not None
        return result.role

    async def DeleteRole(
        self, request: access_pb2.DeleteRoleRequest, context: Context
    ) -> access_pb2.DeleteRoleResponse:
        await self._change(context, access_pb2.AccessCommand(delete_role=request.name))
        return access_pb2.DeleteRoleResponse()

    async def ListRoles(self, request: access_pb2.ListRolesRequest, context: Context) -> access_pb2.ListRolesResponse:
        # The built-in one comes first, whatever its name is.
        found = self._calls.core.state.access.roles()
        names = [role.name for role in found]
        behind = names.index(request.after) + 1 if request.after in names else 0
        if request.after and not behind:
            behind = 1 + sum(name < request.after for name in names[1:])
        roles, more = await page(found[behind:])
        return access_pb2.ListRolesResponse(roles=roles, more=more)

    async def ListAudit(self, request: access_pb2.ListAuditRequest, context: Context) -> access_pb2.ListAuditResponse:
        limit = request.limit or AUDIT_LIMIT_DEFAULT
        if limit > AUDIT_LIMIT_MAX:
            await abort(context, invalid("limit", limit, f"1 to {AUDIT_LIMIT_MAX}").failure)
        try:
            records = await self._audit.newest(limit, request.before_ms)
        except DiskError as error:
            await abort(context, Failure(common_pb2.WRONG_STATE, f"the audit log cannot be read: {error}"))
        return access_pb2.ListAuditResponse(records=records)
