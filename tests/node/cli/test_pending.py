"""What operators see of pending messages, against a real node: lists, counts, drawings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from tests.node.cli.commands import Run, one_node
from tickwheel.client import Client
from tickwheel.node.cli import charts as cli_charts

TOMORROW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(days=1)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One real node with some messages of tomorrow."""
    with one_node(tmp_path_factory.mktemp("cluster")) as address:
        begin_ms = round(TOMORROW.timestamp() * 1_000)
        with Client(address) as client:
            for number in range(12):
                client.schedule(
                    "seen",
                    b"x",
                    due_ms=begin_ms + number * 700_000,
                    key=f"[order]-{number % 3}",
                    tags=["even" if number % 2 == 0 else "odd"],
                )
            client.schedule("other", b"x", due_ms=begin_ms, key="[order]-0")
        yield address


def test_a_row_is_a_line_for_who_reads_a_pipe(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a terminal no width breaks a table's rows: `grep` finds the whole message."""
    monkeypatch.setenv("COLUMNS", "40")
    lines = run("pending", "list", "seen").out.splitlines()
    assert len(lines) == 13
    assert all("[order]-" in line and ("even" in line or "odd" in line) for line in lines[1:])


def test_lists_and_counts_by_what_is_given(run: Run) -> None:
    """Topic, tag, key, prefix and time, alone and together; the text is shown as it is, brackets too."""
    assert len(run("pending", "list", "seen", "--json").json) == 12
    chosen = run("pending", "list", "seen", "--key", "[order]-0", "--tag", "even", "--json").json
    assert [(message["key"], message["tags"]) for message in chosen] == [("[order]-0", ["even"])] * 2
    assert "[order]-0" in run("pending", "list", "seen", "--key", "[order]-0").out
    assert run("pending", "count", "--key-prefix", "[order]", "--json").json["total"] == 13
    until = (TOMORROW + timedelta(hours=1)).isoformat()
    assert run("pending", "count", "seen", "--tag", "odd", "--until", until, "--json").json["total"] == 3
    assert "13 pending" in run("count").out


def test_histogram_is_drawn_and_told(run: Run) -> None:
    """Rows with their totals, gaps said, the fullest named; the same as JSON; a row limit is said."""
    by_hour = run("pending", "histogram", "--json").json
    assert by_hour["by"] == "minute" and by_hour["total"] == 13
    drawn = run("pending", "histogram", "--by", "minute").out
    assert drawn.count("\n" + TOMORROW.strftime("%m-%d %H:00")) == 1
    assert "13 pending" in drawn and "the fullest minute: 2 at" in drawn
    seconds = run("pending", "histogram", "--by", "second", "--rows", "3").out
    assert "without a message" in seconds and "rows more with 9" in seconds
    assert run("pending", "histogram", "seen", "--key", "unknown").out.strip() == "nothing is pending"


def test_bad_questions_end_with_a_reason(run: Run) -> None:
    """A usage error for wrong words, a refusal with its field for unknown topics."""
    assert run("pending", "histogram", "--by", "week").code == 2
    assert run("pending", "list", "--from", "yesterday").code == 2
    unknown = run("pending", "count", "unknown", "--json")
    assert unknown.code == 1 and json.loads(unknown.err)["field"] == "topic"


def test_columns_are_never_empty_for_something() -> None:
    """One of a million still shows, and only the peak is full."""
    assert cli_charts.columns([0, 1, 999_999, 1_000_000]) == " ▁▇█"
    assert cli_charts.bar(1, 1_000_000, 20) == "▏"
    assert cli_charts.bar(10, 10, 20) == "█" * 20
    assert cli_charts.bar(0, 0, 20) == ""
    assert [cli_charts.short(n) for n in (0, 9_999, 12_345, 999_999, 4_560_000)] == [
        "0",
        "9,999",
        "12.3k",
        "1000k",
        "4.6M",
    ]


def test_many_are_cancelled_and_moved(run: Run, address: str) -> None:
    """Not without being asked; then with progress and a report; the list of jobs tells them; stopping is harmless."""
    begin_ms = round((TOMORROW + timedelta(days=30)).timestamp() * 1_000)
    with Client(address) as client:
        for number in range(20):
            client.schedule(
                "swept", b"x", due_ms=begin_ms + number, tags=["a" if number < 15 else "b"], key=str(number)
            )
    refused = run("pending", "cancel", "swept", "--tag", "a")
    assert refused.code == 2 and "15 messages would be cancelled" in refused.err
    moved = run("pending", "reschedule", "swept", "--tag", "b", "--later", "1h", "--yes")
    assert moved.out.strip() == "5 moved"
    assert run("count", "swept", "--from", str(begin_ms + 3_600_000), "--json").json["total"] == 5
    ended = run("pending", "cancel", "swept", "--tag", "a", "--yes", "--json").json
    assert (ended["state"], ended["done"], ended["action"]) == ("FINISHED", 15, "cancel")
    assert run("count", "swept", "--json").json["total"] == 5
    assert run("pending", "reschedule", "swept", "--later", "1h", "--earlier", "1h", "--yes").code == 2
    for chosen in ([], ["--until", str(begin_ms)]):
        everything = run("pending", "cancel", *chosen)
        assert everything.code == 2 and "give a topic" in everything.err, "told before anything is confirmed"
    nothing = run("pending", "cancel", "swept", "--tag", "a")
    assert (nothing.code, nothing.out.strip(), nothing.err) == (0, "0 cancelled", "")
    assert run("pending", "reschedule", "swept", "--tag", "a", "--later", "1h").out.strip() == "0 moved"
    unbegun = run("pending", "cancel", "swept", "--key", "none", "--detach", "--json").json
    assert (unbegun["job_id"], unbegun["state"], unbegun["done"]) == ("", "FINISHED", 0)
    told = run("pending", "sweeps").out
    assert "shift by +3,600 s" in told and "topic=swept tag=a" in told and "15 cancelled" in told
    assert run("pending", "stop", ended["job_id"]).out.strip() == "15 cancelled"
    assert run("pending", "stop", "unknown").code == 1


def test_top_into_a_pipe_and_a_trace(run: Run, address: str) -> None:
    """One picture without escapes; the story of a message from its schedule to its settlement, as text and as JSON."""
    due_ms = run("schedule", "traced", "x", "--delay", "20ms", "--json").json["due_ms"]
    name = run("consume", "traced", "--group", "eyes", "-n", "1", "--json").json["id"]
    picture = run("top")
    assert picture.code == 0 and "\x1b" not in picture.out
    for word in ("tickwheel local", "master n1 in term", "hours", "NODE", "serving", "GROUP", "eyes"):
        assert word in picture.out, picture.out
    story = run("trace", name).out
    assert [word for word in story.split() if word in STEPS] == list(STEPS)
    assert "to eyes (tickwheel consume), attempt 1" in story and "ACK: done" in story
    told = run("trace", name, "--json").json
    assert [event["kind"] for event in told["events"]] == ["scheduled", "dispatched", "delivered", "settled"]
    assert told["events"][0]["due_ms"] == due_ms and told["events"][2]["nodes"]["n1"] >= due_ms
    unknown = run("trace", "0-5-5")
    assert unknown.code == 1 and "no notes exist" in unknown.out
    assert run("trace", "nonsense").code == 1
    assert run("top", "--address", "127.0.0.1:1").code == 3


def test_answers_say_what_is_so(run: Run) -> None:
    """That the target leads already, that nobody needs a certificate here, that there are no notes."""
    led = run("transfer", "n1")
    assert led.code == 1 and "n1 is the master already" in led.err
    assert run("whoami").out.splitlines() == [
        "nobody, known by nothing: neither certificate nor token; rights are off",
        "may do everything without TLS, with TLS what a client may",
    ]
    assert run("trace", "0-5-5").out.splitlines()[0] == "0-5-5: unknown, or no longer known; no notes exist"
    run("schedule", "fatal", "x", "--delay", "0ms")
    run("consume", "fatal", "--group", "g", "-n", "1", "--dead", "--reason", "bad")
    shown = run("dead", "show", "g", "0").out
    assert "declared_dead" in shown and "number" in shown
    assert "tags" not in shown and "headers" not in shown and "payload_missing" not in shown


STEPS = ("scheduled", "committed", "dispatched", "delivered", "settled")
