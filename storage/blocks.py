"""Records of equal size in blocks with a checksum: the layout of append-only files of small records.

Owns the places of records, and the checks. A block has 4,096 bytes: as many records as fit into the first 4,092, zeros,
and the CRC32C of those 4,092 bytes. Only full blocks have a checksum. The checksum of the records after the last full
block is kept by the checkpoint, which names the file's length, and the format version too.

So a file only ever grows: a block's checksum is appended after its last record. Called by the ready queues and dead
letters of the state.
"""

from __future__ import annotations

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.disk import File
from tickwheel.storage.errors import ADVICE, CorruptFileError

BLOCK_BYTES = 4_096
CRC_BYTES = 4


class BlockLayout:
    """Computes where records of one size lie. Record numbers count from the start of the file."""

    __slots__ = ("_used_bytes", "per_block", "record_bytes")

    def __init__(self, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self.per_block = (BLOCK_BYTES - CRC_BYTES) // record_bytes
        self._used_bytes = self.per_block * record_bytes

    def start_of_block(self, number: int) -> int:
        """Number of the first record in the same block."""
        return number - number % self.per_block

    def offset(self, number: int) -> int:
        """Offset of a record; for the first missing record this is the length of the file."""
        blocks, inside = divmod(number, self.per_block)
        return blocks * BLOCK_BYTES + inside * self.record_bytes

    def encode(self, first: int, number: int, records: bytes) -> bytes:
        """The bytes to append after record `number - 1`.

        `records` begin with record `first`, which starts a block and is at most `number`.
        """
        full = len(records) // self._used_bytes
        if not full:  # as in nearly every small topic
            return records[(number - first) * self.record_bytes :]
        blocks = np.zeros((full, BLOCK_BYTES), np.uint8)
        cut = full * self._used_bytes
        blocks[:, : self._used_bytes] = np.frombuffer(records[:cut], np.uint8).reshape(full, self._used_bytes)
        crcs = [google_crc32c.value(block[:-CRC_BYTES].tobytes()) for block in blocks]
        blocks[:, -CRC_BYTES:] = np.array(crcs, "<u4").view(np.uint8).reshape(full, CRC_BYTES)
        return (blocks.tobytes() + records[cut:])[self.offset(number) - self.offset(first) :]

    def check(self, file: File, low: int, high: int) -> bytes:
        """Checked bytes of blocks `low` to `high - 1`. Raises CorruptFileError."""
        at = low * BLOCK_BYTES
        data = file.read_at(at, (high - low) * BLOCK_BYTES)
        if len(data) < (high - low) * BLOCK_BYTES:
            raise CorruptFileError(file.path, at + len(data), "it ends early", ADVICE)
        blocks: NDArray[np.uint8] = np.frombuffer(data, np.uint8).reshape(-1, BLOCK_BYTES)
        stored = blocks[:, -CRC_BYTES:].copy().view("<u4").reshape(-1).tolist()
        for number, crc in enumerate(stored):
            begin = number * BLOCK_BYTES
            if google_crc32c.value(data[begin : begin + BLOCK_BYTES - CRC_BYTES]) != crc:
                raise CorruptFileError(file.path, at + begin, "a block does not match its checksum", ADVICE)
        return data

    def read(self, file: File, first: int, last: int) -> bytes:
        """Records `first` to `last - 1`, which all lie in full blocks; each block is checked. Raises
        CorruptFileError."""
        low, high = first // self.per_block, -(-last // self.per_block)
        blocks: NDArray[np.uint8] = np.frombuffer(self.check(file, low, high), np.uint8).reshape(-1, BLOCK_BYTES)
        records = blocks[:, : self._used_bytes].tobytes()
        skipped = first - low * self.per_block
        return records[skipped * self.record_bytes : (skipped + last - first) * self.record_bytes]
