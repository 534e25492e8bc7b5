"""The log of a node that leads no more says why: an operator asks that first."""

from __future__ import annotations

import pytest

from tickwheel.node.server.house import why_it_leads_no_more
from tickwheel.replication.log import LogStatus, Role


def test_a_disk_that_hangs_is_told_as_the_reason() -> None:
    """Not the silence of members, who have answered."""
    status = LogStatus(Role.SLAVE, 3, None, 1, 1, 1, 1, lease_held=False, hangs_ms=1_530)
    assert why_it_leads_no_more(status, 3, 20) == "its disk has not ended an fsync of the log within 1530 ms"


@pytest.mark.parametrize(
    ("term", "master", "halted", "stall_ms", "said"),
    [
        (4, "n2", "", 0, "n2 stood for election in term 4"),
        (4, None, "", 500, "another member stood for election in term 4"),
        (3, None, "", 0, "no majority of the members answered in time"),
        (
            3,
            None,
            "",
            640,
            "no majority of the members answered in time, and this node was held up for 640 ms just before",
        ),
        (3, None, "the disk is full: free space", 640, "the disk is full: free space"),
    ],
)
def test_why_a_node_leads_no_more(term: int, master: str | None, halted: str, stall_ms: int, said: str) -> None:
    status = LogStatus(Role.SLAVE, term, master, 1, 1, 1, 1, lease_held=False, halted=halted)
    assert why_it_leads_no_more(status, 3, stall_ms) == said
