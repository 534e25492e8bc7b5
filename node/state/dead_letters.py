"""The dead letters of one group: messages it could not process, with payload, until replayed, purged or too old.

Owns two append-only lists in files: rows of fixed size, numbered from 0 in the order of death, and the bytes to which
the rows point (error text, then meta and payload). So a letter does not depend on the hour of its message.

If a node could not read a record when its message died, the letter has a gap of the record's size. Which letters have
gaps differs between nodes (`lacks`), and so do the bytes: neither is part of the digest. A letter of PAYLOAD_LOST has
no record.

Invariants: a number is never reused; the head of both lists goes with the oldest letter; `_gone` has the letters
removed out of turn. Only commands of the log change anything. The state machine is the only caller that changes; others
read.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Listed
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tickwheel.node.state.sequence import Sequence
from tickwheel.proto import state_pb2
from tickwheel.storage.disk import Disk
from tickwheel.wheel.units import Ids

LETTER = np.dtype(
    [
        ("origin", "<u8"),  # id it was scheduled under
        ("died_ms", "<i8"),
        ("first_due_ms", "<i8"),
        ("at", "<u8"),  # of its text in the bytes
        ("tag_mask", "<u8"),
        ("key_hash", "<u8"),
        ("size", "<u4"),  # of its record: meta and payload
        ("meta_size", "<u4"),
        ("text_size", "<u4"),
        ("topic_id", "<u4"),
        ("tag_hash", "<u4"),
        ("attempts", "<u4"),
        ("cause", "<u4"),
        ("flags", "<u4"),
    ]
)
BYTE = np.dtype("u1")
Letters = NDArray[Any]
"""Array of LETTER."""
KEEP_BYTES = 256 << 10
"""Bytes of the newest letters that are kept in memory: few, for many groups may have letters."""
SCAN_ROWS = 4_096


def dead_path(directory: str, group_id: int) -> str:
    """Common prefix of the files of a group's dead letters."""
    return f"{directory}/dead/{group_id}"


