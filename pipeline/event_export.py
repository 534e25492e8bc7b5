"""Exports the event files of nodes as Parquet: one row for each event, in files of bounded size.

Nodes note one event for a whole bundle. Its messages become rows of kind SCHEDULED here, once even if several nodes
noted the bundle, with the content of the bundle's file in one of the directories. Reads event files (storage/events.py)
from copies or from the data directories themselves. A torn or damaged file is read up to the damage, as on the nodes.
Never runs in a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tickwheel.storage.events import EventKind, EventRecord, paths, read_events
from tickwheel.storage.loaded_events import messages_of
from tickwheel.storage.local import LocalDisk
from tickwheel.storage.plain_file import unfinished

ROWS_A_FILE = 1_000_000
DIRECTORY = "events"
SCHEMA = pa.schema(
    [
        ("node", pa.string()),
        ("kind", pa.string()),
        ("at_ms", pa.int64()),
        ("stamped_ms", pa.int64()),
        ("term", pa.int64()),
        ("log_index", pa.int64()),
        ("detail", pa.int32()),
        ("count", pa.int64()),
        ("id", pa.int64()),
        ("unit", pa.int64()),
        ("new_id", pa.int64()),
        ("due_ms", pa.int64()),
        ("attempt", pa.int64()),
        ("topic", pa.string()),
        ("group", pa.string()),
        ("filter", pa.string()),
    ]
)
"""`count` is 1, except for LOST, which stands for several unknown events. Columns that a kind lacks are null."""
_NUMBERS = ("id", "unit", "new_id", "due_ms", "attempt")
_TOPIC_FIRST = (EventKind.DISPATCHED, EventKind.DELIVERED, EventKind.SETTLED)


def table_of(node: str, record: EventRecord) -> pa.Table:
    """One record as rows of SCHEMA."""
    single = record.kind in (EventKind.LEADS, EventKind.LOST)
    rows = 1 if single else record.count
    fixed = {
        "node": node,
        "kind": record.kind.name,
        "at_ms": record.at_ms,
        "stamped_ms": record.stamped_ms,
        "term": record.term,
        "log_index": record.log_index,
        "detail": record.detail,
        "count": record.count if single else 1,
    }
    columns = [pa.repeat(pa.scalar(value, SCHEMA.field(name).type), rows) for name, value in fixed.items()]
    for name in _NUMBERS:
        values = record.columns.get(name)
        columns.append(pa.nulls(rows, pa.int64()) if values is None else pa.array(values.astype(np.int64)))
    topic = group = filter = pa.nulls(rows, pa.string())
    if record.kind is EventKind.SCHEDULED:
        names = dict(text.split("=", 1) for text in record.texts if "=" in text)
        topic = pa.array([names.get(str(number), "") for number in record.columns["topic_id"].tolist()], pa.string())
    elif record.kind in _TOPIC_FIRST and record.texts:
        topic = pa.repeat(pa.scalar(record.texts[0]), rows)
        if len(record.texts) > 1:
            group = pa.repeat(pa.scalar(record.texts[1]), rows)
    elif record.kind is EventKind.LEADS and record.texts:
        group = pa.repeat(pa.scalar(record.texts[0]), rows)
    elif record.kind is EventKind.GROUP:
        topic = pa.array(record.texts[2:], pa.string())
        group, filter = (pa.repeat(pa.scalar(text), rows) for text in record.texts[:2])
    return pa.Table.from_arrays([*columns, topic, group, filter], schema=SCHEMA)


def _tables(directories: Mapping[str, Path]) -> Iterator[pa.Table]:
    disks = {node: LocalDisk(str(directory)) for node, directory in directories.items()}
    loaded: set[tuple[int, str]] = set()
    for node, disk in disks.items():
        for path in paths(disk, DIRECTORY):
            for record in read_events(disk, path):
                if record.kind is not EventKind.LOADED:
                    yield table_of(node, record)
                elif (record.log_index, record.texts[0]) not in loaded:
                    loaded.add((record.log_index, record.texts[0]))
                    yield table_of(node, messages_of(record, list(disks.values())))


def export_events(directories: Mapping[str, Path], out: Path, rows_a_file: int = ROWS_A_FILE) -> int:
    """Write the events of nodes (name to data directory) as Parquet files into a folder. Returns the number of rows."""
    out.mkdir(parents=True, exist_ok=True)
    rows = number = 0
    held: list[pa.Table] = []
    held_rows = 0

    def write() -> None:
        nonlocal number, held, held_rows
        path = out / f"events-{number:05}.parquet"
        with unfinished(path):
            pq.write_table(pa.concat_tables(held), path, compression="zstd")
        number, held, held_rows = number + 1, [], 0

    for table in _tables(directories):
        rows += table.num_rows
        held.append(table)
        held_rows += table.num_rows
        if held_rows >= rows_a_file:
            write()
    if held or not number:
        held = held or [SCHEMA.empty_table()]
        write()
    return rows
