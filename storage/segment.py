"""Segments: the delay log, the delay index and the heads of one hour, as three append-only files.

Owns the byte layout of `<seq>.log`, `<seq>.index` and `<seq>.heads` (docs/FORMATS.md) and its checks.
The wheel's merges write segments through `append_chunk`.

A segment grows by **chunks**; one merge adds one chunk to the hour. In a chunk the index rows lie in
dispatch order (tick, due time, index), so that each tick is one run and a range of ticks is one read;
the records lie in index order. Per chunk the heads file holds {tick, count} of each used tick, a CRC32C
of every 4 KiB of log, and the place (row) of each global index.

Invariants: nothing is ever overwritten, except lost rows by the same bytes (`repair_rows`), so all three files are
restored by their lengths alone; a row carries its own checksum; a wrong checksum is reported (`CorruptSegmentError`),
and such bytes are never returned.
Rows are opaque here except for their size and the place of their checksum; `units_of` gives them the type of units.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.disk import Buffer, Disk, DiskError, File
from tickwheel.storage.unit import UNIT

ROW_BYTES = 96
ROW_CHECKSUM_AT = 88
"""A row's last 8 bytes are its uint32 checksum and four more bytes of content."""

LOG_BLOCK_BYTES = 4096
"""The log is checked in blocks of this size, counted from the start of each chunk."""

LOG_WRITE_BYTES = 1 << 20
"""Largest piece that is joined at once: bounds how long a merge holds the interpreter."""

_HEADER = struct.Struct(
    "<4sHHQIIQQIII"
)  # magic version reserved first_index units ticks log_start log_bytes blocks crc(body) crc
_HEADER_BYTES = _HEADER.size
_MAGIC = b"TWHC"
FORMAT_VERSION = 1

_ROW_WORDS = ROW_BYTES // 8
_SEED = np.uint64(0x9E37_79B9_7F4A_7C15)
_FACTORS = np.array(
    [(0xBF58_476D_1CE4_E5B9 * (2 * i + 1) ** 3 | 1) & (2**64 - 1) for i in range(_ROW_WORDS)], dtype="<u8"
)
_FOLD = np.uint64(0x94D0_49BB_1331_11EB)


class CorruptSegmentError(DiskError):
    """Bytes of a segment differ from those written. Names the file, the offset and the remedy."""

    def __init__(self, path: str, offset: int, cause: str) -> None:
        super().__init__(
            f"{path}: {cause} at byte {offset}. The disk returned other bytes than were written: check it. If this "
            "stops the node, replace the node; in a cluster of one, try tickwheel rebuild (docs/DEPLOY.md, The data is "
            "damaged)"
        )
        self.path = path
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Ticks:
    """The units of a chunk by tick, as the chunk was built."""

    hour: int
    ticks: NDArray[np.uint32]
    """Ticks of the hour, rising."""
    starts: NDArray[np.uint32]
    """First row of each tick, then the end of the last."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Directory entry of one chunk. Tick `ticks[i]` of the hour (rising) has the rows `starts[i]` to `starts[i + 1]`,
    exclusive."""

    seq: int
    first_index: int  # global index of its first unit
    count: int
    first_row: int  # of the index file
    log_start: int  # log offset, as units name it, of its first record
    log_bytes: int
    log_at: int  # where that lies in the log file
    ticks: NDArray[np.uint32]
    starts: NDArray[np.uint32]
    crcs: NDArray[np.uint32]
    places_at: int  # where in the heads file the places begin
    built: Ticks | None = None  # only in a bundle with packed units, which cannot be read without it

    def rows_between(self, tick_min: int, tick_max: int) -> tuple[int, int]:
        """Rows of the chunk with tick_min <= tick of the hour < tick_max."""
        low, high = np.searchsorted(self.ticks, (tick_min, tick_max))
        return int(self.starts[low]), int(self.starts[high])


@dataclass(frozen=True, slots=True)
class SegmentLengths:
    """The valid lengths of a segment's files."""

    rows: int = 0
    log_bytes: int = 0
    heads_bytes: int = 0


