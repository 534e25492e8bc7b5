"""Event files: what was written is read, bounded in size, and a torn or damaged end is only an end."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.storage.events import (
    COLUMNS,
    ENCODED_TOGETHER,
    NAMING,
    TOPICS_A_RECORD,
    EventKind,
    EventRecord,
    EventRecords,
    EventWriter,
    Places,
    content,
    decode,
    encode,
    holding,
    locate,
    paths,
    read_events,
)
from tickwheel.storage.simulated import SimulatedDisk

VALUES = st.one_of(st.integers(0, 300), st.integers(0, 1 << 33), st.integers(0, (1 << 64) - 1))


@st.composite
def records(draw: st.DrawFn) -> EventRecord:
    """Any record: columns that are constant, runs, near each other, or wild."""
    kind = draw(st.sampled_from(EventKind))
    count = draw(st.one_of(st.integers(0, 20), st.integers(45, 60))) if COLUMNS[kind] else draw(st.integers(0, 1 << 31))
    columns = {}
    for name in COLUMNS[kind]:
        base, step = draw(VALUES), draw(st.integers(-3, 3))
        run = np.array([(base + step * row) % (1 << 64) for row in range(count)], np.uint64)
        wild = np.array(draw(st.lists(VALUES, min_size=count, max_size=count)), np.uint64)
        columns[name] = draw(st.sampled_from([run, wild]))
    number = st.integers(0, (1 << 63) - 1)
    texts = draw(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=3))
    return EventRecord(
        *(
            kind,
            draw(number),
            draw(number),
            draw(number),
            draw(number),
            draw(st.integers(0, 255)),
            count,
            texts,
            columns,
        )
    )


def batch(*alike: EventRecord) -> EventRecords:
    """Records of one kind and moment, as they are written."""
    first, names = alike[0], COLUMNS[alike[0].kind]
    columns = {name: np.concatenate([record.columns[name] for record in alike]) for name in names}
    parts = [(record.detail, record.count, record.texts) for record in alike]
    return EventRecords(first.kind, first.at_ms, first.stamped_ms, first.term, first.log_index, parts, columns)


def same(one: EventRecord, other: EventRecord) -> bool:
    """Equal in all that is stored."""
    facts = [
        (r.kind, r.at_ms, r.stamped_ms, r.term, r.log_index, r.detail, r.count, "\0".join(r.texts))
        for r in (one, other)
    ]
    return facts[0] == facts[1] and all(np.array_equal(one.columns[n], other.columns[n]) for n in COLUMNS[one.kind])


@given(st.lists(records(), min_size=1, max_size=5), st.data())
@settings(max_examples=60)
def test_what_was_written_is_read_until_it_is_damaged(written: list[EventRecord], data: st.DataObject) -> None:
    """All records, in order; with one bit turned over, those before it."""
    parts = [encode([batch(record)]) for record in written]
    blob = encode([batch(record) for record in written])
    assert blob == b"".join(parts)
    at, seen = 0, []
    while (found := decode(blob, at)) is not None:
        found_here, at = found
        seen += found_here
    assert at == len(blob)
    assert len(seen) == len(written) and all(map(same, seen, written))
    place = data.draw(st.integers(0, len(blob) - 1))
    broken = bytearray(blob)
    broken[place] ^= 1 << data.draw(st.integers(0, 7))
    at, whole = 0, 0
    while (found := decode(bytes(broken), at)) is not None:
        whole += 1
        at = found[1]
    assert whole == next(number for number in range(len(parts)) if place < sum(map(len, parts[: number + 1])))


OTHER_TEXTS = {EventKind.DISPATCHED: (), EventKind.DELIVERED: ("g", "c"), EventKind.SETTLED: ("g", "r")}


@pytest.mark.parametrize("rows", [1, 3, ENCODED_TOGETHER // 2, 2 * ENCODED_TOGETHER])
def test_records_encoded_together_are_as_if_each_were_alone(rows: int) -> None:
    """Of whatever kinds, and however many values are encoded in one pass."""
    rng = random.Random(rows)
    kinds = [kind for kind in EventKind if kind not in (EventKind.LOST, EventKind.LOADED, EventKind.GROUP)]
    batches = []
    for number in range(20):
        kind, count = rng.choice(kinds), rng.choice((rows, 1, 2))
        spread = rng.choice((1, 1 << 7, 1 << 15, 1 << 31, 1 << 63))
        columns = {name: np.array([rng.randrange(spread) for _ in range(count)], np.uint64) for name in COLUMNS[kind]}
        texts = ("topic", "group", "name")
        batches.append(EventRecords(kind, number, parts=[(0, count if columns else 0, texts)], columns=columns))
    assert encode(batches) == b"".join(encode([one]) for one in batches)


@st.composite
def of_topics(draw: st.DrawFn) -> list[EventRecord]:
    """Records of one kind and moment, each of a topic, as a command or a batch brings them."""
    kind = draw(st.sampled_from([*OTHER_TEXTS]))
    counts = draw(st.lists(st.integers(1, 60), min_size=1, max_size=20))
    details = draw(st.lists(st.integers(0, 1), min_size=len(counts), max_size=len(counts)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    near = {name: draw(st.sampled_from([1, 3, 200, 1 << 20, 1 << 63])) for name in COLUMNS[kind]}
    return [
        EventRecord(
            kind,
            7,
            log_index=9,
            detail=detail,
            count=count,
            texts=(f"t{place}", *OTHER_TEXTS[kind]),
            columns={name: rng.integers(0, near[name], count, np.uint64) for name in near},
        )
        for place, (count, detail) in enumerate(zip(counts, details, strict=True))
    ]


@given(of_topics())
@settings(max_examples=60)
def test_records_of_many_topics_are_read_as_if_each_were_alone(written: list[EventRecord]) -> None:
    """Those that are alike but for the topic lie in one record, with a header and a checksum for all."""
    disk = SimulatedDisk(random.Random(1))
    EventWriter(disk, "events", 64 << 20).append([batch(*written)])
    seen = list(read_events(disk, "events/1.events"))
    assert len(seen) == len(written) and all(map(same, seen, written))
    runs = sum(one.detail != before.detail for before, one in itertools.pairwise(written)) + 1
    places = locate(disk, "events/1.events", Places())
    assert len(places.begins) == runs
    wanted = [min(ids_in(written[-1]))]
    found = list(holding(disk, "events/1.events", places, wanted))
    holders = [one for one in written if ids_in(one) & set(wanted)]
    kept = [one for one in found if ids_in(one) & set(wanted)]
    assert len(kept) == len(holders) and all(map(same, kept, holders))


def test_more_topics_than_one_record_holds() -> None:
    """The rest begins another; a topic that is alone there has the record of a single topic."""
    written = [
        EventRecord(EventKind.DISPATCHED, 7, count=1, texts=(f"t{n}",), columns={"id": one, "unit": one})
        for n in range(TOPICS_A_RECORD + 1)
        for one in [np.array([n], np.uint64)]
    ]
    data = encode([batch(*written)])
    first, end = decode(data, 0) or ([], 0)
    rest, last = decode(data, end) or ([], 0)
    assert last == len(data) and end < 40 * TOPICS_A_RECORD
    assert data[end:] == encode([batch(written[-1])])
    assert all(map(same, [*first, *rest], written)) and len(first) == TOPICS_A_RECORD


def test_the_layout_of_many_topics() -> None:
    """As docs/FORMATS.md describes it, byte by byte."""
    columns = {"unit": np.array([5, 6, 9], np.uint64), "attempt": np.ones(3, np.uint64)}
    data = encode([EventRecords(EventKind.SETTLED, 7, parts=[(1, 2, "tgr"), (1, 1, "ugr")], columns=columns)])
    text = b"g\0r\0t\0u"
    unit = struct.pack("<BxxxxxxxQq", 1, 5, 0) + bytes([0, 1, 4])
    attempt = struct.pack("<BxxxxxxxQq", 0, 1, 0)
    topic = struct.pack("<BxxxxxxxQq", 1, 0, 0) + bytes([0, 0, 1])
    body = unit + attempt + topic
    head = struct.pack("<4sBBBBIIqqQQHH", b"TWEV", 1, 13, 3, 1, 3, len(body), 7, 0, 0, 0, len(text), 0)
    assert data == head + struct.pack("<I", google_crc32c.value(head + text + body)) + text + body


def ids_in(record: EventRecord) -> set[int]:
    """Of the messages that a record names."""
    return {int(value) for name in NAMING if name in record.columns for value in record.columns[name]}


@given(st.lists(records(), min_size=1, max_size=8), st.data())
@settings(max_examples=60)
def test_a_search_decodes_what_may_hold_an_id(written: list[EventRecord], data: st.DataObject) -> None:
    """Every record with the id is found, also if the file has grown since the search before, and so is every bundle;
    of the others only those that arrays could not rule out for less than a decoding costs."""
    disk = SimulatedDisk(random.Random(1))
    writer = EventWriter(disk, "events", 64 << 20)
    places, path = Places(), "events/1.events"
    cut = data.draw(st.integers(0, len(written)))
    for part in (written[:cut], written[cut:]):
        if part:
            writer.append(list(map(batch, part)))
            places = locate(disk, path, places)
    assert places.end == len(content(disk, path))
    assert places.first_ms == next((one.at_ms for one in written if one.at_ms), 0)
    assert places.lost == sum(one.count for one in written if one.kind is EventKind.LOST)
    named = sorted(set().union(*map(ids_in, written)))
    wanted = data.draw(st.lists(st.sampled_from(named) if named else VALUES, min_size=1, max_size=3))
    found = list(holding(disk, path, places, wanted))
    holders = [one for one in written if one.kind is EventKind.LOADED or ids_in(one) & set(wanted)]
    kept = [one for one in found if one.kind is EventKind.LOADED or ids_in(one) & set(wanted)]
    assert len(kept) == len(holders) and all(map(same, kept, holders))


HOURS = 168


def arriving(count: int, rows: int) -> Iterator[EventRecord]:
    """Records of messages that are due at any time of a week, with ids as the wheel gives them: rising in each hour."""
    rng = np.random.default_rng(5)
    taken = np.zeros(HOURS, np.uint64)
    for number in range(count):
        ids = []
        for hour in rng.integers(0, HOURS, rows).tolist():
            ids.append((497_000 + hour) << 32 | int(taken[hour]))
            taken[hour] += 1
        columns = {"id": np.array(ids, np.uint64), "due_ms": np.zeros(rows, np.uint64)}
        columns["topic_id"] = columns["due_ms"]
        yield EventRecord(EventKind.SCHEDULED, number, count=rows, columns=columns)


@pytest.mark.parametrize(("count", "rows"), [(3_000, 1), (6_000, 4), (6_000, 20), (400, 900)])
def test_a_search_reads_few_records_though_all_span_the_week(count: int, rows: int) -> None:
    """However many messages a batch has: the record of each is found, and what may hold it is one block, not the file.
    The index has few bytes for a record and less than two for a message."""
    disk = SimulatedDisk(random.Random(1))
    written = list(arriving(count, rows))
    EventWriter(disk, "events", 1 << 30).append(list(map(batch, written)))
    path = "events/1.events"
    places = locate(disk, path, Places())
    for wanted in np.random.default_rng(6).integers(0, count, 20).tolist():
        number = int(written[wanted].columns["id"][rows // 2])
        assert wanted in [one.at_ms for one in holding(disk, path, places, [number]) if number in ids_in(one)]
        assert len(places.of([number])) <= 1_100
    columns = [getattr(places, name) for name in Places.__slots__]
    size = sum(column.nbytes for column in columns if isinstance(column, np.ndarray))
    assert size <= 48 * count + 2 * count * rows


def test_a_search_finds_a_bundle_among_batches() -> None:
    """Whatever the id: what a bundle brought is not known before it is read."""
    bundle = EventRecord(
        EventKind.LOADED, 7, columns={name: np.zeros(0, np.uint64) for name in COLUMNS[EventKind.LOADED]}
    )
    batches = list(arriving(6, 50))
    disk = SimulatedDisk(random.Random(1))
    EventWriter(disk, "events", 1 << 30).append(list(map(batch, [*batches[:3], bundle, *batches[3:]])))
    places = locate(disk, "events/1.events", Places())
    for number in (0, 497_050 << 32, int(batches[4].columns["id"][9]), (1 << 64) - 1):
        found = [one.kind for one in holding(disk, "events/1.events", places, [number])]
        assert EventKind.LOADED in found and len(found) <= 2


def test_a_search_passes_over_what_was_spoilt_or_cut_since_the_last() -> None:
    """Places are kept, disks fail later: such a record is not found, and the search goes on or ends."""
    disk = SimulatedDisk(random.Random(1))
    written = [*arriving(2, 1_000), *arriving(1, 3)]
    EventWriter(disk, "events", 1 << 30).append(list(map(batch, written)))
    path = "events/1.events"
    places = locate(disk, path, Places())
    number = int(written[0].columns["id"][0])
    assert len(list(holding(disk, path, places, [number]))) == 2
    file = disk.open(path)
    spoilt = bytearray(file.read_at(0, file.size()))
    spoilt[11] ^= 0x7F  # of the first record's count
    file.truncate(0)
    file.append(bytes(spoilt))
    assert [one.count for one in holding(disk, path, places, [number])] == [3]
    file.truncate(500)  # within the first record's columns
    assert list(holding(disk, path, places, [number])) == []
    file.close()
    disk.remove(path)
    assert list(holding(disk, path, places, [number])) == []


def record(number: int) -> EventRecord:
    """A thousand ids of a number's own."""
    ids = np.random.default_rng(number).integers(0, 1 << 40, 1_000).astype(np.uint64)
    return EventRecord(EventKind.CANCELLED, number, count=1_000, columns={"id": ids})


