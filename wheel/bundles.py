"""Chunks of bundles that were ingested: which exist, and how their units are read.

Owns, per hour, the chunks that lie in bundles (storage/bundle.py), and per bundle what its ingest decided. Both are
logical state. A bundle is never rewritten. What the ingest decided (first global index, first log offset, clamped due
times, stamp, topics) is laid over its units whenever they are read (`Overlay`).

Invariants: the chunks of an hour are in order of their first index, and nothing else has indexes in their ranges. A
bundle is kept as long as one of its chunks is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.bundle import BundleSegment, Layout, bundle_path
from tickwheel.storage.disk import Disk
from tickwheel.storage.segment import Chunk
from tickwheel.wheel.units import HOUR_MS, NO_INDEX, Units

TAKEN = np.dtype(
    [
        ("hour", "<u4"),
        ("bundle", "<u4"),
        ("first_index", "<u4"),
        ("units", "<u4"),
        ("log_start", "<u8"),  # offset in the hour's log of its first record
        ("log_at", "<u8"),  # where that record lies in the bundle's log
        ("first_row", "<u4"),  # in the bundle's index
        ("heads_at", "<u4"),  # in the bundle's heads
    ]
)
"""One ingested chunk."""

TakenChunks = NDArray[np.void]


@dataclass(frozen=True, slots=True, eq=False)
class Ingested:
    """What an ingest decided for the bundle's units."""

    chunks: TakenChunks
    clamp_ms: int
    """Units that were due before this time became due at it."""
    late: int
    """Number of units whose hours were over."""


_NONE: TakenChunks = np.zeros(0, TAKEN)


