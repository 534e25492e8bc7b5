"""What a node's log says of the cold tier."""

from __future__ import annotations

from tickwheel.node.server.cold_watch import REMIND_NS, ColdWatch
from tickwheel.proto import admin_pb2


def test_a_master_says_when_promotion_is_overdue_and_not_all_the_time() -> None:
    """At each change, then once an hour; a slave is silent; without this nobody hears that a job has stopped."""
    watch = ColdWatch()

    def said(at_ns: int, state: admin_pb2.ColdState.ValueType, role: admin_pb2.Role.ValueType) -> list[str]:
        status = admin_pb2.NodeStatus(role=role, lease_held=True, cold=admin_pb2.ColdStatus(state=state))
        return [line.level for line in watch.look(at_ns, status)]

    master = admin_pb2.MASTER
    assert said(0, admin_pb2.COLD_LATE, admin_pb2.SLAVE) == []
    assert said(1, admin_pb2.COLD_IN_TIME, master) == []
    assert said(2, admin_pb2.COLD_BEHIND, master) == ["warning"]
    assert said(3, admin_pb2.COLD_BEHIND, master) == []
    assert said(3, admin_pb2.COLD_DUE_SOON, master) == ["error"]
    assert said(3, admin_pb2.COLD_DUE_SOON, master) == []
    assert said(4, admin_pb2.COLD_LATE, master) == ["error"]
    assert said(REMIND_NS, admin_pb2.COLD_LATE, master) == []
    assert said(4 + REMIND_NS, admin_pb2.COLD_LATE, master) == ["error"]
    assert said(5 + REMIND_NS, admin_pb2.COLD_IN_TIME, master) == ["info"]


def test_a_master_says_what_was_loaded_late() -> None:
    """Each time, how many and by how much; not what had been counted before it looked first, nor as a slave. Without
    this a late job leaves no trace that anybody reads."""
    watch = ColdWatch()

    def said(count: int, role: admin_pb2.Role.ValueType = admin_pb2.MASTER) -> list[object]:
        cold = admin_pb2.ColdStatus(loaded_late=count, loaded_late_ms_max=70)
        status = admin_pb2.NodeStatus(role=role, lease_held=True, cold=cold)
        return [line.fields["messages"] for line in watch.look(0, status) if line.level == "error"]

    assert said(40) == []
    assert said(43) == [3]
    assert said(43) == []
    assert said(45, admin_pb2.SLAVE) == []
    assert said(46) == [1]
