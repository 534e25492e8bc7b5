"""An archive that comes too late: it says how many messages had been removed before it could read them."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tests.pipeline.running import RunningCluster
from tests.pipeline.test_archive import connection
from tickwheel.client.snapshot import SettledTopic
from tickwheel.pipeline.archive import archive, read_archive
from tickwheel.pipeline.archive_marks import Mark, TopicMark, missing
from tickwheel.pipeline.archive_place import RECORDS_KEPT, ArchiveError, ArchivePlace

TOPIC, GROUP = "hourly", "keepers"
SLOW = "slow"
"""A group that holds all hours, for as long as it is there."""
HOUR_MS = 3_600_000


def test_what_was_removed_before_it_was_archived_is_told(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A first run in time for one hour; then that hour is gone, and one whose messages were still to be settled. A run
    for some days alone counts as none."""
    place = str(tmp_path / "archive")
    with RunningCluster(tmp_path / "nodes", nodes=1) as cluster:
        client = cluster.client

        def removed() -> None:
            # A new master looks at once.
            cluster.start(cluster.kill_master())
            while cluster.wait(client.snapshot.pin_settled(GROUP)).topics[0].retained == 0:
                time.sleep(0.02)

        def run(**limits: int) -> tuple[int, int, dict[str, int]]:
            [found] = archive(spark, place, connection(cluster), [GROUP], **limits)
            return found.settled, found.known, found.missing

        cluster.wait(client.admin.create_topic(TOPIC))
        for group in (GROUP, SLOW):
            cluster.wait(client.admin.create_group(group, [TOPIC]))
        now_ms = time.time_ns() // 1_000_000
        due_ms = [now_ms - hours_ago * HOUR_MS for hours_ago in [9] * 5 + [7] * 3 + [0] * 4]

        async def schedule() -> None:
            async with client.producer() as producer:
                await producer.schedule_many(TOPIC, [(at_ms, b"x") for at_ms in due_ms])

        cluster.wait(schedule())
        cluster.settle(GROUP, TOPIC, 5)
        assert run() == (5, 0, {})
        cluster.settle(GROUP, TOPIC, 7)
        cluster.wait(client.admin.delete_group(SLOW, discard=True))
        removed()
        assert run(from_ms=1) == (4, 0, {TOPIC: 3})
        with caplog.at_level(logging.WARNING):
            assert run() == (0, 4, {TOPIC: 3})
        assert f"up to 3 messages of topic {TOPIC}" in caplog.text
        assert run() == (0, 4, {})
        assert read_archive(spark, place).count() == 9
        records = ArchivePlace(spark, place)
        assert records.record(GROUP, 4, Mark().text())
        assert run()[2] == {TOPIC: 8}, "of an archive that has never seen the topic"
        assert records.record(GROUP, 6, "{")
        with pytest.raises(ArchiveError, match=rf"_marks/{GROUP}/7\.json: the newest record cannot be read"):
            run()


def topic(**facts: int) -> SettledTopic:
    """With nothing removed or open unless said."""
    plain = {"first": 0, "began": 0, "judged_from": 0, "retained": 0, "floor": 0, "open": 0}
    return SettledTopic(topic_id=1, name="t", **{**plain, "end": 100, **facts})


def last(end: int, floor: int, left: int = 0) -> Mark:
    """Of the run before."""
    return Mark((TopicMark(1, end, floor, left),))


def test_what_no_run_saw_and_what_was_left_open_is_missing() -> None:
    """Of the positions that are gone, not of those that the last run has, nor of those from before the group."""
    assert missing(topic(), Mark(), []) == 0
    assert missing(topic(retained=30), Mark(), []) == 30
    assert missing(topic(retained=30, began=20), Mark(), []) == 10
    assert missing(topic(retained=30), last(40, 40), []) == 0
    assert missing(topic(retained=60), last(40, 40), []) == 20
    assert missing(topic(retained=60), last(40, 30, 4), []) == 24, "all four that were open are gone"
    assert missing(topic(retained=32), last(40, 30, 4), []) == 2, "no more of them than positions"
    assert missing(topic(retained=60), last(400, 400), []) == 60, "another cluster, which was further"
    assert missing(topic(retained=10), last(40, 40), [(10, 50), (5, 45)]) == 10, "removed while it was read"
    mark = last(40, 30, 4)
    assert Mark.parsed(mark.text()) == mark


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "1", "{}", "[" * 100_000, '{"version": 2, "topics": []}', '{"version": 1, "topics": [{}]}'),
        '{"version": 1, "topics": [{"topic_id": 1, "end": "2", "floor": 1, "open": 0}]}',
        '{"version": 1, "topics": [{"topic_id": 1, "end": null, "floor": 1, "open": 0}]}',
        '{"version": 1, "topics": [], "staged": 7}',
        '{"version": 1, "topics": [], "staged": "../../elsewhere"}',
    ],
)
def test_a_mark_that_is_none_is_refused(text: str) -> None:
    """Damaged, or of a later version: nothing is counted by it."""
    with pytest.raises(ValueError, match=r"version 2|differs from what was written|Expecting"):
        Mark.parsed(text)


@pytest.mark.parametrize("local", [True, False], ids=["by a link", "by a rename"])
def test_the_record_of_the_last_run_counts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """Of those that begin from one record a single one is written, even by a run that stood still for very long. Few
    are kept; an earlier version numbered them by entries of the log."""
    place = ArchivePlace(spark, tmp_path)
    if not local:
        monkeypatch.setattr(ArchivePlace, "_local", lambda *_: None)
    marks = tmp_path / "_marks" / GROUP
    marks.mkdir(parents=True)
    (marks / "7123.json").write_text("by an earlier version")
    assert place.newest(GROUP) == (7_123, "by an earlier version")
    assert place.record(GROUP, 7_123, "a") and not place.record(GROUP, 7_123, "b")
    assert place.newest(GROUP) == (7_124, "a")
    for number in range(7_124, 7_124 + RECORDS_KEPT):
        assert place.record(GROUP, number, "later")
    assert not (marks / "7124.json").exists()
    assert not place.record(GROUP, 7_123, "slow")
    assert place.newest(GROUP) == (7_124 + RECORDS_KEPT, "later")
    assert len(list(marks.glob("[!.]*"))) == RECORDS_KEPT and not list(marks.glob("*.new"))


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.integers(0, 60), st.data())
def test_it_is_never_less_than_what_is_missing(settled: set[int], end: int, more: int, data: st.DataObject) -> None:
    """By counting positions one by one: archived by the first run are those settled then and below its end."""
    floor = next(position for position in range(62) if position not in settled or position >= end)
    left = sum(position not in settled for position in range(floor, end))
    retained = data.draw(st.integers(0, end + more))
    archived = {position for position in settled if position < end}
    truth = sum(position not in archived for position in range(retained))
    found = missing(topic(end=end + more, retained=retained), last(end, floor, left), [])
    assert truth <= found <= truth + left
    assert found == truth or floor < retained < end
