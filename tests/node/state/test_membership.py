"""What commands about members make of them, on their own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.node.failure import RequestError
from tickwheel.node.state.membership import after, member_of, message_of
from tickwheel.proto import admin_pb2
from tickwheel.proto.admin_pb2 import RemoveMemberRequest
from tickwheel.proto.log_pb2 import AdminCommand, PromoteMember
from tickwheel.replication.log import Member

NAMES = st.sampled_from(["a", "b", "c", "d"])
COMMANDS = st.one_of(
    st.builds(
        lambda name, disk: AdminCommand(
            add_member=admin_pb2.Member(
                node_id=name, peer_address=f"{name}:1", client_address=f"{name}:2", disk_uuid=disk
            )
        ),
        NAMES,
        st.sampled_from(["", "1", "2"]),
    ),
    st.builds(lambda name: AdminCommand(remove_member=RemoveMemberRequest(node_id=name)), NAMES),
    st.builds(lambda name: AdminCommand(promote_member=PromoteMember(node_id=name)), NAMES),
)


@given(st.lists(COMMANDS, max_size=30))
def test_whatever_is_asked_the_members_stay_sound(commands: list[AdminCommand]) -> None:
    """One command moves at most one voter, somebody always counts, a disk belongs to one, ids never come back."""
    members = {"a": Member("a", "a:1", "a:2")}
    removed: set[str] = set()
    for command in commands:
        before = dict(members)
        try:
            made = after(command, members, removed)
        except RequestError:
            continue
        finally:
            assert members == before, "it changes nothing itself"
        voters = {m.node_id for m in members.values() if not m.learner}
        assert len(voters ^ set(made.voters)) <= 1
        assert made.voters
        members = dict(made.members)
        removed |= {made.removed_id} - {""}
        assert not removed & members.keys()
        disks = [m.disk_uuid for m in members.values() if m.disk_uuid]
        assert len(disks) == len(set(disks))
        for node_id, member in members.items():
            assert before.get(node_id, member).disk_uuid in ("", member.disk_uuid), "a disk was exchanged"
            assert member_of(message_of(member)) == member
