"""Checkpoints of the wheel: one sequential run file, and the fsync of what was merged since the last one.

Owns the run file (docs/FORMATS.md): the hour table, the marks, the arrival buffer with its units in
(hour, index) order, then their records, and which bundles were ingested. It is written once under a new number,
never changed, and removed when a later checkpoint is durable. The wheel's part of the manifest (`WheelState`)
names it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.proto.log_pb2 import ManifestFile
from tickwheel.storage.disk import Buffer as Bytes
from tickwheel.storage.disk import Disk
from tickwheel.storage.segment import CorruptSegmentError, Segment
from tickwheel.wheel.buffer import EXTENT, Block, Buffer
from tickwheel.wheel.jobs import hour_directory, units_from
from tickwheel.wheel.marks import MOVED, MarksCapture
from tickwheel.wheel.units import UNIT_BYTES, CursorKey, Ids, Units, ids_of, join_units, picked

_MAGIC = b"TWRF"
FORMAT_VERSION = 2
"""Version of run files. Version 2 has a list of bundles at its end; a wheel that never ingested one writes version
1."""
STATE_VERSION = 1
_HEADER = struct.Struct("<4sHHQQQQQQ")  # magic version reserved hours marks moves units extents record_bytes
_HOUR_ROW_BYTES = 48
_PIECE_BYTES = 4 << 20
_STATE = struct.Struct(
    "<4sHHIqQQQQQ"
)  # magic version reserved slot_ms due_ms index local_index pending removed_below run


@dataclass(frozen=True, slots=True)
class WheelState:
    """The wheel's part of the manifest."""

    slot_ms: int
    cursor: CursorKey
    local_index: int
    pending: int
    removed_below: int
    run: int

    def encode(self) -> bytes:
        body = _STATE.pack(
            b"TWST", STATE_VERSION, 0, self.slot_ms, self.cursor.due_ms, self.cursor.index,
            self.local_index, self.pending, self.removed_below, self.run,
        )  # fmt: skip
        return body + int(google_crc32c.value(body)).to_bytes(4, "little")

    @classmethod
    def decode(cls, data: bytes) -> WheelState:
        body = data[:-4]
        if len(body) != _STATE.size or google_crc32c.value(body) != int.from_bytes(data[-4:], "little"):
            raise CorruptSegmentError("manifest", 0, "the wheel's state does not match its CRC")
        magic, version, _, slot_ms, due_ms, index, local_index, pending, removed_below, run = _STATE.unpack(body)
        if magic != b"TWST" or version != STATE_VERSION:
            raise CorruptSegmentError("manifest", 0, f"wheel state is not of version {STATE_VERSION}")
        return cls(slot_ms, CursorKey(due_ms, index), local_index, pending, removed_below, run)


def run_path(directory: str, number: int) -> str:
    return f"{directory}/runs/{number}.run"


@dataclass(frozen=True, slots=True)
class RunContent:
    """Content of a run file."""

    hours: NDArray[np.int64]
    marks: Ids
    moves: NDArray[np.void]
    units: Units
    extents: Units
    records: bytes
    bundles: bytes


