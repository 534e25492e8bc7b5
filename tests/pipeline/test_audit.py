"""The audit finds planted faults exactly, and no others, in event files as three nodes write them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
from pyspark.sql import SparkSession

from tickwheel.pipeline.audit import AuditConfig, audit, report
from tickwheel.pipeline.event_export import export_events
from tickwheel.storage import bundle
from tickwheel.storage.events import COLUMNS, EventKind, EventRecord, encode
from tickwheel.storage.unit import UNIT

HOUR = 500_000
START_MS = HOUR * 3_600_000


def record(kind: EventKind, rows: Sequence[tuple[int, ...]], at_ms: int, *texts: str, **facts: int) -> bytes:
    """One record as a node writes it."""
    names = COLUMNS[kind]
    columns = {name: np.array([row[place] for row in rows], np.uint64) for place, name in enumerate(names)}
    count = facts.pop("count", len(rows))
    return encode(EventRecord(kind, at_ms, count=count, texts=texts, columns=columns, **facts))


def test_planted_faults_are_found_exactly(spark: SparkSession, tmp_path: Path) -> None:
    """Lost, early and repeated deliveries; not what was cancelled, moved, retried, skipped or is not due yet."""
    rng = Random(5)
    ids = [HOUR << 32 | index for index in range(400)]
    due = {id: START_MS + rng.randrange(60_000) for id in ids}
    lost, early, twice, cancelled, skipped = (set(ids[n : n + 10]) for n in (0, 10, 20, 30, 40))
    moved, retried, later = set(ids[50:60]), set(ids[60:70]), set(ids[70:80])
    for id in later:
        due[id] = START_MS + 3_600_000
    asked = dict(due)
    for id in moved:
        due[id] += 5_000
    rows_of = [(id, asked[id], 1) for id in ids]
    applied = [record(EventKind.SCHEDULED, rows_of, START_MS, "1=t", stamped_ms=1, log_index=5)]
    applied.append(record(EventKind.CANCELLED, [(i,) for i in sorted(cancelled)], START_MS, log_index=6))
    for id in sorted(moved):
        applied.append(record(EventKind.MOVED, [(id, id + 10_000, due[id] - 1)], START_MS, log_index=7))
        applied.append(record(EventKind.MOVED, [(id, id + 20_000, due[id])], START_MS, log_index=8))
    silent = (HOUR << 32 | 900, HOUR << 32 | 901)
    applied.append(record(EventKind.SCHEDULED, [(id, START_MS, 2) for id in silent], START_MS, "2=nobody", log_index=5))
    applied.append(record(EventKind.DISPATCHED, [(silent[0], silent[0])], START_MS, "nobody", log_index=9))
    units = {id: id + 20_000 if id in moved else id for id in ids if id not in cancelled | later}
    applied.append(record(EventKind.DISPATCHED, list(units.items()), START_MS + 70_000, "t", log_index=9))
    applied.append(
        record(EventKind.SETTLED, [(units[i], 1) for i in sorted(skipped)], START_MS, "t", "g", "", detail=4)
    )
    of_master = [record(EventKind.LEADS, [], START_MS - 100, "n1", term=1)]
    handed = [id for id in units if id not in lost | skipped]
    for id in handed:
        at_ms = due[id] - 7 if id in early else due[id] + 3
        facts = {"term": 1}
        one = record(EventKind.DELIVERED, [(id, due[id], 1)], at_ms, "t", "g", "c", **facts)
        of_master += [one, one] if id in twice else [one]
        if id in retried:
            again = record(EventKind.DELIVERED, [(id, due[id] + 900, 2)], at_ms + 1_000, "t", "g", "c", **facts)
            of_master.append(again)
    of_master.append(record(EventKind.LEADS, [], START_MS + 90_000, "n2", term=2))
    last_ms = max(due[id] + (1_003 if id in retried else 3) for id in handed)
    directories = {}
    for number in range(3):
        directory = tmp_path / f"n{number}"
        (directory / "events").mkdir(parents=True)
        content = b"".join(applied) + (b"".join(of_master) if number == 0 else b"")
        (directory / "events" / "0.events").write_bytes(content + b"TWEV torn")
        directories[f"n{number}"] = directory
    (tmp_path / "n2" / "events" / "1.events").write_bytes(record(EventKind.LOST, [], START_MS, count=3))
    rows = export_events(directories, tmp_path / "parquet", rows_a_file=500)
    assert len(list((tmp_path / "parquet").iterdir())) > 2
    events = spark.read.parquet(str(tmp_path / "parquet"))
    assert events.count() == rows
    found = audit(events, AuditConfig(until_ms=START_MS + 600_000))
    assert (found.scheduled, found.delivered, found.events_left_out) == (402, len(handed), 3)
    assert {(row.id, row.group) for row in found.lost.collect()} == {(id, "g") for id in lost} | {(silent[1], None)}
    assert {row.id for row in found.early.collect()} == early
    assert {(row.id, row.attempt, row.times) for row in found.duplicated.collect()} == {(id, 1, 2) for id in twice}
    [late] = found.lateness.collect()
    assert (late.topic, late.hour_ms, late.messages, late.p50_ms) == ("t", START_MS, len(handed), 3)
    assert found.without_master == [(2, last_ms, START_MS + 90_000)]
    text = report(found, tmp_path / "report")
    for line in ("lost: 11", "early: 10", "duplicated: 10", "3 events were left out"):
        assert line in text
    assert (tmp_path / "report" / "audit.html").stat().st_size > 500
    assert spark.read.parquet(str(tmp_path / "report" / "lost")).count() == 11


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
