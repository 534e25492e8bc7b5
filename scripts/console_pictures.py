"""Makes the pictures of the console in docs/img: a small shop on three nodes, and a chaos run of a minute.

`make pictures`. Needs Playwright (`pip install '.[browser]'`) and Debian's chromium. `make pictures SCREENS=DIR` leaves
docs/img alone and writes every page and every dialog into a folder instead, in both themes at 1440 and 390 pixels, to
be looked at: of the shop, of a cluster full of hostile texts with a node away, and of an empty one. It takes
two to three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tickwheel.bench.console import console_of
from tickwheel.client import AsyncClient, Delivery, Grant, Right, Selection
from tickwheel.node.local_cluster import LocalCluster

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "img"
CHROMIUM = "/usr/bin/chromium"
MINUTE_MS, HOUR_MS = 60_000, 3_600_000
TOPICS = ("order-reminders", "invoices", "webhook-retries", "session-timeouts", "newsletter")
HISTORY_S = 75
"""Rates and lateness are shown over this long at the least."""
REPORT_PX = 1_030
"""Height that shows a report's figures, faults, rates and lateness."""
RUN = "nightly-11-22"
ASKING = re.compile(r"…$|^(Create a topic|Hand over|Make master|#\d+)$")
"""Buttons that open a dialog."""


async def _fill(client: AsyncClient, rng: random.Random, count: int) -> None:
    for topic in TOPICS:
        await client.admin.create_topic(topic)
    for group, topics in {"mail": TOPICS[:2], "hooks": TOPICS[2:3], "sessions": TOPICS[3:4], "archive": TOPICS}.items():
        await client.admin.create_group(group, topics)
    async with client.producer() as producer:
        for number in range(count):
            ahead_ms = int(min(rng.expovariate(1 / (8 * HOUR_MS)), 6 * 24 * HOUR_MS)) + 2_000
            await producer.send(TOPICS[number % 5], _payload(number), delay_ms=ahead_ms, **_meta(number))
    await client.schedules.put("daily/sales-report", "invoices", "go", cron="0 9 * * *", zone="Europe/Berlin")
    await client.schedules.put("hourly/clean-carts", "session-timeouts", "go", cron="0 * * * *")
    await client.schedules.put("monthly/statements", "invoices", "go", cron="0 6 1 * *", zone="America/New_York")
    await client.schedules.pause("monthly/statements")
    await client.schedules.trigger("daily/sales-report")
    await client.sweeps.wait((await client.sweeps.cancel(Selection("newsletter", key_prefix="customer-11"))).job_id)
    await client.access.set_role("support", [Grant((Right.READ, Right.CANCEL), topics=("order-*",), groups=("mail",))])
    await client.access.set_user("ann", roles=["administrator"])
    await client.access.set_user("bob", roles=["support"])
    await client.access.create_token("bob", label="laptop")


def _payload(number: int) -> dict[str, object]:
    kind = TOPICS[number % 5]
    return {
        "customer": f"customer-{number % 997}",
        "order": 300_000 + number,
        "kind": kind,
        "text": "Your order is ready",
    }


def _meta(number: int) -> dict[str, Any]:
    tags = [("eu", "us", "asia")[number % 3], *(["gold"] if number % 7 == 0 else [])]
    return {"key": f"customer-{number % 997}/{300_000 + number}", "tags": tags}