@dataclass(frozen=True, slots=True)
class Overlay:
    """What the ingest of one bundle decided."""

    number: int
    name: str
    slot_ms: int
    clamp_ms: int
    """The cursor's due time at the ingest: earlier due times became it."""
    stamped_ms: int
    topic_ids: tuple[int, ...]
    log_at: int
    index_at: int
    heads_at: int
    bytes: int
    chunks: int = 0
    """Number of its chunks that are still needed."""

    def segment(self, disk: Disk) -> BundleSegment:
        """The bundle, opened for reading."""
        return BundleSegment(
            disk, self.name, self.number, log_at=self.log_at, index_at=self.index_at, heads_at=self.heads_at
        )

    @property
    def path(self) -> str:
        """Path of the bundle."""
        return bundle_path(self.name)

    def chunk(self, segment: BundleSegment, taken: np.void) -> Chunk:
        """A chunk of the bundle with its index and offset in the hour."""
        chunk = segment.chunk_at(int(taken["heads_at"]), int(taken["first_row"]), int(taken["log_at"]))
        ticks, starts = chunk.ticks, chunk.starts
        hour = int(taken["hour"])
        if hour == self.clamp_ms // HOUR_MS:
            ticks, starts = self._clamped(segment, chunk, hour)
        return replace(
            chunk,
            first_index=int(taken["first_index"]),
            log_start=int(taken["log_start"]),
            ticks=ticks,
            starts=starts,
        )

    def _clamped(
        self, segment: BundleSegment, chunk: Chunk, hour: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """The chunk's directory, with all late units moved into the tick of the cursor."""
        tick = self.clamp_ms % HOUR_MS // self.slot_ms
        packed = chunk.built
        built_for = packed.hour if packed else int(segment.units_of(chunk, 0, 1)["due_ms"][0]) // HOUR_MS
        passed = len(chunk.ticks) if built_for < hour else int(np.searchsorted(chunk.ticks, tick, side="right"))
        if not passed:
            return chunk.ticks, chunk.starts
        ticks = np.concatenate([np.array([tick], np.uint32), chunk.ticks[passed:]])
        starts = np.concatenate([chunk.starts[:1], chunk.starts[passed:]])
        return ticks, starts

    def units(self, units: Units, chunk: Chunk) -> Units:
        """Checked units of a chunk, with what the ingest decided laid over them."""
        units = units if units.flags.writeable else units.copy()
        np.maximum(units["due_requested_ms"], self.clamp_ms, out=units["due_ms"])
        units["index"] += np.uint32(chunk.first_index)
        units["offset"] += np.uint64(chunk.log_start)
        previous = units["previous_index"]
        units["previous_index"] = np.where(previous == NO_INDEX, NO_INDEX, previous + np.uint32(chunk.first_index))
        units["scheduled_ms"] = self.stamped_ms
        units["topic_id"] = np.array(self.topic_ids, np.uint32)[units["topic_id"]]
        return units


class Bundles:
    """Used on the core's thread only."""

    def __init__(self) -> None:
        self._chunks: dict[int, TakenChunks] = {}
        self._overlays: dict[int, Overlay] = {}
        self._next = 1
        self.chunks = 0
        """Number of chunks."""

    def take(
        self,
        name: str,
        layout: Layout,
        hours: NDArray[np.int64],
        first: NDArray[np.int64],
        offsets: NDArray[np.int64],
        *,
        clamp_ms: int,
        stamped_ms: int,
        topic_ids: tuple[int, ...],
    ) -> TakenChunks:
        """Register the chunks of a bundle, each in its hour with its first index and log offset."""
        table = layout.table
        number = self._next
        self._next += 1
        taken = np.zeros(len(table), TAKEN)
        taken["hour"] = hours
        taken["bundle"] = number
        taken["first_index"] = first
        taken["units"] = table["units"]
        taken["log_start"] = offsets
        taken["log_at"] = np.cumsum(table["log_bytes"]) - table["log_bytes"]
        taken["first_row"] = np.cumsum(table["units"]) - table["units"]
        taken["heads_at"] = np.cumsum(table["heads_bytes"]) - table["heads_bytes"]
        self._overlays[number] = Overlay(
            number, name, layout.slot_ms, clamp_ms, stamped_ms, topic_ids,
            layout.log_at, layout.index_at, layout.heads_at, layout.bytes, len(table),
        )  # fmt: skip
        self._put(taken)
        return taken

    def _put(self, taken: TakenChunks) -> None:
        starts = np.flatnonzero(np.diff(taken["hour"].astype(np.int64), prepend=-1))
        for part in np.split(taken, starts[1:]):
            hour = int(part["hour"][0])
            known = self._chunks.get(hour)
            self._chunks[hour] = part if known is None else np.concatenate([known, part])
        self.chunks += len(taken)

    def has(self, hour: int) -> bool:
        """Whether the hour has chunks in bundles."""
        return hour in self._chunks

    def of(self, hour: int) -> TakenChunks:
        """Chunks of an hour in bundles, by rising first index."""
        return self._chunks.get(hour, _NONE)

    def overlays_of(self, taken: TakenChunks) -> dict[int, Overlay]:
        """Number of the bundle -> overlay, for the bundles of these chunks."""
        return {number: self._overlays[number] for number in np.unique(taken["bundle"]).tolist()}

    def overlays(self) -> list[Overlay]:
        """Overlays of all bundles, in the order of their ingest."""
        return list(self._overlays.values())

    def inside(self, hour: int, index: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """True for each index of an hour that belongs to a bundle; and for each, how many indexes of bundles lie below
        it."""
        taken = self._chunks.get(hour)
        if taken is None:
            return np.zeros(len(index), np.bool_), np.zeros(len(index), np.int64)
        first, units = taken["first_index"].astype(np.int64), taken["units"].astype(np.int64)
        place = np.searchsorted(first, index, side="right")
        below = np.append(0, np.cumsum(units))[place]
        last = np.maximum(place - 1, 0)
        inside = (place > 0) & (index < first[last] + units[last])
        return inside, below

    def forget(self, below: int) -> list[str]:
        """Hours before `below` are gone: drop their chunks. Returns the names of bundles that have no chunk left."""
        gone: list[str] = []
        for hour in [hour for hour in self._chunks if hour < below]:
            taken = self._chunks.pop(hour)
            self.chunks -= len(taken)
            for number in taken["bundle"].tolist():
                overlay = self._overlays[number]
                if overlay.chunks == 1:
                    del self._overlays[number]
                    gone.append(overlay.name)
                else:
                    self._overlays[number] = replace(overlay, chunks=overlay.chunks - 1)
        return gone

    # -- checkpoints

    def dump(self) -> bytes:
        """The whole content; empty if there never was any."""
        if self._next == 1:
            return b""
        rows = [
            [o.number, o.name, o.slot_ms, o.clamp_ms, o.stamped_ms, o.topic_ids, o.log_at, o.index_at, o.heads_at,
             o.bytes, o.chunks]
            for o in self._overlays.values()
        ]  # fmt: skip
        facts = json.dumps({"next": self._next, "bundles": rows}, separators=(",", ":")).encode()
        chunks = [self._chunks[hour] for hour in sorted(self._chunks)]
        return len(facts).to_bytes(8, "little") + facts + b"".join(part.tobytes() for part in chunks)

    def load(self, data: bytes) -> None:
        """Restore what `dump` returned."""
        if not data:
            return
        size = 8 + int.from_bytes(data[:8], "little")
        facts = json.loads(data[8:size])
        self._next = facts["next"]
        for number, name, slot_ms, clamp_ms, stamped_ms, topic_ids, *rest in facts["bundles"]:
            self._overlays[number] = Overlay(number, name, slot_ms, clamp_ms, stamped_ms, tuple(topic_ids), *rest)
        taken = np.frombuffer(data[size:], TAKEN)
        if len(taken):
            self._put(taken)
