"""The console in a real browser: every page in both themes on a wide and a narrow screen, and two changes by dialog.

Needs Playwright (`pip install '.[browser]'`), Debian's chromium, and axe-core, which npm brings to
node_modules/axe-core of the clone or to the file that TICKWHEEL_AXE names. `TICKWHEEL_SCREENSHOTS` names a folder for
pictures of all pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos_live.stories import KILL_MS, good
from tests.console.secured import Place, certified_console, secured
from tests.project.imports import ROOT
from tickwheel.chaos.live.page import write_files
from tickwheel.chaos.live.verdict import judge
from tickwheel.client import AsyncClient, Selection
from tickwheel.console import certificates
from tickwheel.console.reports import Reports
from tickwheel.console.serving import Serving, serve
from tickwheel.node.local_cluster import LocalCluster

playwright = pytest.importorskip("playwright.async_api", reason="Playwright is not installed: pip install '.[browser]'")

CHROMIUM = shutil.which("chromium")
AXE = Path(os.environ.get("TICKWHEEL_AXE") or ROOT / "node_modules/axe-core/axe.min.js")
PICTURES = os.environ.get("TICKWHEEL_SCREENSHOTS")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
    pytest.mark.skipif(not AXE.is_file(), reason=f"there is no {AXE}: npm install axe-core"),
]

WIDTHS, THEMES = (1440, 390), ("light", "dark")
SCREENS = [(theme, width) for width in WIDTHS for theme in THEMES]
HOUR_MS = 3_600_000
SCREEN, ALARMS = "screen-" + "s" * 120, "alarms-" + "a" * 120
"""Names without any room to break, as long as the cluster takes them."""
ERROR = "<img src=x onerror=alert(1)> \u202eexe.tpircs " + "no-such-screen" * 30
"""A consumer's words, which may be anybody's: HTML, a mark that turns the direction, no room to break."""


async def fill(client: AsyncClient) -> str:
    """Something on every page; the id of a pending message."""
    await client.admin.create_topic("orders", fifo=True)
    for number in range(30):
        key = f"customer-{number}"
        receipt = await client.schedule("reminders", {"number": number}, delay_ms=HOUR_MS * (1 + number), key=key)
    await client.schedule(ALARMS, b"\x00\x01" * 99, delay_ms=0, key="k" * 4_000, tags=["red", "t" * 100])
    await client.admin.create_group(SCREEN, [ALARMS])
    async with client.consumer(SCREEN, [ALARMS], messages_max=1) as consumer:
        async for delivery in consumer:
            await delivery.dead(ERROR)
    await client.schedules.put("daily/report", "reports", "go", cron="0 9 * * *", zone="Europe/Berlin")
    await client.schedules.trigger("daily/report")
    await client.sweeps.wait((await client.sweeps.cancel(Selection("reminders", key="customer-3"))).job_id)
    return receipt.id


@contextlib.asynccontextmanager
async def console_of(cluster: LocalCluster, reports: Path) -> AsyncIterator[str]:
    """The address of a console on a free port."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def open_client(token: str) -> AsyncClient:
        return AsyncClient(cluster.addresses, token=token)

    serving = Serving("127.0.0.1", 0, reports=Reports(reports))
    task = asyncio.ensure_future(serve(open_client, serving, ready.set_result))
    try:
        yield (await ready).rstrip("/")
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def look_at(page: Any, url: str, heading: str) -> None:
    """Load a page and wait until it shows what it is about."""
    await page.goto(url)
    await page.get_by_role("heading", name=heading, level=1).wait_for()
    await page.locator("main :not(.empty)").first.wait_for()
    await page.locator("main [aria-busy]").first.wait_for(state="detached")


async def check(page: Any, what: str) -> None:
    """No finding of axe, nothing wider than the screen."""
    await page.evaluate(await asyncio.to_thread(AXE.read_text, encoding="utf-8"))
    found = await page.evaluate("axe.run()")
    wrong = [f"{rule['id']}: {node['target'][0]}" for rule in found["violations"] for node in rule["nodes"]]
    assert not wrong, (what, wrong)
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{what} is too wide"
    if PICTURES:
        await page.screenshot(path=f"{PICTURES}/{what}.png", full_page=True)


