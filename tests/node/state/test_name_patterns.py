"""Patterns of names: what they mean, and what many of them cost."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.counting import calls_of
from tickwheel.node.state import name_patterns
from tickwheel.node.state.name_patterns import REMEMBERED_MAX, NamePatterns, matches
from tickwheel.node.state.names import TOPIC_NAME_LENGTH_MAX

NAMES = st.text("ab-", max_size=8)
PATTERNS = st.text("ab-*", min_size=1, max_size=8)


@given(PATTERNS, NAMES)
def test_a_pattern_means_what_a_regular_expression_would(pattern: str, name: str) -> None:
    """`*` stands for any characters, also none."""
    wanted = re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None
    assert matches(pattern, name) == wanted


def test_a_hostile_pattern_costs_no_more_than_its_length() -> None:
    """What makes a backtracking matcher take for ever is answered at once."""
    assert not matches("*a" * 60 + "*b", "a" * 127)
    assert not NamePatterns([("*a" * 60 + "*b", 1)]).bits("a" * 127)


@given(st.lists(PATTERNS, max_size=40), st.lists(NAMES, min_size=1, max_size=20))
@example(["a*", "ab*", "ab-*", "*a", "*ba", "**", "a**b"], ["abc", "ab", "ac", "", "b"])
def test_an_index_finds_what_each_pattern_would(patterns: list[str], names: list[str]) -> None:
    """The bits of all patterns that match and of no other, the first time and from memory."""
    index = NamePatterns((pattern, 1 << place) for place, pattern in enumerate(patterns))
    for name in [*names, *names]:
        wanted = sum(1 << place for place, pattern in enumerate(patterns) if matches(pattern, name))
        assert index.bits(name) == wanted, name


@pytest.mark.parametrize(
    "form", ["t{}", "t{}-*", "*-t{}", "t{}-*-x", "x-*-t{}", "*-t{}-*", "x-*-t{}-*-y", "*longer*{}*"]
)
def test_many_patterns_cost_a_name_little_more_than_one(form: str) -> None:
    """Whether each names what it means, a beginning, an end, both, or a piece."""

    def asked(count: int) -> Callable[[], object]:
        index = NamePatterns((form.format(f"{number:04}"), 1) for number in range(count))
        names = [form.format(f"{number:04}").replace("*", "z") for number in range(count - 1, count + 99)]
        assert index.bits(names[0])
        return lambda: [index.bits(name) for name in names[1:]]

    assert calls_of(asked(2_048)) <= 2 * calls_of(asked(1)) + 100


def test_a_batch_of_names_is_remembered_whatever_was_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that fits is compared once, and the memory of names is bounded."""
    index = NamePatterns([("*-x-*", 1)])
    for number in range(REMEMBERED_MAX * 2 + REMEMBERED_MAX // 2):
        index.bits(f"before-{number}")
    batch = [f"name-x-{number}" for number in range(REMEMBERED_MAX)]
    compared: list[str] = []

    def noted(pattern: str, name: str) -> bool:
        compared.append(name)
        return matches(pattern, name)

    monkeypatch.setattr(name_patterns, "matches", noted)
    for _ in range(3):
        assert all(index.bits(name) for name in batch)
    assert compared == batch
    assert len(index._newer) + len(index._older) <= 2 * REMEMBERED_MAX


def test_a_text_that_is_no_name_costs_no_more_than_one() -> None:
    """A request may name a topic of eight megabytes, and its rights are checked before its name."""
    index = NamePatterns([("*-x-*", 1), ("x*", 2), ("x", 4), ("*z", 8)])
    longest = "x" * TOPIC_NAME_LENGTH_MAX
    for text in (longest, longest + "x", longest + "-x-" * 1_000_000, "-x-" * 1_000_000):
        assert index.bits(text) & 1 == text.startswith("-")
    assert sum(map(len, index._newer)) < 4 * (TOPIC_NAME_LENGTH_MAX + 2)
