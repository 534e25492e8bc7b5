"""Reports of chaos runs in the console: what the chaos tool wrote is shown; what others left there does no harm."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.responses import JSONResponse

from tests.chaos_live.stories import KILL_MS, good
from tests.console.browser_client import BrowserClient, running
from tickwheel.chaos.live.page import write_files
from tickwheel.chaos.live.verdict import PROMISES, judge
from tickwheel.client import AsyncClient
from tickwheel.client.errors import NotFound, RequestRefused
from tickwheel.console import reports as reading
from tickwheel.console.app import application
from tickwheel.console.door import DoorConfig
from tickwheel.console.reports import FILE_BYTES_MAX, PAGE, Reports, decoded, summary, whole
from tickwheel.console.sessions import Sessions


def leave(directory: Path, name: str, log: str = "", at_s: int = 1_000) -> Path:
    """A report as the chaos tool writes it; `log`: a node's process died with these words."""
    story = good()
    if log:
        story.tell(KILL_MS, "died", node="n3", code=3, log=log)
    (directory / name).mkdir()
    write_files(judge(story.sorted()), directory / name)
    os.utime(directory / name / "report.json", (at_s, at_s))
    return directory / name / "report.json"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, the second broken."""
    directory = tmp_path_factory.mktemp("written")
    leave(directory, "nightly-1")
    leave(directory, "nightly-2", log="<script>alert(1)</script>", at_s=2_000)
    return directory


@pytest.fixture
def found(written: Path, tmp_path: Path) -> Path:
    """A directory with these runs."""
    return shutil.copytree(written, tmp_path / "found")


def test_promises_have_the_titles_of_the_verdict() -> None:
    """The console does not import the chaos tool, so it has them once more."""
    assert reading.PROMISES == PROMISES


async def test_the_list_has_the_newest_first(found: Path) -> None:
    """When, how long, verdict, faults, nodes, worst figures; a directory without a report is counted."""
    (found / "running").mkdir()
    (found / "notes.txt").write_text("no run", encoding="utf-8")
    page = await Reports(found).page(1)
    broken, held = page["items"]
    assert (broken["name"], held["name"]) == ("nightly-2", "nightly-1")
    assert (broken["verdict"], held["verdict"]) == ("broken", "held") and "process" in broken["broken_counts"]
    assert held["nodes"] == 3 and held["seconds"] > 0 and held["began_ms"] > 0
    assert [fault["kind"] for fault in held["faults"]] == ["kill-master"]
    assert held["figures"]["failovers"] == 1 and held["figures"]["without_max_ms"] == 700
    assert (page["total"], page["without"], page["more"]) == (2, 1, False)


async def test_one_report_has_what_its_page_has(found: Path) -> None:
    """Promises, faults, failovers, roles and curves of the same length; markup is text."""
    story = json.loads((found / "nightly-2/report.json").read_text(encoding="utf-8"))
    report = await Reports(found).one("nightly-2")
    assert {item["promise"] for item in report["promises"]} >= {"P1", "P11", "process"}
    assert "audit" not in {item["promise"] for item in report["promises"]}
    assert any("<script>alert(1)</script>" in item["text"] for item in report["broken"])
    assert [role["node"] for role in report["roles"]] == ["n1", "n2", "n3"]
    assert {len(values) for values in report["series"].values()} == {len(story["series"]["seconds"])}
    assert report["masters"][0]["cause"] == story["failovers"][0]["cause"]
    assert report["load_ms"] == story["run"]["began_ms"] - story["marks"]["run"] * 1_000


async def test_a_long_run_is_drawn_with_few_points(found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates by their mean, lateness by its worst: a peak does not vanish."""
    monkeypatch.setattr(reading, "POINTS_MAX", 3)
    path = found / "nightly-1/report.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    late = [None, 7, 1, 2, 3, None, None]
    report["series"] = {"seconds": list(range(7)), "acknowledged": [3, 0, 0, 6, 6, 6, 9], "delivered": [0] * 7}
    report["series"] |= dict.fromkeys(("late_p50", "late_p99", "late_worst"), late)
    path.write_text(json.dumps(report), encoding="utf-8")
    series = (await Reports(found).one("nightly-1"))["series"]
    assert series["seconds"] == [0, 3, 6] and series["acknowledged"] == [1, 6, 9]
    assert series["late_worst"] == [7, 3, None]


