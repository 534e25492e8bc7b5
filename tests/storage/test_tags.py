"""Hashes of tags: stable, and a mask never misses a tag that is there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.storage.tags import hash64, hashes_of, key_hash, tag_hash, tag_hashes, tag_mask, tag_masks


def test_hash_is_fnv1a() -> None:
    """Known values of FNV-1a, so that other languages can compute the same."""
    assert hash64("") == 0xCBF29CE484222325
    assert hash64("a") == 0xAF63DC4C8601EC8C


@given(st.lists(st.text(min_size=1), min_size=1, max_size=8))
def test_mask_has_no_false_negatives(tags: list[str]) -> None:
    """Every tag of a message may match its mask."""
    mask = tag_mask(tags)
    assert all(mask & tag_mask([tag]) == tag_mask([tag]) for tag in tags)


@given(st.text())
def test_codes_are_never_zero(text: str) -> None:
    """0 means none."""
    assert tag_hash(text)
    assert key_hash(text)


@given(st.lists(st.text(max_size=40), max_size=20), st.integers(0, 100))
def test_many_are_hashed_as_one(texts: list[str], more: int) -> None:
    """Few and many, of equal and of different lengths."""
    texts = [*texts, *(f"tag {number}" for number in range(more))]
    assert hashes_of(texts).tolist() == [hash64(text) for text in texts]


@given(st.lists(st.lists(st.text(min_size=1, max_size=5), max_size=4), max_size=60))
def test_tags_of_many_messages_are_as_those_of_one(messages: list[list[str]]) -> None:
    """Codes and masks, also of messages without tags."""
    tags = [tag for message in messages for tag in message]
    hashes = hashes_of(tags)
    assert tag_hashes(hashes).tolist() == [tag_hash(tag) for tag in tags]
    counts = np.array([len(message) for message in messages], np.int64)
    assert tag_masks(hashes, counts).tolist() == [tag_mask(message) for message in messages]