class DeadLetters:
    def __init__(
        self, disk: Disk, directory: str, group_id: int, restored: state_pb2.GroupSnapshot | None = None
    ) -> None:
        path = dead_path(directory, group_id)
        rows, content = (restored.dead_rows, restored.dead_bytes) if restored is not None else (None, None)
        self.rows = Sequence(disk, f"{path}.rows", LETTER, rows, keep_bytes=KEEP_BYTES)
        self.bytes = Sequence(disk, f"{path}.bytes", BYTE, content, keep_bytes=KEEP_BYTES)
        self._oldest = (-1, 0)
        """(number of the oldest letter, when it died), so that reading it needs no file."""
        gone = np.frombuffer(restored.dead_gone, "<u8").tolist() if restored is not None else ()
        self._gone: set[int] = set(gone)
        self._lacking: set[int] = (
            set(np.frombuffer(restored.dead_lacking, "<u8").tolist()) if restored is not None else set()
        )

    @property
    def count(self) -> int:
        """Letters kept."""
        return self.rows.count - self.rows.first - len(self._gone)

    @property
    def gone_count(self) -> int:
        """Letters removed out of turn: remembered until all earlier ones are gone too."""
        return len(self._gone)

    @property
    def version(self) -> tuple[int, int, int]:
        """Differs after each change."""
        return self.rows.first, self.rows.count, len(self._gone)

    @property
    def oldest_died_ms(self) -> int | None:
        """When the oldest kept letter died; None: there is none."""
        first = self.rows.first
        if not self.count:
            return None
        if self._oldest[0] != first:
            self._oldest = (first, int(self.row(first)["died_ms"]))
        return self._oldest[1]

    @property
    def oldest_number(self) -> int:
        """Number of the oldest letter, or `next_number` if there is none."""
        return self.rows.first

    @property
    def next_number(self) -> int:
        """Number that the next letter will get."""
        return self.rows.count

    def bury(
        self,
        letters: Letters,
        texts: Listed[bytes],
        records: Listed[bytes],
        lacking: NDArray[np.bool_] | None = None,
    ) -> None:
        """Add letters; sizes and places are filled in. `lacking`: True for each letter whose record is a gap."""
        if lacking is not None:
            self._lacking.update((self.rows.count + np.flatnonzero(lacking)).tolist())
        letters["text_size"] = [len(text) for text in texts]
        letters["size"] = [len(record) for record in records]
        sizes = letters["text_size"].astype(np.uint64) + letters["size"]
        letters["at"] = np.uint64(self.bytes.count) + np.cumsum(sizes) - sizes
        parts = [part for pair in zip(texts, records, strict=True) for part in pair]
        self.bytes.append(np.frombuffer(b"".join(parts), BYTE))
        self.rows.append(letters)

    def has(self, number: int) -> bool:
        """Whether a letter is kept."""
        return self.rows.first <= number < self.rows.count and number not in self._gone

    def lacks(self, number: int) -> bool:
        """Whether this node lacks a letter's record, because it could not read it when the message died."""
        return number in self._lacking

    def row(self, number: int) -> Letters:
        """Row of a kept letter."""
        row: Letters = self.rows.read(number, 1)[0]
        return row

    def newest_origins(self, limit: int) -> Ids:
        """First ids of the messages of the last `limit` kept letters."""
        first = max(self.rows.first, self.rows.count - limit)
        origins: Ids = self.rows.read(first, self.rows.count - first)["origin"]
        if not self._gone:
            return origins
        kept = [number not in self._gone for number in range(first, first + len(origins))]
        return origins[np.array(kept, np.bool_)]

    def page(self, first: int, limit: int, below: int | None = None) -> list[tuple[int, Letters]]:
        """Up to `limit` letters as (number, row), from number `first` on and below `below`."""
        found: list[tuple[int, Letters]] = []
        at = max(first, self.rows.first)
        end = self.rows.count if below is None else min(below, self.rows.count)
        while at < end and len(found) < limit:
            rows = self.rows.read(at, min(SCAN_ROWS, end - at))
            kept = (place for place in range(len(rows)) if at + place not in self._gone)
            found += [(at + place, rows[place]) for place, _ in zip(kept, range(limit - len(found)), strict=False)]
            at += len(rows)
        return found

    def numbers_of_topic(self, topic_id: int, first: int, below: int) -> list[int]:
        """Numbers of the kept letters of one topic, from `first` on and below `below`. Reads all rows between."""
        found: list[int] = []
        at, end = max(first, self.rows.first), min(below, self.rows.count)
        while at < end:
            rows = self.rows.read(at, min(SCAN_ROWS, end - at))
            found += (at + np.flatnonzero(rows["topic_id"] == topic_id)).tolist()
            at += len(rows)
        return [number for number in found if number not in self._gone] if self._gone else found

    def content(self, row: Letters) -> tuple[bytes, bytes]:
        """(error text, record) of a kept letter."""
        text_size = int(row["text_size"])
        data = self.bytes.read(int(row["at"]), text_size + int(row["size"])).tobytes()
        return data[:text_size], data[text_size:]

    def text(self, row: Letters) -> bytes:
        """Error text of a kept letter."""
        content: bytes = self.bytes.read(int(row["at"]), int(row["text_size"])).tobytes()
        return content

    def meta(self, row: Letters) -> bytes:
        """Meta of a kept letter's message."""
        content: bytes = self.bytes.read(int(row["at"]) + int(row["text_size"]), int(row["meta_size"])).tobytes()
        return content

    def remove(self, numbers: Listed[int]) -> int:
        """Remove letters; returns how many of them existed."""
        count = self.count
        self._gone.update(number for number in numbers if self.has(number))
        self._advance()
        return count - self.count

    def remove_below(self, number: int) -> int:
        """Remove all letters with a lower number; returns how many."""
        count = self.count
        self._drop(min(number, self.rows.count))
        return count - self.count

    def remove_died_before(self, died_ms: int) -> int:
        """Remove the oldest letters, as long as they died before this time; returns how many."""
        at = self.rows.first
        while at < self.rows.count:
            rows = self.rows.read(at, SCAN_ROWS)
            later = np.flatnonzero(rows["died_ms"] >= died_ms)
            if len(later):
                at += int(later[0])
                break
            at += len(rows)
        return self.remove_below(at)

    def _advance(self) -> None:
        first = self.rows.first
        while first in self._gone:
            first += 1
        self._drop(first)

    def _drop(self, first: int) -> None:
        if first <= self.rows.first:
            return
        place = self.bytes.count
        if first < self.rows.count:
            place = int(self.rows.read(first, 1)["at"][0])
        self.rows.drop_below(first)
        self.bytes.drop_below(place)
        self._gone = {number for number in self._gone if number >= first}
        self._lacking = {number for number in self._lacking if number >= first}
        if first in self._gone:
            self._advance()

    def sequences(self) -> list[Sequence]:
        """The lists in files."""
        return [self.rows, self.bytes]

    def snapshot_into(self, message: state_pb2.GroupSnapshot) -> None:
        """Write what the constructor's `restored` takes."""
        message.dead_rows.CopyFrom(self.rows.snapshot())
        message.dead_bytes.CopyFrom(self.bytes.snapshot())
        message.dead_gone = np.array(sorted(self._gone), "<u8").tobytes()
        message.dead_lacking = np.array(sorted(self._lacking), "<u8").tobytes()

    def digest(self) -> bytes:
        """Digest of the logical content; without the records' bytes, of which a node may lack some."""
        rows, content = self.rows, self.bytes
        facts = struct.pack("<QIQQQ", rows.count, rows.crc, rows.first, content.count, content.first)
        return hashlib.sha256(facts + np.array(sorted(self._gone), "<u8").tobytes()).digest()