class CheckpointJob:
    """Writes the state as it was when the job was made; appends, merges and dispatches may go on meanwhile.

    After `run` the manifest must get `state` and `files`. Once it is durable, call `Wheel.checkpoint_durable(job)`,
    then run `remove_old` in a worker, before the next checkpoint begins.
    """

    kind = "checkpoint"

    def __init__(
        self,
        disk: Disk,
        directory: str,
        state: WheelState,
        hours: NDArray[np.int64],
        marks: MarksCapture,
        buffers: Sequence[Buffer],
        dirty: set[int],
        doomed: list[int],
        bundles: bytes,
        bundle_files: list[ManifestFile],
    ) -> None:
        self._disk = disk
        self._directory = directory
        self.wheel_state = state
        self.state = state.encode()
        self._hours = hours
        self._marks = marks
        self._blocks: list[Block] = [block for buffer in buffers for block in buffer.blocks]
        self._pieces = [(buffer.extents(), list(buffer.records)) for buffer in buffers]
        self.dirty = dirty
        self._bundles = bundles
        self.files: list[ManifestFile] = bundle_files
        self.doomed = doomed
        """Removed hours, whose files go once this checkpoint is durable."""

    def run(self) -> None:
        path = run_path(self._directory, self.wheel_state.run)
        file = self._disk.open(path, create=True)
        crc = 0
        size = 0
        try:
            file.truncate(0)
            for part in self._parts():
                file.append(part)
                crc = google_crc32c.extend(crc, bytes(part))
                size += len(part)
            trailer = crc.to_bytes(4, "little")
            file.append(trailer)
            file.fsync()
        finally:
            file.close()
        self._disk.fsync_dir(f"{self._directory}/runs")
        self._fsync_segments()
        self.files.append(ManifestFile(path=path, bytes=size + 4, crc32c=google_crc32c.extend(crc, trailer)))

    def remove_old(self) -> None:
        """Remove files that only earlier manifests named; call it once this one is durable. Any thread. Raises
        DiskError."""
        directory = f"{self._directory}/runs"
        for name in self._disk.list(directory):
            stem = name.partition(".")[0]
            if stem.isdecimal() and int(stem) < self.wheel_state.run:
                self._disk.remove(f"{directory}/{name}")
        for hour in self.doomed:
            self._disk.remove(hour_directory(self._directory, hour))

    def _fsync_segments(self) -> None:
        for hour, rows, log_bytes, heads_bytes in self._hours[:, [0, 3, 4, 5]].tolist():
            if not rows:
                continue
            segment = Segment(self._disk, hour_directory(self._directory, hour), 0)
            if hour in self.dirty:
                try:
                    segment.fsync()
                finally:
                    segment.close()
                self._disk.fsync_dir(hour_directory(self._directory, hour))
            lengths = (log_bytes, rows * UNIT_BYTES, heads_bytes)
            self.files += [
                ManifestFile(path=path, bytes=length) for path, length in zip(segment.paths(), lengths, strict=True)
            ]

    def _parts(self) -> Iterator[Bytes]:
        units, extents, records = self._gather()
        marks, moves = self._marks.arrays()
        counts = (len(self._hours), len(marks), len(moves), len(units), len(extents))
        record_bytes = int(extents["bytes"].sum())
        yield _HEADER.pack(_MAGIC, FORMAT_VERSION if self._bundles else 1, 0, *counts, record_bytes)
        yield self._hours.tobytes()
        yield marks.tobytes()
        yield moves.tobytes()
        step = _PIECE_BYTES // UNIT_BYTES
        for at in range(0, len(units), step):
            yield units[at : at + step].tobytes()
        yield extents.tobytes()
        held: list[Bytes] = []
        held_bytes = 0
        for record in records:
            held.append(record)
            held_bytes += len(record)
            if held_bytes >= _PIECE_BYTES:
                yield b"".join(held)
                held, held_bytes = [], 0
        yield b"".join(held)
        yield self._bundles

    def _gather(self) -> tuple[Units, Units, Iterator[Bytes]]:
        """Units by (hour, index), one extent for each contiguous range of ids, and the records in that order."""
        if not self._blocks:
            return units_from(np.zeros(0, dtype=np.uint8)), np.zeros(0, dtype=EXTENT), iter(())
        units: Units = join_units([block.units for block in self._blocks])
        ids = ids_of(units)
        order = np.argsort(ids, kind="stable")
        ids, units = ids[order], picked(units, order)
        starts = np.append(0, np.flatnonzero(np.diff(ids) != 1) + 1)
        extents = np.zeros(len(starts), dtype=EXTENT)
        extents["id"] = ids[starts]
        extents["offset"] = units["offset"][starts]
        extents["bytes"] = np.add.reduceat(units["size"].astype(np.int64), starts)
        extents["at"] = np.cumsum(extents["bytes"]) - extents["bytes"]
        extents["count"] = np.diff(starts, append=len(units))
        extents["number"] = starts
        source = np.concatenate([np.full(len(piece), number) for number, (piece, _) in enumerate(self._pieces)])
        pieces = np.concatenate([piece for piece, _ in self._pieces])
        order = np.argsort(pieces["id"], kind="stable")
        return units, extents, self._records(source[order], picked(pieces, order))

    def _records(self, source: NDArray[np.int64], pieces: Units) -> Iterator[Bytes]:
        columns = (source, pieces["append"], pieces["at"], pieces["bytes"])
        for number, append, at, size in zip(*(column.tolist() for column in columns), strict=True):
            yield memoryview(self._pieces[number][1][append])[at : at + size]


def read_run(disk: Disk, path: str) -> RunContent:
    """Read and check a run file."""
    file = disk.open(path)
    try:
        size = file.size()
        parts: list[bytes] = []
        crc = 0
        at = 0
        while at < size:
            part = file.read_at(at, min(_PIECE_BYTES, size - at))
            if not part:
                raise CorruptSegmentError(path, at, "the run file ends early")
            at += len(part)
            if at == size:
                crc = google_crc32c.extend(crc, part[:-4])
            elif at > size - 4:
                raise CorruptSegmentError(path, at, "short read at the end")
            else:
                crc = google_crc32c.extend(crc, part)
            parts.append(part)
    finally:
        file.close()
    data = b"".join(parts)
    if len(data) < _HEADER.size + 4 or crc != int.from_bytes(data[-4:], "little"):
        raise CorruptSegmentError(path, 0, "the run file does not match its CRC")
    magic, version, _, hours, marks, moves, units, extents, record_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC or not 1 <= version <= FORMAT_VERSION:
        raise CorruptSegmentError(path, 0, f"not a run file of version 1 to {FORMAT_VERSION}")
    view = memoryview(data)
    at = _HEADER.size

    def take(size: int) -> memoryview:
        nonlocal at
        at += size
        return view[at - size : at]

    return RunContent(
        hours=np.frombuffer(take(hours * _HOUR_ROW_BYTES), dtype=np.int64).reshape(-1, 6),
        marks=np.frombuffer(take(marks * 8), dtype="<u8"),
        moves=np.frombuffer(take(moves * MOVED.itemsize), dtype=MOVED),
        units=units_from(np.frombuffer(take(units * UNIT_BYTES), dtype=np.uint8)).copy(),
        extents=np.frombuffer(take(extents * EXTENT.itemsize), dtype=EXTENT).copy(),
        records=bytes(take(record_bytes)),
        bundles=bytes(take(len(data) - 4 - at)),
    )
