"""A checkpoint is captured in short turns and written in small pieces, however much state there is."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.node.state.driver import admin, publish_command
from tests.node.state.solo import Solo
from tickwheel.node.state import digest, producers, snapshot
from tickwheel.proto import admin_pb2
from tickwheel.storage.disk import Buffer, Disk
from tickwheel.storage.whole_file import write_pieces


def full(monkeypatch: pytest.MonkeyPatch) -> Solo:
    """Several of everything that a turn or a piece is counted in, and small turns and pieces."""
    monkeypatch.setattr(snapshot, "TURN_TOPICS", 5)
    monkeypatch.setattr(snapshot, "TURN_SUBSCRIPTIONS", 20)
    monkeypatch.setattr(snapshot, "TURN_BATCHES", 3)
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 256)
    solo = Solo()
    solo.create("g")
    names = [f"t{n}" for n in range(40)]
    for number in range(3):
        solo.apply(admin(create_group=admin_pb2.CreateGroupRequest(name=f"g{number}", topics=[*names, "t"])))
    for sequence in range(20):
        solo.apply(publish_command([(f"p{sequence % 3}", sequence // 3 + 1, [solo.now_ms + 10 * sequence] * 5)], 1))
    solo.dispatch(solo.now_ms + 1_000)
    for group_id in (1, 2, 3, 4):
        subscription = solo.state.subscription(group_id, 1)
        assert subscription is not None
        positions, ids, attempts = subscription.deliverable(5, 60)
        solo.settle_some(group_id, ids, attempts, positions)
    return solo


def test_what_is_captured_in_turns_and_written_in_pieces_is_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    solo = full(monkeypatch)
    pieces: list[int] = []

    def written(disk: Disk, path: str, parts: Iterable[Buffer]) -> None:
        gathered = [bytes(part) for part in parts]
        pieces.extend(len(part) for part in gathered)
        write_pieces(disk, path, gathered)

    monkeypatch.setattr(snapshot, "write_pieces", written)
    turns = len(list(solo.state.capture_checkpoint()))
    assert turns >= 40 // 5 + 3 * 41 // 20
    before = solo.state.digest().digest
    solo.checkpoint()
    assert len(pieces) > 10 and max(pieces) < 2 * 256
    solo.restart()
    assert solo.state.digest().digest == before


def test_an_entry_that_is_applied_between_two_turns_is_our_bug_and_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    solo = full(monkeypatch)
    turns = solo.state.capture_checkpoint()
    next(turns)
    solo.group("late")
    with pytest.raises(AssertionError, match="while the state was captured"):
        for _ in turns:
            pass


def test_a_digest_made_in_turns_is_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the turns; each works on a few of whatever there may be many of."""
    solo = full(monkeypatch)
    before = solo.state.digest()
    for name in ("TURN_TOPICS", "TURN_GROUPS", "TURN_SUBSCRIPTIONS"):
        monkeypatch.setattr(digest, name, 5)
    monkeypatch.setattr(producers, "DIGEST_TURN", 3)
    turns, count = solo.state.digest_in_turns(), 0
    with pytest.raises(StopIteration) as complete:
        while True:
            next(turns)
            count += 1
    assert complete.value.value == before
    assert count >= 2 * 40 // 5 + 3 * 41 // 5 + 20 // 3
    turns = solo.state.digest_in_turns()
    next(turns)
    solo.group("late")
    with pytest.raises(AssertionError, match="while a digest was made"):
        list(turns)
