"""The unique keys that messages hold: a table of digests with a message's id and due time each.

A row takes 32 bytes, so two million keys take 64 MB. Rows lie in SHARDS sorted arrays, by digest. An array is never
changed in place: a command that sets keys makes new ones of their shards, so a checkpoint captures the table by taking
references.

A row does not know whether its message still holds the key: `KeyHolders` (key_holders.py) asks the wheel. Rows of
messages that no longer do are dropped when their key is taken anew, or when `KeyHolders.prune` comes to their shard.
When it comes follows from the log, so all nodes have the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.units import HOUR_MS

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
    """The rows of one shard, rising by `high`. Neither array ever changes."""

    high: NDArray[np.uint64]
    rest: NDArray[np.void]

    @property
    def held(self) -> HeldColumns:
        return _held_of(self.rest)


def _held_of(rest: NDArray[np.void]) -> HeldColumns:
    hours = (rest["id"] >> np.uint64(32)).astype(np.int64)
    due_ms = hours * HOUR_MS + (rest["place"] & np.uint32(_SETTLED - 1))
    return HeldColumns(rest["id"], due_ms, rest["place"] >= _SETTLED)


_NONE = Rows(np.zeros(0, np.uint64), np.zeros(0, _REST))


def _find(rows: Rows, topic_id: int, low: int, mixed: int) -> int | None:
    at = int(rows.high.searchsorted(np.uint64(mixed)))
    while at < len(rows.high) and int(rows.high[at]) == mixed:
        found, _, _, topic = rows.rest[at].item()
        if found == low and topic == topic_id:
            return at
        at += 1
    return None


def _with(rows: Rows, at: NDArray[np.intp], known: NDArray[np.bool_], high: NDArray[np.uint64], raw: Any) -> Rows:
    """The rows with these put in: those `known` in the place of the one at `at`, others before it. `high` never
    falls."""
    rest = rows.rest.view(_RAW_REST)
    if known.any():
        rest = rest.copy()
        rest[at[known]] = raw[known]
        if known.all():
            return Rows(rows.high, rest.view(_REST))
        at, high, raw = at[~known], high[~known], raw[~known]
    added = at + np.arange(len(at))
    old = np.ones(len(rest) + len(at), np.bool_)
    old[added] = False
    return Rows(_joined(old, rows.high, added, high), _joined(old, rest, added, raw).view(_REST))


def _joined(old: NDArray[np.bool_], column: Any, added: NDArray[np.intp], values: Any) -> Any:
    out = np.empty(len(old), column.dtype)
    out[old], out[added] = column, values
    return out


class _Places(NamedTuple):
    """Where keys are in the table. All columns are by shard, there by `mixed`, there the last of the keys first."""

    order: NDArray[np.intp]
    """Of the keys."""
    pieces: list[tuple[int, slice]]
    """(shard, part of the columns)."""
    at: NDArray[np.intp]
    """The key's row in its shard; the one before which it belongs, if it has none."""
    known: NDArray[np.bool_]
    """Whether it has one."""
    rest: NDArray[np.void]
    """_REST of those."""


class UniqueKeys:
    def __init__(self) -> None:
        self._shards: dict[int, Rows] = {}
        self._full: set[int] = set()
        """Shards with SHARD_ROWS_MAX rows or more."""
        self.count = 0
        """Rows, those of messages that no longer hold their keys included."""
        self.next_shard = 0
        """The shard that is pruned next."""

    @property
    def used(self) -> bool:
        """Whether a key was ever held, as far as that shows in the state."""
        return bool(self.count or self.next_shard)

    def get(self, key: KeyOf) -> Held | None:
        """The message that took a key last; None: none that is still in the table."""
        mixed = key.mixed
        rows = self._shards.get(mixed % SHARDS, _NONE)
        at = _find(rows, key.topic_id, key.low, mixed)
        if at is None:
            return None
        _, number, place, _ = rows.rest[at].item()
        return Held(number, (number >> 32) * HOUR_MS + (place & _SETTLED - 1), place >= _SETTLED)

    def get_many(self, keys: KeyColumns) -> tuple[NDArray[np.bool_], HeldColumns]:
        """`get` for many keys: which are in the table, and the columns for all; those of others are zeros."""
        places = self._places(keys)
        found, rest = np.empty(len(places.known), np.bool_), np.zeros(len(places.known), _REST)
        found[places.order], rest[places.order] = places.known, places.rest
        rest[~found] = 0
        return found, _held_of(rest)

    def _places(self, keys: KeyColumns) -> _Places:
        count = len(keys.mixed)
        assert count, "keys of no message"
        shards = keys.mixed % np.uint64(SHARDS)
        order = np.lexsort((np.arange(count)[::-1], keys.mixed, shards))
        keys, shards = keys.take(order), shards[order]
        at, there, rest = np.zeros(count, np.intp), np.zeros(count, np.uint64), np.zeros(count, _REST)
        raw = rest.view(_RAW_REST)
        edges = [0, *(np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist(), count]
        pieces = [(int(shards[low]), slice(low, high)) for low, high in pairwise(edges)]
        present = np.zeros(count, np.bool_)
        for shard, piece in pieces:
            rows = self._shards.get(shard)
            if rows is None:
                continue
            at[piece] = rows.high.searchsorted(keys.mixed[piece])
            near = np.minimum(at[piece], len(rows.high) - 1)
            there[piece], raw[piece], present[piece] = rows.high[near], rows.rest.view(_RAW_REST)[near], True
        same = present & (there == keys.mixed)
        known = same & (rest["low"] == keys.low) & (rest["topic_id"] == keys.topic_ids)
        for row in np.flatnonzero(same & ~known).tolist():  # another key has the same `mixed`
            mixed = int(keys.mixed[row])
            rows = self._shards[mixed % SHARDS]
            found = _find(rows, int(keys.topic_ids[row]), int(keys.low[row]), mixed)
            if found is not None:
                at[row], known[row], rest[row] = found, True, rows.rest[found]
        return _Places(order, pieces, at, known, rest)

    def put_many(self, keys: KeyColumns, held: HeldColumns) -> None:
        """Set the messages that hold these keys, which differ. The rows are as if they were put one after the other: of
        equal `mixed` the newest comes first. Each id's hour must be that of the due time. Copies a shard once, however
        many keys lie in it."""
        hours, place = np.divmod(held.due_ms, HOUR_MS)
        assert (hours == held.ids >> np.uint64(32)).all(), "an id names the hour of its due time"
        rest = np.zeros(len(held.ids), _REST)
        rest["low"], rest["id"], rest["topic_id"] = keys.low, held.ids, keys.topic_ids
        rest["place"] = place.astype(np.uint32) | np.where(held.until_settled, np.uint32(_SETTLED), np.uint32(0))
        places = self._places(keys)
        mixed, raw = keys.mixed[places.order], rest[places.order].view(_RAW_REST)
        for shard, piece in places.pieces:
            rows = self._shards.get(shard, _NONE)
            self._set(shard, _with(rows, places.at[piece], places.known[piece], mixed[piece], raw[piece]))

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
        rows = self.next_rows()
        if not kept.all():
            rest = rows.rest.view(_RAW_REST)[kept].view(_REST)
            self._set(self.next_shard, Rows(rows.high[kept], rest))
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
            self._set(number, Rows(rows["high"].copy(), rest))
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
        for name in _REST.names or ():
            rows[name] = rest[name]
        yield number, rows.tobytes()
