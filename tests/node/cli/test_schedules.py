"""`tickwheel schedules ...` against a real node: what each command does and says, in a terminal of 80 columns too."""

from __future__ import annotations

import json
import re

import pytest
from rich.console import Console

from tests.node.cli.commands import Run, running
from tickwheel.node.cli import output
from tickwheel.node.cli import program as cli
from tickwheel.node.cli import schedules as schedules_cli

WORKING_DAYS = ("--cron", "0 9 * * MON-FRI", "--zone", "Europe/Berlin")
SOME_DAY_MS = 1_795_000_000_000


@pytest.fixture
def run(address: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `tickwheel schedules` against the node."""
    monkeypatch.setenv("TICKWHEEL_ADDRESSES", address)
    monkeypatch.setenv("COLUMNS", "80")
    return running(capfd, "schedules")


def test_put_says_what_it_did_and_what_comes(run: Run) -> None:
    """Created, unchanged, replaced; the next run in UTC and by the wall clock of the zone."""
    first = run("put", "report", "reports", "go", *WORKING_DAYS)
    assert first.code == 0 and first.out.startswith("report created. Next run 20") and " 09:00:00 +0" in first.out
    assert run("put", "report", "reports", "go", *WORKING_DAYS).out.startswith("report unchanged.")
    done = run("put", "report", "reports", "went", *WORKING_DAYS, "--jitter", "10m", "--tag", "a", "--json")
    assert done.json["changed"] and not done.json["created"]
    assert (done.json["payload"], done.json["jitter_ms"], done.json["tags"]) == ("went", 600_000, ["a"])
    assert run("put", "report", "reports", "x", *WORKING_DAYS, "--if-absent").code == cli.EXIT_FAILED
    stale = run("put", "report", "reports", "x", *WORKING_DAYS, "--revision", "1000000")
    assert stale.code == cli.EXIT_FAILED and "revision" in stale.err


def test_get_shows_plan_and_account(run: Run) -> None:
    """Ten next runs; the last ones with what became of their messages."""
    run("put", "shown", "shows", "go", "--every", "1h", "--overlap", "skip", "--paused")
    made = run("trigger", "shown", "--json").json
    found = run("get", "shown", "--json").json
    assert (found["state"], found["every_ms"], found["overlap"]) == ("paused", 3_600_000, "skip")
    assert len(found["upcoming_ms"]) == 10 and all(ms % 3_600_000 == 0 for ms in found["upcoming_ms"])
    assert [(item["id"], item["outcome"]) for item in found["runs"]] == [(made["id"], "triggered")]
    assert found["runs"][0]["message_state"] in ("pending", "dispatched")
    text = run("get", "shown").out
    assert "every 1h" in text and made["id"] in text and "1 triggered" in text and "paused" in text


def test_everything_fits_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wider than 80 columns, and no time or id is broken."""
    run("put", "a-name-of-some-length/customer-4711", "a-topic-of-some-length", "x" * 300, *WORKING_DAYS)
    run_id = run("trigger", "a-name-of-some-length/customer-4711", "--json").json["id"]
    wide = Console(highlight=False, width=80, force_terminal=True, color_system=None)
    for module in (output, schedules_cli):
        monkeypatch.setattr(module, "out", wide)
    for words in (["get", "a-name-of-some-length/customer-4711"], ["list"], ["preview", *WORKING_DAYS]):
        shown = run(*words).out
        assert max(map(len, shown.splitlines())) <= 80
        assert words[0] != "get" or run_id in shown
        assert words[0] != "preview" or shown.count("09:00:00") == 10


def test_list_by_prefix(run: Run) -> None:
    """In the order of names; told when there are more."""
    for number in range(3):
        run("put", f"many/{number}", "t", "x", "--every", "1d")
    assert [item["name"] for item in run("list", "many/", "--json").json] == ["many/0", "many/1", "many/2"]
    some = run("list", "many/", "-n", "2")
    assert "many/1" in some.out and "many/2" not in some.out and "more" in some.err


def test_pause_resume_and_delete(run: Run) -> None:
    """Each says what holds now; what is not there is told."""
    run("put", "going", "t", "x", "--every", "1h")
    assert run("pause", "going").out == "going is paused\n"
    assert run("resume", "going").out.startswith("going is active. Next run 20")
    assert run("delete", "going").out == "going deleted\n"
    gone = run("delete", "going")
    assert (gone.code, gone.out) == (cli.EXIT_FAILED, "there is no schedule going\n")
    for command in ("get", "pause", "resume", "trigger"):
        missing = run(command, "going")
        assert missing.code == cli.EXIT_FAILED and "going" in missing.err


def test_backfill(run: Run) -> None:
    """From a planned time on and before another; a repeat with its request id makes nothing."""
    run("put", "past", "pasts", "x", "--cron", "0 0 * * *")
    words = ("backfill", "past", "--from", "2026-01-01T00:00Z", "--until", "2026-01-08T00:00Z", "--request-id", "r")
    assert run(*words).out == "7 runs made\n"
    run(*words)
    assert run("get", "past", "--json").json["runs_backfilled"] == 7
    none = run("backfill", "past", "--from", "2026-01-01T01:00Z", "--until", "2026-01-01T02:00Z")
    assert none.out == "No run was planned then\n"


def test_a_backfilled_run_is_days_later(run: Run) -> None:
    """Said as a duration, not as millions of seconds."""
    run("put", "late", "pasts", "x", "--cron", "0 0 * * *")
    run("backfill", "late", "--from", "2026-01-01T00:00Z", "--until", "2026-01-02T00:00Z")
    line = next(line for line in run("get", "late").out.splitlines() if line.startswith("2026-01-01"))
    assert re.search(r"backfilled +[0-9]+d([0-9]+h)?([0-9]+m)?([0-9]+s)? ", line), line


def test_bytes_that_are_no_text(run: Run) -> None:
    """A payload's are sent as they are; a name of them is refused, for people and as JSON."""
    made = run("put", "bytes", "pasts", "a\udcffb", "--every", "1h", "--paused", "--json")
    assert made.code == 0 and b"a\xffb".hex() in made.json.values(), made.json
    for word in ("put", "get", "pause", "resume", "trigger", "delete"):
        rest = ("pasts", "x", "--every", "1h") if word == "put" else ()
        refused = run(word, "a\udcff", *rest)
        assert refused.code == cli.EXIT_FAILED and "name: 'a\\udcff': a text of UTF-8" in refused.err, refused
        assert json.loads(run(word, "a\udcff", *rest, "--json").err)["field"] == "name"


def test_preview(run: Run) -> None:
    """Without a schedule; with the fixed time that a change of the clock leaves out."""
    words = ("preview", "--cron", "30 2 * * *", "--zone", "Europe/Berlin", "--after", "2026-03-28T00:00Z", "-n", "3")
    lines = run(*words).out.splitlines()
    assert [line.split("  ")[1] for line in lines[1:]] == [
        "Sat 2026-03-28 02:30:00 +0100",
        "Sun 2026-03-29 03:00:00 +0200",
        "Mon 2026-03-30 02:30:00 +0200",
    ]
    day_s = 86_400
    found = run("preview", "--every", "1d", "--after", str(SOME_DAY_MS), "-n", "2", "--json").json
    assert found == [SOME_DAY_MS - SOME_DAY_MS % (day_s * 1_000) + (1 + n) * day_s * 1_000 for n in range(2)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["put", "n", "t", "x"], "exactly one of --cron and --every"),
        (["put", "n", "t", "x", "--cron", "* * * * *", "--every", "1h"], "exactly one of --cron and --every"),
        (["put", "n", "t", "--every", "1h"], "payload"),
        (["put", "n", "t", "x", "--every", "soon"], "a duration is"),
        (["put", "n", "t", "x", "--every", "9" * 400 + "d"], "a duration is"),
        (["put", "n", "t", "x", "--every", "1h", "--header", "h"], "NAME=VALUE"),
        (["put", "n", "t", "x", "--every", "1h", "--missed", "some"], "missed"),
        (["preview"], "exactly one"),
        (["backfill", "n", "--from", "x", "--until", "y"], "ISO 8601"),
    ],
)
def test_wrong_usage(run: Run, words: list[str], said: str) -> None:
    """Told before anything travels."""
    result = run(*words)
    assert result.code == cli.EXIT_USAGE and said in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["put", "n", "t", "x", "--cron", "61 * * * *"], "minute: 0 to 59"),
        (["put", "n", "t", "x", "--cron", "0 0 30 2 *"], "where its months have that day"),
        (["put", "n", "t", "x", "--cron", "0 9 * * *", "--zone", "Berlin"], "did you mean Europe/Berlin?"),
        (["put", "n", "t", "x", "--every", "10ms"], "interval_ms: 10: 1000 to"),
        (["put", "n" * 201, "t", "x", "--every", "1h"], "name"),
        (["put", "n", "t", "x" * 65_537, "--every", "1h"], "65536"),
        (["put", "n", "t", "x", "--every", "1h", "--missed", "all"], "missed_window"),
        (["preview", "--cron", "61 * * * *"], "minute: 0 to 59"),
    ],
)
def test_refused(run: Run, words: list[str], said: str) -> None:
    """The node's refusal names field, value and what is allowed."""
    result = run(*words)
    assert result.code == cli.EXIT_FAILED and said in result.err and "Traceback" not in result.err
