"""The live view: what it draws in any terminal, and that it goes on when nodes and masters go."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from tickwheel.client import NodeStatus
from tickwheel.client.errors import Fault
from tickwheel.client.nodes import node_status_of
from tickwheel.client.topics import group_of
from tickwheel.node.cli.top import Watcher
from tickwheel.node.cli.top_view import HOUR_MS, Heard, draw
from tickwheel.node.local_cluster import LocalCluster
from tickwheel.proto import admin_pb2

NOW_MS = 1_800_000_000_000 // HOUR_MS * HOUR_MS + 25 * 60_000 + 30_000


def status(node_id: str, role: admin_pb2.Role.ValueType = admin_pb2.SLAVE, term: int = 7) -> NodeStatus:
    """A node that is well."""
    wire = admin_pb2.NodeStatus(
        cluster_id="c",
        node_id=node_id,
        role=role,
        state=admin_pb2.NODE_SERVING,
        term=term,
        lease_held=role == admin_pb2.MASTER,
        clock_state=admin_pb2.CLOCK_AGREED,
        clock_error_ms=1.5,
        pending=1_234_567,
        late_p50_ms=2,
        late_p99_ms=5_000,
        redeliver_rate=3,
        topics=[admin_pb2.TopicStatus(name=f"topic-{n}", deliver_rate=n, backlog=n) for n in reversed(range(30))],
    )
    return node_status_of(wire)


def heard() -> Heard:
    """A busy cluster of three."""
    found = Heard()
    found.answers = {"a:1": status("a", admin_pb2.MASTER), "b:1": status("b"), "c:1": status("c")}
    found.last = {address: answer for address, answer in found.answers.items() if not isinstance(answer, Fault)}
    found.groups = [group_of(admin_pb2.Group(name=f"group-{n}", backlog=n, dead=n % 2)) for n in range(20)]
    hour_ms = NOW_MS // HOUR_MS * HOUR_MS
    found.hours = {hour_ms + n * HOUR_MS: n * n for n in range(30)}
    found.seconds = {hour_ms + n * 1_000: n % 7 for n in range(3_600)}
    return found


def shown(found: Heard, width: int = 100, height: int = 40, *, color: bool = False) -> list[str]:
    """Lines as a terminal gets them."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=color, color_system="256" if color else None)
    console.print(draw(found, NOW_MS, width, height))
    return out.getvalue().splitlines()


def test_all_of_it_in_a_large_terminal() -> None:
    """Header, nodes, wheel with its hand, topics and groups with what was left out said, plain without colour."""
    text = "\n".join(shown(heard()))
    assert "\x1b" not in text
    for word in ("master a in term 7", "1.2M pending", "99 % ≤ 5 s", "master*", "topic-29", "group-19", "10 dead"):
        assert word in text, word
    assert text.count(" more") == 2
    (seconds,) = [line for line in shown(heard()) if line.startswith("seconds")]
    assert seconds[9:39] == "·" * 30 and seconds[39] == "┃" and seconds[40] != " "
    assert "\x1b" in "\n".join(shown(heard(), color=True))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [5, 12, 24, 100])
def test_any_terminal_is_enough(width: int, height: int) -> None:
    """Never wider or higher than there is room (down to a least), and the first line always says who is master."""
    lines = shown(heard(), max(width, 40), height)
    assert all(len(line) <= max(width, 40) for line in lines)
    assert len(lines) <= max(height, 8)
    assert "tickwheel c" in lines[0]


def test_what_is_away_is_said() -> None:
    """A node without an answer keeps its name; no master and no node at all are said first; two masters: the newer."""
    found = heard()
    found.answers["c:1"] = Fault("UNAVAILABLE", "gone")
    assert any(line.startswith("c ") and "away" in line for line in shown(found))
    found.answers["a:1"] = status("a")
    assert "no master: 2 of 3 nodes answer; the highest term is 7" in "\n".join(shown(found))
    found.answers = dict.fromkeys(found.answers, found.answers["c:1"])
    assert "no node answers" in "\n".join(shown(found))
    found.answers = {"a:1": status("a", admin_pb2.MASTER, 7), "b:1": status("b", admin_pb2.MASTER, 8)}
    assert "master b in term 8" in "\n".join(shown(found))
    assert shown(Heard())[0].startswith("tickwheel ?")


async def test_masters_change_in_front_of_the_viewer(tmp_path: Path) -> None:
    """Told one address it shows all nodes; when the master is killed it shows that it is away, then the next master,
    and the load ahead again; rates by topic and lateness are there."""
    async with LocalCluster(tmp_path, 3) as cluster, cluster.client() as client:
        for number in range(50):
            await client.schedule("rung", b"x", delay_ms=1 + 40 * number)
        await client.schedule("later", b"x", delay_ms=600_000)
        got = 0
        async with client.consumer("g", "rung") as consumer:
            async for delivery in consumer:
                delivery.ack()
                got += 1
                if got == 50:
                    break
        viewer = Watcher(client)
        deadline = time.monotonic() + 10
        await viewer.all()
        while (viewer.heard.master is None or not viewer.heard.master.topics) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            await viewer.all()
        before = viewer.heard.master
        assert before is not None
        text = draw(viewer.heard, viewer.now_ms(), 100, 40).plain
        for word in ("n1", "n2", "n3", f"master {before.node_id}", "rung", "late", "hours", "GROUP"):
            assert word in text, text
        assert sum(viewer.heard.hours.values()) == 1
        await cluster.kill_node(cluster.node(before.node_id))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            await viewer.all()
            master = viewer.heard.master
            if master is not None and master.node_id != before.node_id and not viewer.heard.trouble:
                break
            draw(viewer.heard, viewer.now_ms(), 80, 24)
        assert master is not None and master.node_id != before.node_id
        text = draw(viewer.heard, viewer.now_ms(), 100, 40).plain
        assert f"master {master.node_id} in term {master.term}" in text
        (away,) = [line for line in text.splitlines() if "away" in line]
        assert away.startswith(before.node_id)
        assert sum(viewer.heard.hours.values()) == 1