async def test_a_file_is_read_again_when_it_changes(found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not otherwise: a list of large reports is read once."""
    reads: list[str] = []
    whole_content = Reports._content

    def counted(self: Reports, name: str) -> bytes:
        reads.append(name)
        return whole_content(self, name)

    monkeypatch.setattr(Reports, "_content", counted)
    reports = Reports(found)
    for _ in range(3):
        await reports.page(1)
    assert sorted(reads) == ["nightly-1", "nightly-2"]
    (found / "nightly-1/report.json").write_text("{", encoding="utf-8")
    (row,) = [item for item in (await reports.page(1))["items"] if item["shown"] == "nightly-1"]
    assert "JSON" in row["trouble"] and len(reads) == 3


async def test_lists_come_in_pages(tmp_path: Path) -> None:
    """A page reads its own files only; a number beyond the last page is the last page."""
    for number in range(PAGE + 1):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}/report.json").write_text("{}", encoding="utf-8")
    reports = Reports(tmp_path)
    first, last = await reports.page(1), await reports.page(1_000)
    assert (len(first["items"]), len(last["items"]), last["page"], last["total"]) == (PAGE, 1, 2, PAGE + 1)


# -- hostile names and files


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../secret", "a/b", "/etc", "a\x00b", ".hidden", "x" * 201, "a\nb", "\u202egpj", "a\udcff"]
)
async def test_a_name_leads_nowhere_else(found: Path, name: str) -> None:
    """Whatever is no plain name of a directory there is refused before any file is looked at."""
    with pytest.raises(RequestRefused) as caught:
        await Reports(found).one(name)
    assert caught.value.field == "name"


async def test_links_are_not_followed(found: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither a linked directory nor a linked file: both may lead to what the console's user may read."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    secret = leave(elsewhere, "run")
    (found / "linked").symlink_to(elsewhere / "run")
    (found / "file").mkdir()
    (found / "file/report.json").symlink_to(secret)
    reports = Reports(found)
    for name in ("linked", "file"):
        with pytest.raises(RequestRefused, match="without links"):
            await reports.one(name)
    rows = {item["shown"]: item for item in (await reports.page(1))["items"]}
    assert "linked" not in rows and "without links" in rows["file"]["trouble"]


async def test_what_is_no_file_is_refused(found: Path) -> None:
    """A pipe does not hold up the console; a directory is told as one; what is absent is not found."""
    for name in ("pipe", "folder"):
        (found / name).mkdir()
    os.mkfifo(found / "pipe/report.json")
    (found / "folder/report.json").mkdir()
    reports = Reports(found)
    for name in ("pipe", "folder"):
        with pytest.raises(RequestRefused, match=f"report.json: {name}: a file"):
            await reports.one(name)
    with pytest.raises(NotFound):
        await reports.one("nightly-3")
    assert {bool(item["trouble"]) for item in (await reports.page(1))["items"]} == {True, False}


async def test_names_that_cannot_be_shown_are_listed_as_escapes(found: Path) -> None:
    """Bytes that are no text, control characters and turned writing: told, not linked."""
    hostile = [b"\xff\xfe", b"line\nbreak", "\u202egnp.exe".encode()]
    for name in hostile:
        (found / os.fsdecode(name)).mkdir()
        (found / os.fsdecode(name) / "report.json").write_bytes(b"{}")
    page = await Reports(found).page(1)
    assert {item["shown"] for item in page["items"]} >= {"\\udcff\\udcfe", "line\\nbreak", "\\u202egnp.exe"}
    assert all(item["trouble"] for item in page["items"] if "\\" in item["shown"])
    JSONResponse(page)


BAD_CONTENTS = {
    "empty": b"",
    "cut": b'{"run": {',
    "bytes": b"\xff\xff\xff",
    "list": b"[]",
    "number": b"7",
    "constant": b'{"run": NaN}',
    "digits": b'{"run": ' + b"9" * 5_000 + b"}",
    "nested": b"[" * 200_000,
    "large": b" " * (FILE_BYTES_MAX + 1),
    "fields": json.dumps(
        {"run": {}, "holds": True, "void": "", "broken_counts": dict.fromkeys(map(str, range(2_000)), 1)}
    ).encode(),
    "verdict absent": b'{"run": {}, "void": "", "broken_counts": {}}',
    "verdict wrong": b'{"run": {}, "void": "", "broken_counts": {"P1": 2}, "holds": true}',
}


@pytest.mark.parametrize("content", BAD_CONTENTS.values(), ids=BAD_CONTENTS)
async def test_a_bad_file_says_what_is_wrong(tmp_path: Path, content: bytes) -> None:
    """In the list and by itself, with field, value and limit, none of them long."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/report.json").write_bytes(content)
    reports = Reports(tmp_path)
    (row,) = (await reports.page(1))["items"]
    with pytest.raises(RequestRefused) as caught:
        await reports.one("run")
    assert row["trouble"] == str(caught.value) and caught.value.field and len(row["trouble"]) < 500


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of everything in a value, itself left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from leaves(item, (*path, key))


