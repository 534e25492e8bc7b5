"""The audit finds planted faults exactly, and no others, in event files as three nodes write them."""

from __future__ import annotations

import errno
import hashlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from typer.testing import CliRunner

from tests.node.core.schedule.test_pending import ask, core_of, schedule
from tests.node.core.trio import World
from tests.pipeline.full_disk import full_disk
from tickwheel.client.errors import RequestRefused
from tickwheel.client.pulling import handle_of
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.promise import answer_of
from tickwheel.node.core.schedule.deleting import finished
from tickwheel.node.core.schedule.intake import from_batch
from tickwheel.node.server import handlers
from tickwheel.node.server.callers import EVERYBODY
from tickwheel.pipeline import audit as judging
from tickwheel.pipeline.audit import TITLES, Audit, AuditConfig, audit, report
from tickwheel.pipeline.cli import app
from tickwheel.pipeline.event_export import export_events
from tickwheel.pipeline.plot_style import COLOURS
from tickwheel.pipeline.report_folder import UNFINISHED, InUseError, report_in
from tickwheel.proto import consumer_pb2, scheduler_pb2
from tickwheel.proto.admin_pb2 import (
    CreateGroupRequest,
    DeleteGroupRequest,
    DeleteTopicRequest,
    ExponentialBackoff,
    ResetGroupRequest,
    RetryPolicy,
)
from tickwheel.proto.common_pb2 import KEY_CONFLICT_REFUSE as REFUSE
from tickwheel.proto.common_pb2 import KEY_CONFLICT_REPLACE as REPLACE
from tickwheel.proto.common_pb2 import (
    KEY_FREE,
    KEY_REFUSED,
    KEY_REPLACED,
    KeyConflict,
    Message,
    MessageId,
    MessageMeta,
)
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.storage import bundle
from tickwheel.storage.events import COLUMNS, EventKind, EventRecords, encode, paths
from tickwheel.storage.unit import UNIT

HOUR = 500_000
START_MS = HOUR * 3_600_000


def record(kind: EventKind, rows: Sequence[tuple[int, ...]], at_ms: int, *texts: str, **facts: int) -> bytes:
    """One record as a node writes it."""
    names = COLUMNS[kind]
    columns = {name: np.array([row[place] for row in rows], np.uint64) for place, name in enumerate(names)}
    part = facts.pop("detail", 0), facts.pop("count", len(rows)), texts
    return encode([EventRecords(kind, at_ms, parts=[part], columns=columns, **facts)])


