"""Membership: changes by the master, one at a time, and refusal of peers that are no members.

Owns: the changes that wait for the one under way; when a learner becomes a voter (it has everything that was in the log
a moment ago); the disk that each member came with. The disk is recorded in the log as soon as it is known, so that a
member whose disk was wiped or swapped is refused ever after. A master that should remove itself hands over first, and
the caller is sent to its successor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tickwheel.node.core.delivery.sync import SyncState
from tickwheel.node.core.founding import ClusterFounding
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Promise
from tickwheel.node.core.serving import Fail
from tickwheel.node.core.world import Now, Reported
from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached, not_master, refuse
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.machine import CommandResult
from tickwheel.node.state.results import AdminResult
from tickwheel.proto import admin_pb2
from tickwheel.proto.log_pb2 import AdminCommand, Command, PromoteMember
from tickwheel.replication.frames import Refusal
from tickwheel.replication.log import NO_INTRODUCTION, Introduction

WAITING_MAX = 64
ADDRESS_LENGTH_MAX = 300
"""Longest address of a member: a host name has 253 characters, a port 5."""
REMOVED_MAX = 10_000
"""Members removed in a cluster's life. Their ids are remembered for ever: a member that lost its disk has forgotten its
votes."""

Transfer = Callable[[str | None], Coroutine[Promise[Any], None, None]]
"""As `Mastership.transfer`."""


@dataclass(slots=True, eq=False)
class _Change:
    """A change that waits for its turn."""

    command: AdminCommand
    caller: Fail | None
    answer: Promise[AdminResult] = field(default_factory=Promise)


class Membership(Part):
    """`change` and `upkeep` are for the master; the rest is for any node."""

    def __init__(self, core: Kernel, transfer: Transfer, founding: ClusterFounding, sync: SyncState) -> None:
        """`transfer` hands mastership over."""
        self._core = core
        self._founding = founding
        self._sync = sync
        self._transfer = transfer
        self._waiting: deque[_Change] = deque()
        self._changing = False
        self._disks: dict[str, str] = {}
        """Member -> the disk that it came with."""
        self._goals: dict[str, int] = {}
        """Learner -> the index that it must reach by the next look to become a voter."""
        self._forgotten = 0
        """How often a member came back to this master without entries that it had acknowledged."""

    async def change(self, command: AdminCommand) -> AdminResult:
        """Make a change (`membership.KINDS`) after those that wait."""
        if len(self._waiting) >= WAITING_MAX:
            raise RequestError(limit_reached("member_changes_waiting", WAITING_MAX))
        for name in ("peer_address", "client_address", "disk_uuid"):
            value = getattr(command.add_member, name)
            if len(value) > ADDRESS_LENGTH_MAX:
                raise invalid(f"member.{name}", value, f"at most {ADDRESS_LENGTH_MAX} characters")
        change = _Change(command, self._core.serving.caller)
        self._waiting.append(change)
        self._next()
        result = await change.answer
        refuse(result.failure)
        return result

    def end(self, failure: Failure) -> None:
        """Answer the waiting changes with `failure`."""
        self._changing = False
        self._goals.clear()
        waiting, self._waiting = self._waiting, deque()
        for change in waiting:
            change.answer.refuse(failure)

    def upkeep(self, now: Now) -> None:
        """Go on with waiting changes, record disks, promote learners."""
        core = self._core
        if not core.leading or not core.state.created or self._changing:
            return
        self._next()
        self._record_disk()
        self._promote()

    def metrics(self) -> Mapping[str, MetricValue]:
        return {"peer_logs_forgotten": float(self._forgotten)}

    def introduction(self) -> Introduction:
        """The members as this node introduces them to peers that it calls: as applied or as shown to it, whichever is
        newer."""
        state, shown = self._core.state, self._core.log.introduced()
        return shown if shown.members else Introduction(state.applied_index, tuple(state.members()))

    def refuses(self, node_id: str, disk_uuid: str, shown: Introduction = NO_INTRODUCTION) -> Refusal | None:
        """Why a peer may not take part: it is unknown, or its disk is not the one it joined with. None: it may.

        This node remembers the first disk of each member; the master records it in the log. Until then a peer with the
        same id and another disk is refused too: otherwise the last disk to arrive would be recorded.

        `shown`: the members that the peer knows. From them a node whose log is behind learns of later members. A node
        that waits to be added keeps them too, because the log that it is about to read begins with old lists.
        """
        core, log = self._core, self._core.log
        members = log.members()
        known = next((m for m in members if m.node_id == node_id), None)
        if self._believes(node_id, disk_uuid, shown) and (known is None or known.disk_uuid in ("", disk_uuid)):
            log.introduce(shown)
        if not members:
            # This node waits to be added, so every caller is a member. A caller whose list lacks itself is not used
            # yet: this node needs its list, and it calls again once it has read of its own membership.
            soon = bool(shown.members) and shown.named(node_id) is None
            return Refusal(f"{node_id} has not read yet that it is a member itself") if soon else None
        known = known or log.introduced().named(node_id)
        if known is None and node_id in core.state.removed_ids:
            return Refusal(
                f"{node_id} was removed from the cluster: what it has is old and nobody asks it any more. Switch it "
                "off; to have its host in the cluster again, add it under a new id, with an empty data directory",
                final=True,
                removed=True,
            )
        if known is None:
            return Refusal(f"{node_id} is not a member: add it (tickwheel member add), under an id never used before")
        joined_with = known.disk_uuid or self._founding.disk_of(node_id)
        if joined_with and disk_uuid and joined_with != disk_uuid:
            return Refusal(
                f"{node_id} comes with another disk than it joined with, so it has forgotten votes and entries: if its "
                "data directory still exists, perhaps on a disk that is not mounted, start it on that; if not, remove "
                "the member and add it anew under a new id (docs/DEPLOY.md, a node is dead)",
                final=True,
            )
        if disk_uuid and self._disks.setdefault(node_id, disk_uuid) != disk_uuid:
            return Refusal(
                f"two disks came as {node_id}, and another disk than this one was the first: stop the node that does "
                "not belong here; if its disk was replaced, remove the member and add it anew under a new id"
            )
        return None

    def came_with(self, node_id: str, disk_uuid: str) -> None:
        """Note the disk of a member that is connected; its hello may have been before this core was made."""
        if disk_uuid:
            self._disks.setdefault(node_id, disk_uuid)

    def forgot(self, node_id: str, last_index: int, acknowledged_index: int) -> None:
        """A member's log ends before entries that it had acknowledged to this master; it gets them again."""
        self._forgotten += 1
        facts = {
            "peer": node_id,
            "log_ends": last_index,
            "acknowledged": acknowledged_index,
            "advice": "an older copy of its data directory was put back, or its disk loses what it has reported as "
            "stored (a write cache that ignores flushes): acknowledged messages are lost once this happens to a "
            "majority (docs/DEPLOY.md, backup and restore)",
        }
        self._core.report(Reported("error", "a member has lost entries that it had acknowledged", facts))

    def _believes(self, node_id: str, disk_uuid: str, shown: Introduction) -> bool:
        """Whether the members that a caller shows are this cluster's, and newer than those that this node knows.

        The list must contain the caller with its disk, and this node with its own: only a member that has this
        cluster's log knows that disk. If neither this node's log nor the list has this node's disk, because no master
        has seen this node yet, the disk is not compared. The list must not contain a member whose removal this node
        has applied.
        """
        core = self._core
        own, caller = shown.named(core.identity.node_id), shown.named(node_id)
        if own is None or caller is None:
            return False
        recorded = any(m.disk_uuid for m in core.log.members() if m.node_id == core.identity.node_id)
        newest = max(core.state.applied_index, core.log.introduced().applied_index)
        return (
            shown.applied_index > newest
            and (own.disk_uuid == core.identity.disk_uuid or not (own.disk_uuid or recorded))
            and caller.disk_uuid in ("", disk_uuid)
            and core.state.removed_ids.isdisjoint(member.node_id for member in shown.members)
        )

    def _next(self) -> None:
        """Make the next change, unless one is under way."""
        while self._waiting and not self._changing:
            change = self._waiting.popleft()
            self._core.serving.run(change.caller, partial(self._begin, change))

    def _begin(self, change: _Change) -> None:
        self._core.serving.start(self._carry_out(change), lambda _: None)

    async def _carry_out(self, change: _Change) -> None:
        try:
            result = await self._make(change.command)
        except RequestError as error:
            # Mastership may be lost: `end` answers the waiting changes, or `upkeep` goes on.
            change.answer.refuse(error.failure)
            return
        change.answer.keep(result)
        self._next()

    async def _make(self, command: AdminCommand) -> AdminResult:
        """Make one change. The result tells whether apply refused it."""
        core = self._core
        if command.WhichOneof("body") == "remove_member":
            if self._is_last_task(command.remove_member.node_id):
                await self._hand_over()
                core.require_master()
                raise RequestError(not_master(None, None))
            if len(core.state.removed_ids) >= REMOVED_MAX:
                raise RequestError(limit_reached("members_removed", REMOVED_MAX))
        else:
            self._check_address(command.add_member)
        made = core.state.members_after(command)
        answer: Promise[CommandResult] = Promise()
        self._changing = True
        now = [member.node_id for member in core.state.members() if not member.learner]
        if sorted(made.voters) == sorted(now):
            core.proposer.submit(Command(admin=command), answer.reply)
        else:
            core.proposer.submit_alone(Command(admin=command), answer.reply, made.voters)
        try:
            result = await answer
        finally:
            self._changing = False
        assert isinstance(result, AdminResult)
        return result

    def _check_address(self, added: admin_pb2.Member) -> None:
        """Refuse a new member at the address of another one, which would turn away whoever calls it there."""
        members = self._core.state.members()
        if any(member.node_id == added.node_id for member in members):
            return
        there = next((m.node_id for m in members if added.peer_address and m.peer_address == added.peer_address), "")
        if there:
            raise invalid("member.peer_address", added.peer_address, f"not where peers reach member {there}")

    def _is_last_task(self, node_id: str) -> bool:
        """Whether this would remove the master itself while another member can follow it."""
        own_id = self._core.identity.node_id
        return node_id == own_id and any(m.node_id != own_id and not m.learner for m in self._core.state.members())

    async def _hand_over(self) -> None:
        self._changing = True
        try:
            await self._transfer(None)
        finally:
            self._changing = False

    def _promote(self) -> None:
        core = self._core
        status = core.log.status()
        # A member votes once its log names its disk (founding.py), so the disk is recorded first.
        recorded = [m for m in core.state.members() if m.disk_uuid or not self._disks.get(m.node_id)]
        learners = [member.node_id for member in recorded if member.learner]
        for node_id in [known for known in self._goals if known not in learners]:
            del self._goals[node_id]
        for node_id in learners:
            progress = status.peers.get(node_id)
            goal = self._goals.get(node_id)
            self._goals[node_id] = status.last_index
            if goal is None or progress is None or not progress.connected:
                continue
            if min(progress.match_index, self._sync.applied_of(node_id)) >= goal:
                self._start(AdminCommand(promote_member=PromoteMember(node_id=node_id)))
                return

    def _record_disk(self) -> None:
        """Record the first disk of a member whose disk is not in the log yet."""
        core = self._core
        self._disks[core.identity.node_id] = core.identity.disk_uuid
        for member in core.state.members():
            disk_uuid = self._disks.get(member.node_id, "")
            if member.disk_uuid or not disk_uuid:
                continue
            filled = admin_pb2.Member(
                node_id=member.node_id,
                peer_address=member.peer_address,
                client_address=member.client_address,
                disk_uuid=disk_uuid,
            )
            self._start(AdminCommand(add_member=filled))
            return

    def _start(self, command: AdminCommand) -> None:
        """Make a change that no caller waits for: the next `upkeep` sees the outcome and tries again if needed."""
        self._core.serving.start(self.change(command), lambda _: None)