def test_files_are_bounded_and_the_oldest_go() -> None:
    """Whatever is written, the directory stays below its bound; what is left is the newest, without a gap; another
    process goes on in a file of its own and counts the old ones."""
    disk = SimulatedDisk(random.Random(1))
    bytes_max = 100_000
    number = 0
    for _ in range(3):
        writer = EventWriter(disk, "events", bytes_max)
        for _ in range(40):
            writer.append([batch(record(number))])
            number += 1
            assert sum(disk.size(path) for path in paths(disk, "events")) <= bytes_max
        writer.close()
    seen = [found.at_ms for path in paths(disk, "events") for found in read_events(disk, path)]
    assert seen == list(range(number - len(seen), number))
    assert len(seen) >= 8


def test_a_torn_end_ends_one_file_only() -> None:
    """A crash in the middle of a write: the records before it are read, and those of later files."""
    disk = SimulatedDisk(random.Random(1))
    for number in range(2):
        writer = EventWriter(disk, "events", 1 << 20)
        writer.append([batch(record(2 * number)), batch(record(2 * number + 1))])
        writer.close()
    first = paths(disk, "events")[0]
    file = disk.open(first)
    file.truncate(file.size() - 10)
    file.close()
    assert [[found.at_ms for found in read_events(disk, path)] for path in paths(disk, "events")] == [[0], [2, 3]]
    assert list(read_events(disk, "events/99.events")) == []
