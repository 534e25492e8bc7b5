"""Bulk writes on the master: takes blocks into the log at a bounded rate, and carries commits to their end.

Owns the queue of waiting blocks, and how far ahead of the applied position each committed batch is proposed. Blocks
wait here and not in the proposer, where dispatches would stand behind them. Nothing here is needed to finish a commit:
the next master finds in the state what is left to publish.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from tickwheel.node.core.disk_room import DiskRoom
from tickwheel.node.core.kernel import Kernel, require_current
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import UNHEARD, Promise, Reply
from tickwheel.node.core.requests import ClientRequests
from tickwheel.node.core.schedule.flow import FlowControl
from tickwheel.node.core.schedule.intake import KIND_DUE, IncomingBatch
from tickwheel.node.core.schedule.publisher import Publisher
from tickwheel.node.core.world import ClusterMs, Now, SteadyMs
from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached, refuse, refused
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.machine import CommandResult
from tickwheel.node.state.names import check_producer_id
from tickwheel.node.state.staging import Job, Staging, StagingResult
from tickwheel.proto import common_pb2, staging_pb2
from tickwheel.proto.admin_pb2 import CreateTopicRequest
from tickwheel.proto.log_pb2 import AdminCommand, Command
from tickwheel.proto.staging_pb2 import (
    STAGED_OPEN,
    AbortStagedRequest,
    CommitStagedRequest,
    ExpireStaged,
    GetStagedJobRequest,
    PublishStaged,
    StageBlock,
    StagedJob,
    StageRequest,
    StagingCommand,
)

QUEUE_BYTES_MAX = 32 << 20
"""Bytes of blocks that wait for the log."""
IN_FLIGHT_BYTES_MAX = 2 << 20
"""Bytes of blocks proposed and not yet applied: a dispatch may have to stand behind them."""
BLOCK_BYTES_MAX = 8 << 20
"""A block is read and published in one piece on the core's thread. Twice the largest payload."""
PUBLISH_AHEAD_MAX = 4
"""Blocks of one batch that are proposed for publication and not yet applied."""
JOBS_DRIVEN_MAX = 8
"""Committed batches published at the same time; others wait."""
PAUSE_MS = 100
EXPIRY_PERIOD_MS = 10_000
RUN_IDLE_MS = 600_000
"""A run of which nothing came for this long makes way for another run of its job: its driver was probably killed."""
RUNS_HEARD_MAX = 64
"""Runs of a job whose last block is remembered; beyond that, the one heard of longest ago is forgotten."""
ATTEMPTS_MAX = 100_000
MEMORY_MS_MAX = 3_650 * 86_400_000
"""Ten years, the same limit as for the setting `staging_memory_ms`."""
BATCH_LIMIT = 1 << 62


@dataclass(slots=True)
class _Waiting:
    command: Command
    answer: Promise[CommandResult]
    bytes: int


@dataclass(slots=True)
class _Drive:
    """How far a committed batch has been proposed."""

    batch: int
    next: int
    in_flight: int = 0
    not_before_ms: int = 0


