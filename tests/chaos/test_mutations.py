"""Old bugs: each is put in and taken out whole, and those that show quickly are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tickwheel.chaos.cli_mutants import AIMS, BEGIN, END, GUARDS, TEST_ONLY, Found, config_of, write_table
from tickwheel.chaos.sim.mutations import LAYERS, MUTATIONS, mutated
from tickwheel.chaos.sim.run import simulate
from tickwheel.chaos.sim.setup import Level, SimulationConfig
from tickwheel.wheel.engine import Wheel


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_can_be_put_in(name: str) -> None:
    """A method that was renamed would leave an old bug that changes nothing."""
    with mutated(name):
        pass


def test_it_is_taken_out() -> None:
    """A run without a bug after one with it sees the product's own code, even if the run raises."""
    before = Wheel.__dict__["append"]
    with pytest.raises(KeyError), mutated("late_not_clamped"):
        assert Wheel.__dict__["append"] is not before
        raise KeyError
    assert Wheel.__dict__["append"] is before


QUICK = [
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
]


@pytest.mark.parametrize("name", QUICK)
def test_quick_ones_are_found(name: str) -> None:
    """Checkers and workload notice an old bug, or a guard that is off, within a few seeds."""
    assert any(simulate(seed, config_of(name)).failed for seed in range(8))


def test_aims_are_at_guards() -> None:
    """A guard that was renamed would be looked for where nothing leads to it."""
    assert set(AIMS) | TEST_ONLY <= set(GUARDS)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_alone_does_no_harm(name: str) -> None:
    """A guard is needed behind another that is taken away only if that one's absence alone breaks nothing."""
    config = SimulationConfig(level=Level.LOG, nodes=3, seconds=3, faults=("replay", "kill"), mutation=name)
    for seed in range(2):
        result = simulate(seed, config)
        assert not result.failed, result.broken


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
