"""Hashes of tags and keys: what a unit keeps of them, the same in every language.

A tag's 64-bit hash is FNV-1a over its UTF-8 bytes. Its code is the upper half folded into 32 bits; its mask
has three bits set, at the places that three groups of six bits of the hash name. A message's mask is the OR
of its tags' masks. A wanted tag can match only if all of its bits are in the message's mask. Hashes
collide, so the text must be checked exactly in the end. `tickwheel.wheel.filters` selects units by them.
"""

from __future__ import annotations

from collections.abc import Iterable

_OFFSET = 0xCBF2_9CE4_8422_2325
_PRIME = 0x0000_0100_0000_01B3
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF
TAG_BITS = 3


def hash64(text: str) -> int:
    """FNV-1a (Fowler, Noll, Vo) over the UTF-8 bytes."""
    value = _OFFSET
    for byte in text.encode():
        value = (value ^ byte) * _PRIME & _MASK64
    return value


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
