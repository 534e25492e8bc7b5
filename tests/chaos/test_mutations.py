"""Old bugs: each is put in and taken out whole, and those that show quickly are found."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tickwheel.chaos import cli_mutants
from tickwheel.chaos.cli_mutants import (
    BEGIN,
    END,
    GUARDS,
    Found,
    begun,
    broken_when_whole,
    config_of,
    hunt,
    keep_rows,
    known_rows,
    whole_config_of,
    write_table,
)
from tickwheel.chaos.sim.mutation_table import GUARD_AIMS, Patches
from tickwheel.chaos.sim.mutations import LAYERS, MUTATIONS, mutated
from tickwheel.chaos.sim.run import simulate
from tickwheel.chaos.sim.setup import Level, SimulationConfig
from tickwheel.node.core.delivery.heard_leases import HeardLeases
from tickwheel.replication.guards import Guards
from tickwheel.wheel.engine import Wheel

CHAOS = Path(__file__).parents[2] / "docs" / "CHAOS.md"


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_can_be_put_in(name: str) -> None:
    """A method that was renamed would leave an old bug that changes nothing."""
    with mutated(name):
        pass


def test_it_must_take_the_same_arguments() -> None:
    """A method that has got another argument would be found by a TypeError, and not by what the old bug does."""
    with pytest.raises(AssertionError, match="other arguments"):
        Patches().replace(HeardLeases, "held", lambda original, self, now_ms: [])


def test_it_is_taken_out() -> None:
    """A run without a bug after one with it sees the product's own code, even if the run raises."""
    before = Wheel.__dict__["append"]
    with pytest.raises(KeyError), mutated("late_not_clamped"):
        assert Wheel.__dict__["append"] is not before
        raise KeyError
    assert Wheel.__dict__["append"] is before


QUICK = [
    "cancelled_before_apply",
    "acknowledged_when_appended",
    "not_held_until_due",
    "idempotence_off",
    "stamped_at_apply",
    "vote_not_stored",
    "resets_fenced",
    "higher_term_obeyed",
    "durable_before_acknowledged",
    "apply_errors_fatal",
    "loss_reported_unknown",
    "slices_bounded",
    "own_durability_counts",
    "apply_sliced",
    "transfer_marked",
    "proposals_local",
    "keys_of_own_batch_unseen",
    "settled_before_commit",
    "passed_taken_for_due",
    "extensions_not_told",
    "extended_without_lease",
    "checksums_not_compared",
    "cold_marks_ignored",
    "deleted_topics_stay",
]


SHORTER = {
    "own_leases_forgotten": (3, 7),
    "disks_not_compared": (5, 16),
    "keys_of_own_batch_unseen": (1, 1),
    "extensions_not_told": (2, 1),
    "stale_lease": (2, 1),
    "transfer_marked": (2, 7),
    "cancelled_before_apply": (1, 6),
    "not_held_until_due": (1, 8),
    "one_peer_believed": (1, 8),
    "checksums_not_compared": (2, 1),
    "cold_marks_ignored": (3, 1),
    "deleted_topics_stay": (2, 5),
    "journal_cut_early": (2, 8),
    "deletion_cancels_nothing": (2, 1),
    "handover_without_leases": (2, 8),
    "settled_before_commit": (3, 0),
    "higher_term_obeyed": (2, 4),
}
"""Seconds of load and faults that are enough for a bug, and a seed that finds it in them: runs shorter than those of
the table in docs/CHAOS.md."""


def hunts(name: str) -> Iterator[tuple[int, SimulationConfig, SimulationConfig]]:
    """Seeds, each with a run that has the bug in it and the same run without it. The first seed finds the bug, until a
    later version draws its dice anew; then others may, and at last runs as long as those of the table."""
    bug, whole = config_of(name), whole_config_of(name)
    row = re.search(rf"^\| {name} \|[^|]*\|[^|]*\| (\d+) \|", CHAOS.read_text(), re.MULTILINE)
    lengths = [(bug.seconds, int(row[1]) - 1 if row else 0)]
    if name in SHORTER:
        lengths.insert(0, SHORTER[name])
    for seconds, known in lengths:
        for seed in (known, *(seed for seed in range(24) if seed != known)):
            yield seed, replace(bug, seconds=seconds), replace(whole, seconds=seconds)


@pytest.mark.parametrize("name", QUICK)
def test_quick_ones_are_found(name: str) -> None:
    """Checkers and workload notice an old bug, or a guard that is off, within a few seeds, and nothing without it."""
    seed, whole = next((seed, whole) for seed, bug, whole in hunts(name) if simulate(seed, bug).failed)
    assert not broken_when_whole(seed, whole)


