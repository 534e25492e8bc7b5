"""Recurring schedules on three real nodes while their master is killed: each planned second has exactly one message."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio

from tests.process.test_recovery import until_equal
from tickwheel.client import AsyncClient, Missed, RunOutcome, ScheduleState
from tickwheel.client.moments import ms_of
from tickwheel.node.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
SECONDS = 12
NAMES = [f"tick-{number}" for number in range(5)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Three nodes for all tests here; at the end they are alike."""
    async with LocalCluster(tmp_path_factory.mktemp("cluster"), 3) as started:
        yield started
        await started.wait_ready()
        await until_equal(started.nodes)


def soon(seconds: int) -> datetime:
    """A full second from now on."""
    return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=seconds)


async def received(
    client: AsyncClient, topic: str, count: int, kill_at: int, kill: asyncio.Event
) -> dict[tuple[str, int], set[str]]:
    """Message ids by schedule and planned time, once there are so many; `kill` is set when some have come."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    async with client.consumer("watch", [topic]) as consumer:
        async for delivery in consumer:
            headers = delivery.headers
            found[headers["tickwheel-schedule"], int(headers["tickwheel-planned"])].add(delivery.id)
            assert delivery.due_ms >= int(headers["tickwheel-planned"])
            await delivery.ack()
            if len(found) == kill_at:
                kill.set()
            if len(found) == count:
                return found
    raise AssertionError("the consumer ended")


async def test_each_planned_second_has_one_message(cluster: LocalCluster) -> None:
    """P1, P5: five schedules, by cron and by interval, run every second; the master dies by SIGKILL in between, and a
    second time while the first is back. No second is left out or made twice."""
    client = cluster.client()
    start = soon(3)
    end = start + timedelta(seconds=SECONDS)
    for number, name in enumerate(NAMES):
        when: dict[str, Any] = {"cron": "* * * * * *"} if number % 2 else {"every": timedelta(seconds=1)}
        await client.schedules.put(name, "ticks", b"x", start=start, end=end, missed=Missed.SKIP, **when)
    killed = asyncio.Event()
    total = len(NAMES) * (SECONDS + 1)
    receiving = asyncio.ensure_future(received(client, "ticks", total, 2 * len(NAMES), killed))
    async with asyncio.timeout(60):
        await killed.wait()
        for _ in range(2):
            master = await cluster.master()
            await cluster.kill_node(master)
            await cluster.master()
            cluster.start_node(master)
            await cluster.wait_ready()
        found = await receiving
    begin_ms = ms_of("start", start)
    seconds = [begin_ms + 1_000 * number for number in range(SECONDS + 1)]
    assert sorted(found) == [(name, planned_ms) for name in NAMES for planned_ms in seconds]
    assert all(len(ids) == 1 for ids in found.values())
    for name in NAMES:
        schedule = await client.schedules.get(name)
        assert (schedule.state, schedule.counts.made) == (ScheduleState.ENDED, SECONDS + 1)
        assert {run.outcome for run in schedule.runs} == {RunOutcome.MADE} and not schedule.upcoming
        assert {(name, ms_of("planned", run.planned)): {run.id} for run in schedule.runs}.items() <= found.items()


async def test_asked_runs_and_a_pause_through_a_kill(cluster: LocalCluster) -> None:
    """Trigger, backfill and pause are answered before and after a change of master as one cluster: what was asked for
    once is there once, and a paused schedule stays paused."""
    client = cluster.client()
    await client.schedules.put("hourly", "hours", b"x", cron="0 * * * *", paused=True)
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    end = begin + timedelta(hours=900)
    master = await cluster.master()
    filling = asyncio.ensure_future(client.schedules.backfill("hourly", begin, end))
    run = await client.schedules.trigger("hourly", request_id="once")
    await cluster.kill_node(master)
    again = await client.schedules.trigger("hourly", request_id="once")
    assert (again.id, again.outcome) == (run.id, RunOutcome.TRIGGERED)
    await filling
    cluster.start_node(master)
    schedule = await client.schedules.get("hourly")
    assert schedule.state == ScheduleState.PAUSED
    assert (schedule.counts.backfilled, schedule.counts.triggered, schedule.counts.made) == (900, 1, 0)
    planned: list[int] = []
    async with client.consumer("hours", ["hours"], messages_max=901) as consumer:
        async for delivery in consumer:
            planned.append(int(delivery.headers["tickwheel-planned"]))
            delivery.ack()
    hours = [ms_of("begin", begin) + 3_600_000 * number for number in range(900)]
    assert sorted(planned)[:900] == hours
    assert await client.schedules.delete("hourly")
