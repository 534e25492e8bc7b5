"""Hashes of tags and keys, which a unit keeps in place of their texts. They are the same in every language.

A tag's 64-bit hash is FNV-1a over its UTF-8 bytes. Its code is the upper half folded into 32 bits; its mask
has three bits set, at the places that three groups of six bits of the hash name. A message's mask is the OR
of its tags' masks. A wanted tag can match only if all of its bits are in the message's mask. Hashes
collide, so the text must be checked exactly in the end. `tickwheel.wheel.filters` selects units by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

_OFFSET = 0xCBF2_9CE4_8422_2325
_PRIME = 0x0000_0100_0000_01B3
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF
_FEW_TEXTS = 64
"""Up to this many texts are hashed faster one by one."""
TAG_BITS = 3


def hash64(text: str) -> int:
    """FNV-1a (Fowler, Noll, Vo) over the UTF-8 bytes."""
    return _fnv(_OFFSET, text.encode())


def _fnv(value: int, content: bytes) -> int:
    for byte in content:
        value = (value ^ byte) * _PRIME & _MASK64
    return value


def hash64_many(content: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Hashes:
    """`hash64` of n texts. `content`: their UTF-8, one after the other; `offsets`: n + 1, where each begins, then the
    end. Hashes one byte of all texts in a step; the few longest are finished one by one."""
    hashes = np.full(len(offsets) - 1, _OFFSET, np.uint64)
    order = np.argsort(np.diff(-offsets), kind="stable")
    starts, shorter = offsets[:-1][order], np.diff(-offsets)[order]
    place, left = 0, len(order)
    while (left := int(shorter[:left].searchsorted(-place))) > _FEW_TEXTS:
        rows = order[:left]
        hashes[rows] = (hashes[rows] ^ content[starts[:left] + place].astype(np.uint64)) * np.uint64(_PRIME)
        place += 1
    for row in order[:left].tolist():
        hashes[row] = _fnv(int(hashes[row]), content[offsets[row] + place : offsets[row + 1]].tobytes())
    return hashes


def hashes_of(texts: Sequence[str]) -> Hashes:
    """`hash64` of each text."""
    if len(texts) <= _FEW_TEXTS:
        return np.fromiter(map(hash64, texts), np.uint64, len(texts))
    blobs = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, blobs)], dtype=np.int64)
    return hash64_many(np.frombuffer(b"".join(blobs), np.uint8), offsets)


def tag_hashes(hashes: Hashes) -> NDArray[np.uint32]:
    """`tag_hash` of tags, by their hashes."""
    folded = (hashes >> np.uint64(32) ^ hashes).astype(np.uint32)
    return np.maximum(folded, np.uint32(1))


def tag_masks(hashes: Hashes, counts: NDArray[np.int64]) -> Hashes:
    """`tag_mask` of n messages. `hashes`: those of their tags, message by message; `counts`: how many each has."""
    bits = np.zeros(len(hashes), np.uint64)
    for turn in range(TAG_BITS):
        bits |= np.uint64(1) << (hashes >> np.uint64(8 + 6 * turn) & np.uint64(63))
    masks, tagged = np.zeros(len(counts), np.uint64), np.flatnonzero(counts)
    if len(tagged):
        masks[tagged] = np.bitwise_or.reduceat(bits, (np.cumsum(counts) - counts)[tagged])
    return masks


def tag_hash(tag: str) -> int:
    """32-bit code of a tag; never 0, which means none."""
    value = hash64(tag)
    return (value >> 32 ^ value) & 0xFFFF_FFFF or 1


def tag_mask(tags: Iterable[str]) -> int:
    """64-bit mask of a message: the OR of its tags' bits."""
    mask = 0
    for tag in tags:
        value = hash64(tag)
        for turn in range(TAG_BITS):
            mask |= 1 << (value >> (8 + 6 * turn) & 63)
    return mask


def key_hash(key: str) -> int:
    """64-bit code of a key; never 0, which means none."""
    return hash64(key) or 1
