"""The effect of commands about members: pure, so that a master can compute it before it proposes.

A member is added as a learner and votes once it is promoted. The id of a removed member never comes back: a lost disk
has forgotten votes and entries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from tickwheel.node.failure import RequestError, invalid, limit_reached, refused
from tickwheel.node.state.names import check_node_id
from tickwheel.proto import admin_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.replication.log import Member

MEMBERS_MAX = 15
"""Every member receives every entry; more members do not make a cluster safer."""

KINDS = frozenset({"add_member", "remove_member", "promote_member"})


@dataclass(frozen=True, slots=True)
class Members:
    """The members after a command. `removed_id`: the id that it retires for good; empty: none."""

    members: Mapping[str, Member]
    removed_id: str = ""

    @property
    def voters(self) -> list[str]:
        """Ids of the voting members."""
        return [member.node_id for member in self.members.values() if not member.learner]


def member_of(message: admin_pb2.Member) -> Member:
    """A member from its message."""
    return Member(
        message.node_id, message.peer_address, message.client_address, message.disk_uuid, learner=message.learner
    )


def message_of(member: Member) -> admin_pb2.Member:
    """A member as a message."""
    return admin_pb2.Member(
        node_id=member.node_id,
        peer_address=member.peer_address,
        client_address=member.client_address,
        disk_uuid=member.disk_uuid,
        learner=member.learner,
    )


def after(command: AdminCommand, members: Mapping[str, Member], removed_ids: Collection[str]) -> Members:
    """The members after a command of KINDS. Raises RequestError: the command is refused."""
    kind = command.WhichOneof("body")
    if kind == "add_member":
        return _added(member_of(command.add_member), members, removed_ids)
    if kind == "remove_member":
        return _removed(command.remove_member.node_id, members)
    assert kind == "promote_member", f"{kind} is no command about members"
    return _promoted(command.promote_member.node_id, members)


def _unknown(node_id: str) -> RequestError:
    return refused(pb.UNKNOWN_NAME, f"member {node_id} does not exist", field="node_id", value=node_id)


def _added(member: Member, members: Mapping[str, Member], removed_ids: Collection[str]) -> Members:
    """Add a member, or record the disk of a known one."""
    node_id = member.node_id
    problem = check_node_id(node_id)
    if problem:
        raise invalid("node_id", node_id, problem)
    if node_id in removed_ids:
        text = f"member {node_id} was removed; a node that comes back takes a new id"
        raise refused(pb.WRONG_STATE, text, field="node_id", value=node_id)
    found = members.get(node_id)
    places = (member.peer_address, member.client_address)
    if found is not None and found.disk_uuid and member.disk_uuid not in ("", found.disk_uuid):
        text = (
            f"member {node_id} has another disk: it has forgotten votes and entries; "
            "remove it and add the node under a new id"
        )
        raise refused(pb.WRONG_STATE, text, field="disk_uuid", value=member.disk_uuid)
    if found is not None and (found.peer_address, found.client_address) != places:
        text = f"member {node_id} exists with other addresses"
        raise refused(pb.NAME_TAKEN, text, field="node_id", value=node_id)
    for other in members.values():
        if other.node_id != node_id and member.disk_uuid and other.disk_uuid == member.disk_uuid:
            text = f"this disk belongs to member {other.node_id}"
            raise refused(pb.WRONG_STATE, text, field="disk_uuid", value=member.disk_uuid)
    if found is not None:
        return Members({**members, node_id: replace(found, disk_uuid=member.disk_uuid or found.disk_uuid)})
    if len(members) >= MEMBERS_MAX:
        raise RequestError(limit_reached("members", MEMBERS_MAX))
    return Members({**members, node_id: replace(member, learner=True)})


def _removed(node_id: str, members: Mapping[str, Member]) -> Members:
    if node_id not in members:
        raise _unknown(node_id)
    left = Members({other: member for other, member in members.items() if other != node_id}, node_id)
    if not left.voters:
        text = "the last member that counts cannot be removed"
        raise refused(pb.WRONG_STATE, text, field="node_id", value=node_id)
    return left


def _promoted(node_id: str, members: Mapping[str, Member]) -> Members:
    found = members.get(node_id)
    if found is None:
        raise _unknown(node_id)
    return Members({**members, node_id: replace(found, learner=False)})
