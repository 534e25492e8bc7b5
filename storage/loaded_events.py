"""LOADED records of event files: one for each ingested bundle, and its expansion into one row for each message.

A LOADED record lists the ranges of ids that a bundle's chunks got, so ten million messages need a few dozen records.
Facts of single messages (due time, topic) are in the bundle, which is kept beside the event files as long as one of its
hours is. Without the bundle their ids are still known, and their due times up to the hour.

Used by workers of a node for traces, and by audits. Only reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.bundle import (
    BadBundleError,
    BundleSegment,
    Layout,
    bundle_path,
    chunks_of,
    read_layout,
    segment_of,
)
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.storage.errors import UnknownVersionError
from tickwheel.storage.events import TEXT_BYTES_MAX, Column, EventKind, EventRecord
from tickwheel.storage.unit import HOUR_MS, UNIT

Rows = NDArray[np.int64]
GAP_ROWS = 256
"""Unneeded rows that are read rather than reading twice."""


def note_texts(name: str, topics: Sequence[str]) -> tuple[str, ...]:
    """Texts of a LOADED record: the bundle's name, then as many of its topics, in their order in the bundle, as fit."""
    room = TEXT_BYTES_MAX - len(name)
    texts = [name]
    for topic in topics:
        room -= 1 + len(topic.encode())
        if room < 0:
            break
        texts.append(topic)
    return tuple(texts)


def _first_ids(note: EventRecord) -> Column:
    first: Column = (note.columns["hour"] << np.uint64(32)) | note.columns["first_index"]
    return first


def rows_of(note: EventRecord, ids: Column) -> Rows:
    """Rows of the bundle for those of the ids that it brought."""
    first, units = _first_ids(note), note.columns["units"]
    # In a bundle hours rise, and so do the indexes of chunks that came to one hour.
    place = np.searchsorted(first, ids, side="right") - 1
    chunk = np.maximum(place, 0)
    inside = (place >= 0) & (ids - first[chunk] < units[chunk])
    before = np.cumsum(units) - units
    rows: Rows = (before[chunk] + ids - first[chunk])[inside].astype(np.int64)
    return rows


def messages_of(note: EventRecord, disks: Sequence[Disk], rows: Rows | None = None) -> EventRecord:
    """The SCHEDULED record of a LOADED record's messages, read from the first disk with a complete copy of the bundle.

    `rows`: rising rows of the bundle; None: all. If no disk has the bundle, each message counts as due at the end of
    its hour, and its topic is known only if there is a single one.
    """
    units = note.columns["units"].astype(np.int64)
    rows = np.arange(int(units.sum()), dtype=np.int64) if rows is None else rows
    ends = np.cumsum(units)
    chunk = np.searchsorted(ends, rows, side="right")
    ids = _first_ids(note)[chunk] + (rows - (ends - units)[chunk]).astype(np.uint64)
    topics = note.texts[1:]
    found = _read(note, disks, rows)
    if found is None:
        due = note.columns["hour"][chunk] * np.uint64(HOUR_MS) + np.uint64(HOUR_MS - 1)
        places = np.full(len(rows), 0 if len(topics) == 1 else len(topics), np.uint64)
    else:
        # As in the wheel: late messages became due at the cursor.
        due = np.maximum(found["due_requested_ms"].astype(np.uint64), note.columns["clamp_ms"][chunk])
        places = found["topic_id"].astype(np.uint64)
    return replace(
        note,
        kind=EventKind.SCHEDULED,
        count=len(rows),
        texts=tuple(f"{place}={name}" for place, name in enumerate(topics)),
        columns={"id": ids, "due_ms": due, "topic_id": places},
    )


def _read(note: EventRecord, disks: Sequence[Disk], rows: Rows) -> NDArray[np.void] | None:
    name = note.texts[0] if note.texts else ""
    for disk in disks:
        try:
            path = bundle_path(name)
            if not disk.exists(path):
                continue
            file = disk.open(path)
            try:
                layout = read_layout(file, file.size())
            finally:
                file.close()
            if not np.array_equal(layout.table["units"], note.columns["units"]):
                continue
            segment = segment_of(disk, name, layout)
            try:
                parts = [np.zeros(0, UNIT), *_parts(segment, layout, rows)]
                return np.concatenate(parts)
            finally:
                segment.close()
        except (DiskError, BadBundleError, UnknownVersionError):
            continue  # another node's copy may be whole
    return None


def _parts(segment: BundleSegment, layout: Layout, rows: Rows) -> Iterator[NDArray[np.void]]:
    """Units of rising rows of a bundle; rows near each other are read together."""
    ends = np.cumsum(layout.table["units"], dtype=np.int64)
    edges = np.searchsorted(rows, np.append(0, ends)).tolist()
    for number, (_, chunk, _) in enumerate(chunks_of(segment, layout)):
        inside = rows[edges[number] : edges[number + 1]] - chunk.first_row
        for near in np.split(inside, np.flatnonzero(np.diff(inside) > GAP_ROWS) + 1):
            if len(near):
                first = int(near[0])
                yield segment.units_of(chunk, first, int(near[-1]) + 1 - first)[near - first]