@contextlib.asynccontextmanager
async def _life(client: AsyncClient, rng: random.Random) -> AsyncIterator[None]:
    """Messages come and are delivered; some webhooks fail, some for good."""

    async def send() -> None:
        number = 100_000
        async with client.producer() as producer:
            while True:
                for _ in range(rng.randrange(6, 14)):
                    number += 1
                    delay_ms = rng.randrange(500, 40_000)
                    await producer.send(TOPICS[number % 5], _payload(number), delay_ms=delay_ms, **_meta(number))
                await asyncio.sleep(0.25)

    async def take(group: str, topics: tuple[str, ...]) -> None:
        async with client.consumer(group, topics, name=f"{group}-1") as consumer:
            async for delivery in consumer:
                await _handle(group, delivery, rng)

    tasks = [asyncio.create_task(send())]
    for group, topics in {"mail": TOPICS[:2], "hooks": TOPICS[2:3], "sessions": TOPICS[3:4]}.items():
        tasks.append(asyncio.create_task(take(group, topics)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def _handle(group: str, delivery: Delivery, rng: random.Random) -> None:
    chance = rng.random() if group == "hooks" else 1.0
    if chance < 0.02:
        await delivery.dead("HTTP 410 Gone from https://example.org/hook")
    elif chance < 0.1 and delivery.attempt == 1:
        await delivery.nack(reason="HTTP 503 from https://example.org/hook")
    else:
        await delivery.ack()


async def _show(page: Any, url: str) -> None:
    await page.goto(url)
    await page.locator("main :not(.empty)").first.wait_for()
    await page.locator("main [aria-busy]").first.wait_for(state="detached")
    await page.evaluate("document.fonts.ready")


def _pages(message_id: str, report: str = "") -> dict[str, str]:
    """Every page of the shop by the name of its picture."""
    return {
        "overview": "/",
        "pending": "/pending",
        "pending-key": "/pending?key_prefix=customer-17&span=all",
        "pending-none": "/pending?tag=nobody&span=all",
        "schedules": "/schedules",
        "schedule": "/schedules?name=daily/sales-report",
        "topics": "/topics",
        "topic": "/topics?name=webhook-retries",
        "groups": "/groups",
        "group": "/groups?name=hooks",
        "dead": "/dead",
        "dead-letters": "/dead?group=hooks",
        "sweeps": "/sweeps",
        "message": f"/message?id={message_id}",
        "nodes": "/nodes",
        "settings": "/settings",
        "access": "/access",
        "audit": "/audit",
        **({"reports": "/reports", "report": f"/reports?name={report}"} if report else {}),
    }


KEPT = {
    ("overview", "light"): "console-overview",
    ("overview", "dark"): "console-overview-dark",
    ("pending", "dark"): "console-pending",
    ("message", "light"): "console-message",
    ("report", "light"): "console-report",
}
"""Pictures of the documents."""

# -- a cluster as an enemy would fill it

HTML = "<img src=x onerror=alert(1)><script>alert(2)</script>"
ARABIC = "شحن-الطلبات-עברית"
RIGHT_TO_LEFT = f"\u202eexe.tpircs\u202c-{ARABIC}"
EMOJI = "👩‍👩‍👧‍👦🚀 Zürich ﷽ Z͑ͫ̓a͙͢l̴g̈́o"
LONG = "a-name-without-any-room-to-break-" * 20
HOSTILE_TOPICS = ("plain", "t" * 127, "with.dots-and_dashes.and.a.long.tail." + "x" * 80)
PAYLOADS: tuple[Any, ...] = (
    bytes(range(256)) * 9,
    HTML,
    {"text": RIGHT_TO_LEFT, "deep": [[[[EMOJI]]]]},
    b"\x00",
    LONG * 100,
)


async def _fill_hostile(client: AsyncClient) -> str:
    """Long names, marks that turn the direction, HTML, emoji, keys of 4 KB, bodies of bytes; the id of a message."""
    long_key = LONG[:200] + "k" * 3_800
    ids = []
    for number in range(40):
        key = (HTML, RIGHT_TO_LEFT, EMOJI, long_key, "")[number % 5]
        labels = [HTML, ARABIC, EMOJI.replace("\u200d", ""), *(f"tag-{at}" for at in range(5))]
        receipt = await client.schedule(
            HOSTILE_TOPICS[number % 3],
            PAYLOADS[number % 5],
            delay_ms=MINUTE_MS * (1 + number * 40),
            key=key,
            tags=labels[: number % 9],
            headers={"x-html": HTML, "x-direction": RIGHT_TO_LEFT, "x-long": LONG},
        )
        ids.append(receipt.id)
    group = "g" * 127
    await client.admin.create_group(group, HOSTILE_TOPICS)
    for number in range(3):
        await client.schedule(HOSTILE_TOPICS[1], PAYLOADS[number], delay_ms=0, key=long_key, tags=[HTML])
    errors = iter((HTML, RIGHT_TO_LEFT + LONG, EMOJI))
    async with client.consumer(group, [HOSTILE_TOPICS[1]], name=f"{HTML} {RIGHT_TO_LEFT}", messages_max=3) as consumer:
        async for delivery in consumer:
            await delivery.dead(next(errors))
    for number, name in enumerate((HTML, ARABIC, EMOJI.split()[1], LONG[:190])):
        await client.schedules.put(
            name,
            HOSTILE_TOPICS[1],
            PAYLOADS[number],
            cron="*/7 1-23/2 1,15 * mon-fri",
            zone="America/Argentina/Buenos_Aires",
        )
    await client.schedules.trigger(HTML)
    await client.sweeps.wait((await client.sweeps.cancel(Selection(key_prefix=long_key[:1000]))).job_id)
    await client.sweeps.wait((await client.sweeps.cancel(Selection(tag=HTML, topic=HOSTILE_TOPICS[1]))).job_id)
    patterns = tuple(f"{'p' * 90}-{number}-*" for number in range(12))
    await client.access.set_role("r" * 60, [Grant((Right.READ, Right.CANCEL), topics=patterns, groups=patterns)])
    await client.access.set_user("u" * 60, roles=["administrator", "r" * 60])
    for _ in range(4):
        await client.access.create_token("u" * 60, label="l" * 60)
    return ids[0]


def _hostile_pages(message_id: str) -> dict[str, str]:
    group, topic = "g" * 127, HOSTILE_TOPICS[1]
    return {
        "overview": "/",
        "pending": "/pending?span=all",
        "pending-html": f"/pending?{urlencode({'key_prefix': HTML, 'span': 'all'})}",
        "schedules": "/schedules",
        "schedule-html": f"/schedules?{urlencode({'name': HTML})}",
        "schedule-arabic": f"/schedules?{urlencode({'name': ARABIC})}",
        "topics": "/topics",
        "topic": f"/topics?name={topic}",
        "topic-unknown": f"/topics?{urlencode({'name': LONG + HTML})}",
        "groups": "/groups",
        "group": f"/groups?name={group}",
        "dead": "/dead",
        "dead-letters": f"/dead?group={group}",
        "sweeps": "/sweeps",
        "message": f"/message?id={message_id}",
        "message-unknown": "/message?id=0-1-1",
        "message-wrong": f"/message?{urlencode({'id': HTML})}",
        "nodes": "/nodes",
        "access": "/access",
        "audit": "/audit",
    }


async def _take(browser: Any, url: str, pages: Mapping[str, str]) -> None:
    """The pictures of the documents."""
    for theme in ("light", "dark"):
        async with _looking(browser, theme, 1440) as page:
            for name, path in pages.items():
                if picture := KEPT.get((name, theme)):
                    await _show(page, url + path)
                    if name in ("overview", "report"):
                        await page.wait_for_timeout(1_500)  # the wheel has its hours, the charts their size
                    shown: Any = {"x": 0, "y": 0, "width": 1440, "height": REPORT_PX if name == "report" else 900}
                    await page.screenshot(path=IMAGES / f"{picture}.png", full_page=True, clip=shown)


@contextlib.asynccontextmanager
async def _looking(browser: Any, theme: str, width: int) -> AsyncIterator[Any]:
    view: Any = {"viewport": {"width": width, "height": 900}, "color_scheme": theme}
    context = await browser.new_context(**view, reduced_motion="reduce")
    try:
        yield await context.new_page()
    finally:
        await context.close()


async def _take_screens(browser: Any, url: str, pages: Mapping[str, str], screens: Path, scene: str) -> None:
    """Every page and the dialogs of its buttons, in both themes and widths."""

    async def take(theme: str, width: int) -> None:
        async with _looking(browser, theme, width) as page:
            page.on("pageerror", lambda error: print(f"{scene}: {error}"))
            for name, path in pages.items():
                file = f"{scene}-{name}"
                await _show(page, url + path)
                if name in ("overview", "report"):
                    await page.wait_for_timeout(1_500)
                await page.screenshot(path=screens / f"{file}-{theme}-{width}.png", full_page=True)
                if await page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    print(f"{file} is wider than {width} pixels")
                await _take_dialogs(page, screens, f"{file}-%s-{theme}-{width}.png")

    await asyncio.gather(*(take(theme, width) for width in (1440, 390) for theme in ("light", "dark")))


async def _take_dialogs(page: Any, screens: Path, file: str) -> None:
    buttons = page.locator("main button").filter(has_text=ASKING)
    seen = set()
    for number in range(await buttons.count()):
        words = (await buttons.nth(number).inner_text()).strip("…").lower().replace(" ", "-")
        if words in seen:
            continue
        seen.add(words)
        await buttons.nth(number).click()
        await page.locator("dialog[open]").wait_for()
        await page.screenshot(path=screens / (file % (re.sub(r"[^a-z-]", "", words) or "letter")))
        await page.keyboard.press("Escape")
        await page.locator("dialog[open]").wait_for(state="detached")


@contextlib.asynccontextmanager
async def _browser() -> AsyncIterator[Any]:
    playwright = importlib.import_module("playwright.async_api")  # of the extra `browser`, which dev does not have
    async with playwright.async_playwright() as library:
        browser = await library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


async def _first_dead(client: AsyncClient) -> str:
    """The id of the first message that the shop gives up."""
    async with asyncio.timeout(300):
        while True:
            if letters := (await client.dead.page("hooks")).letters:
                return letters[0].id
            await asyncio.sleep(1)


async def _shop(reports: Path, screens: Path | None) -> None:
    rng = random.Random(17)
    report = RUN if (reports / RUN).is_dir() else ""
    with tempfile.TemporaryDirectory(prefix="tickwheel-pictures-") as directory:
        async with LocalCluster(Path(directory), 3, cluster_id="shop") as cluster:
            client = cluster.client()
            await _fill(client, rng, 6_000 if screens else 60_000)
            async with (
                _life(client, rng),
                console_of(cluster.addresses, "--reports", str(reports)) as url,
                _browser() as browser,
            ):
                page = await browser.new_page()
                await page.goto(url)  # the console keeps a history only while somebody looks
                pages = _pages(await _first_dead(client), report)
                if screens:
                    await _take_screens(browser, url, pages, screens, "shop")
                else:
                    await asyncio.sleep(HISTORY_S)
                    await _take(browser, url, pages)


async def _hostile(reports: Path, screens: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tickwheel-pictures-") as directory:
        async with LocalCluster(Path(directory), 3, cluster_id="c" * 60) as cluster:
            message_id = await _fill_hostile(cluster.client())
            async with console_of(cluster.addresses, "--reports", str(reports)) as url, _browser() as browser:
                page = await browser.new_page()
                await _show(page, url)
                await cluster.kill_node(await cluster.master())
                await cluster.master()
                await _take_screens(browser, url, _hostile_pages(message_id), screens, "hostile")


async def _empty(reports: Path, screens: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tickwheel-pictures-") as directory:
        async with LocalCluster(Path(directory), 1, cluster_id="new") as cluster:
            await cluster.master()
            async with (
                console_of(cluster.addresses, "--reports", str(reports), "--read-only") as url,
                _browser() as browser,
            ):
                places = (
                    "",
                    "pending",
                    "schedules",
                    "topics",
                    "groups",
                    "dead",
                    "sweeps",
                    "message",
                    "access",
                    "audit",
                )
                pages = {name or "overview": f"/{name}" for name in places}
                await _take_screens(browser, url, pages, screens, "empty")


async def make(reports: Path, screens: Path | None) -> None:
    """Take the pictures of the documents, or every screen."""
    if screens is None:
        await _shop(reports, None)
        return
    await asyncio.to_thread(screens.mkdir, parents=True, exist_ok=True)
    await _shop(reports, screens)
    await _hostile(reports, screens)
    await _empty(reports, screens)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--screens", type=Path, help="a folder for pictures of every page and dialog")
    parser.add_argument(
        "--reports", type=Path, help=f"a folder with the chaos run {RUN}; without it one is run, but for --screens"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tickwheel-pictures-") as directory:
        reports = options.reports or Path(directory)
        if not options.screens and not (reports / RUN / "report.json").is_file():
            command = [sys.executable, "-m", "tickwheel.node.cli.main", "chaos", "run", "--minutes", "1"]
            subprocess.run([*command, "--dir", str(reports / RUN)], check=True)
        asyncio.run(make(reports, options.screens))


if __name__ == "__main__":
    main()
