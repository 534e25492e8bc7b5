"""The unique keys that messages hold: a table of digests with a message's id and due time each.

A row takes 32 bytes, so two million keys take 64 MB. Rows lie in SHARDS sorted tables, by digest. A table is never
changed in place: a command that sets keys makes new ones of their shards, so a checkpoint captures the table by taking
references.

A row does not know whether its message still holds the key: `KeyHolders` (key_holders.py) asks the wheel. Rows of
messages that no longer do are dropped when their key is taken anew, or when `KeyHolders.prune` comes to their shard.
When it comes follows from the log, so all nodes have the same rows.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.units import HOUR_MS, hours_of

KEY_BYTES_MAX = 255
"""Of the UTF-8 of a unique key."""
DIGEST_BYTES = 16
UNIQUE_KEYS_MAX = 2_000_000
"""KeyColumns that a cluster holds at most; the master refuses further ones. The few that are under way come on top."""
SHARDS = 1_024
SHARD_ROWS_MAX = 4 * UNIQUE_KEYS_MAX // SHARDS
"""Rows of one shard from which on the master refuses further keys that lie in it. Chance fills no shard that far;
keys that were searched for it do. A command that sets a key copies its shard, and a dispatch looks through one."""
DIGEST_TURN = 64
"""Shards in one turn of a digest: at most four megabytes."""

DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])
"""A key's digest, as in `Publish.unique_keys`. All zeros: no key."""
ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("id", "<u8"), ("place", "<u4"), ("topic_id", "<u4")])
"""`high` is mixed with the topic id. `place`: milliseconds of the due time within the hour of `id`, and SETTLED."""

_REST = np.dtype([("low", "<u8"), ("id", "<u8"), ("place", "<u4"), ("topic_id", "<u4")])
_RAW_REST = np.dtype((np.void, _REST.itemsize))
_REST_ROW = struct.Struct("<QQII")
_SETTLED = 1 << 31
_MASK64 = (1 << 64) - 1
_SPREAD = 0x9E37_79B9_7F4A_7C15
"""The golden ratio in 64 bits (Knuth, The Art of Computer Programming 3, 6.4): equal keys of two topics lie apart."""


class KeyOf(NamedTuple):
    """A unique key in its topic: the halves of its digest."""

    topic_id: int
    high: int
    low: int

    @property
    def mixed(self) -> int:
        """Where it lies in the table."""
        return self.high ^ (self.topic_id * _SPREAD & _MASK64)


class Held(NamedTuple):
    """The message that took a key last. `until_settled`: it holds the key until it is settled, not only until it is
    dispatched."""

    id: int
    due_ms: int
    until_settled: bool


class KeyColumns(NamedTuple):
    """`KeyOf` in columns. `mixed` takes the place of `high`."""

    topic_ids: NDArray[np.uint32]
    mixed: NDArray[np.uint64]
    low: NDArray[np.uint64]

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Topic id, mixed and low of each key."""
        return zip(*(column.tolist() for column in self), strict=True)

    def take(self, rows: NDArray[np.intp]) -> KeyColumns:
        """Those in these rows."""
        return KeyColumns(self.topic_ids[rows], self.mixed[rows], self.low[rows])


class HeldColumns(NamedTuple):
    """`Held` in columns."""

    ids: NDArray[np.uint64]
    due_ms: NDArray[np.int64]
    until_settled: NDArray[np.bool_]


def digest_of(unique_key: str) -> bytes:
    """BLAKE2b of a key's UTF-8, 16 bytes; never all zeros, which means no key."""
    found = hashlib.blake2b(unique_key.encode(), digest_size=DIGEST_BYTES).digest()
    return found if any(found) else b"\1" * DIGEST_BYTES


def key_of(topic_id: int, digest: bytes) -> KeyOf:
    """The key with this digest in a topic. `digest`: 16 bytes."""
    return KeyOf(topic_id, int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))


def keys_of(topic_ids: NDArray[np.uint32], digests: NDArray[np.void]) -> KeyColumns:
    """The keys with these DIGESTs in these topics."""
    mixed = digests["high"] ^ (topic_ids.astype(np.uint64) * np.uint64(_SPREAD))
    return KeyColumns(topic_ids, mixed, digests["low"])