HOSTILE = ["\udc00<b>", "x" * 100_000, -1e300, 10**400, True, None, [], {}, [[]], {"\ud800": {}}, ["x"], {"a": 1}]


async def test_no_content_makes_a_mistake_of_ours(found: Path) -> None:
    """Every field of a real report replaced by each hostile value: shown within bounds, or refused by its place."""
    report = json.loads((found / "nightly-2/report.json").read_text(encoding="utf-8"))
    refused = 0
    for path in leaves(report):
        for value in HOSTILE:
            changed = copy.deepcopy(report)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            try:
                fields = decoded(json.dumps(changed).encode())
                answer = JSONResponse([summary(fields), whole(fields)])
            except RequestRefused as error:
                refused += 1
                JSONResponse({"error": str(error), "details": dict(error.metadata)})
            else:
                assert len(bytes(answer.body)) < 1 << 20, path
    assert refused > 500


# -- the calls


@pytest_asyncio.fixture
async def browser(found: Path) -> AsyncIterator[BrowserClient]:
    """A browser of a console with reports, without a cluster."""

    def open_client(token: str) -> AsyncClient:
        return AsyncClient("127.0.0.1:1", timeout_s=0.1, token=token)

    config = DoorConfig(frozenset(), "session", False, False)
    async with running(application(Sessions(open_client), config, Reports(found))) as app:
        yield BrowserClient(app)


async def test_only_visitors_of_the_cluster_read_reports(browser: BrowserClient) -> None:
    """The cluster says who that is: while it does not answer, nobody does."""
    assert (await browser.open())["reports"]
    await browser.read("reports", 503)
    await browser.read("report", 503, name="nightly-1")


async def test_a_wrong_question_names_its_field(browser: BrowserClient) -> None:
    """Before the cluster is asked."""
    for name, query, field in [
        ("reports", {"page": "0"}, "page"),
        ("reports", {"directory": "/"}, "directory"),
        ("report", {}, "name"),
        ("report", {"name": "x" * 5_000}, "name"),
    ]:
        assert (await browser.read(name, 400, **query))["details"]["field"] == field


async def test_files_of_runs_are_not_served(browser: BrowserClient) -> None:
    """Only what the console understands of a report reaches a browser, never a file itself."""
    for path in ("/reports/nightly-1/report.html", "/static/nightly-1/report.html", "/reports/nightly-1"):
        assert (await browser.call("GET", path)).status == 404


async def test_without_a_directory_the_page_says_how(tmp_path: Path) -> None:
    """The option is named; a directory that is not there is told at the start."""
    config = DoorConfig(frozenset(), "session", False, False)
    async with running(application(Sessions(lambda token: AsyncClient("127.0.0.1:1", token=token)), config)) as app:
        browser = BrowserClient(app)
        assert (await browser.read("reports", 400))["details"]["field"] == "--reports"
    for path in (tmp_path / "none", leave(tmp_path, "run")):
        with pytest.raises(RequestRefused) as caught:
            Reports(path)
        assert caught.value.field == "--reports"
