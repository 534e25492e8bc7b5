"""What the console lets in, and what every answer carries. No cluster: nothing here may reach one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.console.browser_client import BrowserClient, running
from tickwheel.client import AsyncClient
from tickwheel.console import app as console_app
from tickwheel.console.app import LOGINS_AT_ONCE, PAGES, STATIC, application
from tickwheel.console.changes import CHANGES
from tickwheel.console.door import BODY_BYTES_MAX, DoorConfig
from tickwheel.console.reads import READS
from tickwheel.console.sessions import Sessions

HOSTS = frozenset({"127.0.0.1", "localhost"})


def nobody(token: str) -> AsyncClient:
    """A client of a cluster that is not there."""
    return AsyncClient("127.0.0.1:1", timeout_s=0.1, token=token)


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[BrowserClient]:
    """A browser of a console without a cluster."""
    async with running(application(Sessions(nobody), DoorConfig(HOSTS, "session", False, False))) as app:
        yield BrowserClient(app)


async def test_every_page_is_the_same_document_under_a_strict_policy(browser: BrowserClient) -> None:
    """No inline script or style, no frame, nothing from elsewhere; the session is for this site and not for scripts."""
    for path in PAGES:
        answer = await browser.call("GET", path)
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    fresh = BrowserClient(browser._app)
    cookie = (await fresh.call("GET", "/")).headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Domain" not in cookie
    document = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", document)


async def test_modules_name_files_that_are_there(browser: BrowserClient) -> None:
    """Every import of a module, every file of the document and of the style sheet is served."""
    names: set[Path] = set()
    for file in [*STATIC.rglob("*.js"), *STATIC.glob("*.css"), STATIC / "index.html"]:
        text = file.read_text(encoding="utf-8")
        names |= {(file.resolve().parent / name).resolve() for name in re.findall(r'from "(\.[^"]+)"', text)}
        names |= {STATIC.resolve() / name for name in re.findall(r'["(]/static/([\w./-]+)', text)}
    assert len(names) > 20
    for name in names:
        answer = await browser.call("GET", f"/static/{name.relative_to(STATIC.resolve())}")
        assert answer.status == 200, name


async def test_a_foreign_host_gets_nothing(browser: BrowserClient) -> None:
    """A page elsewhere whose name leads here (DNS rebinding) is refused, with field, value and limit."""
    for host in ("evil.example", "127.0.0.1.evil.example:7780", ""):
        answer = await browser.call("GET", "/api/picture", headers={"host": host})
        assert answer.status == 400
        assert answer.json()["details"]["field"] == "Host"
    assert (await browser.call("GET", "/", headers={"host": "LOCALHOST:9"})).status == 200


@pytest.mark.parametrize("name", sorted([*CHANGES, "login", "logout"]))
async def test_no_change_without_the_token_of_its_session(browser: BrowserClient, name: str) -> None:
    """Without the header, with another session's, without a cookie, from another origin, as a form: all refused."""
    await browser.open()
    own, other = browser.csrf, BrowserClient(browser._app)
    await other.open()
    forged = [
        {"x-csrf-token": ""},
        {"x-csrf-token": other.csrf},
        {"x-csrf-token": "\xe9"},
        {"cookie": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
    ]
    for headers in forged:
        answer = await browser.call("POST", f"/api/{name}", body=b"{}", headers=headers)
        assert answer.status == 403 and answer.json()["reason"] == "FORGED", headers
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert (await browser.call("POST", f"/api/{name}", body=b"a=1", headers=form)).status == 400
    assert browser.csrf == own
    assert (await browser.call("GET", f"/api/{name}")).status == 405
    assert (await browser.call("DELETE", f"/api/{name}")).status == 400


async def test_bodies_are_small_objects(browser: BrowserClient) -> None:
    """What is larger, no JSON, no object, nests without end, says a field twice or is no text is refused by name."""
    await browser.open()
    bodies = [b"[]", b"{", b"\xff", b'{"id": 1', b"[" * 50_000, b'"' + b"x" * BODY_BYTES_MAX + b'"']
    bodies += [b'{"id": "0-1-1", "id": "0-1-2"}', b'\xef\xbb\xbf{"id": "0-1-1"}', b'{"id": NaN}']
    bodies += [b'{"id": "\\ud800"}', b'{"\\ud800": 1}', b'{"id": {"\xed\xa0\x80": 1}}']
    for body in bodies:
        answer = await browser.call("POST", "/api/messages/cancel", body=body)
        assert answer.status == 400 and answer.json()["details"]["field"] == "body"


async def test_a_browser_that_leaves_within_its_body_is_no_mistake(browser: BrowserClient) -> None:
    """Nobody reads the answer, and the log has no traceback."""
    await browser.open()
    answer = await browser.call("POST", "/api/messages/cancel", body=None)
    assert answer.status == 400 and answer.json()["details"] == {
        "field": "body", "value": "cut off after 0 bytes", "limit": "a whole request",
    }  # fmt: skip


WRONG: list[tuple[str, dict[str, object], str]] = [
    ("messages/cancel", {"id": 7}, "id"),
    ("messages/cancel", {"id": "x"}, "id"),
    ("messages/cancel", {"id": "0-1-1", "more": 1}, "more"),
    ("messages/reschedule", {"id": "0-1-1"}, "due_ms"),
    ("messages/reschedule", {"id": "0-1-1", "due_ms": -1}, "due_ms"),
    ("messages/reschedule", {"id": "0-1-1", "due_ms": True}, "due_ms"),
    ("messages/reschedule", {"id": "0-1-1", "delay_ms": 10**18}, "delay_ms"),
    ("sweeps/begin", {"job_id": "a", "action": "burn"}, "action"),
    ("sweeps/begin", {"action": "cancel"}, "job_id"),
    ("dead/replay", {"group": "g", "numbers": []}, "numbers"),
    ("dead/replay", {"group": "g", "numbers": ["1"]}, "numbers"),
    ("dead/purge", {"group": ""}, "group"),
    ("topics/create", {"name": "x" * 5_000}, "name"),
    ("topics/pause", {"name": "a", "paused": "maybe"}, "paused"),
    ("groups/reset", {"name": "g", "start_from": "time"}, "start_ms"),
    ("groups/reset", {"name": "g", "start_from": "never"}, "start_from"),
    ("login", {"token": ""}, "token"),
]


@pytest.mark.parametrize(("name", "body", "field"), WRONG)
async def test_a_wrong_change_names_its_field(
    browser: BrowserClient, name: str, body: dict[str, object], field: str
) -> None:
    """Before any node is asked: field, value and limit."""
    await browser.open()
    details = (await browser.change(name, body, 400))["details"]
    assert details["field"] == field and details["limit"] and "value" in details


async def test_a_wrong_question_names_its_field(browser: BrowserClient) -> None:
    """Queries are as strict as bodies."""
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("topics", {"page": "x"}, "page"),
        ("topics", {"sort": "colour"}, "sort"),
        ("count", {"step_ms": "1500"}, "step_ms"),
        ("count", {"step_ms": "0"}, "step_ms"),
        ("count", {"due_ms_min": "1" * 30}, "due_ms_min"),
        ("pending", {"nonsense": "1"}, "nonsense"),
        ("pending", {"tag": ["a", "b"]}, "tag"),
        ("message", {}, "id"),
        ("message", {"id": "a-b-c"}, "id"),
        ("trace", {"id": "0-99999999999-0"}, "id"),
        ("letter", {"group": "g", "number": "-1"}, "number"),
        ("dead", {}, "group"),
    ]
    for name, query, field in asked:
        details = (await browser.read(name, 400, **query))["details"]
        assert details["field"] == field, (name, query, details)