@pytest.mark.timeout(300)
async def test_every_page_in_a_browser(tmp_path: Path) -> None:
    """Each page in both themes at two widths without a finding of axe or an error; a cancel and a replay."""
    reports = await asyncio.to_thread(leave_reports, tmp_path / "reports")
    async with LocalCluster(tmp_path / "cluster", 1) as cluster:
        message_id = await fill(cluster.client())
        pages = {
            "/": "Overview",
            "/pending": "Pending messages",
            "/topics": "Topics",
            "/topics?name=reminders": "Topics",
            "/groups": "Consumer groups",
            f"/groups?name={SCREEN}": "Consumer groups",
            f"/topics?name={ALARMS}": "Topics",
            f"/message?id={message_id}": "Message",
            "/dead": "Dead letters",
            f"/dead?group={SCREEN}": "Dead letters",
            "/sweeps": "Sweeps",
            "/schedules": "Recurring schedules",
            "/schedules?name=daily/report": "Recurring schedules",
            "/nodes": "Nodes",
            "/settings": "Settings",
            "/access": "Users and roles",
            "/audit": "Audit log",
            "/reports": "Chaos reports",
            "/reports?name=clocks": "Chaos reports",
        }
        async with console_of(cluster, reports) as address, playwright.async_playwright() as library:
            browser = await library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            errors: list[str] = []

            async def look_at_all(width: int) -> None:
                context = await browser.new_context(
                    viewport={"width": width, "height": 900}, color_scheme="dark", reduced_motion="reduce"
                )
                page = await context.new_page()
                page.on("pageerror", lambda error: errors.append(str(error)))
                page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
                for path, heading in pages.items():
                    await look_at(page, address + path, heading)
                    name = path.split("?")[0].strip("/") or "overview"
                    for theme in THEMES:
                        await page.emulate_media(color_scheme=theme)
                        await check(page, f"{name}{'-one' if '?' in path else ''}-{theme}-{width}")
                await context.close()

            await asyncio.gather(*map(look_at_all, WIDTHS))
            page = await browser.new_page(viewport={"width": 390, "height": 900})
            await dialogs_fit(page, f"{address}/groups?name={SCREEN}", ("Pause…", "Reset…", "Delete…"))
            await dialogs_fit(page, f"{address}/dead?group={SCREEN}", ("#0", "Replay all…", "Purge all…"))
            assert await page.get_by_text("\\u202eexe.tpircs").count() == 1
            await page.set_viewport_size({"width": 1440, "height": 900})
            await cancel_by_dialog(page, f"{address}/message?id={message_id}")
            await replay_by_dialog(page, f"{address}/dead?group={SCREEN}")
            await find_by_key(page, address)
            await leave_before_the_answer(page, address)
            await browser.close()
        assert not errors
        assert (await cluster.client().get(message_id)).state == "CANCELLED"
        assert (await cluster.client().dead.page(SCREEN)).total == 0


@pytest.mark.timeout(300)
async def test_an_open_page_lives_through_a_failover(tmp_path: Path) -> None:
    """Three nodes, the master killed under an open page: it shows the next one and the dead one, and what is asked and
    changed on it afterwards is done by the new master. Nothing is loaded again."""
    async with LocalCluster(tmp_path / "cluster", 3) as cluster:
        message_id = await fill(cluster.client())
        async with console_of(cluster, tmp_path) as address, playwright.async_playwright() as library:
            browser = await library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            errors: list[str] = []
            contexts = [
                await browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
                for theme, width in SCREENS
            ]
            pages = [await context.new_page() for context in contexts]
            for page in pages:
                page.on("pageerror", lambda error: errors.append(str(error)))
                await look_at(page, address, "Overview")
            master = await cluster.master()
            for page in pages:
                await page.get_by_text(f"{master.node_id} leads in term").wait_for()
            loads = [await page.evaluate("performance.timeOrigin") for page in pages]
            await cluster.kill_node(master)
            for page, (theme, width) in zip(pages, SCREENS, strict=True):
                await page.get_by_text(re.compile(f"^n[^{master.node_id[1:]}] leads in term")).wait_for()
                row = page.get_by_role("row").filter(has_text=master.node_id)
                await row.get_by_text("away").first.wait_for()
                await check(page, f"overview-failover-{theme}-{width}")
            assert [await page.evaluate("performance.timeOrigin") for page in pages] == loads
            await cancel_by_dialog(pages[0], f"{address}/message?id={message_id}")
            await replay_by_dialog(pages[0], f"{address}/dead?group={SCREEN}")
            await browser.close()
        assert not errors
        assert (await cluster.client().get(message_id)).state == "CANCELLED"


def leave_reports(directory: Path) -> Path:
    """A run that held, a played case that broke a promise in the words of a hostile log, and what is no report."""
    hostile = "<img src=x onerror=alert(1)>" * 5
    for name, log, case in (("nightly", "", ""), ("clocks", hostile, "hour-ahead")):
        story = good()
        if log:
            story.tell(KILL_MS, "died", node="n3", code=3, log=log)
        verdict = judge(story.sorted())
        verdict.run["case"] = case
        if case:
            seen = {"what": "a skew of an hour in status", "passed": True, "seen": "3,600,002 ms"}
            verdict.checks = [{"at_s": 1.0, **seen}]
        (directory / name).mkdir(parents=True)
        write_files(verdict, directory / name)
    (directory / "spoilt").mkdir()
    (directory / "spoilt/report.json").write_text('{"run": 7}', encoding="utf-8")
    return directory