class Lived:
    """What happened on three nodes, as their own event files tell it."""

    def __init__(self, folder: Path) -> None:
        self.world = World(config=replace(CoreConfig(), segment_bytes=1 << 20, events_bytes_max=8 << 20))
        self.world.elect()
        self.world.run(2_000)
        self.until_ms = 0
        self._folder = folder

    def admin(self, **body: Any) -> None:
        """One administrative command."""
        found = ask(self.world, core_of(self.world).parts.requests.admin(AdminCommand(**body)))
        assert found.failure is None, found

    def schedule(self, *delays_ms: int, topic: str = "t", tags: Sequence[str] = ()) -> list[int]:
        """Ids of messages that are due then."""
        return schedule(self.world, [(topic, delay_ms, "k", tags) for delay_ms in delays_ms])

    def keyed(self, *messages: tuple[str, int, KeyConflict.ValueType]) -> list[int]:
        """A batch of messages with unique keys, as key, delay and rule; what became of each, as KeyOutcome."""
        rows = [
            Message(
                topic="t",
                payload=b"x",
                due_ms=self.world.now_ms + delay_ms,
                meta=MessageMeta(unique_key=key),
                on_key_conflict=rule,
            )
            for key, delay_ms, rule in messages
        ]
        request = scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=rows))
        batch = from_batch(request, core_of(self.world).state.settings)
        outcome = ask(self.world, answer_of(partial(core_of(self.world).parts.publisher.schedule, batch)))
        return [0] * len(rows) if outcome.keys is None else outcome.keys.tolist()

    def move(self, id: int, delay_ms: int) -> int:
        """Its new id."""
        request = scheduler_pb2.RescheduleRequest(id=MessageId(hour=id >> 32, index=id & 0xFFFF_FFFF))
        request.delay_ms = delay_ms
        moved = ask(
            self.world,
            handlers.reschedule(core_of(self.world), request, EVERYBODY),
        )
        assert moved.outcome == scheduler_pb2.RESCHEDULED
        return int(moved.id.hour) << 32 | int(moved.id.index)

    def cancel(self, id: int) -> None:
        """Before it is dispatched."""
        assert ask(self.world, core_of(self.world).parts.requests.cancel(id)) == scheduler_pb2.CANCELLED

    def delete_topic(self, name: str) -> None:
        """With all that is in it."""
        request = DeleteTopicRequest(name=name, cancel_pending=True)
        assert finished(ask(self.world, core_of(self.world).parts.deleter.topic(request)))

    def delete_group(self, name: str) -> None:
        """With all that it is owed."""
        request = DeleteGroupRequest(name=name, discard=True)
        assert finished(ask(self.world, core_of(self.world).parts.deleter.group(request)))

    def pull(self, group: str, *outcomes: consumer_pb2.Outcome.ValueType, topic: str = "t") -> None:
        """A batch for each outcome, all of it settled so."""
        for outcome in outcomes or (consumer_pb2.ACK,):
            request = consumer_pb2.PullRequest(group=group, topic=topic, messages_max=1_000, wait_ms=1_000)
            handle = handle_of(ask(self.world, core_of(self.world).parts.consumers.pull(request)))
            handle.outcome = outcome
            ask(self.world, answer_of(partial(core_of(self.world).parts.consumers.settle, handle)))

    def events(self, spark: SparkSession) -> DataFrame:
        """Exported from the files of all nodes."""
        self.world.run(1_000)
        self.until_ms = self.world.now_ms
        directories = {}
        for name, node in self.world.nodes.items():
            folder = directories[name] = self._folder / name
            (folder / "events").mkdir(parents=True)
            for path in paths(node.disk, "events"):
                file = node.disk.open(path)
                (folder / path).write_bytes(file.read_at(0, file.size()) + b"TWEV torn")
        rows = export_events(directories, self._folder / "parquet", rows_a_file=500)
        events = spark.read.parquet(str(self._folder / "parquet"))
        assert events.count() == rows
        return events


def test_what_nodes_do_as_promised_is_no_finding(spark: SparkSession, tmp_path: Path) -> None:
    """Messages that were moved, by hand and by a sweep, cancelled, replaced by their unique keys, retried, dead,
    filtered, of a group that came late, was reset or is gone, broadcast, of a deleted topic; although the master
    changed."""
    lived = Lived(tmp_path)
    world = lived.world
    for name, more in {"g": {}, "choosy": {"filter": "a"}, "all": {"broadcasting": True}, "gone": {}}.items():
        lived.admin(create_group=CreateGroupRequest(name=name, topics=["t"], **more))  # type: ignore[arg-type]
    lived.schedule(*range(400, 420))
    lived.schedule(430, tags=["a"])
    lived.schedule(500, topic="deleted")
    moved = lived.schedule(*[60_000] * 4)
    again = [lived.move(lived.move(id, 120_000), 600) for id in moved[:2]]
    assert again[0] != moved[0]
    lived.cancel(lived.move(moved[2], 700))
    lived.cancel(moved[3])
    one_batch = (("k", 500, REFUSE), ("k", 500, REFUSE), ("k", 600, REPLACE), ("l", 700, REFUSE))
    assert lived.keyed(*one_batch) == [KEY_FREE, KEY_REFUSED, KEY_REPLACED, KEY_FREE]
    assert lived.keyed(("l", 650, REPLACE)) == [KEY_REPLACED]
    lived.delete_topic("deleted")
    world.run(1_000)
    lived.pull("g")
    lived.pull("choosy")
    soon = RetryPolicy(exponential=ExponentialBackoff(initial_ms=100, factor=1, max_ms=100))
    late = CreateGroupRequest(name="late", topics=["t"], start_from=consumer_pb2.LATEST, retry=soon)
    lived.admin(create_group=late)
    lived.delete_group("gone")
    master = world.elect()
    master.kill()
    world.elect()
    master.start()
    world.heal()
    world.run(2_000)
    lived.schedule(*range(50, 55))
    world.run(500)
    lived.pull("late", consumer_pb2.RETRY)
    lived.pull("g", consumer_pb2.DEAD)
    world.run(1_000)
    lived.pull("late")
    lived.admin(reset_group=ResetGroupRequest(name="g", start_from=consumer_pb2.EARLIEST))
    lived.pull("g")
    events = lived.events(spark)
    found = audit(events, AuditConfig(lived.until_ms))
    assert found.broken() == {}, {name: getattr(found, name).collect() for name in found.broken()}
    assert (found.scheduled, found.filtered, found.broadcasting, found.events_left_out) == (35, ["choosy"], ["all"], 0)
    assert found.delivered == 30
    assert len(found.without_master) == 1
    # Given out once more under attempt 1, within one term: after a reset that is no duplicate.
    count = events.where(F.col("kind") == "DELIVERED").where("group = 'g'").groupBy("id", "attempt").count()
    assert count.where("count > 1").count() == 5