def row_checksums(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Checksum of each row of a uint8[n, 96] array; the checksum's own four bytes do not count.

    Each 8-byte word is multiplied by an odd factor of its own and summed modulo 2^64, then folded: any
    change of one word changes the sum. (A CRC of 96 bytes at a time would cost more than the whole merge.)
    """
    words = rows.reshape(-1).view("<u8").reshape(-1, _ROW_WORDS)
    total = words[:, -1] >> np.uint64(32)
    total *= _FACTORS[-1]
    total += _SEED
    for column in range(_ROW_WORDS - 1):
        total += words[:, column] * _FACTORS[column]
    total ^= total >> np.uint64(32)
    total *= _FOLD
    total >>= np.uint64(32)
    return total.astype("<u4")


def stored_checksums(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The checksum field of each row, as a writable view."""
    return rows.reshape(-1).view("<u4").reshape(-1, ROW_BYTES // 4)[:, ROW_CHECKSUM_AT // 4]


def chunk_heads(
    first_index: int,
    ticks: NDArray[np.uint32],
    counts: NDArray[np.uint32],
    log_start: int,
    log_bytes: int,
    crcs: NDArray[np.uint32],
    places: NDArray[np.uint32],
) -> tuple[bytes, bytes, bytes]:
    """The heads of one chunk: its header, its directory, and its places."""
    body = ticks.astype("<u4").tobytes() + counts.astype("<u4").tobytes() + crcs.astype("<u4").tobytes()
    header = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        0,
        first_index,
        len(places),
        len(ticks),
        log_start,
        log_bytes,
        len(crcs),
        google_crc32c.value(body),
        0,
    )
    header = header[:-4] + google_crc32c.value(header[:-4]).to_bytes(4, "little")
    return header, body, places.astype("<u4").tobytes()


class Readable(Protocol):
    """A file or a part of one, with the methods that reading a segment needs."""

    @property
    def path(self) -> str: ...

    def read_at(self, offset: int, size: int) -> bytes: ...


class Segment:
    """The three files of one segment, opened on first use. One user at a time; close when done."""

    def __init__(self, disk: Disk, directory: str, seq: int) -> None:
        self._disk = disk
        self._stem = f"{directory}/{seq}"
        self.seq = seq
        self._files: dict[str, File] = {}

    def _file(self, suffix: str, create: bool = False) -> File:
        file = self._files.get(suffix)
        if file is None:
            file = self._disk.open(f"{self._stem}.{suffix}", create=create)
            self._files[suffix] = file
        return file

    def _reader(self, suffix: str) -> Readable:
        return self._file(suffix)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def paths(self) -> list[str]:
        return [f"{self._stem}.{suffix}" for suffix in ("log", "index", "heads")]

    def fsync(self) -> None:
        for suffix in ("log", "index", "heads"):
            self._file(suffix).fsync()

    def append_chunk(
        self,
        lengths: SegmentLengths,
        first_index: int,
        log_start: int,
        ticks: NDArray[np.uint32],
        counts: NDArray[np.uint32],
        rows: NDArray[np.uint8],
        places: NDArray[np.uint32],
        records: Iterable[Buffer],
    ) -> tuple[SegmentLengths, Chunk]:
        """Append a chunk at `lengths`; bytes beyond (of a failed attempt) are cut off first.

        `rows`: uint8[n, 96] in dispatch order with their checksums. `places`: uint32[n], the row within the chunk of
        each index from `first_index` on. `records`: in index order. Raises DiskFullError; repeating is safe.
        """
        log = self._cut("log", lengths.log_bytes)
        index = self._cut("index", lengths.rows * ROW_BYTES)
        heads = self._cut("heads", lengths.heads_bytes)
        crcs: list[int] = []
        log_bytes = 0
        for piece in _pieces(records):
            log.append(piece)
            log_bytes += len(piece)
            crcs.extend(
                google_crc32c.value(piece[at : at + LOG_BLOCK_BYTES]) for at in range(0, len(piece), LOG_BLOCK_BYTES)
            )
        index.append(rows.reshape(-1).data)
        count = len(rows)
        crcs_array = np.array(crcs, dtype="<u4")
        parts = chunk_heads(first_index, ticks, counts, log_start, log_bytes, crcs_array, places)
        heads.append_many(parts)
        starts = np.zeros(len(counts) + 1, dtype=np.uint32)
        np.cumsum(counts, out=starts[1:])
        places_at = lengths.heads_bytes + len(parts[0]) + len(parts[1])
        chunk = Chunk(
            self.seq,
            first_index,
            count,
            lengths.rows,
            log_start,
            log_bytes,
            lengths.log_bytes,
            ticks,
            starts,
            crcs_array,
            places_at,
        )
        return SegmentLengths(lengths.rows + count, lengths.log_bytes + log_bytes, places_at + 4 * count), chunk

    def _cut(self, suffix: str, length: int) -> File:
        file = self._file(suffix, create=True)
        size = file.size()
        if size < length:
            raise CorruptSegmentError(file.path, size, f"the file ends before its length of {length}")
        if size > length:
            file.truncate(length)
        return file

    def chunks(self, heads_bytes: int) -> list[Chunk]:
        """The directory: every chunk of the first `heads_bytes` of the heads file."""
        found: list[Chunk] = []
        at = row = log_at = 0
        while at < heads_bytes:
            chunk = self.chunk_at(at, row, log_at)
            found.append(chunk)
            row += chunk.count
            log_at += chunk.log_bytes
            at = self.heads_end(chunk)
        return found

    def heads_end(self, chunk: Chunk) -> int:
        """Offset in the heads file where a chunk's heads end."""
        return chunk.places_at + 4 * chunk.count

    def chunk_at(self, at: int, first_row: int, log_at: int) -> Chunk:
        """The chunk whose header lies at offset `at` of the heads; the caller knows where its rows and its log lie."""
        file = self._reader("heads")
        header = file.read_at(at, _HEADER_BYTES)
        if len(header) < _HEADER_BYTES or google_crc32c.value(header[:-4]) != int.from_bytes(header[-4:], "little"):
            raise CorruptSegmentError(file.path, at, "bad chunk header")
        magic, version, _, first_index, count, tick_count, log_start, log_bytes, blocks, body_crc, _ = _HEADER.unpack(
            header
        )
        if magic != _MAGIC or version != FORMAT_VERSION:
            raise CorruptSegmentError(file.path, at, f"not a chunk of version {FORMAT_VERSION} (it says {version})")
        body_bytes = 8 * tick_count + 4 * blocks
        body = file.read_at(at + _HEADER_BYTES, body_bytes)
        if len(body) < body_bytes or google_crc32c.value(body) != body_crc:
            raise CorruptSegmentError(file.path, at + _HEADER_BYTES, "bad chunk directory")
        words = np.frombuffer(body, dtype="<u4")
        starts = np.zeros(tick_count + 1, dtype=np.uint32)
        np.cumsum(words[tick_count : 2 * tick_count], out=starts[1:])
        return Chunk(
            self.seq, first_index, count, first_row, log_start, log_bytes, log_at,
            words[:tick_count], starts, words[2 * tick_count :], at + _HEADER_BYTES + body_bytes,
        )  # fmt: skip

    def rows(self, first_row: int, count: int) -> NDArray[np.uint8]:
        """Rows of the index file as uint8[count, 96], each checked."""
        file = self._reader("index")
        try:
            data = file.read_at(first_row * ROW_BYTES, count * ROW_BYTES)
        except DiskError as error:
            cause = f"the index cannot be read ({error})"
            raise CorruptSegmentError(file.path, first_row * ROW_BYTES, cause) from error
        if len(data) != count * ROW_BYTES:
            raise CorruptSegmentError(file.path, first_row * ROW_BYTES, "the index ends early")
        rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, ROW_BYTES)
        bad = np.flatnonzero(row_checksums(rows) != stored_checksums(rows))
        if len(bad):
            raise CorruptSegmentError(
                file.path, (first_row + int(bad[0])) * ROW_BYTES, "a unit does not match its checksum"
            )
        return rows

    def bad_rows(self, first_row: int, count: int) -> NDArray[np.int64]:
        """Rows of the index file that `rows` would refuse. If the disk cannot read a range it is halved until single
        rows fail."""
        try:
            self.rows(first_row, count)
        except CorruptSegmentError:
            if count == 1:
                return np.array([first_row], np.int64)
            half = count // 2
            parts = (self.bad_rows(first_row, half), self.bad_rows(first_row + half, count - half))
            return np.concatenate(parts)
        return np.zeros(0, np.int64)

    def repair_rows(self, first_row: int, rows: NDArray[np.uint8]) -> None:
        """Write lost rows again, the same bytes as before; they are on stable storage on return."""
        file = self._file("index")
        file.write_at(first_row * ROW_BYTES, np.ascontiguousarray(rows).tobytes())
        file.fsync()

    def units_of(self, chunk: Chunk, first: int, count: int) -> NDArray[np.void]:
        """Checked units of a chunk from its row `first` on."""
        return self.rows(chunk.first_row + first, count).reshape(-1).view(UNIT)

    def places(self, chunk: Chunk, index_min: int, index_max: int) -> NDArray[np.uint32]:
        """Row within the chunk of each global index from index_min to below index_max.

        Places have no checksum: compare the `index` of the units found there, and raise `corrupt_places` if they
        differ.
        """
        file = self._reader("heads")
        at = chunk.places_at + 4 * (index_min - chunk.first_index)
        data = file.read_at(at, 4 * (index_max - index_min))
        if len(data) != 4 * (index_max - index_min):
            raise CorruptSegmentError(file.path, at, "the heads end early")
        places = np.frombuffer(data, dtype="<u4")
        if (places >= chunk.count).any():
            raise self.corrupt_places(chunk)
        return places

    def corrupt_places(self, chunk: Chunk) -> CorruptSegmentError:
        """The error to raise if places point to rows of other units."""
        return CorruptSegmentError(self._reader("heads").path, chunk.places_at, "a place names the row of another unit")

    def read_log(self, chunk: Chunk, start: int, size: int) -> bytes:
        """`size` bytes of log from offset `start` (as units name it), within one chunk, checked block by block."""
        relative = start - chunk.log_start
        first = relative // LOG_BLOCK_BYTES
        last = -(-(relative + size) // LOG_BLOCK_BYTES)
        begin = first * LOG_BLOCK_BYTES
        wanted = min(last * LOG_BLOCK_BYTES, chunk.log_bytes) - begin
        file = self._reader("log")
        data = file.read_at(chunk.log_at + begin, wanted)
        if len(data) != wanted:
            raise CorruptSegmentError(file.path, chunk.log_at + begin, "the log ends early")
        for number in range(first, last):
            at = (number - first) * LOG_BLOCK_BYTES
            if google_crc32c.value(data[at : at + LOG_BLOCK_BYTES]) != int(chunk.crcs[number]):
                raise CorruptSegmentError(
                    file.path, chunk.log_at + begin + at, "a block of records does not match its CRC"
                )
        return data[relative - begin : relative - begin + size]


def _pieces(records: Iterable[Buffer]) -> Iterable[bytes]:
    """The same bytes in pieces of LOG_WRITE_BYTES, the last one shorter."""
    held: list[Buffer] = []
    held_bytes = 0
    for record in records:
        view = memoryview(record)
        while held_bytes + len(view) >= LOG_WRITE_BYTES:
            cut = LOG_WRITE_BYTES - held_bytes
            held.append(view[:cut])
            yield b"".join(held)
            held, held_bytes, view = [], 0, view[cut:]
        if len(view):
            held.append(view)
            held_bytes += len(view)
    if held:
        yield b"".join(held)