ASKED: dict[str, dict[str, object]] = {
    "message": {"id": "0-1-1"},
    "letter": {"group": "g", "number": 1},
    "dead": {"group": "g"},
    "topic": {"name": "a"},
    "group": {"name": "a"},
    "schedule": {"name": "a"},
}


async def test_without_a_cluster_every_call_says_so(browser: BrowserClient) -> None:
    """503 with the reason for each address; the session and the picture are there all the same."""
    session = await browser.open()
    assert session["trouble"] and session["caller"] is None
    for name in sorted(READS):
        if name in ("picture", "trace", "audit"):
            continue  # they ask every node and tell what each says
        found = await browser.read(name, 503, **ASKED.get(name, {}))
        assert "127.0.0.1:1" in found["error"], name
    picture = await browser.read("picture")
    assert picture["master_id"] == "" and picture["numbers"] is None and picture["hours"] is None
    assert picture["nodes"][0]["away"] and "connection refused" in picture["nodes"][0]["why"]


async def test_a_page_does_not_wait_for_a_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls do; its frame, which says that there is none, is there soon."""
    monkeypatch.setattr(console_app, "SESSION_S", 0.1)
    patient = Sessions(lambda token: AsyncClient("127.0.0.1:1", timeout_s=3_600, token=token))
    async with running(application(patient, DoorConfig(HOSTS, "session", False, False))) as app:
        session = await asyncio.wait_for(BrowserClient(app).open(), 60)
    assert session["trouble"] == "no master answered within 0.1 s" and not session["login_needed"]


async def test_a_console_that_only_reads_changes_nothing() -> None:
    """Every change is refused here, with words that say how to allow it; logging in is no change."""
    async with running(application(Sessions(nobody), DoorConfig(HOSTS, "session", False, True))) as app:
        browser = BrowserClient(app)
        assert (await browser.open())["read_only"]
        for name in CHANGES:
            found = await browser.change(name, {}, 403)
            assert found["reason"] == "READ_ONLY" and "--read-only" in found["error"]
        await browser.change("logout", {})


async def test_strangers_take_no_memory(browser: BrowserClient) -> None:
    """A session without a login is its cookie alone, and a made-up cookie is a session of nobody."""
    await browser.open()
    thief = BrowserClient(browser._app)
    thief.cookies["session"] = "made-up"
    assert not (await thief.open())["logged_in"]
    assert thief.csrf != browser.csrf


async def test_what_is_not_there_is_404(browser: BrowserClient) -> None:
    """No traceback, no listing of folders, nothing outside the folder of the pages."""
    for path in ("/nowhere", "/api/nothing", "/static/", "/static/../app.py", "/static/%2e%2e/app.py"):
        answer = await browser.call("GET", path)
        assert answer.status == 404 and b"Traceback" not in answer.body


async def test_tokens_are_tried_a_few_at_a_time(browser: BrowserClient) -> None:
    """Any number of strangers who guess have a bounded number of connections to the nodes between them."""
    open_now, most = 0, 0

    class Counted(AsyncClient):
        async def __aenter__(self) -> Counted:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            await super().__aenter__()
            return self

        async def close(self) -> None:
            nonlocal open_now
            open_now -= 1
            await super().close()

    def counted(token: str) -> AsyncClient:
        return Counted("127.0.0.1:1", timeout_s=0.1, token=token)

    async with running(application(Sessions(counted), DoorConfig(HOSTS, "session", False, False))) as app:
        guesser = BrowserClient(app)
        await guesser.open()
        await asyncio.gather(*(guesser.change("login", {"token": f"tw_{n}"}, 503) for n in range(3 * LOGINS_AT_ONCE)))
    assert most == LOGINS_AT_ONCE and open_now <= 0