class Rows(NamedTuple):
    """The rows of one shard, rising by `high`, as bytes that never change: few rows of many shards are read and
    inserted at once, which array functions do ten times slower."""

    high: memoryview[int]
    """Elements of 8 bytes."""
    rest: bytes
    """_REST of each."""

    @property
    def held(self) -> HeldColumns:
        return _held_of(np.frombuffer(self.rest, _REST))

    @property
    def topic_ids(self) -> NDArray[np.uint32]:
        topic_ids: NDArray[np.uint32] = np.frombuffer(self.rest, _REST)["topic_id"]
        return topic_ids


def _held_of(rest: NDArray[np.void]) -> HeldColumns:
    hours = hours_of(rest["id"])
    due_ms = hours * HOUR_MS + (rest["place"] & np.uint32(_SETTLED - 1))
    return HeldColumns(rest["id"], due_ms, rest["place"] >= _SETTLED)


def _rows(high: bytes, rest: bytes) -> Rows:
    return Rows(memoryview(high).cast("Q"), rest)


_NONE = _rows(b"", b"")


_Place = tuple[int, int | None]
"""Where a key is in its shard: before which row it belongs, and its own row, if it has one."""


def _with(rows: Rows, puts: list[tuple[int, int, _Place]], rest_of: bytes) -> Rows:
    """The rows with these keys put in. `puts`: (mixed, minus its turn, place) of each; `rest_of`: _REST by turn. Of
    equal `mixed` the newest comes first."""
    width = _REST.itemsize
    rest: bytes | bytearray = rows.rest
    new = sorted([put for put in puts if put[2][1] is None])
    if len(new) < len(puts):
        rest = bytearray(rest)
        for _, turn, (_, at) in puts:
            if at is not None:
                rest[at * width : (at + 1) * width] = rest_of[-turn * width : (1 - turn) * width]
    highs: list[bytes | memoryview[int]] = []
    rests: list[bytes | memoryview[int]] = []
    start, old = 0, memoryview(rest)
    for mixed, turn, (left, _) in new:
        if left > start:
            highs.append(rows.high[start:left])
            rests.append(old[start * width : left * width])
            start = left
        highs.append(mixed.to_bytes(8, "little"))
        rests.append(rest_of[-turn * width : (1 - turn) * width])
    return _rows(b"".join([*highs, rows.high[start:]]), b"".join([*rests, old[start * width :]]))