@pytest.mark.timeout(300)
async def test_a_certificate_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One press logs in; after a logout nobody is in, although the browser still shows the certificate."""
    monkeypatch.setattr(certificates, "LOOK_S", 0.0)
    async with (
        secured(tmp_path) as base,
        certified_console(base) as place,
        playwright.async_playwright() as library,
    ):
        browser = await library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for theme, width in SCREENS:
            for name in ("ann", "eve"):
                files = {"certPath": f"{place.folder}/{name}.crt", "keyPath": f"{place.folder}/{name}.key"}
                context = await browser.new_context(
                    viewport={"width": width, "height": 900},
                    color_scheme=theme,
                    ignore_https_errors=True,
                    client_certificates=[{"origin": place.url, **files}],
                )
                page = await context.new_page()
                await page.goto(f"{place.url}/topics")
                await page.get_by_role("heading", name="Log in", level=1).wait_for()
                await check(page, f"login-{name}-{theme}-{width}")
                if name == "eve":
                    await page.get_by_text("cannot log in").wait_for()
                    assert await page.get_by_role("button", name="Log in as").count() == 0
                else:
                    await page.keyboard.press("Enter")
                    await page.get_by_role("heading", name="Topics", level=1).wait_for()
                    await page.get_by_role("link", name="alarms").wait_for()
                    await leave_page(page, place, width)
                await context.close()
        await browser.close()


async def leave_page(page: Any, place: Place, width: int) -> None:
    """By the button, and where there is no room for it by the line that goes."""
    if width > 800:
        await page.get_by_role("button", name="Log out").click()
        await page.get_by_role("button", name="Log in as ann").wait_for()
    else:
        place.write("# nobody")
        await page.get_by_text("cannot log in").wait_for()
        place.write(f"ann {place.secrets['ann']}")
    await page.goto(f"{place.url}/topics")
    await page.get_by_role("button", name="Log in as ann").wait_for()


async def dialogs_fit(page: Any, url: str, buttons: tuple[str, ...]) -> None:
    """Whatever is named in a dialog can be read there, and its buttons are inside."""
    await page.goto(url)
    for name in buttons:
        await page.locator("main button").filter(has_text=name).first.click()
        dialog = page.locator("dialog[open]")
        assert await dialog.evaluate("(found) => found.scrollWidth <= found.clientWidth"), name
        await page.keyboard.press("Escape")
        await dialog.wait_for(state="detached")


async def cancel_by_dialog(page: Any, url: str) -> None:
    """Escape changes nothing; the button does what it says."""
    await page.goto(url)
    await page.get_by_role("button", name="Cancel…").click()
    dialog = page.get_by_role("dialog", name="Cancel this message?")
    await dialog.get_by_text("It will never be delivered").wait_for()
    await page.keyboard.press("Escape")
    await dialog.wait_for(state="detached")
    assert await page.get_by_text("pending", exact=True).count() == 1
    await page.get_by_role("button", name="Cancel…").click()
    await dialog.get_by_role("button", name="Cancel 1 message").click()
    await page.get_by_role("status").get_by_text("Cancelled").wait_for()
    await page.locator("main").get_by_text("cancelled", exact=True).first.wait_for()


async def replay_by_dialog(page: Any, url: str) -> None:
    """One letter is chosen; the dialog and the button say one."""
    await page.goto(url)
    await page.get_by_role("checkbox", name="Choose dead letter 0").check()
    await page.get_by_role("button", name="Replay 1…").click()
    dialog = page.get_by_role("dialog", name="Replay 1 dead letter?")
    await dialog.get_by_role("button", name="Replay 1 dead letter").click()
    await page.get_by_role("status").get_by_text("1 dead letter replayed").wait_for()
    await page.get_by_text("No dead letters").wait_for()


async def find_by_key(page: Any, address: str) -> None:
    """`/` leads to the search, and a key to its message, by keys alone."""
    await page.goto(address)
    await page.get_by_role("heading", name="Overview").wait_for()
    await page.keyboard.press("/")
    await page.keyboard.type("key:customer-5")
    await page.keyboard.press("Enter")
    await page.get_by_role("cell", name="customer-5", exact=True).wait_for()
    assert "key=customer-5" in page.url


async def leave_before_the_answer(page: Any, address: str) -> None:
    """What comes after one has gone on to another page does not show up there."""
    held: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    asked = re.compile(r"/api/group\?")
    await page.route(asked, lambda route: held.set_result(route))
    await page.goto(f"{address}/groups?name={SCREEN}")
    route = await asyncio.wait_for(held, 30)
    await page.get_by_role("link", name="Topics", exact=True).click()
    await page.get_by_role("link", name="reminders").wait_for()
    async with page.expect_response(asked) as answered:
        await route.continue_()
    await (await answered.value).finished()
    await page.evaluate("new Promise((done) => setTimeout(done))")  # its page has had its turn
    assert await page.get_by_role("link", name="reminders").count() == 1
