"""Who the members are, as one node shows it to another that may be behind.

A node lets in and calls the members by what it has applied. One that is far behind does not know those that were added
since, and if what it knows is gone or down, nobody would reach it any more. So each caller shows in its hello the
members by what it has applied itself, and how far that is, or what it was shown if that is newer. Who is to take what
is shown, and when, is node/core/membership.py's to judge; the log keeps it (ReplicatedLog.introduce) and connects to
them.

docs/architecture/members.md says why this is safe. Owns the form on the wire.
"""

from __future__ import annotations

from tickwheel.proto.peer_pb2 import Hello, MemberShown
from tickwheel.replication.log import NO_INTRODUCTION, Introduction, Member
from tickwheel.replication.plausible import INDEX_MAX

MEMBERS_MAX = 64
"""More are none of a cluster's: they are not looked at."""


def hello_of(peer_address: str, introduction: Introduction) -> Hello:
    """The first frame of a stream."""
    shown = [
        MemberShown(node_id=member.node_id, peer_address=member.peer_address, disk_uuid=member.disk_uuid)
        for member in introduction.members
    ]
    return Hello(peer_address=peer_address, applied_index=introduction.applied_index, members=shown)


def shown_in(hello: Hello) -> Introduction:
    """What a caller shows; nothing, if it is of an older version."""
    if len(hello.members) > MEMBERS_MAX or hello.applied_index > INDEX_MAX:
        return NO_INTRODUCTION
    members = tuple(Member(shown.node_id, shown.peer_address, "", shown.disk_uuid) for shown in hello.members)
    return Introduction(hello.applied_index, members)
