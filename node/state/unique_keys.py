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
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tickwheel.wheel.units import HOUR_MS

KEY_BYTES_MAX = 255
"""Of the UTF-8 of a unique key."""
DIGEST_BYTES = 16
UNIQUE_KEYS_MAX = 2_000_000
"""Keys that a cluster holds at most; the master refuses further ones. The few that are under way come on top."""
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


def digest_of(unique_key: str) -> bytes:
    """BLAKE2b of a key's UTF-8, 16 bytes; never all zeros, which means no key."""
    found = hashlib.blake2b(unique_key.encode(), digest_size=DIGEST_BYTES).digest()
    return found if any(found) else b"\1" * DIGEST_BYTES


def key_of(topic_id: int, digest: bytes) -> KeyOf:
    """The key with this digest in a topic. `digest`: 16 bytes."""
    return KeyOf(topic_id, int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))


class Rows(NamedTuple):
    """The rows of one shard, rising by `high`. Neither array ever changes."""

    high: NDArray[np.uint64]
    rest: NDArray[np.void]

    @property
    def ids(self) -> NDArray[np.uint64]:
        ids: NDArray[np.uint64] = self.rest["id"]
        return ids

    @property
    def due_ms(self) -> NDArray[np.int64]:
        hours = (self.rest["id"] >> np.uint64(32)).astype(np.int64)
        due: NDArray[np.int64] = hours * HOUR_MS + (self.rest["place"] & np.uint32(_SETTLED - 1))
        return due

    @property
    def until_settled(self) -> NDArray[np.bool_]:
        flags: NDArray[np.bool_] = self.rest["place"] >= _SETTLED
        return flags


_NONE = Rows(np.zeros(0, np.uint64), np.zeros(0, _REST))


def _find(rows: Rows, key: KeyOf, mixed: int) -> int | None:
    at = int(rows.high.searchsorted(np.uint64(mixed)))
    while at < len(rows.high) and int(rows.high[at]) == mixed:
        low, _, _, topic_id = rows.rest[at].item()
        if low == key.low and topic_id == key.topic_id:
            return at
        at += 1
    return None


def _merged(rows: Rows, puts: list[tuple[int, KeyOf, Held]]) -> Rows:
    """The rows with these keys set, as if put one after the other: of equal `high`, the newest row comes first."""
    new: list[tuple[int, tuple[int, int, int, int]]] = []
    changed: list[tuple[int, tuple[int, int, int, int]]] = []
    for mixed, key, held in reversed(puts):
        place = held.due_ms % HOUR_MS | (_SETTLED if held.until_settled else 0)
        row = (key.low, held.id, place, key.topic_id)
        at = _find(rows, key, mixed)
        if at is None:
            new.append((mixed, row))
        else:
            changed.append((at, row))
    high, rest = rows
    if changed:
        rest = rest.copy()
        for at, row in changed:
            rest[at] = row
    if not new:
        return Rows(high, rest)
    new.sort(key=lambda put: put[0])
    added = np.array([mixed for mixed, _ in new], np.uint64)
    places = high.searchsorted(added).tolist()
    # As plain bytes: numpy copies fields one by one.
    raw = np.array([row for _, row in new], _REST).view(_RAW_REST)
    return Rows(_inserted(high, places, added), _inserted(rest.view(_RAW_REST), places, raw).view(_REST))


def _inserted(column: NDArray[Any], places: list[int], added: NDArray[Any]) -> NDArray[Any]:
    """The column with each added element before the one that is at its place now. `places` never fall."""
    parts: list[NDArray[Any]] = []
    start = 0
    for number, place in enumerate(places):
        parts += (column[start:place], added[number : number + 1])
        start = place
    return np.concatenate((*parts, column[start:]))


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
        at = _find(rows, key, mixed)
        if at is None:
            return None
        _, number, place, _ = rows.rest[at].item()
        return Held(number, (number >> 32) * HOUR_MS + (place & _SETTLED - 1), place >= _SETTLED)

    def put_all(self, taken: Mapping[KeyOf, Held]) -> None:
        """Set the messages that hold these keys. Each id's hour must be that of the due time. Copies a shard once,
        however many keys lie in it."""
        by_shard: dict[int, list[tuple[int, KeyOf, Held]]] = {}
        for key, held in taken.items():
            assert held.due_ms // HOUR_MS == held.id >> 32, "an id names the hour of its due time"
            mixed = key.mixed
            by_shard.setdefault(mixed % SHARDS, []).append((mixed, key, held))
        for shard, puts in by_shard.items():
            self._set(shard, _merged(self._shards.get(shard, _NONE), puts))

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
        mixed = digests["high"] ^ (topic_ids.astype(np.uint64) * np.uint64(_SPREAD))
        keyed = (topic_ids != 0) & ((digests["high"] != 0) | (digests["low"] != 0))
        full = keyed & np.isin(mixed % np.uint64(SHARDS), np.array(sorted(self._full), np.uint64))
        for row in np.flatnonzero(full).tolist():
            if self.get(KeyOf(int(topic_ids[row]), int(digests["high"][row]), int(digests["low"][row]))) is None:
                return row
        return None

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
