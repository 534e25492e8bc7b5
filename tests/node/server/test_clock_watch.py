"""What the log says of clocks: each change once, a reminder a minute, nothing while a node has just started."""

from __future__ import annotations

from tickwheel.node.core.world import Reported
from tickwheel.node.server.clock_watch import PATIENCE_NS, REMIND_NS, ClockWatch
from tickwheel.proto import admin_pb2

SECOND = 1_000_000_000


def status(
    clock_state: admin_pb2.ClockState.ValueType = admin_pb2.CLOCK_AGREED, offset_ms: float = 0.0, error_ms: float = 1.0
) -> admin_pb2.NodeStatus:
    """Of node a, with a peer b whose wall clock is off."""
    shown = admin_pb2.NodeStatus(node_id="a", clock_state=clock_state, clock_agreed_age_ms=1, clock_reason="why")
    shown.peers.add(node_id="b", clock_offset_ms=offset_ms, clock_error_ms=error_ms)
    return shown


def said(lines: list[Reported]) -> list[tuple[str, str]]:
    return [(line.level, line.event) for line in lines]


def test_a_wrong_clock_is_warned_of_until_it_is_right() -> None:
    """Once when it goes wrong, once a minute, once when it is right again; who is not heard of is neither."""
    watch = ClockWatch(100)
    watch.look(0, status(), 0, 0)
    assert watch.look(1, status(offset_ms=100.5, error_ms=2), 0, 0) == [], "the round trip may explain it"
    (line,) = watch.look(SECOND, status(offset_ms=-3_600_000), 0, 0)
    assert (line.level, line.fields) == ("warning", {"peer": "b", "skew_ms": -3_600_000})
    assert watch.look(2 * SECOND, status(offset_ms=-3_600_000), 0, 0) == []
    assert watch.look(3 * SECOND, status(offset_ms=0, error_ms=0), 0, 0) == []
    assert len(watch.look(SECOND + REMIND_NS, status(offset_ms=-3_600_000), 0, 0)) == 1
    assert said(watch.look(2 * REMIND_NS, status(), 0, 0)) == [("info", "a wall clock is right again")]


def test_a_node_that_stood_still_calls_no_clock_wrong() -> None:
    """Its time is behind until the others confirm the pause: a busy machine's log said that all clocks are wrong. A
    warning that stood before is not taken back either."""
    watch = ClockWatch(100)
    watch.look(0, status(offset_ms=500), 0, 0)
    behind = status(offset_ms=1_000)
    behind.clock_offset_ms = 1_000
    assert watch.look(1, behind, 0, 0, unconfirmed=True) == []
    assert watch.look(2, status(), 0, 0, unconfirmed=True) == []
    assert [line.fields["peer"] for line in watch.look(3, behind, 0, 0)] == ["a"]
    assert said(watch.look(4, status(), 0, 0)) == [("info", "a wall clock is right again")] * 2


def test_the_end_of_the_agreement_is_told_and_an_end_of_dispatch_is_an_error() -> None:
    """Holdover warns; when dispatch stops it is an error, repeated each minute; agreement again is told too."""
    watch = ClockWatch(100)
    assert said(watch.look(0, status(), 0, 0)) == [("info", "the members' clocks agree")]
    held, expired = status(admin_pb2.CLOCK_HOLDOVER), status(admin_pb2.CLOCK_EXPIRED)
    expired.state = admin_pb2.NODE_WITHOUT_TIME
    assert said(watch.look(SECOND, held, 0, 0)) == [("warning", "the members' clocks do not agree")]
    assert watch.look(2 * SECOND, held, 0, 0) == []
    for at_ns in (3 * SECOND, 3 * SECOND + REMIND_NS):
        assert said(watch.look(at_ns, expired, 0, 0)) == [
            ("error", "dispatch has stopped: the members' clocks do not agree")
        ]
    assert said(watch.look(2 * REMIND_NS, status(), 0, 0)) == [("info", "the members' clocks agree")]


def test_a_start_takes_its_time() -> None:
    """A node that looks for the others is not worth a line before some seconds are over."""
    watch = ClockWatch(100)
    unagreed = status(admin_pb2.CLOCK_UNAGREED)
    assert watch.look(0, unagreed, 0, 0) == []
    assert watch.look(PATIENCE_NS - 1, unagreed, 0, 0) == []
    assert len(watch.look(PATIENCE_NS, unagreed, 0, 0)) == 1


def test_jumps_and_early_cursors_are_errors() -> None:
    """Each time they happen."""
    watch = ClockWatch(100)
    watch.look(0, status(), 0, 0)
    assert [line.level for line in watch.look(1, status(), 1, 3)] == ["error", "error"]
    assert watch.look(2, status(), 1, 3) == []


def test_a_cluster_that_started_with_wrong_clocks_is_told_from_wrong_clocks() -> None:
    """They had been set right since, and were all called wrong: messages came a year late, or never."""
    watch = ClockWatch(100)
    behind = status()
    behind.clock_slew_ms = 59_000
    assert said(watch.look(0, behind, 0, 0)) == [("info", "the members' clocks agree")]
    behind.clock_slew_ms = 31_536_000_000
    (line,) = watch.look(SECOND, behind, 0, 0)
    assert line.level == "warning" and "behind the members' clocks" in line.event
    assert "stop all nodes, then start them" in str(line.fields["advice"])
    assert watch.look(2 * SECOND, behind, 0, 0) == []
    assert len(watch.look(SECOND + REMIND_NS, behind, 0, 0)) == 1
    assert watch.look(2 * REMIND_NS, status(), 0, 0) == []
    behind.clock_slew_ms = -31_536_000_000
    (line,) = watch.look(2 * REMIND_NS + 1, behind, 0, 0)
    assert "ahead of the members' clocks" in line.event and "keep the nodes running" in str(line.fields["advice"])