class StagedWrites(Part):
    """Idle while the node is not master."""

    of_master = True

    def __init__(
        self, core: Kernel, publisher: Publisher, flow: FlowControl, disk_room: DiskRoom, requests: ClientRequests
    ) -> None:
        self._core = core
        self._publisher = publisher
        self._flow = flow
        self._disk_room = disk_room
        self._requests = requests
        self._queue: deque[_Waiting] = deque()
        self._queue_bytes = 0
        self._in_flight_bytes = 0
        self._pumping = False
        self._drives: dict[str, _Drive] = {}
        self._next_expiry_ms = 0
        self._wants_ms: ClusterMs | None = None
        self._paces = Paces()
        self._heard = RunsHeard()

    # -- requests

    async def stage(self, request: StageRequest, batch: IncomingBatch, owner: str = "") -> StagedJob:
        """Keep a checked block; returns when it is on stable storage of a majority.

        `owner`: the user who stages, while rights are on.
        """
        _check_names(request.job_id, request.run_id, request.batch)
        _check_block(request, batch)
        self._check_times(batch)
        state = self._core.state
        refuse(state.staging.owner_refusal(request.job_id, owner))
        await self._end_idle_runs(request.job_id, request.run_id, owner)
        again = state.staging.holds(request.job_id, request.attempt, request.sequence)
        if not again:
            known = state.staging.judge(request.job_id, request.batch, request.run_id, batch.bytes, state.settings)
            if known is not None:
                return self._describe(request.job_id, request.batch)
        refuse(self._disk_room.refusal())
        if not again:  # in the log, in the job's file, and as messages
            refuse(self._disk_room.bulk_refusal(state.staging.room_bytes + 3 * batch.bytes))
        if self._queue_bytes + batch.bytes > QUEUE_BYTES_MAX:
            raise RequestError(limit_reached("staged blocks waiting", QUEUE_BYTES_MAX))
        name = batch.topics[0]
        if state.topic_id(name) is None:
            if not state.settings.topics_auto_create:
                require_current(self._core)
                raise refused(common_pb2.UNKNOWN_NAME, f"topic {name} does not exist", field="topic", value=name)
            await self._requests.admin(AdminCommand(create_topic=CreateTopicRequest(name=name), actor=owner))
        if not again:
            refuse(self._flow.admit(batch, batch.when, self._core.clock.now_ms()))
        try:
            result = await self._queue_block(request, batch, owner)
            assert isinstance(result, StagingResult)
            refuse(result.failure)
            if not again and result.state == STAGED_OPEN:
                self._flow.staged(request.job_id, request.batch, batch)
        finally:
            self._flow.answered([batch])
        return self._describe(request.job_id, request.batch)

    async def _end_idle_runs(self, job_id: str, run_id: str, owner: str) -> None:
        """Abort the other runs of a job of which nothing has come for long. Otherwise their rows would keep their room
        from the run that writes them again, and never expire while it tries."""
        job = self._core.state.staging.job(job_id)
        if job is None or job.state != STAGED_OPEN or run_id in job.dead_runs:
            return
        steady_ms, resting_ms = self._core.steady_ms(), self._core.clock.now_ms() - job.touched_ms
        idle_ms = min(RUN_IDLE_MS, self._core.state.settings.staging_expiry_ms)
        for idle in self._heard.idle_others(job, run_id, steady_ms, resting_ms, idle_ms):
            abort = AbortStagedRequest(job_id=job_id, batch=job.batch, run_id=idle)
            await self._core.proposer.propose(Command(staging=StagingCommand(abort=abort, owner=owner)), StagingResult)

    def _check_times(self, batch: IncomingBatch) -> None:
        now_ms, limit_ms = self._core.clock.now_ms(), self._core.state.settings.delay_ms_max
        latest = int(batch.when.max())
        if latest > now_ms + limit_ms:
            row = int(batch.when.argmax())
            raise invalid(f"due_ms[{row}]", latest, f"at most {limit_ms} ms ahead of now ({now_ms})")

    def _queue_block(self, request: StageRequest, batch: IncomingBatch, owner: str) -> Promise[CommandResult]:
        publish = self._publisher.publish_of([batch], [batch.when]).publish
        del publish.requests[:]
        # No caller is told ids, so the row of each unit need not be kept.
        publish.rows = b""
        block = StageBlock(
            job_id=request.job_id,
            batch=request.batch,
            run_id=request.run_id,
            partition=request.partition,
            attempt=request.attempt,
            sequence=request.sequence,
            rows=batch.count,
            block=publish.SerializeToString(),
        )
        command = Command(staging=StagingCommand(stage=block, owner=owner))
        item = _Waiting(command, Promise(), len(block.block))
        self._queue.append(item)
        self._queue_bytes += item.bytes
        self._core.serving.own(self._pump)
        return item.answer

    def _pump(self) -> None:
        """Propose waiting blocks, as far as the limit on blocks in flight allows."""
        if self._pumping:
            return  # a proposal was answered at once; the loop below goes on
        self._pumping = True
        try:
            while self._queue and self._in_flight_bytes < IN_FLIGHT_BYTES_MAX:
                item = self._queue.popleft()
                self._queue_bytes -= item.bytes
                self._in_flight_bytes += item.bytes
                self._submit_block(item)
        finally:
            self._pumping = False

    def _submit_block(self, item: _Waiting) -> None:
        def applied(result: CommandResult) -> None:
            self._in_flight_bytes -= item.bytes
            item.answer.keep(result)
            self._pump()

        def failed(failure: Failure) -> None:
            self._in_flight_bytes -= item.bytes
            item.answer.refuse(failure)
            self._pump()

        self._core.proposer.submit(item.command, Reply(applied, failed), may_gather=True)

    async def commit(self, request: CommitStagedRequest, owner: str = "") -> StagedJob:
        """Decide which attempts count. Returns once the decision is certain, not when the rows are published."""
        _check_names(request.job_id, request.run_id, request.batch)
        if len(request.attempts) > ATTEMPTS_MAX:
            raise invalid("attempts", len(request.attempts), f"at most {ATTEMPTS_MAX}")
        if not 0 <= request.memory_ms <= MEMORY_MS_MAX:
            raise invalid("memory_ms", request.memory_ms, f"0 to {MEMORY_MS_MAX}")
        await self._core.proposer.propose(Command(staging=StagingCommand(commit=request, owner=owner)), StagingResult)
        return self._describe(request.job_id, request.batch)

    async def abort(self, request: AbortStagedRequest, owner: str = "") -> StagedJob:
        """Drop the rows that a run has staged, and fence the run off."""
        _check_names(request.job_id, request.run_id, request.batch)
        await self._core.proposer.propose(Command(staging=StagingCommand(abort=request, owner=owner)), StagingResult)
        return self._describe(request.job_id, request.batch)

    async def job(self, request: GetStagedJobRequest, owner: str = "") -> StagedJob:
        """The state of a job. Raises RequestError if this node may not know the newest: a driver goes by it."""
        require_current(self._core)
        _check_names(request.job_id, "any", request.batch)
        refuse(self._core.state.staging.owner_refusal(request.job_id, owner))
        answer = self._describe(request.job_id, request.batch)
        if request.reserve_rows and request.rows_per_s:
            steady_ms = self._core.steady_ms()
            answer.wait_ms = self._paces.reserve(request.job_id, request.reserve_rows, request.rows_per_s, steady_ms)
        return answer

    def _describe(self, job_id: str, batch: int) -> StagedJob:
        state = self._core.state
        settings = state.settings
        answer = StagedJob(
            job_id=job_id,
            batch=batch,
            state=staging_pb2.STAGED_NONE,
            staged_bytes=state.staging.staged_bytes,
            staged_bytes_max=settings.staging_bytes_max,
            batch_messages_max=settings.batch_messages_max,
            payload_bytes_max=settings.payload_bytes_max,
            delay_ms_max=settings.delay_ms_max,
            now_ms=self._core.clock.now_ms(),
        )
        job = state.staging.job(job_id)
        if job is not None:
            answer.state = job.state_of(batch)
            if batch == job.batch:
                answer.rows = job.rows
                answer.rows_published = job.rows_published
                answer.rows_discarded = job.rows_discarded
        return answer

    # -- work of the master

    def metrics(self) -> Mapping[str, MetricValue]:
        return {"staged_bytes": float(self._core.state.staging.staged_bytes)}

    def tick(self, now: Now) -> None:
        """Propose the next blocks of committed batches; look for expired jobs."""
        if not now.acting:
            return
        now_ms = now.cluster_ms
        self._wants_ms = None
        staging = self._core.state.staging
        for number, job in enumerate(staging.publishing()):
            if number >= JOBS_DRIVEN_MAX:
                break
            self._core.serving.side(partial(self._drive_failed, job, now_ms), self._drive, job, now_ms)
        if now_ms >= self._next_expiry_ms or self._next_expiry_ms > now_ms + EXPIRY_PERIOD_MS:
            self._next_expiry_ms = now_ms + EXPIRY_PERIOD_MS
            if self._core.clock.known and staging.something_over(now_ms, self._core.state.settings):
                command = Command(staging=StagingCommand(expire=ExpireStaged()))
                self._core.proposer.submit(command, UNHEARD, may_gather=True)

    def upkeep(self, now: Now) -> None:
        """Forget the runs of jobs without staged rows."""
        self._heard.forget(self._core.state.staging)

    def wait_ms(self, now: Now) -> int | None:
        """Until the next look, if something had to wait."""
        return self._wants_ms - now.cluster_ms if now.acting and self._wants_ms is not None else None

    def _drive_failed(self, job: Job, now_ms: ClusterMs) -> None:
        """Try the job again after a pause, from what is applied by then; the other jobs go on."""
        drive = self._drives[job.job_id] = _Drive(job.batch, job.position)
        drive.not_before_ms = ClusterMs(now_ms + PAUSE_MS)
        self._wants_ms = ClusterMs(now_ms + PAUSE_MS)

    def _drive(self, job: Job, now_ms: ClusterMs) -> None:
        drive = self._drives.get(job.job_id)
        if drive is None or drive.batch != job.batch:
            drive = self._drives[job.job_id] = _Drive(job.batch, job.position)
        if not drive.in_flight:
            # Everything proposed has been answered: go on from what is applied.
            drive.next = job.position
        waits = drive.not_before_ms > now_ms and drive.not_before_ms <= now_ms + PAUSE_MS
        if waits or self._publisher.arrivals_full():
            self._wants_ms = ClusterMs(now_ms + PAUSE_MS // 2)
            return
        drive.not_before_ms = 0
        while drive.in_flight < PUBLISH_AHEAD_MAX and drive.next < len(job.plan) and not drive.not_before_ms:
            command = PublishStaged(job_id=job.job_id, batch=job.batch, position=drive.next)
            drive.next += 1
            drive.in_flight += 1
            self._submit_publish(job.job_id, drive, Command(staging=StagingCommand(publish=command)))

    def _submit_publish(self, job_id: str, drive: _Drive, command: Command) -> None:
        def applied(result: CommandResult) -> None:
            drive.in_flight -= 1
            assert isinstance(result, StagingResult)
            if result.state != staging_pb2.STAGED_PUBLISHING and self._drives.get(job_id) is drive:
                del self._drives[job_id]

        def failed(failure: Failure) -> None:
            drive.in_flight -= 1
            drive.not_before_ms = self._core.clock.now_ms() + PAUSE_MS

        self._core.proposer.submit(command, Reply(applied, failed), may_gather=True)

    def end(self, failure: Failure) -> None:
        """Answer the waiting blocks with `failure`: they were not proposed."""
        queue, self._queue = self._queue, deque()
        self._queue_bytes = 0
        self._drives.clear()
        self._heard = RunsHeard()
        for item in queue:
            item.answer.refuse(failure)


def _check_names(job_id: str, run_id: str, batch: int) -> None:
    for name, value in (("job_id", job_id), ("run_id", run_id)):
        problem = check_producer_id(value)
        if problem:
            raise invalid(name, value, problem)
    if not 0 <= batch < BATCH_LIMIT:
        raise invalid("batch", batch, "0 or more")


def _check_block(request: StageRequest, batch: IncomingBatch) -> None:
    if not request.attempt:
        raise invalid("attempt", 0, "a number drawn by chance")
    if not (isinstance(batch.kinds, int) and batch.kinds == KIND_DUE):
        raise invalid("columns", "delays", "absolute times: due_ms")
    if batch.bytes > BLOCK_BYTES_MAX:
        raise invalid("columns", f"{batch.bytes} bytes", f"at most {BLOCK_BYTES_MAX} bytes a block")


PACED_JOBS_MAX = 1_024
"""Jobs remembered. Beyond that, the job whose moment is earliest is forgotten; it may then be a little faster."""
PACE_MS_MAX = 86_400_000


class Paces:
    """The pace of a job's rows over all its tasks: each task asks before it sends, and is told how long to wait.

    Owns one moment for each job: all rows reserved so far are sent by then. The moments are the master's own and not
    replicated: a new master starts afresh, so for a moment rows may come twice as fast. Rows that were reserved and
    never sent (a task died) cost only their time.
    """

    def __init__(self) -> None:
        self._through_ms: dict[str, float] = {}

    def reserve(self, job_id: str, rows: int, rows_per_s: int, steady_ms: SteadyMs) -> int:
        """Reserve `rows`; returns after how many milliseconds they may be sent."""
        if job_id not in self._through_ms and len(self._through_ms) >= PACED_JOBS_MAX:
            self._through_ms = {name: at for name, at in self._through_ms.items() if at > steady_ms}
            if len(self._through_ms) >= PACED_JOBS_MAX:
                del self._through_ms[min(self._through_ms, key=lambda name: self._through_ms[name])]
        begins_ms = max(self._through_ms.get(job_id, 0.0), float(steady_ms))
        self._through_ms[job_id] = min(begins_ms + rows * 1_000 / rows_per_s, steady_ms + PACE_MS_MAX)
        return round(begins_ms - steady_ms)


class RunsHeard:
    """When something of each run was heard last, of the jobs that have rows staged. On the master alone: a run that it
    has not heard counts as heard when rows of its job were staged last."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[str, SteadyMs]] = {}
        """By job and run."""

    def idle_others(self, job: Job, run_id: str, steady_ms: SteadyMs, resting_ms: int, idle_ms: int) -> list[str]:
        """A block of `run_id` has come, `resting_ms` after the last one that was staged for the job: the other runs
        with rows staged of which nothing came for `idle_ms`. Each is named once."""
        runs = self._runs.get(job.job_id)
        if runs is None:  # the job may have as many runs as blocks: they are looked at once, and few are remembered
            staged = sorted({attempt.run_id for attempt in job.attempts.values()})
            since_ms = SteadyMs(steady_ms - max(0, resting_ms))
            runs = self._runs[job.job_id] = dict.fromkeys(staged[:RUNS_HEARD_MAX], since_ms)
        runs[run_id] = steady_ms
        if len(runs) > RUNS_HEARD_MAX:
            del runs[min(runs, key=lambda name: runs[name])]
        idle = {name for name, heard_ms in runs.items() if steady_ms - heard_ms >= idle_ms}
        for name in idle:
            del runs[name]
        return sorted(idle & {attempt.run_id for attempt in job.attempts.values()}) if idle else []

    def forget(self, staging: Staging) -> None:
        """Forget jobs that have no rows staged, or whose rows count already."""
        for job_id in [name for name in self._runs if (job := staging.job(name)) is None or job.state != STAGED_OPEN]:
            del self._runs[job_id]
