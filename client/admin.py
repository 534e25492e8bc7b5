"""The operator's calls: status, members, topics, groups, settings, transfer, digest, backup.

Changes go to the master.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any, Unpack

import grpc

from tickwheel.client.calls import ServiceCalls, listed
from tickwheel.client.cluster import STATUS_TIMEOUT_S
from tickwheel.client.copies import BackupChunk, HeldFile, chunk_of, held_messages
from tickwheel.client.disk_use import DiskUse, disk_use_of
from tickwheel.client.errors import ClusterUnavailable, Fault, TickwheelError, error_of, fault_of_call
from tickwheel.client.ids import parse_id
from tickwheel.client.nodes import (
    Handover,
    Member,
    NodeStatus,
    ServerInfo,
    StateDigest,
    digest_of,
    handover_of,
    member_of,
    node_status_of,
    server_info_of,
)
from tickwheel.client.notes import Trace, trace_of
from tickwheel.client.requests import request_of
from tickwheel.client.retrying import RetryPolicy, policy_message
from tickwheel.client.settings import SettingChanges, Settings, changes_message, settings_of
from tickwheel.client.states import StartFrom, start_of
from tickwheel.client.topics import Deletion, Group, Topic, group_deletion_of, group_of, topic_deletion_of, topic_of
from tickwheel.proto import admin_pb2
from tickwheel.proto.admin_pb2_grpc import AdminStub
from tickwheel.transport.channel import END_OF_STREAM

BACKUP_SILENCE_S = 120.0
"""The first chunk of a backup comes once the node has written a checkpoint."""


def _request_id() -> int:
    """A random id by which a node recognizes the repeats of one call."""
    return secrets.randbits(63) | 1


class AdminClient(ServiceCalls[AdminStub]):
    """`AsyncClient.admin`."""

    _service = AdminStub

    async def know_all(self) -> dict[str, NodeStatus | Fault]:
        """The status of every node, as `statuses`. First learns the addresses of all nodes from the known ones."""
        answers = await self.statuses()
        while True:
            for answer in answers.values():
                if isinstance(answer, Fault):
                    continue
                self._cluster.learn(answer.master_address, answer.term)
                for peer in answer.peers:
                    if peer.client_address:
                        self._cluster.add(peer.client_address)
            if len(self._cluster.addresses) <= len(answers):
                return answers
            answers = await self.statuses()

    async def trace(self, message_ids: Sequence[str], timeout_s: float = 10.0) -> dict[str, Trace | Fault]:
        """The events about 1 to 100 messages that each known node has noted, by address; a Fault for a node without
        answer. A message that was moved has several ids, which the events of moves name."""
        request = request_of(admin_pb2.TraceRequest, ids=[parse_id(message_id) for message_id in message_ids])
        return await self._ask_each(lambda stub: stub.Trace, request, trace_of, timeout_s)

    async def statuses(self, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, NodeStatus | Fault]:
        """The status of each known node, by address; a Fault for a node without an answer."""
        answers = await self._cluster.statuses(timeout_s)
        return {
            address: answer if isinstance(answer, Fault) else node_status_of(answer)
            for address, answer in answers.items()
        }

    async def status(self, address: str, timeout_s: float | None = None) -> NodeStatus:
        """Status of one node."""
        return node_status_of(
            await self._ask_at(address, lambda stub: stub.GetStatus, admin_pb2.GetStatusRequest(), timeout_s)
        )

    async def server_infos(self, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, ServerInfo | Fault]:
        """Version and services of each known node, by address; a Fault without an answer or for an older version.

        Needs a right to read."""
        request = admin_pb2.GetServerInfoRequest()
        return await self._ask_each(lambda stub: stub.GetServerInfo, request, server_info_of, timeout_s)

    async def master_status(self, timeout_s: float | None = None) -> NodeStatus:
        """Status of the master."""
        request = admin_pb2.GetStatusRequest()
        return node_status_of(await self._ask(lambda stub: stub.GetStatus, request, timeout_s=timeout_s))

    async def transfer(self, target_id: str = "") -> Handover:
        """Hand mastership over as planned; empty: to the voter with the longest log. Raises OutcomeUnknown."""
        request = request_of(admin_pb2.TransferMasterRequest, target_id=target_id)
        answer = await self._ask(
            lambda stub: stub.TransferMaster, request, repeatable=False, try_timeout_s=self._timeout_s, stays=True
        )
        return handover_of(answer)

    async def add_member(self, node_id: str, peer_address: str, client_address: str) -> list[Member]:
        """Add one node, which its peers and clients reach at these addresses (host:port). It counts once it has caught
        up. Returns the members after the change; no error if the node is one already."""
        member = request_of(admin_pb2.Member, node_id=node_id, peer_address=peer_address, client_address=client_address)
        request = request_of(admin_pb2.AddMemberRequest, member=member)
        return _members(await self._ask(lambda stub: stub.AddMember, request, try_timeout_s=self._timeout_s))

    async def remove_member(self, node_id: str) -> list[Member]:
        """Remove one node. Returns the members after the change."""
        request = request_of(admin_pb2.RemoveMemberRequest, node_id=node_id)
        return _members(await self._ask(lambda stub: stub.RemoveMember, request, try_timeout_s=self._timeout_s))

    async def create_topic(self, name: str, *, fifo: bool = False) -> Topic:
        """Create a topic. No error if the same topic exists."""
        request = request_of(admin_pb2.CreateTopicRequest, name=name, fifo=fifo)
        return topic_of(await self._ask(lambda stub: stub.CreateTopic, request))

    async def delete_topic(self, name: str, *, cancel_pending: bool = False) -> Deletion:
        """Delete a topic. The deletion of a large one continues after the answer, as the sweep `job_id`.

        Without `cancel_pending` it raises RequestRefused if the topic holds messages, with the counts `pending`,
        `undelivered` and `dead` in the metadata.
        """
        request = request_of(
            admin_pb2.DeleteTopicRequest, name=name, cancel_pending=cancel_pending, request_id=_request_id()
        )
        return topic_deletion_of(await self._ask(lambda stub: stub.DeleteTopic, request, try_timeout_s=self._timeout_s))

    async def topics(self) -> list[Topic]:
        """All topics, as the master knows them."""

        async def fetch(last: admin_pb2.Topic | None) -> admin_pb2.ListTopicsResponse:
            request = request_of(admin_pb2.ListTopicsRequest, after_id=last.topic_id if last else 0)
            return await self._ask(lambda stub: stub.ListTopics, request)

        return [topic_of(topic) for topic in (await listed(fetch, lambda page: page.topics))[0]]

    async def create_group(
        self,
        name: str,
        topics: Sequence[str],
        *,
        start_from: StartFrom | str | datetime = StartFrom.EARLIEST,
        start_ms: int = 0,
        filter: str = "",
        retry: RetryPolicy | None = None,
        broadcasting: bool = False,
    ) -> Group:
        """Create a consumer group. No error if the same group exists.

        `start_from`: a StartFrom, or an aware datetime. `filter`: `a || b`, or `*`. `retry`: its retry policy; None:
        the delay levels.
        """
        place, start_ms = start_of(start_from, start_ms)
        request = request_of(
            admin_pb2.CreateGroupRequest,
            name=name,
            topics=topics,
            start_from=place,
            start_ms=start_ms,
            filter=filter,
            retry=policy_message(retry),
            broadcasting=broadcasting,
        )
        return group_of(await self._ask(lambda stub: stub.CreateGroup, request))

    async def set_group_filter(self, name: str, filter: str) -> Group:
        """Replace the filter, from the group's floor on. Consumers that name the old one are refused from now on."""
        request = request_of(admin_pb2.SetGroupFilterRequest, name=name, filter=filter)
        return group_of(await self._ask(lambda stub: stub.SetGroupFilter, request))

    async def pause_topic(self, name: str, *, paused: bool = True) -> Topic:
        """Stop all deliveries of the topic until it is resumed (`paused=False`); a change of master keeps that."""
        request = request_of(admin_pb2.SetPausedRequest, name=name, paused=paused)
        return topic_of(await self._ask(lambda stub: stub.SetTopicPaused, request))

    async def pause_group(self, name: str, *, paused: bool = True) -> Group:
        """Stop all deliveries to the group until it is resumed (`paused=False`); open ones can be settled."""
        request = request_of(admin_pb2.SetPausedRequest, name=name, paused=paused)
        return group_of(await self._ask(lambda stub: stub.SetGroupPaused, request))

    async def reset_group(
        self, name: str, start_from: StartFrom | str | datetime, *, start_ms: int = 0, topics: Sequence[str] = ()
    ) -> Group:
        """Start the group anew at a StartFrom or an aware datetime, in these topics or in all.

        Open deliveries become invalid and attempts begin at 1. Raises OutcomeUnknown if the answer is lost: a repeat
        would invalidate deliveries made since.
        """
        place, start_ms = start_of(start_from, start_ms)
        request = request_of(admin_pb2.ResetGroupRequest, name=name, topics=topics, start_from=place, start_ms=start_ms)
        return group_of(await self._ask(lambda stub: stub.ResetGroup, request, repeatable=False))

    async def update_group(self, name: str, retry: RetryPolicy) -> Group:
        """Replace the retry policy of a group. Retries that wait already keep their time."""
        request = request_of(admin_pb2.UpdateGroupRequest, name=name, retry=policy_message(retry))
        return group_of(await self._ask(lambda stub: stub.UpdateGroup, request))

    async def delete_group(self, name: str, *, discard: bool = False) -> Deletion:
        """Delete a group. The deletion of a large one continues after the answer, as the sweep `job_id`.

        Without `discard` it raises RequestRefused if the group has unsettled messages, with the counts `undelivered`,
        `retries` and `dead` in the metadata.
        """
        request = request_of(admin_pb2.DeleteGroupRequest, name=name, discard=discard, request_id=_request_id())
        return group_deletion_of(await self._ask(lambda stub: stub.DeleteGroup, request, try_timeout_s=self._timeout_s))

    async def groups(self) -> list[Group]:
        """All groups, as the master knows them."""

        async def fetch(last: admin_pb2.Group | None) -> admin_pb2.ListGroupsResponse:
            request = request_of(admin_pb2.ListGroupsRequest, after_id=last.group_id if last else 0)
            return await self._ask(lambda stub: stub.ListGroups, request)

        return [group_of(group) for group in (await listed(fetch, lambda page: page.groups))[0]]

    async def settings(self) -> Settings:
        """The replicated settings."""
        return settings_of(await self._ask(lambda stub: stub.GetSettings, admin_pb2.GetSettingsRequest()))

    async def update_settings(self, **changes: Unpack[SettingChanges]) -> Settings:
        """Change the settings that are named, for all nodes at once; the others stay as they are, also if somebody
        changes them at the same time. Returns all settings after the change."""
        return settings_of(await self._ask(lambda stub: stub.UpdateSettings, changes_message(changes)))

    async def digest(self, address: str) -> StateDigest:
        """Digest of the logical state of one node."""
        request = admin_pb2.GetDigestRequest()
        return digest_of(await self._ask_at(address, lambda stub: stub.GetDigest, request))

    async def disk_use(self, address: str, *, by_topic: bool = False) -> DiskUse:
        """The disk use of one node. `by_topic`: also of each topic, for which the node reads the indexes of all hours,
        in calls of a bounded part each."""
        pages: list[admin_pb2.DiskUse] = []
        request = request_of(admin_pb2.GetDiskUseRequest, by_topic=by_topic)
        while not pages or request.hour_min:
            page = await self._ask_at(address, lambda stub: stub.GetDiskUse, request)
            if 0 < page.next_hour <= request.hour_min:
                raise TickwheelError("a node read nothing and said that more follows", "INTERNAL")
            pages.append(page)
            request.hour_min = page.next_hour
        return disk_use_of(pages)

    async def backup(
        self,
        address: str,
        timeout_s: float | None = None,
        *,
        stale: bool = False,
        held: Sequence[HeldFile] = (),
        silence_s: float = BACKUP_SILENCE_S,
    ) -> AsyncGenerator[BackupChunk, None]:
        """A consistent copy of one node's state, in chunks.

        `timeout_s`: for all of it. `silence_s`: the longest wait for one chunk. `stale`: even if the node takes no part
        or is behind. `held`: what has arrived of an earlier try, at most 20,000 files. A file that begins with it comes
        from there on; while the node compares, it sends chunks that say so (`comparing`). A node of an earlier version
        sends everything.
        """
        request = request_of(admin_pb2.BackupRequest, stale=stale, held=held_messages(held))
        stub = AdminStub(self._cluster.channel(address))
        call = stub.Backup(request, timeout=timeout_s)
        try:
            chunk: Any
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        chunk = await call.read()
                except TimeoutError:
                    raise ClusterUnavailable(
                        f"{address} has sent nothing for {silence_s:.0f} s", "UNAVAILABLE"
                    ) from None
                except grpc.aio.AioRpcError as error:
                    fault = fault_of_call(error)
                    if not request.held or not _is_new_to(fault, request.HELD_FIELD_NUMBER):
                        raise error_of(fault) from error
                    request.ClearField("held")
                    call = stub.Backup(request, timeout=timeout_s)
                    continue
                if chunk is END_OF_STREAM:
                    return
                yield chunk_of(chunk)
        finally:
            call.cancel()


def _members(answer: admin_pb2.MemberList) -> list[Member]:
    return [member_of(member) for member in answer.members]


def _is_new_to(fault: Fault, field_number: int) -> bool:
    """Whether the node refused a field of the request itself, since its version does not know it."""
    return fault.reason == "INVALID_FIELD" and fault.metadata.get("field") == str(field_number)
