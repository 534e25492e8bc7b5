"""The pace of a job's rows over all its tasks: each task asks before it sends, and is told how long to wait.

Owns one moment for each job: all rows reserved so far are sent by then. The moments are the master's own and not
replicated: a new master starts afresh, so for a moment rows may come twice as fast. Rows that were reserved and never
sent (a task died) cost only their time.
"""

from __future__ import annotations

from tickwheel.node.core.world import SteadyMs

JOBS_MAX = 1_024
"""Jobs remembered. Beyond that, the job whose moment is earliest is forgotten; it may then be a little faster."""
WAIT_MS_MAX = 86_400_000


class Paces:
    def __init__(self) -> None:
        self._through_ms: dict[str, float] = {}

    def reserve(self, job_id: str, rows: int, rows_per_s: int, steady_ms: SteadyMs) -> int:
        """Reserve `rows`; returns after how many milliseconds they may be sent."""
        if job_id not in self._through_ms and len(self._through_ms) >= JOBS_MAX:
            self._through_ms = {name: at for name, at in self._through_ms.items() if at > steady_ms}
            if len(self._through_ms) >= JOBS_MAX:
                del self._through_ms[min(self._through_ms, key=lambda name: self._through_ms[name])]
        begins_ms = max(self._through_ms.get(job_id, 0.0), float(steady_ms))
        self._through_ms[job_id] = min(begins_ms + rows * 1_000 / rows_per_s, steady_ms + WAIT_MS_MAX)
        return round(begins_ms - steady_ms)
