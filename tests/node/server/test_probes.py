"""What probes say of a node, by what it looks like."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tickwheel.node.server.health import WHOLE, health_of
from tickwheel.node.server.probes import (
    LAG_ENTRIES_MAX,
    OVERDUE_S_MAX,
    Seen,
    health_page,
    live_page,
    ready_page,
)
from tickwheel.proto import admin_pb2


def status(**fields: object) -> admin_pb2.NodeStatus:
    """Of a slave that serves."""
    values: dict[str, object] = {
        "node_id": "n1",
        "role": admin_pb2.SLAVE,
        "state": admin_pb2.NODE_SERVING,
        "master_id": "n2",
        "term": 4,
        **fields,
    }
    return admin_pb2.NodeStatus(**values)  # type: ignore[arg-type]  # of each field's own type


WELL = Seen(status(), lag_entries=3, tick_overdue_s=0, stopping=False, certificate_reason="")


def test_ready_is_what_the_health_service_calls_serving() -> None:
    """In every state, role, with and without master and lease: no balancer gets two answers."""
    for state, role, lease, master in product(
        admin_pb2.NodeState.values(), admin_pb2.Role.values(), (False, True), ("", "n2")
    ):
        seen = replace(WELL, status=status(state=state, role=role, lease_held=lease, master_id=master))
        assert ready_page(seen).well == health_of(seen.status)[WHOLE], (state, role, lease, master)
        assert health_page(seen).well == ready_page(seen).well
    assert ready_page(WELL).text == "ready\n"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"stopping": True}, "running: it was told to stop"),
        ({"lag_entries": LAG_ENTRIES_MAX + 1}, "log: 10,001 entries to apply"),
        ({"tick_overdue_s": OVERDUE_S_MAX + 1}, "loop: its next step has been due for 11 s"),
        (
            {"status": status(state=admin_pb2.NODE_ALONE, state_reason="it hears\nno master " + "x" * 9_000)},
            "takes part: ALONE: it hears no master xxx",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_unready_node_says_why(changed: dict[str, object], says: str) -> None:
    """One line for each reason, of bounded length."""
    answer = ready_page(replace(WELL, **changed))  # type: ignore[arg-type]  # of each field's own type
    assert not answer.well and says in answer.text
    assert answer.text.count("\n") == 2 and len(answer.text) < 1_000
    assert not health_page(replace(WELL, **changed)).well  # type: ignore[arg-type]


def test_warnings_are_listed_and_leave_the_node_ready() -> None:
    """A wrong clock, a full disk, a certificate: somebody must act, and nothing gets better without this node."""
    looks = status(
        clock_reason="two clocks differ", disk_above_mark=True, unreadable_messages=2, unreadable_reason="bad record"
    )
    answer = health_page(replace(WELL, status=looks, certificate_reason="it ends in 3 days"))
    assert answer.well
    assert [line.split(":")[0] for line in answer.text.splitlines() if line.startswith("warns")] == [
        "warns clock",
        "warns disk",
        "warns records",
        "warns certificates",
    ]


def test_a_node_is_alive_until_its_steps_stay_out() -> None:
    """Whatever the cluster is like: a restart would not help it."""
    assert live_page(0).well and live_page(OVERDUE_S_MAX).well
    dead = live_page(OVERDUE_S_MAX + 1)
    assert not dead.well and "11 s" in dead.text
