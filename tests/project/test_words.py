"""One word for one thing: docs/WORDS.md says which, and what is not said instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.project.imports import ROOT

CLEANED = ("replication", "storage", "wheel")
"""Folders that keep to the whole table."""

OTHERS = ("bench", "chaos", "client", "docs", "node", "pipeline", "scripts")
IN_USE = {
    "synced": "how far the 50 ms message of a master has told its slaves: a field of the wire, `synced_tick`",
    "taken over": "bundles, in fields of the wire and names of metrics",
    "takeover": "bundles, in fields of the wire and names of metrics",
    "outstanding": "deliveries that take a credit",
}
"""Words with a meaning of their own in the other folders."""

ONLY_IN = {"sync": ("replication",)}
"""Words that mean something in these of the cleaned folders alone: storage and wheel know no messages of peers."""


def rows() -> list[tuple[str, str, list[str]]]:
    """Word, meaning, and the words that are not said instead."""
    text = (ROOT / "docs/WORDS.md").read_text(encoding="utf-8")
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0] not in ("word", "---"):
            found.append((cells[0], cells[1], re.findall(r"`([^`]+)`", cells[2])))
    return found


def places(text: str, word: str) -> Iterator[int]:
    """Numbers of the lines that say a word, alone or as a part of a name."""
    pattern = re.compile(rf"(?<![a-z]){re.escape(word)}(?![a-z])", re.IGNORECASE)
    for number, line in enumerate(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text).splitlines(), 1):
        if pattern.search(line):
            yield number


def files(folder: str) -> list[Path]:
    """Sources and documents of a folder."""
    found = [path for suffix in ("py", "md") for path in sorted((ROOT / folder).rglob(f"*.{suffix}"))]
    assert found, folder
    return found


def test_a_word_is_found_alone_and_in_names() -> None:
    """In prose, in names with underscores and in names of classes; not inside another word."""
    assert list(places("a\nit is synced\n", "synced")) == [2]
    assert list(places("last_synced_ns\nSyncedFile\nWasSynced\n", "synced")) == [1, 2, 3]
    assert list(places("fsynced unsynced resynced", "synced")) == []


def test_each_word_stands_once_and_in_order() -> None:
    """The table is alphabetical, each row has a meaning, and no forbidden word is a word of the table."""
    words = [word for word, _, _ in rows()]
    assert len(words) > 60 and len(set(words)) == len(words)
    plain = [re.sub("[^a-z0-9 ]", "", word.lower()) for word in words]
    assert plain == sorted(plain)
    assert all(meaning for _, meaning, _ in rows())
    assert not set(words) & {word for _, _, instead in rows() for word in instead}


def test_forbidden_words_are_not_said() -> None:
    """Neither in code nor in comments and documents, anywhere in the product."""
    wrong = []
    for folder in CLEANED + OTHERS:
        forbidden = {word: f"say {right}" for right, _, instead in rows() for word in instead}
        if folder in CLEANED:
            forbidden |= {word: "it is a message" for word, where in ONLY_IN.items() if folder not in where}
        else:
            forbidden = {word: why for word, why in forbidden.items() if word not in IN_USE}
        for path in files(folder):
            if path.name == "WORDS.md":
                continue
            text = path.read_text(encoding="utf-8")
            for word, why in forbidden.items():
                wrong += [f"{path.relative_to(ROOT)}:{number}: {word}: {why}" for number in places(text, word)]
    assert not wrong, "\n".join(wrong)
