"""The list of members that a node shows to a peer that may be behind.

A node lets in and dials the members by its applied entries. A node that is far behind does not know the members added
since. If all members that it knows are gone or down, nobody could reach it. So each caller lists in its hello the
members by its own applied entries and its applied index, or the list that it was shown itself if that is newer.
node/core/membership.py decides whether a node takes such a list; the log keeps it (ReplicatedLog.introduce) and
connects to its members.

docs/architecture/members.md says why this is safe. Owns the format on the wire.
"""

from __future__ import annotations

from tickwheel.proto.peer_pb2 import Hello, MemberShown
from tickwheel.replication.log import NO_INTRODUCTION, Introduction, Member
from tickwheel.replication.plausible import INDEX_MAX

MEMBERS_MAX = 64
"""No cluster has more members: a longer list is ignored."""


def hello_of(peer_address: str, introduction: Introduction) -> Hello:
    """The body of a stream's first frame."""
    shown = [
        MemberShown(node_id=member.node_id, peer_address=member.peer_address, disk_uuid=member.disk_uuid)
        for member in introduction.members
    ]
    return Hello(peer_address=peer_address, applied_index=introduction.applied_index, members=shown)


def shown_in(hello: Hello) -> Introduction:
    """The members in a hello; none if an older version sent it, or if its numbers are out of bounds."""
    if len(hello.members) > MEMBERS_MAX or hello.applied_index > INDEX_MAX:
        return NO_INTRODUCTION
    members = tuple(Member(shown.node_id, shown.peer_address, "", shown.disk_uuid) for shown in hello.members)
    return Introduction(hello.applied_index, members)
