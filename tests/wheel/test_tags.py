"""Hashes of tags: stable, and a mask never misses a tag that is there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.wheel.tags import hash64, key_hash, tag_hash, tag_mask


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
