"""The audit as a second judge of live runs: it agrees on a history as it is, finds what was planted, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.chaos_live.stories import BACK_MS, BEGAN_MS, KILL_MS, Story, good
from tickwheel.chaos.live.audit_export import export_history
from tickwheel.chaos.live.history import read_history
from tickwheel.chaos.live.second_opinion import Opinion, add_opinion, compare, findings_of, judged
from tickwheel.chaos.live.verdict import Findings, Verdict, judge

LOST, EARLY, TWICE, CANCELLED, UNSURE, MOVED = 7, 71, 130, 140, 141, 150


def _planted() -> Story:
    """One message that never comes to a group, one that comes early, one that comes twice under one attempt; and three
    that look like it and are not: cancelled, cancelled without an answer, moved."""
    story = good()
    for got in story.all_of("got"):
        gone = {CANCELLED, UNSURE} | ({LOST} if got["group"] == "steady" else set())
        keep = [place for place, uid in enumerate(got["uids"]) if uid not in gone]
        for name in ("uids", "ids", "attempts"):
            got[name] = [got[name][place] for place in keep]
    story.drop(lambda record: record["k"] in ("settle", "settled"))
    story.got(5_000, "steady", [TWICE])
    story.tell(600, "cancel", b=9_001, uid=CANCELLED, id="x")
    story.tell(601, "cancelled", b=9_001, uid=CANCELLED, outcome="CANCELLED")
    story.tell(600, "cancel", b=9_002, uid=UNSURE, id="x")
    story.tell(601, "fail", b=9_002, reason="lost", unknown=True)
    for send in story.all_of("send"):
        if EARLY in send["uids"]:
            send["asked"][send["uids"].index(EARLY)] += 60
        if MOVED in send["uids"]:
            send["asked"][send["uids"].index(MOVED)] += 2_000
    story.tell(603, "move", b=9_003, uid=MOVED, id="x", asked=BEGAN_MS + 400)
    story.tell(604, "moved", b=9_003, uid=MOVED, outcome="RESCHEDULED")
    return story


def _opinion(spark: SparkSession, story: Story, directory: Path) -> tuple[Verdict, Opinion]:
    directory.mkdir()
    lines = [json.dumps(record) for record in story.sorted()]
    (directory / "supervisor.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    exported = export_history(directory, directory / "events", rows_a_file=700)
    assert len(list((directory / "events").iterdir())) == -(-exported.rows // 700)
    verdict = judge(read_history([directory / "supervisor.jsonl"]))
    answer = judged(spark, directory / "events", exported.until_ms, int(BEGAN_MS), directory / "audit")
    found = findings_of(answer)
    return verdict, Opinion(answer["scheduled"], found, compare(verdict.findings, found))


def test_both_judges_agree_on_a_good_run(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing lost, early or twice, and the same time without a master: the run stays what it was."""
    verdict, second = _opinion(spark, good(), tmp_path / "run")
    assert second.differences == []
    add_opinion(verdict, second)
    assert verdict.holds
    assert verdict.audit["scheduled"] == verdict.counts["acknowledged"]
    assert verdict.audit["without_master_ms"] == pytest.approx(BACK_MS - KILL_MS, abs=200)
    assert (tmp_path / "run" / "audit" / "audit.html").exists()


def test_both_judges_find_what_was_planted(spark: SparkSession, tmp_path: Path) -> None:
    """The same messages, by name; a judge that cannot find is no second one. Where they differ the run is broken."""
    verdict, second = _opinion(spark, _planted(), tmp_path / "run")
    assert second.findings.lost == {(1_000 + LOST, "steady")}
    assert second.findings.early == {(1_000 + EARLY, "steady"), (1_000 + EARLY, "moody")}
    assert second.findings.duplicated == {(1_000 + TWICE, "steady", 1)}
    assert second.differences == []
    assert {"P1", "P3"} <= set(verdict.broken_counts)
    # A verdict that has overlooked something is told so, with the message's id, and the run is broken by that alone.
    verdict.findings.lost.clear()
    verdict.findings.without_master_ms.append(2_000.0)
    second = Opinion(second.scheduled, second.findings, compare(verdict.findings, second.findings))
    verdict.broken_counts.clear()
    add_opinion(verdict, second)
    assert not verdict.holds
    assert verdict.broken_counts == {"audit": 2}
    [lost, gap] = verdict.audit["differences"]
    assert lost == f"lost: 1 for the audit alone, such as ({1_000 + LOST}, 'steady')"
    assert gap == "time without a master: 2,700 ms in 2 times for the verdict, 700 ms in 1 for the audit"
    assert "findings" not in verdict.as_json()


def test_agreement_is_silence() -> None:
    """Each kind of difference is named, from either side."""
    one, other = Findings(early={(1, "g")}), Findings(duplicated={(1, "g", 2)})
    assert compare(one, one) == []
    assert [text.partition(":")[0] for text in compare(one, other)] == ["early", "duplicated"]
