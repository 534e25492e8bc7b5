"""The console on three real nodes: what its pages read and change, through the loss of the master, and with rights."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from starlette.types import ASGIApp

from tests.console.browser_client import BrowserClient, running
from tickwheel.client import AsyncClient, Grant, Right, StartFrom
from tickwheel.console.app import application
from tickwheel.console.door import DoorConfig
from tickwheel.console.sessions import Sessions
from tickwheel.node.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOUR_MS = 3_600_000
MANY = 120
"""Pending messages of the tests: more than two pages."""
CONFIG = DoorConfig(frozenset(), "session", False, False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Three nodes with something to look at."""
    async with LocalCluster(tmp_path_factory.mktemp("cluster"), 3, cluster_id="shop") as started:
        await fill(started.client())
        yield started


async def fill(client: AsyncClient) -> None:
    """Pending messages of three customers, and two dead letters."""
    async with client.producer() as producer:
        for number in range(MANY):
            await producer.send(
                "reminders",
                json.dumps({"number": number}).encode(),
                delay_ms=HOUR_MS + number * 60_000,
                key=f"customer-{number % 3}/{number}",
                tags=["even" if number % 2 == 0 else "odd"],
            )
    await client.admin.create_group("screen", ["alarms"])
    for number in range(2):
        await client.schedule("alarms", b"\x00\xff" if number else "text", delay_ms=0, key=f"alarm-{number}")
    async with client.consumer("screen", ["alarms"], messages_max=2) as consumer:
        async for delivery in consumer:
            await delivery.dead("no such screen")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(cluster: LocalCluster) -> AsyncIterator[ASGIApp]:
    """A console of the cluster."""

    def open_client(token: str) -> AsyncClient:
        return AsyncClient(cluster.addresses, token=token, timeout_s=10)

    async with running(application(Sessions(open_client), CONFIG)) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def browser(app: ASGIApp) -> BrowserClient:
    """A browser that has loaded a page."""
    found = BrowserClient(app)
    session = await found.open()
    assert not session["login_needed"] and session["caller"]["unrestricted"]
    return found


