"""Moments at which two things of a node meet, counted: a run in which they never do proves nothing about them.

Background work of a node is mostly over before the next command comes. Runs with slow work, small buffers and
short retention (shape.py) lead there; tests/chaos/test_moments.py demands that each is reached.
"""

from __future__ import annotations

from tickwheel.chaos.sim.history_machines import MomentSeen
from tickwheel.chaos.sim.node import Machine
from tickwheel.wheel.checkpoint import CheckpointJob
from tickwheel.wheel.engine import Wheel
from tickwheel.wheel.jobs import Job, LoadJob, MergeJob

CHECKPOINT_IN_MERGE = "a checkpoint begins while a merge runs"
LOAD_WITH_ARRIVALS = "a load ends with arrivals"
LOAD_OVERTAKEN = "a dispatch overtakes the load that it needs"
HOURS_REMOVED = "hours with messages are removed"
REMOVED_IN_MERGE = "an hour is removed while a merge writes to it"
MOMENTS = (CHECKPOINT_IN_MERGE, LOAD_WITH_ARRIVALS, LOAD_OVERTAKEN, HOURS_REMOVED, REMOVED_IN_MERGE)
COPY_RESUMED = "a copy of a checkpoint resumes with what an earlier one left"
COPY_OF_LATER = "a copy resumes from a later checkpoint, or from that of another node"
FOUNDER_REFUSED = "a founder with an empty disk is refused by founders that were away"
FOUNDERS_CONNECTED = "a founder with an empty disk is connected with founders that were away, and nobody else is up"
MOMENTS_OF_FAULTS = (COPY_RESUMED, COPY_OF_LATER, FOUNDER_REFUSED, FOUNDERS_CONNECTED)
"""To these a fault of its own leads, which also writes them down."""


def watch(machine: Machine, wheel: Wheel) -> None:
    """Write down the moments that a wheel comes to."""
    begin_checkpoint, finish, remove_hours = wheel.begin_checkpoint, wheel.finish, wheel.remove_hours

    def see(what: str) -> None:
        machine.note(MomentSeen, what)

    def observed_begin_checkpoint() -> CheckpointJob:
        if wheel.files.merging is not None:
            see(CHECKPOINT_IN_MERGE)
        return begin_checkpoint()

    def observed_finish(job: Job) -> None:
        if isinstance(job, LoadJob):
            if job is not wheel.window.loading:
                see(LOAD_OVERTAKEN)
            elif job.arrivals:
                see(LOAD_WITH_ARRIVALS)
        elif isinstance(job, MergeJob) and any(hour < wheel.holdings.removed_below for hour, _, _ in job.results):
            see(REMOVED_IN_MERGE)
        finish(job)

    def observed_remove_hours(below: int) -> None:
        if len(wheel.holdings.hours.used(wheel.holdings.removed_below, below)):
            see(HOURS_REMOVED)
        remove_hours(below)

    wheel.begin_checkpoint = observed_begin_checkpoint  # type: ignore[method-assign]
    wheel.finish = observed_finish  # type: ignore[method-assign]
    wheel.remove_hours = observed_remove_hours  # type: ignore[method-assign]
