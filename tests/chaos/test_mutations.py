"""Old bugs: each is put in and taken out whole, and those that show quickly are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tickwheel.chaos.cli_mutants import BEGIN, END, Found, config_of, write_table
from tickwheel.chaos.sim.mutations import MUTATIONS, mutated
from tickwheel.chaos.sim.run import simulate
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


@pytest.mark.parametrize("name", ["acknowledged_when_appended", "not_held_until_due", "idempotence_off"])
def test_quick_ones_are_found(name: str) -> None:
    """Checkers and workload notice an old bug within a few seeds."""
    assert any(simulate(seed, config_of(name)).failed for seed in range(6))


def test_the_table_replaces_itself(tmp_path: Path) -> None:
    """The document keeps what stands around the table, however often it is written."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for seeds in (3, 4):
        write_table(page, [Found("x", "log", "default", seeds, "P1", "how")])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "old" not in text and "| x | log | default | 4 | P1 |" in text and "| 3 |" not in text
