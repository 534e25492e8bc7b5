"""Same seed, same run: in this process, and in others whose hashes differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tickwheel.chaos.ever_run import BEFORE, Counted, count
from tickwheel.chaos.sim.run import shrink, simulate
from tickwheel.chaos.sim.setup import Level, RunResult, SimulationConfig

SCRIPT = """
from tickwheel.chaos.sim.run import simulate
from tickwheel.chaos.sim.setup import Level, SimulationConfig
for level in Level:
    print(level, simulate(3, SimulationConfig(level=level, seconds=2)).digest)
"""


def digests_in_another_process(hash_seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=240
    )
    return done.stdout.splitlines()


def test_two_processes_agree() -> None:
    """The digest of all events is equal byte for byte at each level, whatever the hash seed."""
    digests = digests_in_another_process("1")
    assert len(digests) == len(Level)
    assert digests == digests_in_another_process("77")


def test_seeds_differ() -> None:
    """Another seed is another run."""
    config = SimulationConfig(level=Level.LOG, seconds=1)
    assert simulate(1, config).digest != simulate(2, config).digest


def test_leaving_a_fault_out_leaves_the_others() -> None:
    """The plan of a seed does not depend on which of its faults are injected."""
    config = SimulationConfig(level=Level.LOG, seconds=6)
    whole = simulate(5, config)
    part = simulate(5, SimulationConfig(level=Level.LOG, seconds=6, only=(0,)))
    assert part.planned == whole.planned and len(whole.planned) > 1
    assert sum(tally.injected for tally in part.tallies.values()) == 1


def test_shrinking_keeps_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are left out while the same promise breaks, down to the one that is needed."""
    from tickwheel.chaos.sim import run

    config = SimulationConfig(level=Level.LOG, seconds=6)
    failing = simulate(5, config)
    needed = failing.planned[-1].number
    failing.promise = failing.broken = "P1"

    def pretend(seed: int, tried: SimulationConfig) -> object:
        result = RunResult(seed, planned=failing.planned)
        if tried.only is None or needed in tried.only:
            result.promise = result.broken = "P1"
        return result

    monkeypatch.setattr(run, "simulate", pretend)
    runs: list[int] = []
    smallest, _ = shrink(failing, config, lambda tried, left: runs.append(left))
    assert smallest.only == (needed,)
    assert runs[-1] == 1


def test_all_seeds_ever_run_are_counted(tmp_path: Path) -> None:
    """The total of one run is where the next begins, and each commit has its own; a file of before commits were noted
    is gone on with."""
    tally = tmp_path / "tally.json"
    tally.write_text('{"seeds": 2.0, "simulated_s": 1.5, "failed": 1.0}')
    count(tally, "abc", Counted(3, 12.5, 0))
    count(tally, "def", Counted(1, 1.0, 0))
    ever = count(tally, "abc", Counted(4, 1.0, 1))
    assert ever.total == Counted(10, 16.0, 2)
    assert ever.commits == {BEFORE: Counted(2, 1.5, 1), "abc": Counted(7, 13.5, 1), "def": Counted(1, 1.0, 0)}
    assert count(tally, "abc", Counted()) == ever
