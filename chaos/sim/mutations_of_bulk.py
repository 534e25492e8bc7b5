"""Old bugs of bulk writes and bulk load; mutations.py knows them all."""

from __future__ import annotations

from typing import Any

from tickwheel.chaos.sim.mutation_table import Patches, aimed, mutation
from tickwheel.node.state.loads import Ingesting, Loads
from tickwheel.node.state.staging import Staging, StagingResult
from tickwheel.node.state.view import StateView
from tickwheel.proto.log_pb2 import Ingest as IngestCommand
from tickwheel.proto.staging_pb2 import AbortStagedRequest, CommitStagedRequest, StagingSnapshot
from tickwheel.wheel.engine import Wheel
from tickwheel.wheel.units import CursorKey

PUBLISHING = aimed("power-checkpoint", "kill", nodes=3, writes=1, write_blocks=16, loop_gap_us=30_000)
"""Checkpoints come often, and in the middle of what takes several rounds."""

# -- staged publication


@mutation(Staging, "_commit")
def losers_published(original: Any, self: Staging, commit: CommitStagedRequest, *args: Any) -> Any:
    """A commit schedules all attempts of its run, those too that it does not name."""
    job = self.job(commit.job_id)
    named = {attempt.attempt for attempt in commit.attempts}
    held = job.attempts if job is not None and job.batch == commit.batch else {}
    others = [
        block
        for number, attempt in held.items()
        if number not in named and attempt.run_id == commit.run_id
        for block in attempt.blocks.values()
    ]
    result = original(self, commit, *args)
    if job is not None and job.plan and result.failure is None:
        job.plan += others
    return result


@mutation(Staging, "_abort")
def aborts_not_fenced(original: Any, self: Staging, abort: AbortStagedRequest, stamped_ms: int, settings: Any) -> Any:
    """An abort drops nothing, and what its run still sends is taken."""
    job = self.job(abort.job_id)
    return StagingResult() if job is None else StagingResult(state=job.state_of(abort.batch))


@mutation(Staging, "restore")
def published_not_in_checkpoints(original: Any, self: Staging, snapshot: StagingSnapshot) -> None:
    """A checkpoint does not say which batches are published."""
    for job in snapshot.jobs:
        job.published_through = -1
    original(self, snapshot)


@mutation(Staging, "restore", aim=PUBLISHING)
def publication_begins_anew(original: Any, self: Staging, snapshot: StagingSnapshot) -> None:
    """A node that starts from a checkpoint takes a batch of which some is published for one of which nothing is."""
    original(self, snapshot)
    for job in self.publishing():
        job.position = job.rows_published = job.rows_discarded = 0


# -- bundles


@mutation()
def loads_taken_twice(patches: Patches) -> None:
    """The repeat of a bundle that was taken over takes it over again."""

    def apply(original: Any, self: Ingesting, ingest: IngestCommand, *args: Any, **named: Any) -> Any:
        known = self._loads.get(ingest.job_id)
        if known is not None and ingest.sequence <= known.taken:
            known.taken = ingest.sequence - 1
        return original(self, ingest, *args, **named)

    patches.replace(Ingesting, "apply", apply)

    def __init__(original: Any, self: StateView, *args: Any) -> None:
        original(self, *args)
        self.loads = Loads()

    patches.replace(StateView, "__init__", __init__)


@mutation(Wheel, "ingest")
def late_bundles_not_clamped(
    original: Any, self: Wheel, name: str, layout: Any, topic_ids: Any, stamped_ms: int
) -> Any:
    """What a bundle brings late keeps its due time below the cursor."""
    window = self.window
    cursor, window.cursor = window.cursor, CursorKey(0, 0)
    try:
        return original(self, name, layout, topic_ids, stamped_ms)
    finally:
        window.cursor = cursor
