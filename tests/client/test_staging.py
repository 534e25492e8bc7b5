"""The fingerprint of staged rows: the same for the same rows, however they are cut and ordered, and no other."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tickwheel.client.staging import Rows

Row = tuple[int, bytes, bytes]
ROWS = st.lists(
    st.tuples(st.integers(0, 1 << 40), st.binary(min_size=1, max_size=9), st.binary(max_size=3)), max_size=9
)


def fingerprint(rows: list[Row], topic: str = "t") -> int:
    """Of rows of due time, payload and meta; without the column of metas where there are none."""
    metas = [meta for _, _, meta in rows]
    return Rows(
        topic,
        np.array([due_ms for due_ms, _, _ in rows], np.int64),
        np.array([len(payload) for _, payload, _ in rows], np.uint32),
        b"".join(payload for _, payload, _ in rows),
        np.array(list(map(len, metas)), np.uint32) if any(metas) else None,
        b"".join(metas),
    ).fingerprint()


@given(ROWS, st.randoms(use_true_random=False), st.integers(0, 9))
def test_order_and_blocks_do_not_matter(rows: list[Row], chance: object, cut: int) -> None:
    """Tasks of another run have other rows in another order, and blocks end elsewhere."""
    mixed = list(rows)
    chance.shuffle(mixed)  # type: ignore[attr-defined]
    assert (fingerprint(mixed[:cut]) + fingerprint(mixed[cut:])) % (1 << 64) == fingerprint(rows)


@given(ROWS, ROWS)
def test_other_rows_have_another_one(rows: list[Row], others: list[Row]) -> None:
    """Whatever differs: a time, a payload, a meta, where one ends, how many there are, the topic."""
    assume(sorted(rows) != sorted(others))
    assert fingerprint(rows) != fingerprint(others)
    assert not rows or fingerprint(rows) != fingerprint(rows, "u")


def test_it_stays_what_it_was() -> None:
    """A job that was published by one version may be run again by the next."""
    assert fingerprint([(1, b"a", b""), (2, b"bc", b"m")]) == 0x8228_9DC6_8D3E_8698