async def until(look: Callable[[], Awaitable[Any]], good: Callable[[Any], bool], timeout_s: float = 30.0) -> Any:
    """What `look` finds once it is good."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = await look()
            if good(found):
                return found
            await asyncio.sleep(0.1)


async def test_the_picture_has_nodes_and_the_load_ahead(browser: BrowserClient) -> None:
    """Three nodes, one master, and after a moment the hours in which messages are due."""
    picture = await until(lambda: browser.read("picture"), lambda found: bool(found["hours"] and found["dead"] == 2))
    assert picture["cluster_id"] == "shop" and picture["numbers"]["pending"] == MANY
    assert [node["node_id"] for node in picture["nodes"]] == ["n1", "n2", "n3"]
    assert sorted(node["role"] for node in picture["nodes"]) == ["master", "slave", "slave"]
    assert sum(number for _, number in picture["hours"]) == MANY


async def test_pages_that_listen_share_one_look(app: ASGIApp, browser: BrowserClient) -> None:
    """Two streams get the very same bytes of the same picture: the nodes were asked once."""
    other = BrowserClient(app)
    async with browser.stream("/api/stream") as mine, other.stream("/api/stream") as theirs:
        assert (await anext(mine)).startswith(b"event: history\n")
        assert (await anext(theirs)).startswith(b"event: history\n")
        async with asyncio.timeout(20):
            first = {number_of(part): part for part in [await anext(mine) for _ in range(3)]}
            both = [part async for part in taking(theirs, 3)]
    shared = [part for part in both if number_of(part) in first]
    assert shared and all(first[number_of(part)] is part for part in shared)


async def taking(parts: AsyncIterator[bytes], number: int) -> AsyncIterator[bytes]:
    """The next parts."""
    for _ in range(number):
        yield await anext(parts)


def number_of(part: bytes) -> bytes:
    """The number of a picture."""
    return part.split(b"\n")[1]


async def test_pending_messages_are_counted_listed_and_searched(browser: BrowserClient) -> None:
    """By steps of any width, by pages, by each condition."""
    hours = await browser.read("count", step_ms=HOUR_MS)
    assert hours["total"] == MANY and not hours["next"]
    quarter = await browser.read("count", step_ms=15 * 60_000)
    assert sum(number for _, number in quarter["steps"]) == MANY and len(quarter["steps"]) > len(hours["steps"])
    assert all(start % (15 * 60_000) == 0 for start, _ in quarter["steps"])
    page = await browser.read("pending")
    ids, token = [item["id"] for item in page["items"]], page["next"]
    while token:
        page = await browser.read("pending", next=token)
        ids, token = ids + [item["id"] for item in page["items"]], page["next"]
    assert len(ids) == len(set(ids)) == MANY
    for conditions, number in [
        ({"tag": "odd"}, MANY // 2),
        ({"key": "customer-1/1"}, 1),
        ({"key_prefix": "customer-2/"}, MANY // 3),
        ({"key_prefix": "customer-2/", "tag": "odd"}, MANY // 6),
        ({"topic": "nobody-knows"}, 0),
    ]:
        asked: dict[str, object] = {**conditions}
        if "topic" not in conditions:
            assert (await browser.read("count", **asked))["total"] == number, conditions
            found = await browser.read("pending", **asked)
            assert len(found["items"]) == min(50, number)
        else:
            assert (await browser.call("GET", "/api/count", query=asked)).status in (200, 404)


async def test_a_message_is_moved_cancelled_and_traced(browser: BrowserClient) -> None:
    """Its content, both changes with their outcomes, and what the nodes noted."""
    [item] = (await browser.read("pending", key="customer-0/0"))["items"]
    found = await browser.read("message", id=item["id"])
    assert found["state"] == "PENDING" and json.loads(found["payload"]["text"]) == {"number": 0}
    moved = await browser.change("messages/reschedule", {"id": item["id"], "delay_ms": 5 * HOUR_MS})
    assert moved["outcome"] == "RESCHEDULED"
    assert (await browser.change("messages/cancel", {"id": item["id"]}))["outcome"] == "CANCELLED"
    again = await browser.change("messages/reschedule", {"id": item["id"], "delay_ms": 1})
    assert again["outcome"] == "CANCELLED"
    assert (await browser.read("message", id=item["id"]))["state"] == "CANCELLED"
    assert (await browser.change("messages/cancel", {"id": "0-1-1"}))["outcome"] == "NOT_FOUND"
    story = await until(
        lambda: browser.read("trace", id=item["id"]),
        lambda found: any(event["kind"] == "cancelled" and len(event["nodes"]) == 3 for event in found["events"]),
    )
    assert [event["kind"] for event in story["events"]][:2] == ["scheduled", "moved"]
    assert moved["id"] in story["ids"]


async def test_a_sweep_cancels_what_matches(browser: BrowserClient) -> None:
    """One job, with its progress; a selection of everything is refused with the field."""
    body = {"job_id": "sweep-1", "action": "cancel", "tag": "even", "key_prefix": "customer-1/"}
    begun = await browser.change("sweeps/begin", body)
    assert begun["job_id"] == "sweep-1" and begun["selection"] == {"tag": "even", "key_prefix": "customer-1/"}
    ended = await until(lambda: browser.read("sweeps"), lambda found: found["items"][0]["state"] == "FINISHED")
    assert ended["items"][0]["done"] == MANY // 6 and ended["items"][0]["fraction"] == 1.0
    assert (await browser.change("sweeps/begin", body))["state"] == "FINISHED"
    refused = await browser.change("sweeps/begin", {"job_id": "sweep-2", "action": "cancel"}, 400)
    assert refused["details"]["field"]
    shifted = {"job_id": "sweep-3", "action": "shift", "shift_ms": -60_000, "tag": "odd"}
    assert (await browser.change("sweeps/begin", shifted))["action"] == "shift by -60000"


async def test_topics_and_groups_are_listed_and_changed(browser: BrowserClient) -> None:
    """Pages with order and filter; a topic that holds messages is deleted only with a second word."""
    await browser.change("topics/create", {"name": "spare", "fifo": True})
    found = await browser.read("topics", name="ar")
    assert [item["name"] for item in found["items"]] == ["alarms", "spare"] and found["total"] == 3
    assert (await browser.read("topics", sort="dispatched", descending="true"))["items"][0]["name"] == "alarms"
    assert (await browser.change("topics/pause", {"name": "spare", "paused": True}))["paused"]
    held = await browser.change("topics/delete", {"name": "reminders"}, 409)
    assert int(held["details"]["pending"]) > 0
    assert (await browser.change("topics/delete", {"name": "spare"}))["finished"]
    groups = await browser.read("groups", sort="dead", descending="true")
    assert groups["items"][0]["name"] == "screen" and groups["items"][0]["dead"] == 2
    assert (await browser.read("topic", name="alarms"))["groups"][0]["name"] == "screen"
    assert (await browser.change("groups/pause", {"name": "screen", "paused": True}))["paused"]
    assert not (await browser.change("groups/pause", {"name": "screen", "paused": False}))["paused"]
    assert (await browser.change("groups/reset", {"name": "screen", "start_from": "latest"}))["backlog"] == 0
    assert (await browser.change("groups/delete", {"name": "nobody"}, 404))["reason"] == "UNKNOWN_NAME"


async def test_a_group_tells_its_oldest_unsettled_message(cluster: LocalCluster, browser: BrowserClient) -> None:
    """Its due time, to the tick; the oldest first when the list goes down by age, groups without a backlog last."""
    client = cluster.client()
    await client.admin.create_group("slow", ["waiting"])
    await client.admin.create_group("idle", ["waiting"])
    await client.admin.reset_group("idle", StartFrom.LATEST)
    receipt = await client.schedule("waiting", "x", delay_ms=0)
    await client.schedule("waiting", "y", delay_ms=2_000)

    async def group(name: str) -> Any:
        return (await browser.read("group", name=name))["group"]

    # The console may still show the groups as they were up to three seconds ago.
    slow = await until(lambda: group("slow"), lambda found: found is not None and found["backlog"] == 2)
    assert 0 <= receipt.due_ms - slow["oldest_ms"] < 1_000
    assert (await group("screen"))["oldest_ms"] is None
    items = (await browser.read("groups", sort="oldest_ms", descending="true"))["items"]
    assert items[0]["oldest_ms"] == min(item["oldest_ms"] for item in items if item["oldest_ms"] is not None)
    assert items[-1]["oldest_ms"] is None


@pytest.mark.parametrize("payload", [b'{"half": "\\ud83d"}', *(b"[" * deep + b"]" * deep for deep in (500, 2_000))])
async def test_no_payload_hides_its_message(cluster: LocalCluster, browser: BrowserClient, payload: bytes) -> None:
    """JSON can name half a character, which no encoder takes, and nest deeper than it can be written again."""
    receipt = await cluster.client().schedule("odd", payload, delay_ms=HOUR_MS)
    found = await browser.read("message", id=receipt.id)
    assert found["payload"]["text"].translate(str.maketrans("", "", " \n")) == payload.decode().replace(" ", "")


async def test_recurring_schedules_are_shown_and_triggered(cluster: LocalCluster, browser: BrowserClient) -> None:
    """Plan, next and last runs; pause, a run now, and deletion."""
    await cluster.client().schedules.put("daily/report", "reports", "go", cron="0 9 * * *", zone="Europe/Berlin")
    [row] = (await browser.read("schedules", prefix="daily/"))["items"]
    assert row["cron"] == "0 9 * * *" and row["state"] == "active" and row["next_ms"] > 0
    assert (await browser.read("schedules", prefix="x"))["items"] == []
    found = await browser.read("schedule", name="daily/report")
    assert len(found["upcoming"]) == 10 and found["payload"]["text"] == "go"
    assert (await browser.change("schedules/pause", {"name": "daily/report", "paused": True}))["state"] == "paused"
    asked = {"name": "daily/report", "request_id": "once"}
    run = await browser.change("schedules/trigger", asked)
    assert await browser.change("schedules/trigger", asked) == run
    assert [run["outcome"] for run in (await browser.read("schedule", name="daily/report"))["runs"]] == ["triggered"]
    assert (await browser.change("schedules/pause", {"name": "daily/report", "paused": False}))["state"] == "active"
    assert (await browser.change("schedules/delete", {"name": "daily/report"}))["deleted"]
    assert (await browser.read("schedule", 404, name="daily/report"))["reason"] == "UNKNOWN_NAME"
    await cluster.client().admin.delete_topic("reports", cancel_pending=True)


async def test_dead_letters_are_shown_replayed_and_purged(browser: BrowserClient) -> None:
    """Text and bytes as what they are; the counts that the cluster gives."""
    page = await browser.read("dead", group="screen")
    assert page["total"] == 2 and page["items"][0]["error"] == "no such screen"
    text, raw = [await browser.read("letter", group="screen", number=item["number"]) for item in page["items"]]
    assert text["payload"]["text"] == "text" and raw["payload"]["kind"] == "bytes"
    numbers = [page["items"][0]["number"], 999]
    assert await browser.change("dead/replay", {"group": "screen", "numbers": numbers}) == {
        "changed": 1,
        "missing": 1,
        "kept": 0,
    }
    assert (await browser.change("dead/purge", {"group": "screen"}))["changed"] == 1
    assert (await browser.read("groups", dead="true"))["items"] == []


async def test_the_console_goes_on_through_the_loss_of_the_master(
    cluster: LocalCluster, browser: BrowserClient
) -> None:
    """A page that listens sees the node away and the next master; a change right after the kill is carried out."""
    [item] = (await browser.read("pending", key="customer-2/5"))["items"]
    async with browser.stream("/api/stream") as parts:
        await anext(parts)
        killed = await cluster.master()
        await cluster.kill_node(killed)
        cancelling = asyncio.create_task(browser.change("messages/cancel", {"id": item["id"]}))

        async def picture() -> Any:
            return json.loads((await anext(parts)).split(b"data: ")[1])

        seen = await until(picture, lambda found: found["master_id"] not in ("", killed.node_id))
        assert [node["node_id"] for node in seen["nodes"] if node["away"]] == [killed.node_id]
        assert (await cancelling)["outcome"] == "CANCELLED"
        cluster.start_node(killed)
        await until(picture, lambda found: not any(node["away"] for node in found["nodes"]))
    await cluster.wait_ready()
    target = next(node.node_id for node in cluster.nodes if node.node_id != seen["master_id"])
    assert (await browser.change("members/transfer", {"target": target}))["master_id"] == target
    assert (await browser.change("members/transfer", {"target": "nobody"}, 409))["reason"] == "WRONG_STATE"


async def test_the_command_serves_through_the_loss_of_the_master(cluster: LocalCluster) -> None:
    """docs/CONSOLE.md as it is typed, and a page's calls over HTTP: the stream of pictures goes on in one connection,
    what is asked meanwhile waits for the next master, a change is answered truly, a sweep goes on. Ctrl-C ends open
    pages at once, without a word."""
    line = "tickwheel console --addresses a:7700,b:7700,c:7700 --read-only"
    assert f"\n{line}\n" in (Path(__file__).parents[2] / "docs/CONSOLE.md").read_text(encoding="utf-8")
    words = line.replace("a:7700,b:7700,c:7700", ",".join(cluster.addresses)).removesuffix(" --read-only").split()[1:]
    made = await cluster.client().schedule("notes", b"x", delay_ms=HOUR_MS, key="note-1")
    console = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tickwheel.node.cli.main", *words, "--bind", "127.0.0.1:0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert console.stdout is not None
    url = (await console.stdout.readline()).split()[2].decode().rstrip("/,")
    jar, patience = aiohttp.CookieJar(unsafe=True), aiohttp.ClientTimeout(60)
    async with aiohttp.ClientSession(url, cookie_jar=jar, timeout=patience) as browser:
        async with browser.get("/") as page:
            assert page.status == 200
        async with browser.get("/api/session") as answer:
            headers = {"x-csrf-token": (await answer.json())["csrf"]}
        async with browser.get("/api/stream", timeout=aiohttp.ClientTimeout(0)) as stream:
            numbers: list[int] = []

            async def picture() -> Any:
                while not (line := await stream.content.readline()).startswith(b"id: "):
                    assert line and not line.startswith(b"event: ended")
                numbers.append(int(line[4:]))
                return json.loads((await stream.content.readline()).removeprefix(b"data: "))

            before = await until(picture, lambda found: bool(found["master_id"]))
            killed = await cluster.master()
            sweep = {"job_id": "console-failover", "action": "cancel", "topic": "reminders", "tag": "odd"}

            async def change(name: str, body: object) -> Any:
                async with browser.post(f"/api/{name}", json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    return await answer.json()

            begun = await change("sweeps/begin", sweep)
            await cluster.kill_node(killed)
            moving = asyncio.create_task(change("messages/reschedule", {"id": made.id, "delay_ms": 2 * HOUR_MS}))
            async with browser.get("/api/topics") as answer:
                assert answer.status == 200 and "notes" in {topic["name"] for topic in (await answer.json())["items"]}
            after = await until(picture, lambda found: found["master_id"] not in ("", killed.node_id))
            assert after["term"] > before["term"]
            assert [node["node_id"] for node in after["nodes"] if node["away"]] == [killed.node_id]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            moved = await moving
            assert moved["outcome"] == "RESCHEDULED"
            message = await cluster.client().get(made.id)
            assert message.due_ms == moved["due_ms"]
            ended = await cluster.client().sweeps.wait(begun["job_id"])
            assert ended.state == "FINISHED" and ended.done > 0
        again = {"last-event-id": "\u00ff" * 200}
        async with browser.get("/api/stream", headers=again, timeout=aiohttp.ClientTimeout(0)) as stream:
            assert await stream.content.readline() == b"event: history\n"
            console.send_signal(signal.SIGINT)
            while await stream.content.readline():
                pass
    assert await asyncio.wait_for(console.wait(), 30) in (0, 130)
    assert console.stderr is not None and await console.stderr.read() == b""
    cluster.start_node(killed)
    await cluster.wait_ready()


async def test_with_rights_a_token_decides(cluster: LocalCluster, app: ASGIApp, browser: BrowserClient) -> None:
    """Last, since it turns rights on: no token, a wrong one, one that may only read, one that may do all."""
    client = cluster.client()
    await client.access.set_user("root", ["administrator"])
    grant = Grant((Right.READ,), topics=("alarms",), groups=("screen",))
    await client.access.set_role("reader", [grant])
    await client.access.set_user("ann", ["reader"])
    root = (await client.access.create_token("root")).secret
    ann = (await client.access.create_token("ann")).secret
    refused = await browser.change("login", {"token": ann}, 409)
    assert "nobody needs to log in" in refused["error"]
    await client.admin.update_settings(rights=True)

    stranger = BrowserClient(app)
    await until(stranger.open, lambda session: bool(session["login_needed"]))
    for name in ("topics", "pending", "settings", "access"):
        assert (await stranger.read(name, 401))["reason"] == "UNAUTHENTICATED"
    await stranger.change("messages/cancel", {"id": "0-1-1"}, 401)
    assert (await stranger.change("login", {"token": "tw_wrong"}, 401))["reason"] == "UNAUTHENTICATED"

    reader = BrowserClient(app)
    await reader.open()
    before = dict(reader.cookies)
    reader.csrf = (await reader.change("login", {"token": ann}))["csrf"]
    assert reader.cookies != before and ann not in str(reader.cookies)
    assert (await reader.open())["caller"]["name"] == "ann"
    assert [item["name"] for item in (await reader.read("topics"))["items"]] == ["alarms"]
    refused = await reader.change("topics/pause", {"name": "alarms", "paused": True}, 403)
    assert refused["reason"] == "RIGHT_REQUIRED"
    assert refused["details"]["field"] == "administer" and refused["details"]["value"] == "alarms"
    assert (await reader.read("access", 403))["reason"] == "RIGHT_REQUIRED"

    admin = BrowserClient(app)
    await admin.open()
    admin.csrf = (await admin.change("login", {"token": root}))["csrf"]
    access = await admin.read("access")
    assert {user["name"] for user in access["users"]} == {"root", "ann"}
    assert root not in json.dumps(access) and ann not in json.dumps(access)
    audit = await admin.read("audit")
    assert any(record["user"] == "ann" and record["result"] != "OK" for record in audit["records"])
    settings = {item["name"]: item["value"] for item in (await admin.read("settings"))["items"]}
    assert settings["rights"] is True and settings["slot_ms"] > 0

    reader.csrf = (await reader.change("logout", {}))["csrf"]
    await reader.read("topics", 401)
