"""Every sync of the journal is needed: each one, turned into nothing, is found by the test of its promise.

A scenario runs on many seeds. As it is, none may find a loss; with one sync ignored, some must.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tickwheel.replication.journal import Journal
from tickwheel.storage.errors import CorruptFileError
from tickwheel.storage.simulated import SimulatedDisk

DIRECTORY = "g0/journal"
SEEDS = range(150)
Sabotage = Callable[[SimulatedDisk], None]


def opened(disk: SimulatedDisk) -> Journal:
    return Journal.open(disk, DIRECTORY, segment_bytes=10_000)


def fill(journal: Journal, count: int, term: int) -> None:
    for _ in range(count):
        index = journal.last_index + 1
        journal.append(index, term, f"{index}:{term};".encode() * 300)


def sync(journal: Journal) -> None:
    work = journal.begin_fsync()
    work.run()
    journal.finish_fsync(work)


def heal(disk: SimulatedDisk) -> None:
    disk.ignore_fsync(None)
    disk.ignore_fsync_dir(None)


def group_commit(disk: SimulatedDisk, sabotage: Sabotage) -> bool:
    """Durable entries are there after a power loss."""
    journal = opened(disk)
    sabotage(disk)
    fill(journal, 20, 1)
    sync(journal)
    disk.crash()
    again = opened(disk)
    return again.last_index == 20 and again.entry(20)[2].startswith(b"20:1;")


def truncation(disk: SimulatedDisk, sabotage: Sabotage) -> bool:
    """Replaced entries that count as durable have really replaced the old ones."""
    journal = opened(disk)
    fill(journal, 3, 1)
    sync(journal)
    sabotage(disk)
    journal.truncate_from(2)
    fill(journal, 2, 2)
    sync(journal)
    disk.crash()
    again = opened(disk)
    return again.last_index == 3 and [again.term_at(index) for index in (1, 2, 3)] == [1, 2, 2]


def vote(disk: SimulatedDisk, sabotage: Sabotage) -> bool:
    """Term and vote are there after a power loss."""
    journal = opened(disk)
    journal.set_hard_state(1, "a")
    sabotage(disk)
    journal.set_hard_state(2, "b")
    disk.crash()
    again = opened(disk)
    return (again.term, again.voted_for) == (2, "b")


def restart_after_a_kill(disk: SimulatedDisk, sabotage: Sabotage) -> bool:
    """What a restarted node counts as durable survives, though the killed process had not synced it."""
    journal = opened(disk)
    fill(journal, 20, 1)
    disk.kill()
    sabotage(disk)
    journal = opened(disk)
    durable_index = journal.durable_index
    heal(disk)
    disk.crash()
    return durable_index == 20 and opened(disk).last_index == 20


def creation(disk: SimulatedDisk, sabotage: Sabotage) -> bool:
    """A power loss before the first sync leaves a journal that opens, whatever pages it kept."""
    sabotage(disk)
    journal = opened(disk)
    heal(disk)
    fill(journal, 6, 1)
    disk.crash()
    return opened(disk).last_index <= 6


def creation_and_sync(disk: SimulatedDisk, sabotage: Sabotage) -> bool:
    """The first sync of a new journal does not have to care for its directory."""
    sabotage(disk)
    journal = opened(disk)
    heal(disk)
    fill(journal, 1, 1)
    sync(journal)
    disk.crash()
    return opened(disk).last_index == 1


def reset(disk: SimulatedDisk, sabotage: Sabotage) -> bool:
    """An installed checkpoint's base is durable when the call returns."""
    journal = opened(disk)
    fill(journal, 4, 1)
    sync(journal)
    sabotage(disk)
    journal.reset_to(50, 7)
    heal(disk)
    disk.crash()
    again = opened(disk)
    return (again.base_index, again.base_term, again.last_index) == (50, 7, 50)


def nothing(_disk: SimulatedDisk) -> None:
    """No sabotage."""


def no_segment_sync(disk: SimulatedDisk) -> None:
    disk.ignore_fsync(lambda path: path.endswith(".segment"))


def no_hard_state_sync(disk: SimulatedDisk) -> None:
    disk.ignore_fsync(lambda path: "hard_state" in path)


def no_dir_sync(disk: SimulatedDisk) -> None:
    disk.ignore_fsync_dir(lambda path: path == DIRECTORY)


def losses(scenario: Callable[[SimulatedDisk, Sabotage], bool], sabotage: Sabotage) -> int:
    """On how many seeds the promise was broken."""
    count = 0
    for seed in SEEDS:
        try:
            count += not scenario(SimulatedDisk(Random(seed)), sabotage)
        except CorruptFileError:
            count += 1
    return count


SCENARIOS = [group_commit, truncation, vote, restart_after_a_kill, creation, creation_and_sync, reset]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_promise_holds(scenario: Callable[[SimulatedDisk, Sabotage], bool]) -> None:
    """With all syncs in place no seed finds a loss."""
    assert losses(scenario, nothing) == 0


@pytest.mark.parametrize(
    ("scenario", "sabotage"),
    [
        (group_commit, no_segment_sync),
        (group_commit, no_dir_sync),
        (truncation, no_segment_sync),
        (vote, no_hard_state_sync),
        (vote, no_dir_sync),
        (restart_after_a_kill, no_segment_sync),
        (restart_after_a_kill, no_dir_sync),
        (creation, no_segment_sync),
        (creation_and_sync, no_dir_sync),
        (reset, no_segment_sync),
        (reset, no_dir_sync),
    ],
)
def test_without_the_sync_a_loss_is_found(
    scenario: Callable[[SimulatedDisk, Sabotage], bool], sabotage: Sabotage
) -> None:
    """The checker sees what the missing sync lets happen."""
    assert losses(scenario, sabotage) > 0
