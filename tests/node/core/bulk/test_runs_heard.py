"""What the master remembers of the runs of staged jobs."""

from __future__ import annotations

from collections.abc import ValuesView

from tickwheel.node.core.bulk.staging import RUNS_HEARD_MAX, RunsHeard
from tickwheel.node.core.world import SteadyMs
from tickwheel.node.state.staging import Attempt, Job

IDLE_MS = 600_000


class Looked(dict[int, Attempt]):
    """Counts how often all attempts are looked at."""

    times = 0

    def values(self) -> ValuesView[Attempt]:  # type: ignore[override]
        self.times += 1
        return super().values()


def test_a_job_of_very_many_runs_is_looked_at_once() -> None:
    """A client can begin each block in a run of its own: to look at all of them with each took 16 s for 20,000, in
    which the node did nothing else."""
    attempts = Looked({number: Attempt(f"run {number}", number) for number in range(20 * RUNS_HEARD_MAX)})
    heard, job = RunsHeard(), Job("j", attempts=attempts)
    for number in range(2 * RUNS_HEARD_MAX):
        assert heard.idle_others(job, f"new {number}", SteadyMs(IDLE_MS + number), 0, IDLE_MS) == []
        assert len(heard._runs["j"]) <= RUNS_HEARD_MAX
    assert attempts.times == 1
