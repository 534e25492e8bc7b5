"""Bundles: what is built comes back, of damaged ones nothing is believed, those of the first version are still read."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.bundle_v1 import build_v1
from tickwheel.storage import bundle, packed_units
from tickwheel.storage.bundle import BadBundleError
from tickwheel.storage.disk import DiskError
from tickwheel.storage.simulated import SimulatedDisk
from tickwheel.storage.unit import HOUR_MS, NO_INDEX, ONE_TAG, UNIT

HOUR = 500_000
START_MS = HOUR * HOUR_MS
Builder = Callable[[np.ndarray, bytes, int], bytes]


def build_v2(units: np.ndarray, records: bytes, slot_ms: int) -> bytes:
    return b"".join(bundle.build(units, records, slot_ms=slot_ms, topics=3))


def build_first(units: np.ndarray, records: bytes, slot_ms: int) -> bytes:
    return build_v1(units, records, slot_ms=slot_ms, topics=3)


def stored(data: bytes) -> tuple[SimulatedDisk, str]:
    """A disk that has the bundle under the name of its bytes."""
    disk = SimulatedDisk(random.Random(1))
    name = hashlib.sha256(data).hexdigest()
    file = disk.open(bundle.bundle_path(name), create=True)
    file.append(data)
    file.close()
    return disk, name


def read(data: bytes) -> tuple[np.ndarray, bytes]:
    """All units, as rows of the whole bundle, and all records, after the check that a node makes."""
    disk, name = stored(data)
    layout = bundle.check(disk, name)
    segment = bundle.segment_of(disk, name, layout)
    parts, logs = [], []
    for _, chunk, _ in bundle.chunks_of(segment, layout):
        parts.append(segment.units_of(chunk, 0, chunk.count))
        logs.append(segment.read_log(chunk, 0, chunk.log_bytes) if chunk.log_bytes else b"")
        assert segment.places(chunk, 0, chunk.count).tolist() == list(range(chunk.count))
    segment.close()
    return np.concatenate(parts), b"".join(logs)


def units_of(rows: list[tuple[int, ...]]) -> np.ndarray:
    """Of (due, size, meta size, topic, tag hash, tag mask, key hash, flags), sorted by due time."""
    units = np.zeros(len(rows), UNIT)
    names = ("due_requested_ms", "size", "meta_size", "topic_id", "tag_hash", "tag_mask", "key_hash", "flags")
    for name, column in zip(names, zip(*sorted(rows), strict=True), strict=True):
        units[name] = column
    return units


def same(column: st.SearchStrategy[int], value: int) -> st.SearchStrategy[int]:
    """Sometimes anything, sometimes the same in all rows: then it is not kept row by row."""
    return st.one_of(st.just(value), column)


ROW = st.tuples(
    st.one_of(
        st.integers(START_MS, START_MS + 3_000),
        st.integers(START_MS, START_MS + 3 * HOUR_MS),
        st.integers(START_MS, START_MS + 20_000 * HOUR_MS),
        st.just(START_MS + 5),
    ),
    same(st.integers(2, 70_000), 100),
    st.just(2),
    st.integers(0, 2),
    same(st.integers(0, 2**32 - 1), 0),
    same(st.integers(0, 2**64 - 1), 2**64 - 1),
    same(st.integers(0, 2**64 - 1), 7),
    st.integers(0, ONE_TAG),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=60), st.sampled_from([100, 200, 500, 1_000]), st.booleans())
def test_what_is_built_comes_back(rows: list[tuple[int, ...]], slot_ms: int, alike: bool) -> None:
    """Packed or as they were: every field of every unit, chains and offsets included, and every record."""
    if alike:
        rows = [(due, *rows[0][1:]) for due, *_ in rows]
    units = units_of(rows)
    records = random.Random(len(rows)).randbytes(int(units["size"].sum()))
    packed, log = read(build_v2(units, records, slot_ms))
    first, first_log = read(build_first(units, records, slot_ms))
    assert log == first_log == records
    for name in UNIT.names or ():
        if name != "crc":
            assert packed[name].tolist() == first[name].tolist(), name
    in_hour = packed["due_ms"] // HOUR_MS
    assert packed["previous_index"][0] == NO_INDEX and (packed["index"][np.diff(in_hour, prepend=-1) != 0] == 0).all()


def many(count: int = 5_000, sizes: bool = True) -> tuple[np.ndarray, bytes]:
    """More units than one block has, of three hours."""
    rng = np.random.default_rng(3)
    units = np.zeros(count, UNIT)
    units["due_requested_ms"] = np.sort(START_MS + rng.integers(0, 3 * HOUR_MS, count))
    units["size"] = rng.integers(10, 300, count) if sizes else 20
    units["key_hash"] = rng.integers(0, 2**63, count)
    units["topic_id"] = rng.integers(0, 3, count)
    return units, random.Random(3).randbytes(int(units["size"].sum()))


@pytest.mark.parametrize("sizes", [True, False])
def test_any_rows_are_read_without_the_others(sizes: bool) -> None:
    """A tick or a single message of a large chunk: what is read in part equals the whole, across blocks too."""
    units, records = many(sizes=sizes)
    data = build_v2(units, records, 1_000)
    whole, _ = read(data)
    disk, name = stored(data)
    layout = bundle.check(disk, name)
    segment = bundle.segment_of(disk, name, layout)
    chunks = [chunk for _, chunk, _ in bundle.chunks_of(segment, layout)]
    rng = random.Random(5)
    for _ in range(60):
        chunk = rng.choice(chunks)
        first = rng.randrange(chunk.count)
        count = rng.choice([1, 3, packed_units.BLOCK_ROWS, rng.randrange(1, chunk.count)])
        count = min(count, chunk.count - first)
        at = chunk.first_row + first
        assert np.array_equal(segment.units_of(chunk, first, count), whole[at : at + count])
    unit = whole[-1]
    record = segment.read_log(chunks[-1], int(unit["offset"]), int(unit["size"]))
    assert record == records[-int(unit["size"]) :]


def test_a_unit_takes_what_it_needs() -> None:
    """Messages without keys and tags that are all as long: few bytes each beside the record, where it was a hundred."""
    units = np.zeros(50_000, UNIT)
    units["due_requested_ms"] = np.sort(START_MS + np.random.default_rng(1).integers(0, 6 * HOUR_MS, len(units)))
    units["size"] = 100
    records = bytes(100 * len(units))
    assert len(build_first(units, records, 1_000)) / len(units) > 200
    assert len(build_v2(units, records, 1_000)) / len(units) < 104.5


@pytest.mark.parametrize("build", [build_v2, build_first])
def test_of_a_damaged_bundle_nothing_is_believed(build: Builder) -> None:
    """A byte that has changed, wherever, or an end that is missing: refused with a text, never by another error."""
    units, records = many(300)
    data = build(units, records, 500)
    rng = random.Random(7)
    layout_of = bundle.Layout(500, 3, np.frombuffer(data, bundle.TABLE, 3, bundle.HEADER_BYTES))
    parts = [0, bundle.HEADER_BYTES, layout_of.log_at, layout_of.index_at, layout_of.heads_at, len(data)]
    places = [rng.randrange(low, high) for low, high in itertools.pairwise(parts) for _ in range(40)]
    for place in places:
        bad = bytearray(data)
        bad[place] ^= 1 << rng.randrange(8)
        disk, name = stored(bytes(bad))
        with pytest.raises((BadBundleError, DiskError)) as raised:
            bundle.check(disk, name)
        assert name in str(raised.value)
    for length in [0, 10, *(rng.randrange(len(data)) for _ in range(20))]:
        disk, name = stored(data[:length])
        with pytest.raises((BadBundleError, DiskError)):
            bundle.check(disk, name)


def test_what_claims_to_be_a_bundle_and_matches_its_checksums_is_refused() -> None:
    """Checksums are no proof: rows of another order, of another hour, of more than there are, of a topic not listed."""
    units, records = many(300)
    good = units.copy()
    cases: list[tuple[str, Callable[[np.ndarray], None]]] = [
        ("topic", lambda u: u["topic_id"].__setitem__(7, 3)),
        ("meta", lambda u: u["meta_size"].__setitem__(7, 5_000)),
        ("flags", lambda u: u["flags"].__setitem__(7, 4)),
    ]
    for text, spoil in cases:
        bad = good.copy()
        spoil(bad)
        disk, name = stored(build_v2(bad, records, 1_000))
        with pytest.raises(BadBundleError, match=text):
            bundle.check(disk, name)
    for text, wrong, lost in (("sorted", good[::-1], 0), ("lengths", good, 1)):
        with pytest.raises(BadBundleError, match=text):
            build_v2(wrong, records[lost:], 1_000)


def test_a_newer_version_is_refused_by_name() -> None:
    """It says which version it is and what this program reads."""
    units, records = many(10)
    data = bytearray(build_v2(units, records, 1_000))
    data[8] = 9
    data[52:56] = google_crc32c.value(bytes(data[:52])).to_bytes(4, "little")
    disk, name = stored(bytes(data))
    with pytest.raises(DiskError, match="version 9"):
        bundle.check(disk, name)