def test_planted_faults_are_found_exactly(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in what nodes have noted: a delivery that is missing, too early, made twice, of a cancelled message, and of
    one that nobody scheduled; and for the exit code."""
    lived = Lived(tmp_path)
    lived.admin(create_group=CreateGroupRequest(name="g", topics=["t"]))
    lost, early, twice, cancelled, moved, last = lived.schedule(*[60_000] * 6)
    ids = {id: lived.move(id, 500) for id in (lost, early, twice, moved)}
    silent = lived.schedule(400, topic="nobody")[0]
    lived.cancel(cancelled)
    lived.world.run(2_000)
    lived.pull("g")
    events = lived.events(spark)
    delivered = events.where(F.col("kind") == "DELIVERED")
    is_lost = F.col("id").eqNullSafe(ids[lost]) | F.col("unit").eqNullSafe(ids[lost])
    is_undispatched = (F.col("kind") == "DISPATCHED") & (F.col("id") == silent)
    some = delivered.where(F.col("id") == ids[moved])
    phantom = max(last, silent, *ids.values()) + 1
    planted = (
        events.where(~(is_lost & F.col("kind").isin("DELIVERED", "SETTLED")) & ~is_undispatched)
        .withColumn(
            "at_ms",
            F.when((F.col("kind") == "DELIVERED") & (F.col("id") == ids[early]), F.col("due_ms") - 7).otherwise(
                F.col("at_ms")
            ),
        )
        .union(delivered.where(F.col("id") == ids[twice]))
        .union(some.withColumn("id", F.lit(cancelled)))
        .union(some.withColumn("id", F.lit(phantom)))
        .cache()
    )
    found = audit(planted, AuditConfig(lived.until_ms))
    assert {(row.id, row.group) for row in found.lost.collect()} == {(lost, "g"), (silent, None)}
    assert {row.id for row in found.early.collect()} == {early, cancelled}
    assert {(row.id, row.times, row.terms) for row in found.duplicated.collect()} == {(twice, 2, 1)}
    assert {row.id for row in found.cancelled.collect()} == {cancelled}
    assert {row.id for row in found.unscheduled.collect()} == {phantom}
    text = report(found, tmp_path / "report")
    for line in ("lost: 2", "early: 2", "duplicated: 1", "cancelled yet delivered: 1", "delivered, never scheduled: 1"):
        assert line in text
    assert spark.read.parquet(str(tmp_path / "report" / "lost")).count() == 2
    monkeypatch.setattr(judging, "audit", lambda *_: found)
    for broken, code in ((found.broken(), 1), ({}, 0)):
        monkeypatch.setattr(Audit, "broken", lambda _, broken=broken: broken)
        words = ["audit", "--events", str(tmp_path / "parquet"), "--out", str(tmp_path / f"exit-{code}")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == code, done.output
        assert ("a promise was broken: lost 2, early 2" in done.output) == bool(code)


def test_an_audit_of_nothing_is_no_good_one(spark: SparkSession, tmp_path: Path) -> None:
    """Nodes that note no events would otherwise pass every audit."""
    (tmp_path / "n" / "events").mkdir(parents=True)
    done = CliRunner().invoke(app, ["audit", f"n={tmp_path / 'n'}", "--out", str(tmp_path / "out")])
    assert done.exit_code == 1 and "these events name no message" in f"{done.output}{done.exception}"


def test_an_audit_that_failed_can_be_run_again(spark: SparkSession, tmp_path: Path) -> None:
    """It was refused, since the folder was not empty: at first because of the events, later because of findings."""
    (tmp_path / "n" / "events").mkdir(parents=True)
    note = record(EventKind.DELIVERED, [(HOUR << 32, START_MS, 1)], START_MS, "t", "g", "c", term=1)
    (tmp_path / "n" / "events" / "0.events").write_bytes(note)
    out = tmp_path / "new" / "out"
    words = ["audit", f"n={tmp_path / 'n'}", "--out", str(out)]
    with full_disk(100):
        full = CliRunner().invoke(app, words)
    assert isinstance(full.exception, OSError) and not out.parent.exists()
    with pytest.MonkeyPatch.context() as failing:
        failing.setattr(judging, "_plot", Mock(side_effect=OSError(errno.ENOSPC, "full", "x.png")))
        late = CliRunner().invoke(app, words)
    assert isinstance(late.exception, OSError) and not out.parent.exists()
    (out / UNFINISHED / "lost").mkdir(parents=True)
    (out / UNFINISHED / "audit.html").write_text("half", encoding="utf-8")  # by a run that was killed
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.iterdir()} == {"events", "lateness", "lateness.png", "audit.html", *TITLES}
    again = CliRunner().invoke(app, words)
    assert "it exists already; name a new folder" in str(again.exception)


DIES_AT_A_RENAME = """
import os, signal, sys
from pathlib import Path
from tickwheel.pipeline.report_folder import report_in

left = int(sys.argv[2])

def count(event, arguments):
    global left
    left -= event == "os.rename"
    if left < 0 and event == "os.rename":
        os.kill(os.getpid(), signal.SIGKILL)

with report_in(Path(sys.argv[1])) as folder:
    for name in ("lost", "early"):
        (folder / name).mkdir()
        (folder / name / "rows").touch()
    (folder / "audit.html").touch()
    sys.addaudithook(count)
"""


def test_what_an_audit_has_moved_that_was_killed_is_no_report(tmp_path: Path) -> None:
    """Some of its folders were in place already, and the next run was refused: name a new folder."""
    for renames in range(4):
        out = tmp_path / str(renames)
        out.mkdir()
        (out / "notes.txt").touch()
        command = [sys.executable, "-c", DIES_AT_A_RENAME, str(out), str(renames)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert len(list(out.iterdir())) == 2 + max(0, renames - 1)
        with report_in(out) as folder:
            assert {path.name for path in out.iterdir()} == {"notes.txt", UNFINISHED}
            (folder / "audit.html").write_text("whole", encoding="utf-8")
        assert {path.name for path in out.iterdir()} == {"notes.txt", "audit.html"}


def test_two_audits_do_not_write_to_one_folder(tmp_path: Path) -> None:
    """The second is refused and leaves the first one's files alone."""
    with report_in(tmp_path / "out") as folder:
        (folder / "lost").mkdir()
        with pytest.raises(InUseError, match="another command"), report_in(tmp_path / "out"):
            pass
        assert (folder / "lost").is_dir()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lost"]


def test_lines_of_many_topics_look_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the largest has a colour of its own; the others share one line, of the worst of them."""
    drawn: list[Figure] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    rows = [
        Row(topic=f"t{topic}", hour_ms=START_MS + hour * 3_600_000, messages=100 - topic, p99_ms=float(topic + hour))
        for topic in range(30)
        for hour in range(2)
    ]
    judging._plot(rows, [], tmp_path / "lateness.png")
    [axes] = drawn[0].axes
    lines = axes.get_lines()
    assert len({str(to_rgba(line.get_color())) for line in lines}) == len(lines) == len(COLOURS) + 1
    assert lines[-1].get_label() == f"worst of {30 - len(COLOURS)} others"
    assert np.asarray(lines[-1].get_ydata())[:2].tolist() == [29.0, 30.0]


def test_no_line_leads_over_hours_without_a_message_and_losses_of_the_master_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ramp would show a lateness that nobody measured."""
    drawn: list[Figure] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    late = {0: 5.0, 1: 6.0, 9: 700.0}
    rows = [
        Row(topic="t", hour_ms=START_MS + hour * 3_600_000, messages=1, p99_ms=value) for hour, value in late.items()
    ]
    lost_ms = START_MS + 9 * 3_600_000
    judging._plot(rows, [(2, lost_ms, lost_ms + 900), (3, lost_ms + 60_000, lost_ms + 61_000)], tmp_path / "late.png")
    [axes] = drawn[0].axes
    [line] = axes.get_lines()
    found = np.asarray(line.get_ydata(), float)
    assert np.array_equal(found, [5.0, 6.0, np.nan, 700.0, np.nan], equal_nan=True)
    assert len(axes.patches) == 2 and axes.get_title()
    legend = axes.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["t", "no master"]


def test_a_loaded_message_that_never_came_is_lost(spark: SparkSession, tmp_path: Path) -> None:
    """Nodes note a bundle, not its messages, and only one of them still has it: those that are missing are named."""
    due = [START_MS + 100 * n for n in range(300)]
    units = np.zeros(len(due), UNIT)
    units["due_requested_ms"] = due
    units["size"] = 4
    units["topic_id"] = np.arange(len(due)) % 2
    data = b"".join(bundle.build(units, b"abcd" * len(due), slot_ms=1_000, topics=2))
    name = hashlib.sha256(data).hexdigest()
    note = record(EventKind.LOADED, [(HOUR, 70, 300, 0)], START_MS, name, "t", "u", log_index=4, stamped_ms=1)
    first = HOUR << 32 | 70
    missing = {12, 33, 258}
    came = [record(EventKind.DISPATCHED, [(first + n, first + n)], due[n], "tu"[n % 2]) for n in range(300)]
    came += [
        record(EventKind.DELIVERED, [(first + n, due[n], 1)], due[n] + 2, "tu"[n % 2], "g", "c", term=1)
        for n in set(range(300)) - missing
    ]
    directories = {f"n{number}": tmp_path / f"n{number}" for number in range(3)}
    for node, directory in directories.items():
        (directory / "events").mkdir(parents=True)
        (directory / "events" / "0.events").write_bytes(note + (b"".join(came) if node == "n0" else b""))
    (tmp_path / "n2" / "bulk").mkdir()
    (tmp_path / "n2" / "bulk" / f"{name}.bundle").write_bytes(data)
    assert export_events(directories, tmp_path / "parquet") == 300 + 300 + 297
    found = audit(spark.read.parquet(str(tmp_path / "parquet")), AuditConfig(until_ms=START_MS + 600_000))
    assert (found.scheduled, found.delivered) == (300, 297)
    lost = {(row.id, row.topic, row.due_ms, row.group) for row in found.lost.collect()}
    assert lost == {(first + n, "tu"[n % 2], due[n], "g") for n in missing}


def test_what_spark_cannot_read_as_events_is_told_by_one_line(spark: SparkSession, tmp_path: Path) -> None:
    """Without its traceback, and without Java's."""
    spark.range(3).write.parquet(str(tmp_path / "events"))
    done = CliRunner().invoke(app, ["audit", "--events", str(tmp_path / "events"), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, RequestRefused)
    assert str(done.exception).startswith(f"{tmp_path / 'events'}: ") and "\n" not in str(done.exception)
