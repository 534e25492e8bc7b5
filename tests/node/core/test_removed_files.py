"""An operator removes files of a stopped node: it does not start as a member that has forgotten what it said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.node.core.trio import Client, Node, World
from tickwheel.node.core.checkpoint import JOURNAL_DIRECTORY, MANIFEST_PATH
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.rebuild import RebuildError, rebuild
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.replication.journal import Journal
from tickwheel.replication.journal_files import CorruptJournalError, segment_path, segment_sequences


def stopped_master(*, with_checkpoint: bool, segment_bytes: int = CoreConfig().segment_bytes) -> Node:
    """The master of three nodes, after it has acknowledged messages."""
    every = 10 if with_checkpoint else 10_000
    world = World(config=replace(CoreConfig(), checkpoint_entries=every, segment_bytes=segment_bytes))
    client = Client(world)
    node = world.elect()
    for number in range(20):
        client.schedule([60_000])
        world.run_until(lambda: len(client.acked) == number + 1)  # noqa: B023
    world.run(1_000)
    assert node.disk.exists(MANIFEST_PATH) == with_checkpoint
    node.kill()
    return node


@pytest.mark.parametrize("with_checkpoint", [True, False])
@pytest.mark.parametrize("removed", [JOURNAL_DIRECTORY, f"{JOURNAL_DIRECTORY}/hard_state"])
def test_a_node_without_its_journal_or_its_votes_does_not_start(removed: str, with_checkpoint: bool) -> None:
    """It kept its disk's id, so the others would count its votes and acknowledgements."""
    node = stopped_master(with_checkpoint=with_checkpoint)
    node.disk.remove(removed)
    with pytest.raises(ImpossibleStateError, match=f"{removed} was removed.*add it anew under a new id"):
        node.start()


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_a_node_without_its_newest_entries_does_not_start(*, with_checkpoint: bool) -> None:
    """P1: the end of its journal would look like that of a crash, and it had acknowledged what is gone."""
    node = stopped_master(with_checkpoint=with_checkpoint, segment_bytes=1_000)
    *_, newest, reserve = segment_sequences(node.disk.list(JOURNAL_DIRECTORY))
    assert newest > 1
    for sequence in (newest, reserve):
        node.disk.remove(segment_path(JOURNAL_DIRECTORY, sequence))
    with pytest.raises(CorruptJournalError, match=r"it was removed.*add it anew under a new id"):
        node.start()


@pytest.mark.parametrize("founded", [True, False])
def test_a_node_without_any_segment_does_not_start(*, founded: bool) -> None:
    """Nor if it waits for the founding, and has acknowledged entries of a master that the others had elected."""
    node = stopped_master(with_checkpoint=False)
    if not founded:
        node.disk.remove("founding")
    for sequence in segment_sequences(node.disk.list(JOURNAL_DIRECTORY)):
        node.disk.remove(segment_path(JOURNAL_DIRECTORY, sequence))
    with pytest.raises(ImpossibleStateError, match=f"{JOURNAL_DIRECTORY} was removed.*add it anew under a new id"):
        node.start()


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_a_checkpoint_is_not_given_up_for_a_journal_without_its_segments(*, with_checkpoint: bool) -> None:
    """`tickwheel rebuild` took a journal of which only the vote was left for a whole one, and removed the manifest."""
    node = stopped_master(with_checkpoint=with_checkpoint)
    for sequence in segment_sequences(node.disk.list(JOURNAL_DIRECTORY)):
        node.disk.remove(segment_path(JOURNAL_DIRECTORY, sequence))
    with pytest.raises(RebuildError, match="there is no journal here; nothing was changed"):
        rebuild(node.disk, CoreConfig().segment_bytes)
    assert node.disk.exists(MANIFEST_PATH) == with_checkpoint


def test_a_checkpoint_is_not_given_up_for_a_journal_that_holds_less() -> None:
    """As one may of a version that kept no record of its newest segment."""
    node = stopped_master(with_checkpoint=True, segment_bytes=1_000)
    *_, newest, reserve = segment_sequences(node.disk.list(JOURNAL_DIRECTORY))
    for path in (*(segment_path(JOURNAL_DIRECTORY, s) for s in range(2, reserve + 1)), f"{JOURNAL_DIRECTORY}/newest"):
        node.disk.remove(path)
    with pytest.raises(RebuildError, match=r"the checkpoint holds more.*nothing was changed"):
        rebuild(node.disk, 1_000)
    assert newest > 2 and node.disk.exists(MANIFEST_PATH)


@pytest.mark.parametrize("removed", [MANIFEST_PATH, "founding", "leases", f"{JOURNAL_DIRECTORY}/newest"])
def test_a_node_without_other_files_has_its_journal(removed: str) -> None:
    """Everything that it said stands there."""
    node = stopped_master(with_checkpoint=removed == MANIFEST_PATH)
    node.disk.remove(removed)
    node.start()
    node.world.run(2_000)
    assert node.host is not None and node.host.core.state.created


def test_a_damaged_checkpoint_is_not_given_up_for_an_empty_journal() -> None:
    """Of a node whose journal was lost, and begun anew by an earlier version's `tickwheel recover`."""
    node = stopped_master(with_checkpoint=True)
    node.disk.remove(JOURNAL_DIRECTORY)
    Journal.open(node.disk, JOURNAL_DIRECTORY).close()
    node.disk.flip(MANIFEST_PATH, 30)
    with pytest.raises(RebuildError, match="holds no entry; nothing was changed"):
        rebuild(node.disk, CoreConfig().segment_bytes)
    assert node.disk.exists(MANIFEST_PATH)
