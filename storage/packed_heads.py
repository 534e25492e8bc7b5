"""The heads of a bundle with packed units: for each chunk its ticks, and the CRCs of its log.

Owns their layout (docs/FORMATS.md). Unlike the heads of a segment they have no places: in a bundle a unit's index is
its row. Ticks are stored as gaps and counts of 0, 1, 2 or 4 bytes, as wide as the largest of the bundle needs.
"""

from __future__ import annotations

import struct

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.packed_units import width_of
from tickwheel.storage.segment import LOG_BLOCK_BYTES, Chunk, CorruptSegmentError, Readable, Ticks

FORMAT_VERSION = 2
"""Version of a chunk's heads; version 1 are the heads of segments."""

_MAGIC = b"TWHC"
_HEADER = struct.Struct("<4sHBBIIIIIQII")
# magic version gap_bytes count_bytes hour units first_tick ticks blocks log_bytes crc(body) crc(header)
_START_BYTES = 6


def chunk_directories(
    table: NDArray[np.void],
    edges: NDArray[np.int64],
    ticks: NDArray[np.uint32],
    counts: NDArray[np.int64],
    records: bytes,
) -> list[bytes]:
    """The heads of all chunks of a table (bundle.TABLE). Chunk i has the ticks `edges[i]` to `edges[i + 1]`,
    exclusive."""
    gaps = np.zeros(len(ticks), np.int64)
    gaps[1:] = np.diff(ticks.astype(np.int64))
    firsts = edges[:-1]
    gaps[firsts] = 0
    gap_bytes, count_bytes = width_of(int(gaps.max())), width_of(int(counts.max()))
    gap_column, count_column = _narrow(gaps, gap_bytes), _narrow(counts, count_bytes)
    at = 0
    heads: list[bytes] = []
    facts = (table["hour"], table["units"], ticks[firsts], np.diff(edges), table["log_bytes"], firsts)
    for hour, units, first_tick, used, size, first in zip(*(column.tolist() for column in facts), strict=True):
        crcs = [
            google_crc32c.value(records[low : min(low + LOG_BLOCK_BYTES, at + size)])
            for low in range(at, at + size, LOG_BLOCK_BYTES)
        ]
        at += size
        part = slice(first, first + used)
        body = gap_column[part].tobytes() + count_column[part].tobytes() + np.array(crcs, "<u4").tobytes()
        header = _HEADER.pack(
            _MAGIC, FORMAT_VERSION, gap_bytes, count_bytes, hour, units, first_tick, used, len(crcs), size,
            google_crc32c.value(body), 0,
        )[:-4]  # fmt: skip
        heads.append(header + google_crc32c.value(header).to_bytes(4, "little") + body)
    return heads


def _narrow(values: NDArray[np.int64], width: int) -> NDArray[np.unsignedinteger]:
    return values.astype(f"<u{width}") if width else np.zeros((len(values), 0), np.uint8)


def is_directory(file: Readable, at: int) -> bool:
    """Whether the heads at this offset are those of packed units, not of a segment."""
    start = file.read_at(at, _START_BYTES)
    return start[:4] == _MAGIC and int.from_bytes(start[4:], "little") == FORMAT_VERSION


def read_directory(file: Readable, at: int, seq: int, first_row: int, log_at: int) -> Chunk:
    """The chunk whose heads begin at offset `at`; the caller knows where its rows and its log lie. Raises
    CorruptSegmentError."""
    header = file.read_at(at, _HEADER.size)
    if len(header) < _HEADER.size or google_crc32c.value(header[:-4]) != int.from_bytes(header[-4:], "little"):
        raise CorruptSegmentError(file.path, at, "bad chunk header")
    _, _, gap_bytes, count_bytes, hour, units, first_tick, used, blocks, log_bytes, body_crc, _ = _HEADER.unpack(header)
    if gap_bytes not in (0, 1, 2, 4) or count_bytes not in (1, 2, 4):
        raise CorruptSegmentError(file.path, at, f"gaps of {gap_bytes} and counts of {count_bytes} bytes are not known")
    body_bytes = used * (gap_bytes + count_bytes) + 4 * blocks
    body = file.read_at(at + _HEADER.size, body_bytes)
    if len(body) < body_bytes or google_crc32c.value(body) != body_crc:
        raise CorruptSegmentError(file.path, at + _HEADER.size, "bad chunk directory")
    gaps = np.frombuffer(body, f"<u{gap_bytes}", used) if gap_bytes else np.zeros(used, np.uint8)
    counts = np.frombuffer(body, f"<u{count_bytes}", used, used * gap_bytes)
    starts = np.zeros(used + 1, np.uint32)
    np.cumsum(counts, out=starts[1:])
    if not used or int(starts[-1]) != units:
        raise CorruptSegmentError(file.path, at, "the ticks of a chunk have another number of units than it has")
    ticks = (first_tick + np.cumsum(gaps, dtype=np.int64)).astype(np.uint32)
    crcs = np.frombuffer(body, "<u4", blocks, used * (gap_bytes + count_bytes))
    return Chunk(
        seq, 0, units, first_row, 0, log_bytes, log_at, ticks, starts, crcs, at + _HEADER.size + body_bytes,
        Ticks(hour, ticks, starts),
    )  # fmt: skip
