"""Tag filters over units: nothing that matches is ever lost, and how much passes that does not."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickwheel.storage.tags import tag_hash, tag_mask
from tickwheel.wheel.filters import TagFilter, are_tags, filter_of, is_tag, normalised
from tickwheel.wheel.units import ONE_TAG, UNIT, Units

TAGS = st.text(min_size=1, max_size=6).filter(is_tag)


def units_of(messages: Sequence[Sequence[str]], first_version: bool = False) -> Units:
    """Units of messages with these tags; as the first version made them they do not say how many there were."""
    units = np.zeros(len(messages), UNIT)
    for unit, tags in zip(units, messages, strict=True):
        unit["tag_mask"] = tag_mask(tags)
        if first_version:
            unit["tag_hash"] = tag_hash(tags[0]) if tags else 0
        elif len(tags) == 1:
            unit["tag_hash"], unit["flags"] = tag_hash(tags[0]), ONE_TAG
    return units


def made(expression: str) -> TagFilter:
    """The filter of an expression that does not want everything."""
    found = filter_of(normalised(expression) or "")
    assert found is not None
    return found


@given(st.lists(st.one_of(TAGS, st.text("a |*\t\u3000é", max_size=3), st.just("a" * 129)), max_size=6))
def test_tags_are_looked_at_together_as_one_by_one(tags: list[str]) -> None:
    """What is wrong at the edge of one is not hidden by the next."""
    assert are_tags(tags) == all(map(is_tag, tags))


@pytest.mark.parametrize(
    ("given_text", "kept"),
    [
        *(("*", ""), ("", ""), (" a||b ", "a || b"), ("b || a || b", "a || b"), ("a b", "a b"), ("a\n|| b", "a || b")),
        *(("a ||", None), ("a || *", None), ("a | b", None), ("|| a", None), ("x" * 129, None)),
    ],
)
def test_an_expression_is_normalised_or_refused(given_text: str, kept: str | None) -> None:
    """Order, blanks and repeats do not make another filter; half an expression is none."""
    assert normalised(given_text) == kept
    if kept:
        assert normalised(kept) == kept


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(TAGS, max_size=4), max_size=20), st.lists(TAGS, min_size=1, max_size=4), st.booleans())
def test_what_matches_is_always_wanted(messages: list[list[str]], wanted: list[str], first_version: bool) -> None:
    """P1: a filter may pass too much, never too little, also over units that an earlier version wrote."""
    found = made(" || ".join(wanted)).wanted(units_of(messages, first_version))
    for tags, passes in zip(messages, found.tolist(), strict=True):
        assert passes or not set(tags) & set(wanted)
        assert tags or not passes


def test_how_much_passes_by_collision() -> None:
    """False positives: none of 20,000 with one tag; of those with several about (bits set / 64)^3 a wanted tag."""
    dice = Random(1)

    def drawn() -> str:
        return f"{dice.getrandbits(40):x}"

    wanted = made(" || ".join(drawn() for _ in range(8)))
    assert not wanted.wanted(units_of([(drawn(),) for _ in range(20_000)])).any()
    for several in (2, 4, 8):
        units = units_of([[drawn() for _ in range(several)] for _ in range(10_000)])
        rates = [
            float(TagFilter((), [mask], [0]).wanted(units).mean()) for mask in wanted.masks if mask.bit_count() == 3
        ]
        assert len(rates) >= 4
        expected = (1 - (63 / 64) ** (3 * several)) ** 3
        assert 0.3 * expected < float(np.mean(rates)) < 1.1 * expected, rates
