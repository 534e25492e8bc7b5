"""One word for one thing: docs/WORDS.md says which, and what is not said instead."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.project.imports import ROOT

CLEANED = ("replication", "storage", "wheel")
"""Folders that keep to the whole table."""

OTHERS = ("bench", "chaos", "client", "docs", "node", "pipeline", "scripts", "transport")
IN_USE = {
    "synced": "how far the 50 ms message of a master has told its slaves: a field of the wire, `synced_tick`",
    "taken over": "bundles, in fields of the wire and names of metrics",
    "takeover": "bundles, in fields of the wire and names of metrics",
    "outstanding": "deliveries that take a credit",
}
"""Words with a meaning of their own in the other folders."""

KEPT_NAMES = ("index_rows_mended", "salvaged_records", "staged_bytes_max", "staged_messages_max")
"""Names of metrics and settings that keep an older word: dashboards and config files have them."""

NOT_IN = {
    "sync": ("storage", "wheel"),
    "guard": ("bench", "client", "node", "pipeline", "scripts", "storage", "transport", "wheel"),
    "guarded": ("bench", "client", "node", "pipeline", "replication", "scripts", "storage", "transport", "wheel"),
    "staged": ("node/core/delivery", "replication", "storage", "transport", "wheel"),
    "verdict": ("client", "node/core", "node/server", "node/state", "replication", "storage", "transport", "wheel"),
}
"""Words of the table that have nothing to name in these folders."""


def rows() -> list[tuple[str, str, list[str]]]:
    """Word, meaning, and the words that are not said instead."""
    text = (ROOT / "docs/WORDS.md").read_text(encoding="utf-8")
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0] not in ("word", "---"):
            found.append((cells[0], cells[1], re.findall(r"`([^`]+)`", cells[2])))
    return found


@functools.cache
def saying(words: frozenset[str]) -> re.Pattern[str]:
    """Finds any of these words, alone or as a part of a name."""
    said = ("[ _]".join(map(re.escape, word.split())) for word in sorted(words))
    return re.compile(rf"(?<![a-z])(?:{'|'.join(said)})(?![a-z])", re.IGNORECASE)


def places(text: str, *words: str) -> Iterator[tuple[int, str]]:
    """Where any of these words is said: the number of the line, and the word."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text)
    for found in saying(frozenset(words)).finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found[0].lower().replace("_", " ")


def files(folder: str) -> list[Path]:
    """Sources and documents of a folder."""
    found = [path for suffix in ("py", "md") for path in sorted((ROOT / folder).rglob(f"*.{suffix}"))]
    assert found, folder
    return found


def test_a_word_is_found_alone_and_in_names() -> None:
    """In prose, in names with underscores and in names of classes; not inside another word."""
    assert list(places("a\nit is synced\n", "synced")) == [(2, "synced")]
    assert [number for number, _ in places("last_synced_ns\nSyncedFile\nWasSynced\n", "synced")] == [1, 2, 3]
    assert list(places("fsynced unsynced resynced", "synced")) == []
    assert list(places("rows in hand\nrows_in_hand\nin handy\n", "in", "in hand", "rows")) == [
        *((1, "rows"), (1, "in"), (2, "rows"), (2, "in"), (3, "in")),
    ]
    assert list(places("in handy\nRowsInHand\n", "in hand", "synced")) == [(2, "in hand")]


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
    kept = re.compile("|".join(KEPT_NAMES))
    for folder in CLEANED + OTHERS:
        forbidden = {word: f"say {right}" for right, _, instead in rows() for word in instead}
        if folder not in CLEANED:
            forbidden = {word: why for word, why in forbidden.items() if word not in IN_USE}
        for path in files(folder):
            if path.name == "WORDS.md":
                continue
            name = str(path.relative_to(ROOT))
            here = forbidden | {
                word: "it has another meaning"
                for word, folders in NOT_IN.items()
                if name.startswith(tuple(f"{folder}/" for folder in folders))
            }
            text = kept.sub("", path.read_text(encoding="utf-8"))
            wrong += [f"{name}:{number}: {word}: {here[word]}" for number, word in places(text, *here)]
    assert not wrong, "\n".join(wrong)
