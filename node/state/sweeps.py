"""Sweeps: jobs that cancel or move every pending message of a selection, step by step.

Deleting a topic or group is such a job too: it cancels the pending messages, and at its end the target is removed.

Owns where each job stands, as part of the replicated state. So any master can carry it on, and every message counts
once: a step states how many messages were applied before it, and has no effect if that number no longer holds. The
master finds the messages of a step (node/core/schedule/sweeper.py); what becomes of each is decided here when the step
is applied.

A job covers messages that came with commands stamped up to `stamped_ms_max`. Once it has begun, masters stamp nothing
with that time or an earlier one (`stamp_floor_ms`). Successors that a job appends are stamped later, so it never meets
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached
from tickwheel.node.state.names import check_producer_id
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.publishing import read_units
from tickwheel.node.state.results import NO_DUE, NO_IDS, SweepResult
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.log_pb2 import SweepCommand, SweepStep
from tickwheel.proto.scheduler_pb2 import SWEEP_FINISHED, SWEEP_RUNNING, SWEEP_STOPPED, Sweep, SweepState
from tickwheel.wheel.sweep import DISPATCHED, DONE

SWEEPS_MAX = 64
"""Remembered jobs; beyond it the oldest ended job is forgotten."""
RUNNING_MAX = 8
COUNT_MAX = (1 << 64) - 1
"""Counts that commands state stop at the largest number of their field; no sum may make apply fail."""
DELETIONS = ("delete_topic", "delete_group")
"""Actions that cancel until a pass over all pending messages finds none, and then remove their target."""
CANCELLING = ("cancel", *DELETIONS)
"""Actions that cancel what they select; the others move it."""


class Sweeps:
    """Changed by apply only."""

    def __init__(self) -> None:
        self._jobs: dict[str, Sweep] = {}
        self.running = 0
        """Jobs that have not ended."""

    def __iter__(self) -> Iterator[Sweep]:
        """Jobs in the order they began. Do not change them."""
        return iter(self._jobs.values())

    def get(self, job_id: str) -> Sweep | None:
        """One job, or None. Do not change it."""
        return self._jobs.get(job_id)

    def stamp_floor_ms(self) -> int:
        """Earliest stamp of entries that a master proposes from now on; 0: any."""
        if not self.running:
            return 0
        return max(job.stamped_ms_max for job in self if job.state == SWEEP_RUNNING) + 1

    def apply(self, command: SweepCommand, wheel: WheelPort, pending: int, stamped_ms: int) -> SweepResult:
        """Apply one command; `pending`: messages in the wheel."""
        kind = command.WhichOneof("body")
        if kind == "begin":
            return self._begin(command.begin, pending, stamped_ms)
        if kind == "step":
            return self._step(command.step, wheel, stamped_ms)
        job = self._jobs.get(command.stop)
        if job is None:
            return SweepResult(failure=unknown_sweep(command.stop))
        if job.state == SWEEP_RUNNING:
            self._end(job, SWEEP_STOPPED, stamped_ms)
        return SweepResult(_copy(job))

    def _begin(self, wanted: Sweep, pending: int, stamped_ms: int) -> SweepResult:
        problem = check_producer_id(wanted.job_id)
        if problem:
            return SweepResult(failure=invalid("job_id", wanted.job_id, problem).failure)
        action = wanted.WhichOneof("action")
        if action is None:
            return SweepResult(failure=invalid("action", "absent", "cancel, due_ms or shift_ms").failure)
        known = self._jobs.get(wanted.job_id)
        if known is not None:
            if known.selection == wanted.selection and known.WhichOneof("action") == action:
                return SweepResult(_copy(known))
            text = f"sweep {wanted.job_id} has begun with another selection or action"
            return SweepResult(failure=Failure(pb.NAME_TAKEN, text, {"field": "job_id", "value": wanted.job_id}))
        if self.running >= RUNNING_MAX:
            return SweepResult(failure=limit_reached("sweeps_running", RUNNING_MAX, 1_000))
        if len(self._jobs) >= SWEEPS_MAX:
            ended = next(job.job_id for job in self if job.state != SWEEP_RUNNING)
            del self._jobs[ended]
        job = Sweep(
            job_id=wanted.job_id,
            state=SWEEP_RUNNING,
            selection=wanted.selection,
            begun_ms=stamped_ms,
            stamped_ms_max=wanted.stamped_ms_max,
            pending=pending,
            target_id=wanted.target_id,
            with_dead=wanted.with_dead,
        )
        setattr(job, action, getattr(wanted, action))
        self._jobs[job.job_id] = job
        self.running += 1
        return SweepResult(_copy(job))

    def _step(self, step: SweepStep, wheel: WheelPort, stamped_ms: int) -> SweepResult:
        job = self._jobs.get(step.job_id)
        if job is None or job.state != SWEEP_RUNNING or job.steps != step.number:
            return SweepResult(None if job is None else _copy(job), stale=True)
        count = len(step.ids) // 8
        if len(step.ids) != 8 * count or len(step.due_ms) != 8 * count:
            return SweepResult(_copy(job), invalid("ids", f"{len(step.ids)} bytes", "8 an id, as due_ms").failure)
        done_ids, new_ids, due = NO_IDS, NO_IDS, NO_DUE
        action = job.WhichOneof("action")
        if count:
            ids, due_ms = np.frombuffer(step.ids, "<u8"), np.frombuffer(step.due_ms, "<i8")
            if action in CANCELLING:
                outcomes = wheel.cancel_many(ids, due_ms)
            else:
                try:
                    units, records = read_units(step.moved, stamped_ms)
                except RequestError as error:
                    return SweepResult(_copy(job), error.failure)
                if len(units) != count:
                    return SweepResult(_copy(job), invalid("moved", len(units), f"{count} successors").failure)
                outcomes, new_ids, due = wheel.move_many(ids, due_ms, units, records)
            done_ids = ids[outcomes == DONE]
            too_late = int(np.count_nonzero(outcomes == DISPATCHED))
            job.done += len(done_ids)
            job.too_late += too_late
            job.gone += count - len(done_ids) - too_late
        job.steps += 1
        job.examined = min(COUNT_MAX, job.examined + step.examined)
        job.too_far = min(COUNT_MAX, job.too_far + step.too_far)
        job.next_due_ms, job.next_index = step.next_due_ms, step.next_index
        if action in DELETIONS:
            job.pass_found += count
        if step.last and job.pass_found:
            # Commands under way when the job began, and retries, may have added messages in the part already scanned.
            job.pass_found = job.next_due_ms = job.next_index = 0
        elif step.last:
            self._end(job, SWEEP_FINISHED, stamped_ms)
        return SweepResult(_copy(job), done=len(done_ids), ids=done_ids, new_ids=new_ids, due_ms=due)

    def note_removed(self, job_id: str, undelivered: int, dead: int) -> Sweep:
        """Add to what a deletion has removed: undelivered messages and dead letters. Returns a copy of the job."""
        job = self._jobs[job_id]
        job.undelivered += undelivered
        job.dead += dead
        return _copy(job)

    def _end(self, job: Sweep, state: SweepState.ValueType, stamped_ms: int) -> None:
        job.state = state
        job.ended_ms = stamped_ms
        self.running -= 1

    # -- checkpoints and digests

    def dump(self) -> list[Sweep]:
        """Copies of all jobs, in the order they began."""
        return [_copy(job) for job in self]

    def load(self, jobs: Iterable[Sweep]) -> None:
        """Replace the content by what `dump` returned."""
        self._jobs = {job.job_id: _copy(job) for job in jobs}
        self.running = sum(job.state == SWEEP_RUNNING for job in self)

    def digest_parts(self) -> list[bytes]:
        """Content for the digest of the state."""
        return [job.SerializeToString(deterministic=True) for job in self]


def unknown_sweep(job_id: str) -> Failure:
    """The refusal because no such job exists (any more)."""
    text = f"no sweep {job_id} is known; the last {SWEEPS_MAX} are remembered"
    return Failure(pb.UNKNOWN_NAME, text, {"field": "job_id", "value": job_id[:64]})


def _copy(job: Sweep) -> Sweep:
    copied = Sweep()
    copied.CopyFrom(job)
    return copied