DIRECTED = [
    "handover_without_leases",
    "hours_removed_early",
    "unverified_committed",
    "term_ahead_of_disk",
    "stale_lease",
    "one_peer_believed",
    "leases_forgotten_with_checkpoint",
    "own_leases_forgotten",
    "installed_over_writes",
    "journal_cut_early",
    "members_not_shown",
    "new_disks_vote",
    "broken_copies_installed",
    "resumed_files_not_synced",
    "disks_not_compared",
    "deletion_cancels_nothing",
]
"""Bugs that the default faults hardly ever meet."""


@pytest.mark.parametrize("name", DIRECTED)
def test_directed_ones_are_found_and_only_they(name: str) -> None:
    """The scenario that walks into the gap soon breaks a promise with the bug in it, and none without, though its
    faults had their effect."""
    for seed, bug, whole in hunts(name):
        if simulate(seed, bug).failed:
            clean = simulate(seed, whole)
            assert not clean.failed, clean.broken
            if any(tally.effective for tally in clean.tallies.values()):
                return
    raise AssertionError("found in no run in which the faults had their effect")


def test_a_hunt_goes_on_where_it_was(tmp_path: Path) -> None:
    """A table that takes hours is made in pieces: what was run is not run again, unless the scenario has changed."""
    path = tmp_path / "rows.json"
    row = hunt(begun("slices_bounded"), 0, 300, time.monotonic() + 1e6)
    assert row.by and row.whole == 1 and row.over(300)
    half = Found("votes_sticky", "log", begun("votes_sticky").faults, 7)
    gone = Found("idempotence_off", "node", "another scenario", 4, "P5", "how")
    keep_rows(path, 0, {one.name: one for one in (row, half, gone)})
    assert known_rows(path, 0) == {"slices_bounded": row, "votes_sticky": half}
    assert known_rows(path, 1) == known_rows(tmp_path / "none.json", 0) == {}
    assert hunt(half, 0, 300, time.monotonic()).seeds == 7 and not half.over(300)


def test_a_row_needs_its_whole_runs() -> None:
    """A scenario that breaks a promise by itself proves nothing about what is missing in it."""
    name = "votes_sticky"
    found = Found(name, "log", begun(name).faults, 1, "P10", "how", whole=1)
    assert not found.over(300)
    found.seeds, found.whole = 74, 9
    assert not found.over(300) and found.next_whole(0) == 73, "the seed that found it is among them"
    found.unclean = "P10 at 3 s"
    assert found.over(300) and not found.proven and "BROKEN" in found.cells()[-1]
    default = Found("slices_bounded", "log", begun("slices_bounded").faults, 74, "P11", "how")
    assert not default.over(300) and default.next_whole(0) == 73, "of the default scenario, the seed that found it"
    default.whole = 1
    assert default.over(300) and default.cells()[-1] == "1"


def test_a_run_that_breaks_by_itself_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the default scenario too: a fault of the product itself was once taken for the find of an old bug."""

    def unclean_config_of(name: str) -> SimulationConfig:
        return replace(whole_config_of(name), guards=Guards(slices_bounded=False))

    monkeypatch.setattr(cli_mutants, "whole_config_of", unclean_config_of)
    row = hunt(begun("acknowledged_when_appended"), 0, 300, time.monotonic() + 1e6)
    assert row.by and row.unclean.startswith("P11") and not row.proven


def test_aims_are_at_guards() -> None:
    """A guard that was renamed would be looked for where nothing leads to it."""
    assert set(GUARD_AIMS) <= set(GUARDS)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_alone_does_no_harm(name: str) -> None:
    """A guard is needed behind another that is taken away only if that one's absence alone breaks nothing."""
    config = SimulationConfig(level=Level.LOG, nodes=3, seconds=3, faults=("replay", "kill"), mutation=name)
    for seed in range(2):
        result = simulate(seed, config)
        assert not result.failed, result.broken


def test_every_bug_has_its_row() -> None:
    """The table in docs/CHAOS.md names the guards and old bugs of the code, in their order, and no others."""
    table = CHAOS.read_text().partition(BEGIN)[2].partition(END)[0]
    assert re.findall(r"^\| (\w+) \|", table, re.MULTILINE) == [*GUARDS, *MUTATIONS]


def test_the_table_replaces_itself(tmp_path: Path) -> None:
    """The document keeps what stands around the table, and rows that were not looked at; unknown ones go."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n| gone | log | default | 9 | P1 |\n{END}\nafter\n")
    write_table(page, [Found("votes_sticky", "log", "default", 5, "P10", "how")])
    for seeds in (3, 4):
        write_table(page, [Found("slices_bounded", "log", "default", seeds, "P11", "how")])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "| slices_bounded | log | default | 4 | P11 |" in text and "| 3 |" not in text and "gone" not in text
    assert "| votes_sticky | log | default | 5 | P10 |" in text