class UniqueKeys:
    def __init__(self) -> None:
        self._shards: dict[int, Rows] = {}
        self._full: set[int] = set()
        """Shards with SHARD_ROWS_MAX rows or more."""
        self.count = 0
        """Rows, including those of messages that no longer hold their keys."""
        self.next_shard = 0
        """The shard that is pruned next."""

    @property
    def used(self) -> bool:
        """Whether a key was ever held, as far as that shows in the state."""
        return bool(self.count or self.next_shard)

    def get(self, key: KeyOf) -> Held | None:
        """The message that took a key last; None: none that is still in the table."""
        mixed = key.mixed
        [(_, at)] = self._places([(key.topic_id, mixed, key.low)])
        if at is None:
            return None
        _, number, due, _ = _REST_ROW.unpack_from(self._shards[mixed % SHARDS].rest, at * _REST.itemsize)
        return Held(number, (number >> 32) * HOUR_MS + (due & _SETTLED - 1), due >= _SETTLED)

    def get_many(self, keys: KeyColumns) -> tuple[NDArray[np.bool_], HeldColumns]:
        """`get` for many keys: which are in the table, and columns for all, with zeros for keys that are not."""
        width, none = _REST.itemsize, bytes(_REST.itemsize)
        parts, found = [], []
        for (_, mixed, _), (_, at) in zip(keys.rows(), self._places(keys.rows()), strict=True):
            found.append(at is not None)
            parts.append(none if at is None else self._shards[mixed % SHARDS].rest[at * width : (at + 1) * width])
        return np.array(found, np.bool_), _held_of(np.frombuffer(b"".join(parts), _REST))

    def _places(self, keys: Iterable[tuple[int, int, int]]) -> list[_Place]:
        """`keys`: topic id, mixed and low of each."""
        found: list[_Place] = []
        shards, row_of, width = self._shards, _REST_ROW.unpack_from, _REST.itemsize
        for topic_id, mixed, low in keys:
            high, rest = shards.get(mixed % SHARDS, _NONE)
            left = at = bisect_left(high, mixed)
            end = len(high)
            while at < end and high[at] == mixed:  # nearly always one row at most
                other, _, _, topic = row_of(rest, at * width)
                if other == low and topic == topic_id:
                    found.append((left, at))
                    break
                at += 1
            else:
                found.append((left, None))
        return found

    def put_many(self, keys: KeyColumns, held: HeldColumns) -> None:
        """Set the messages that hold these keys, which differ. The rows are as if they were put one after the other: of
        equal `mixed` the newest comes first. Each id's hour must be that of the due time. Copies a shard once, however
        many keys lie in it."""
        hours, place = np.divmod(held.due_ms, HOUR_MS)
        assert (hours == hours_of(held.ids)).all(), "an id names the hour of its due time"
        rest = np.zeros(len(held.ids), _REST)
        rest["low"], rest["id"], rest["topic_id"] = keys.low, held.ids, keys.topic_ids
        rest["place"] = place.astype(np.uint32) | np.where(held.until_settled, np.uint32(_SETTLED), np.uint32(0))
        by_shard: dict[int, list[tuple[int, int, _Place]]] = {}
        for turn, (mixed, found) in enumerate(zip(keys.mixed.tolist(), self._places(keys.rows()), strict=True)):
            by_shard.setdefault(mixed % SHARDS, []).append((mixed, -turn, found))
        rest_of = rest.tobytes()
        for shard, puts in by_shard.items():
            self._set(shard, _with(self._shards.get(shard, _NONE), puts, rest_of))

    def _set(self, shard: int, rows: Rows) -> None:
        count = len(rows.high)
        self.count += count - len(self._shards.get(shard, _NONE).high)
        if count:
            self._shards[shard] = rows
        else:
            self._shards.pop(shard, None)
        if count >= SHARD_ROWS_MAX:
            self._full.add(shard)
        else:
            self._full.discard(shard)

    @property
    def crowded(self) -> bool:
        """Whether `no_room` may find anything."""
        return bool(self._full)

    def no_room(self, topic_ids: NDArray[np.uint32], digests: NDArray[np.void]) -> int | None:
        """The first row of these columns whose key is not in the table and whose shard has SHARD_ROWS_MAX rows or more;
        None: there is none. Zeros are no key; topic 0 does not exist."""
        keys = keys_of(topic_ids, digests)
        keyed = (topic_ids != 0) & ((digests["high"] != 0) | (digests["low"] != 0))
        full = np.isin(keys.mixed % np.uint64(SHARDS), np.array(sorted(self._full), np.uint64))
        rows = np.flatnonzero(keyed & full)
        if not len(rows):
            return None
        found, _ = self.get_many(keys.take(rows))
        return None if found.all() else int(rows[found.argmin()])

    def next_rows(self) -> Rows:
        """The rows of the shard that is pruned next."""
        return self._shards.get(self.next_shard, _NONE)

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Keep these of `next_rows`, and go on to the next shard."""
        if not kept.all():
            high, rest = self.next_rows()
            rest_kept = np.frombuffer(rest, _RAW_REST)[kept].tobytes()
            self._set(self.next_shard, _rows(np.frombuffer(high, np.uint64)[kept].tobytes(), rest_kept))
        self.next_shard = (self.next_shard + 1) % SHARDS

    # -- checkpoints

    def capture(self) -> list[tuple[int, Rows]]:
        """(number, rows) of each shard that has any, rising; nothing in it changes."""
        return sorted(self._shards.items())

    def restore(self, shards: Iterable[tuple[int, bytes]], next_shard: int) -> None:
        """Restore what `capture` and `bytes_of` returned."""
        self._shards, self._full, self.count = {}, set(), 0
        for number, content in shards:
            rows = np.frombuffer(content, ROW)
            rest = np.zeros(len(rows), _REST)
            for name in _REST.names or ():
                rest[name] = rows[name]
            self._set(number, _rows(rows["high"].tobytes(), rest.tobytes()))
        self.next_shard = next_shard

    def digest_in_turns(self) -> Generator[None, None, bytes]:
        """SHA-256 of all rows, in turns of a few milliseconds."""
        sha = hashlib.sha256(b"%d" % self.next_shard)
        for turn, (number, content) in enumerate(contents(self.capture()), 1):
            sha.update(b"%d:" % number + content)
            if turn % DIGEST_TURN == 0:
                yield
        return sha.digest()


def contents(shards: Iterable[tuple[int, Rows]]) -> Iterator[tuple[int, bytes]]:
    """(number, bytes of its ROWs) of captured shards."""
    for number, (high, rest) in shards:
        rows = np.zeros(len(high), ROW)
        rows["high"] = high
        columns = np.frombuffer(rest, _REST)
        for name in _REST.names or ():
            rows[name] = columns[name]
        yield number, rows.tobytes()
