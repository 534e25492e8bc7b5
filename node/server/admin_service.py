"""The Admin service: status, members, topics, groups, settings, digest, backup.

Thin: a change goes to the core as an AdminCommand; this node answers reads itself, whatever its role. Changes need
the admin role, reads the client role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import google_crc32c
import grpc

from tickwheel.node.core.checkpoint import BackupFile
from tickwheel.node.core.deleting import finished
from tickwheel.node.core.failure import Failure, invalid, limit_reached
from tickwheel.node.server.callers import Caller
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.copying import files_to_copy
from tickwheel.node.server.errors import abort
from tickwheel.node.server.gate import caller
from tickwheel.node.server.paging import page
from tickwheel.node.server.resolving import fail, resolve
from tickwheel.node.state.results import AdminResult
from tickwheel.proto import admin_pb2, common_pb2, scheduler_pb2
from tickwheel.proto.access_pb2 import RIGHT_READ
from tickwheel.proto.admin_pb2_grpc import AdminServicer
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.replication.ports import Executor
from tickwheel.storage.disk import Disk, DiskError

Context = grpc.aio.ServicerContext[Any, Any]

INTERVAL_MS_MIN, INTERVAL_MS_MAX, INTERVAL_MS_DEFAULT = 50, 60_000, 1_000
CHUNK_BYTES = 1 << 20


def _readable(answer: admin_pb2.TraceResponse, who: Caller) -> admin_pb2.TraceResponse:
    """The events of messages in topics that the caller may read. Messages whose topic no event names are left out."""

    def key(event: admin_pb2.TraceEvent) -> tuple[int, int]:
        return event.id.hour, event.id.index

    allowed = {key(event) for event in answer.events if event.topic and who.topic(RIGHT_READ, event.topic) is None}
    events = [event for event in answer.events if key(event) in allowed]
    del answer.events[:]
    answer.events.extend(events)
    return answer


class AdminService(AdminServicer):
    def __init__(
        self,
        calls: Calls,
        status_streams_max: int,
        disk: Disk,
        executor: Executor,
        certificate_reason: Callable[[], str],
    ) -> None:
        self._calls = calls
        self._certificate_reason = certificate_reason
        self._status_streams_max = status_streams_max
        self._disk = disk
        self._executor = executor
        self._watching = 0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End the status streams, so that a stop does not wait for them."""
        self._stopping.set()

    # -- looks

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.NodeStatus:
        return self._status()

    def _status(self) -> admin_pb2.NodeStatus:
        status = self._calls.core.status()
        status.certificate_reason = self._certificate_reason()
        return status

    async def WatchStatus(  # type: ignore[override]  # writes through the context
        self, request: admin_pb2.WatchStatusRequest, context: Context
    ) -> None:
        interval_ms = request.interval_ms or INTERVAL_MS_DEFAULT
        if not INTERVAL_MS_MIN <= interval_ms <= INTERVAL_MS_MAX:
            limit = f"{INTERVAL_MS_MIN} to {INTERVAL_MS_MAX}"
            await abort(context, invalid("interval_ms", interval_ms, limit).failure)
        if self._watching >= self._status_streams_max:
            await abort(context, limit_reached("status_streams", self._status_streams_max))
        self._watching += 1
        try:
            while not self._stopping.is_set():
                await context.write(self._status())
                try:
                    await asyncio.wait_for(self._stopping.wait(), interval_ms / 1_000)
                except TimeoutError:
                    continue
        finally:
            self._watching -= 1

    async def ListTopics(self, request: admin_pb2.ListTopicsRequest, context: Context) -> admin_pb2.ListTopicsResponse:
        who = caller()
        free, rights = who.free, who.rights
        found = self._calls.core.topics(request.after_id)
        topics, more = await page(found, lambda topic: free or rights.sees_topic(topic.name))
        return admin_pb2.ListTopicsResponse(topics=topics, more=more)

    async def ListGroups(self, request: admin_pb2.ListGroupsRequest, context: Context) -> admin_pb2.ListGroupsResponse:
        who = caller()
        free, rights = who.free, who.rights
        found = self._calls.core.groups(request.after_id)
        groups, more = await page(found, lambda group: free or rights.sees_group(group.name))
        return admin_pb2.ListGroupsResponse(groups=groups, more=more)

    async def GetSettings(self, request: admin_pb2.GetSettingsRequest, context: Context) -> admin_pb2.Settings:
        return self._calls.core.settings_message()

    async def Trace(self, request: admin_pb2.TraceRequest, context: Context) -> admin_pb2.TraceResponse:
        core = self._calls.core
        who = caller()
        answer: admin_pb2.TraceResponse = await self._calls.answer(context, lambda done: core.trace(request, done))
        return answer if who.free else _readable(answer, who)

    async def GetDigest(self, request: admin_pb2.GetDigestRequest, context: Context) -> admin_pb2.StateDigest:
        return self._calls.core.digest()

    async def GetDiskUse(self, request: admin_pb2.GetDiskUseRequest, context: Context) -> admin_pb2.DiskUse:
        return await self._calls.answer(context, lambda done: self._calls.core.disk_use(request, done))

    # -- changes

    async def _change(self, context: Context, command: AdminCommand) -> AdminResult:
        command.actor = caller().actor
        result: AdminResult = await self._calls.answer(context, lambda done: self._calls.core.admin(command, done))
        return result

    async def TransferMaster(
        self, request: admin_pb2.TransferMasterRequest, context: Context
    ) -> admin_pb2.TransferMasterResponse:
        return await self._calls.answer(context, lambda done: self._calls.core.transfer(request.target_id, done))

    async def AddMember(self, request: admin_pb2.AddMemberRequest, context: Context) -> admin_pb2.MemberList:
        await self._change(context, AdminCommand(add_member=request.member))
        return self._calls.core.members()

    async def RemoveMember(self, request: admin_pb2.RemoveMemberRequest, context: Context) -> admin_pb2.MemberList:
        await self._change(context, AdminCommand(remove_member=request))
        return self._calls.core.members()

    async def CreateTopic(self, request: admin_pb2.CreateTopicRequest, context: Context) -> admin_pb2.Topic:
        await self._change(context, AdminCommand(create_topic=request))
        found = self._calls.core.topic(request.name)
        return found if found is not None else await self._gone(context, "topic", request.name)

    async def DeleteTopic(
        self, request: admin_pb2.DeleteTopicRequest, context: Context
    ) -> admin_pb2.DeleteTopicResponse:
        job: scheduler_pb2.Sweep = await self._calls.answer(
            context, lambda done: self._calls.core.delete_topic(request, done)
        )
        return admin_pb2.DeleteTopicResponse(
            job_id=job.job_id, finished=finished(job), cancelled=job.done, undelivered=job.undelivered
        )

    async def CreateGroup(self, request: admin_pb2.CreateGroupRequest, context: Context) -> admin_pb2.Group:
        await self._change(context, AdminCommand(create_group=request))
        found = self._calls.core.group(request.name)
        return found if found is not None else await self._gone(context, "group", request.name)

    async def UpdateGroup(self, request: admin_pb2.UpdateGroupRequest, context: Context) -> admin_pb2.Group:
        await self._change(context, AdminCommand(update_group=request))
        found = self._calls.core.group(request.name)
        return found if found is not None else await self._gone(context, "group", request.name)

    async def DeleteGroup(
        self, request: admin_pb2.DeleteGroupRequest, context: Context
    ) -> admin_pb2.DeleteGroupResponse:
        job: scheduler_pb2.Sweep = await self._calls.answer(
            context, lambda done: self._calls.core.delete_group(request, done)
        )
        return admin_pb2.DeleteGroupResponse(
            job_id=job.job_id,
            finished=finished(job),
            cancelled=job.done,
            undelivered=job.undelivered,
            dead=job.dead,
        )

    async def SetGroupFilter(self, request: admin_pb2.SetGroupFilterRequest, context: Context) -> admin_pb2.Group:
        await self._change(context, AdminCommand(set_group_filter=request))
        return await self._group(context, request.name)

    async def SetTopicPaused(self, request: admin_pb2.SetPausedRequest, context: Context) -> admin_pb2.Topic:
        await self._change(context, AdminCommand(set_topic_paused=request))
        found = self._calls.core.topic(request.name)
        return found if found is not None else await self._gone(context, "topic", request.name)

    async def SetGroupPaused(self, request: admin_pb2.SetPausedRequest, context: Context) -> admin_pb2.Group:
        await self._change(context, AdminCommand(set_group_paused=request))
        return await self._group(context, request.name)

    async def ResetGroup(self, request: admin_pb2.ResetGroupRequest, context: Context) -> admin_pb2.Group:
        await self._change(context, AdminCommand(reset_group=request))
        return await self._group(context, request.name)

    async def _group(self, context: Context, name: str) -> admin_pb2.Group:
        """The group as it is now; ends the call if it is gone."""
        found = self._calls.core.group(name)
        if found is None:
            await self._gone(context, "group", name)
            raise AssertionError("an aborted call does not return")
        return found

    async def UpdateSettings(self, request: admin_pb2.Settings, context: Context) -> admin_pb2.Settings:
        await self._change(context, AdminCommand(settings=request))
        return self._calls.core.settings_message()

    async def _gone(self, context: Context, kind: str, name: str) -> Any:
        """End the call: another caller removed what this call has just created."""
        await abort(
            context, Failure(common_pb2.UNKNOWN_NAME, f"{kind} {name} was removed", {"field": "name", "value": name})
        )

    # -- backup

    async def Backup(  # type: ignore[override]  # writes through the context
        self, request: admin_pb2.BackupRequest, context: Context
    ) -> None:
        core = self._calls.core
        stale_reason = core.backup_origin().stale_reason
        if stale_reason and not request.stale:
            text = f"a backup of this node may be old: {stale_reason}. Ask another node, or take it as it is (--stale)"
            await abort(context, Failure(common_pb2.WRONG_STATE, text, {"field": "stale"}))
        files = await files_to_copy(core, self._calls.wake)
        if isinstance(files, Failure):
            await abort(context, files)
        try:
            origin: admin_pb2.BackupOrigin | None = core.backup_origin()
            total_bytes = sum(file.bytes for file in files)
            for number in range(len(files)):
                await self._send_file(context, files, number, total_bytes, origin)
                origin = None
        finally:
            self._calls.core.backup_copied(files)

    async def _send_file(
        self,
        context: Context,
        files: list[BackupFile],
        number: int,
        total_bytes: int,
        origin: admin_pb2.BackupOrigin | None,
    ) -> None:
        file, last_file = files[number], number == len(files) - 1
        offset = 0
        while True:
            size = min(CHUNK_BYTES, file.bytes - offset)
            data = await self._read(file.path, offset, size)
            if len(data) < size:
                await abort(
                    context,
                    Failure(common_pb2.WRONG_STATE, f"{file.path} was removed meanwhile; start the backup again"),
                )
            # Checked after the read: the file was there, unchanged, until then.
            if not self._calls.core.backup_progressed(files):
                await abort(
                    context,
                    Failure(common_pb2.WRONG_STATE, "the backup stood still for too long; start it again"),
                )
            end = offset + size
            chunk = admin_pb2.BackupChunk(
                path=file.path,
                offset=offset,
                data=data,
                crc32c=google_crc32c.value(data),
                file_bytes=file.bytes,
                total_bytes=total_bytes,
                last=last_file and end >= file.bytes,
                origin=None if offset else origin,
            )
            await context.write(chunk)
            offset = end
            if offset >= file.bytes:
                return

    async def _read(self, path: str, offset: int, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()

        def read() -> bytes:
            try:
                file = self._disk.open(path)
            except DiskError:
                return b""
            try:
                return file.read_at(offset, size)
            finally:
                file.close()

        def done(data: bytes | None, error: BaseException | None) -> None:
            if error is not None:
                fail(future, error)
            else:
                resolve(future, data or b"")

        self._executor.submit(read, done)
        return await future
