"""Tag filters: select the units that a group wants by the tag hashes and masks in the units.

An expression is `*` (everything) or tags with `||` between them, any of which is enough. It is kept normalised:
each tag once, in order, `a || b`; empty stands for everything. Pure, and the same on every node: apply depends on it.

A unit is wanted if all bits of one of the wanted tags are in the unit's mask. If the message has a single tag
(`ONE_TAG`), the tag's hash must be equal too. Hashes collide: a unit may be wanted by mistake, but never rejected by
mistake. Readers of the tags themselves check exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tickwheel.storage.tags import tag_hash, tag_mask
from tickwheel.wheel.units import ONE_TAG, Units

EVERYTHING = "*"
TAGS_MAX = 64
"""Tags of a message, and of an expression: each wanted tag costs a pass over the units."""
TAG_LENGTH_MAX = 128
TAG_RULE = f"1 to {TAG_LENGTH_MAX} printable characters without |, no blank at either end, not *"
FILTER_RULE = f"* or 1 to {TAGS_MAX} tags with || between them"


def is_tag(tag: str) -> bool:
    """Whether a tag is allowed by TAG_RULE."""
    return (
        0 < len(tag) <= TAG_LENGTH_MAX
        and tag.isprintable()
        and "|" not in tag
        and tag != EVERYTHING
        and tag == tag.strip()
    )


def are_tags(tags: Sequence[str]) -> bool:
    """Whether all tags are allowed by TAG_RULE. Looks at all of them together."""
    if not tags:
        return True
    text = f"|{'|'.join(tags)}|"
    # Of the characters that str.strip takes only the blank is printable.
    return (
        text.isprintable()
        and text.count("|") == len(tags) + 1
        and not any(wrong in text for wrong in ("||", "| ", " |", f"|{EVERYTHING}|"))
        and max(map(len, tags)) <= TAG_LENGTH_MAX
    )


def normalised(expression: str) -> str | None:
    """The normalised expression (empty: everything); None if it is invalid."""
    parts = [part.strip() for part in expression.split("||")]
    if parts in ([""], [EVERYTHING]):
        return ""
    tags = sorted(set(parts))
    if len(tags) > TAGS_MAX or not all(map(is_tag, tags)):
        return None
    return " || ".join(tags)


@dataclass(frozen=True, slots=True)
class TagFilter:
    """A filter that does not want everything. `tags`, `masks` and `hashes` belong together one by one."""

    tags: tuple[str, ...]
    masks: Sequence[int]
    hashes: Sequence[int]

    def wanted(self, units: Units) -> NDArray[np.bool_]:
        """True for each unit that may match: all that do, and a few by collision."""
        masks, hashes = units["tag_mask"], units["tag_hash"]
        several = (units["flags"] & ONE_TAG) == 0
        found = np.zeros(len(units), np.bool_)
        for mask, code in zip(self.masks, self.hashes, strict=True):
            bits = np.uint64(mask)
            found |= ((masks & bits) == bits) & (several | (hashes == np.uint32(code)))
        return found


@lru_cache(maxsize=4_096)
def filter_of(expression: str) -> TagFilter | None:
    """The filter of a normalised expression; None if it wants everything."""
    tags = tuple(expression.split(" || ")) if expression else ()
    if not tags:
        return None
    return TagFilter(tags, [tag_mask((tag,)) for tag in tags], [tag_hash(tag) for tag in tags])


def shown(expression: str) -> str:
    """A normalised expression for display: never empty."""
    return expression or EVERYTHING
