"""Makes the pictures of the console in docs/img: a small shop on three nodes, and a chaos run of a minute.

`make pictures`. Needs Playwright (`pip install '.[browser]'`) and Debian's chromium. `SCREENS=DIR` puts every page
there as well, in both themes at 1440 and 390 pixels, to be looked at.
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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

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


async def _fill(client: AsyncClient, rng: random.Random) -> None:
    for topic in TOPICS:
        await client.admin.create_topic(topic)
    for group, topics in {"mail": TOPICS[:2], "hooks": TOPICS[2:3], "sessions": TOPICS[3:4], "archive": TOPICS}.items():
        await client.admin.create_group(group, topics)
    async with client.producer() as producer:
        for number in range(60_000):
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


@contextlib.asynccontextmanager
async def _console(addresses: list[str], reports: Path) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tickwheel.console", "--addresses", ",".join(addresses)),
        *("--bind", "127.0.0.1:0", "--reports", str(reports)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        found = re.search(r"http://[\w.:]+", (await process.stdout.readline()).decode())
        if found is None:
            raise RuntimeError("the console did not start")
        yield found.group()
    finally:
        process.terminate()
        await process.wait()


async def _show(page: Any, url: str) -> None:
    await page.goto(url)
    await page.locator("main :not(.empty)").first.wait_for()
    await page.locator("main [aria-busy]").first.wait_for(state="detached")
    await page.evaluate("document.fonts.ready")


async def _pages(client: AsyncClient) -> dict[str, str]:
    """Every page by the name of its picture."""
    letter = (await client.dead.page("hooks")).letters[0]
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
        "message": f"/message?id={letter.id}",
        "nodes": "/nodes",
        "settings": "/settings",
        "access": "/access",
        "audit": "/audit",
        "reports": "/reports",
        "report": f"/reports?name={RUN}",
    }


async def _take(browser: Any, url: str, client: AsyncClient, screens: Path | None) -> None:
    pages = await _pages(client)
    kept = {
        ("overview", "light"): "console-overview",
        ("overview", "dark"): "console-overview-dark",
        ("pending", "dark"): "console-pending",
        ("message", "light"): "console-message",
        ("report", "light"): "console-report",
    }
    for theme, width in [(theme, width) for width in (1440, 390) for theme in ("light", "dark")]:
        view: Any = {"viewport": {"width": width, "height": 900}, "color_scheme": theme}
        context = await browser.new_context(**view, reduced_motion="reduce")
        page = await context.new_page()
        for name, path in pages.items():
            picture = kept.get((name, theme)) if width == 1440 else None
            if not (picture or screens):
                continue
            await _show(page, url + path)
            if name in ("overview", "report"):
                await page.wait_for_timeout(1_500)  # the wheel has its hours, the charts their size
            if picture:
                shown: Any = {"x": 0, "y": 0, "width": width, "height": REPORT_PX if name == "report" else 900}
                await page.screenshot(path=IMAGES / f"{picture}.png", full_page=True, clip=shown)
            if screens:
                await page.screenshot(path=screens / f"{name}-{theme}-{width}.png", full_page=True)
        await context.close()


async def make(reports: Path, screens: Path | None) -> None:
    """Run the shop and take the pictures."""
    playwright = importlib.import_module("playwright.async_api")  # of the extra `browser`, which dev does not have
    rng = random.Random(17)
    with tempfile.TemporaryDirectory(prefix="tickwheel-pictures-") as directory:
        async with LocalCluster(Path(directory), 3, cluster_id="shop") as cluster:
            client = cluster.client()
            await _fill(client, rng)
            async with (
                _life(client, rng),
                _console(cluster.addresses, reports) as url,
                playwright.async_playwright() as library,
            ):
                browser = await library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                page = await browser.new_page()
                await page.goto(url)  # the console keeps a history only while somebody looks
                await asyncio.sleep(HISTORY_S)
                await _take(browser, url, client, screens)
                await browser.close()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--screens", type=Path, help="a folder for pictures of every page")
    parser.add_argument("--reports", type=Path, help=f"a folder with the chaos run {RUN}; without it one is run")
    options = parser.parse_args()
    if options.screens:
        options.screens.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tickwheel-pictures-") as directory:
        reports = options.reports or Path(directory)
        if not (reports / RUN / "report.json").is_file():
            command = [sys.executable, "-m", "tickwheel.node.cli.main", "chaos", "run", "--minutes", "1"]
            subprocess.run([*command, "--dir", str(reports / RUN)], check=True)
        asyncio.run(make(reports, options.screens))


if __name__ == "__main__":
    main()
