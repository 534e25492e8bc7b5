"""How many rows are staged by topic, for limits on pending messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tickwheel.node.state.staging import Staging

SUM_MS = 100
"""How long a sum is reused. Rows that are taken meanwhile are added."""


class StagedRows:
    """Counts the blocks that this master has taken, until their rows are messages or dropped.

    The state does not know the topics of staged rows, so a new master does not count by topic what was staged before.
    Attempts that a commit leaves out count until its batch is published.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._jobs: dict[str, tuple[int, Counter[str]]] = {}
        """Job -> its batch, and the rows of it by topic."""
        self._sum: Counter[str] = Counter()
        self._until_ms = 0

    def take(self, job_id: str, batch: int, rows: Mapping[str, int]) -> None:
        """A block was staged."""
        known = self._jobs.get(job_id)
        if known is None or known[0] != batch:
            known = self._jobs[job_id] = batch, Counter()
        known[1].update(rows)
        self._sum.update(rows)

    def by_topic(self, now_ms: int) -> Mapping[str, int]:
        """Topic -> rows staged for it."""
        if self._jobs and not now_ms < self._until_ms <= now_ms + SUM_MS:
            self._until_ms = now_ms + SUM_MS
            self._sum_up()
        return self._sum

    def _sum_up(self) -> None:
        """Sum up what may yet become messages, and forget the jobs that are over."""
        self._sum = Counter()
        for job_id, (batch, rows) in list(self._jobs.items()):
            job = self._staging.job(job_id)
            if job is None or job.batch != batch or not job.waiting_rows:
                del self._jobs[job_id]
                continue
            # Of one that is being published the part that is left of all its rows.
            left = min(1.0, job.waiting_rows / max(1, rows.total()))
            for topic, count in rows.items():
                self._sum[topic] += round(count * left)

    def upkeep(self) -> None:
        """Forget what is over, also while no limit asks for the rows."""
        self._sum_up()

    def clear(self) -> None:
        """Forget all."""
        self._jobs.clear()
        self._sum.clear()
