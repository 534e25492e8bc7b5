"""Rows staged by bulk writers, and their publication: a write takes effect exactly once.

A job has at most one open batch. Tasks stage blocks under (run, partition, attempt). The commit names the attempts
that count, once for all. From then on the master schedules block by block (PublishStaged). Its progress is part of the
state, so any later master continues from there.

Invariants:
- Only a commit makes rows messages, only of attempts of its own run, and only the first commit of a batch does.
- Batches of a job are published in rising order; batches up to `published_through` are never published again.
- Requests of a fenced run (aborted, or of an earlier batch) are refused. An abort changes nothing once a commit
  counts.
- A position is published only by the command that names it: repeated and late commands do nothing.
- Expiry, and the choice of a finished job to forget, follow from stamps and settings in the log alone. A job that was
  committed with a memory time of its own is forgotten by that time, never to make room for others.
- A job belongs to the user who is named first; requests of another user are refused and change nothing.
- Blocks are charged CHARGE_BYTES_MIN at least, so `staging_bytes_max` also bounds the memory for their places.

Called by the state machine; `judge` and `publishing` also by the master's staged writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError

from tickwheel.node.failure import Failure, RequestError, limit_reached, refuse, refused
from tickwheel.node.state.publishing import Publishing
from tickwheel.node.state.results import PublishResult
from tickwheel.node.state.settings import Settings
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto import staging_pb2
from tickwheel.proto.common_pb2 import KEY_USED_EXISTING
from tickwheel.proto.log_pb2 import ManifestFile, Publish, PublishRequest
from tickwheel.proto.parsing import parsed
from tickwheel.proto.staging_pb2 import (
    STAGED_NONE,
    STAGED_OPEN,
    STAGED_PUBLISHED,
    STAGED_PUBLISHING,
    StageBlock,
    StagedJobSnapshot,
    StagedState,
    StagingCommand,
    StagingSnapshot,
)
from tickwheel.storage.disk import Disk, DiskFullError
from tickwheel.storage.errors import ADVICE, CorruptFileError
from tickwheel.storage.segment import ROW_BYTES

CHARGE_BYTES_MIN = 64 << 10
"""Least bytes that a block is charged."""
DEAD_RUNS_MAX = 16
"""Aborted runs that a job remembers. A forgotten run could stage again; the job's commit or expiry drops such
blocks."""
ROOM_HINT_MS = 1_000


class Block(NamedTuple):
    """A block's place in its job's file."""

    offset: int
    bytes: int
    rows: int
    crc: int

    @property
    def room_bytes(self) -> int:
        """What its rows take on the disk once they are messages."""
        return self.bytes + self.rows * ROW_BYTES


@dataclass(slots=True)
class Attempt:
    """One task's attempt at one partition."""

    run_id: str
    partition: int
    blocks: dict[int, Block] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows staged so far."""
        return sum(block.rows for block in self.blocks.values())


@dataclass(slots=True)
class Job:
    """`state` is the state of `batch`: NONE (nothing is staged), OPEN or PUBLISHING."""

    job_id: str
    batch: int = 0
    state: StagedState.ValueType = STAGED_NONE
    published_through: int = -1
    dead_runs: list[str] = field(default_factory=list)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    plan: list[Block] = field(default_factory=list)
    position: int = 0
    rows: int = 0
    rows_published: int = 0
    rows_discarded: int = 0
    fingerprint: int = 0
    """This field and the next three describe the batch committed last."""
    memory_ms: int = 0
    """How long the job is remembered after its publication; 0: until its place is needed."""
    touched_ms: int = 0
    file_number: int = 0
    file: StagedFile | None = None
    charged_bytes: int = 0
    room_bytes: int = 0
    """Of all blocks in its file."""
    waiting_rows: int = 0
    """Rows that may yet become messages."""
    owner: str = ""
    """User who owns the job; empty: nobody."""

    def state_of(self, batch: int) -> StagedState.ValueType:
        """The state of one batch."""
        if batch <= self.published_through:
            return STAGED_PUBLISHED
        return self.state if batch == self.batch else STAGED_NONE


@dataclass(frozen=True, slots=True)
class StagingResult:
    """Result of a staging command: the batch's state after it, or a refusal."""

    failure: Failure | None = None
    state: StagedState.ValueType = STAGED_NONE
    published: int = 0
    """Messages scheduled by this command."""
    position: int = 0
    schedule: tuple[Publish, PublishResult] | None = field(default=None, compare=False)
    """The scheduled messages in the form of a client's schedule."""


def _fenced(job_id: str, run_id: str, why: str) -> RequestError:
    return refused(pb.WRONG_STATE, f"run {run_id} of job {job_id} is over: {why}", field="run_id", value=run_id)


def _not_staged(job_id: str, what: str) -> RequestError:
    text = f"job {job_id}: {what}; it expired, was aborted, or was never staged: write it again"
    return refused(pb.WRONG_STATE, text, field="attempts", value=what)


class Staging:
    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self.directory = f"{directory}/staging"
        self._jobs: dict[str, Job] = {}
        self._publishing: dict[str, Job] = {}
        self._last_file = 0
        self.staged_bytes = 0
        """Bytes charged to all jobs."""
        self.room_bytes = 0
        """What the rows of all jobs take on the disk, beside their files, once they are messages; no part of the
        state."""
        self.waiting_rows = 0
        """Rows of all jobs that may yet become messages; no part of the state."""
        self.doomed: list[str] = []
        """Files to remove once no checkpoint names them; no part of the state."""

    # -- commands

    def apply(
        self, command: StagingCommand, stamped_ms: int, settings: Settings, publishing: Publishing
    ) -> StagingResult:
        """Apply one command of the log."""
        kind = command.WhichOneof("body")
        try:
            if kind in ("stage", "commit", "abort"):
                return self._of_owner(command, stamped_ms, settings)
            if kind == "publish":
                return self._publish(command.publish, stamped_ms, settings, publishing)
            if kind == "expire":
                self._expire(stamped_ms, settings)
                return StagingResult()
            raise refused(pb.WRONG_STATE, f"staging command {kind or 'without a body'} is not known")
        except RequestError as error:
            return StagingResult(error.failure)

    def _of_owner(self, command: StagingCommand, stamped_ms: int, settings: Settings) -> StagingResult:
        kind = command.WhichOneof("body")
        body = command.stage if kind == "stage" else command.commit if kind == "commit" else command.abort
        refuse(self.owner_refusal(body.job_id, command.owner))
        try:
            if kind == "stage":
                return self._stage(command.stage, stamped_ms, settings)
            if kind == "commit":
                return self._commit(command.commit, stamped_ms, settings)
            return self._abort(command.abort, stamped_ms, settings)
        finally:
            job = self._jobs.get(body.job_id)
            if job is not None and command.owner:
                job.owner = command.owner

    def owner_refusal(self, job_id: str, owner: str) -> Failure | None:
        """Why a user must not touch a job; None: the user owns it, nobody does, or it is unknown.

        `owner` empty: rights are off, or the caller may do anything.
        """
        job = self._jobs.get(job_id)
        if job is None or not job.owner or not owner or owner == job.owner:
            return None
        text = f"job {job_id} belongs to another user: choose a job id of your own"
        return refused(pb.NAME_TAKEN, text, field="job_id", value=job_id).failure

    def judge(self, job_id: str, batch: int, run_id: str, size: int, settings: Settings) -> StagingResult | None:
        """The answer to a block of a batch that counts already; None: the block would be kept. Raises RequestError: it
        would be refused.

        Used by apply, and by a master that can then answer without the log.
        """
        job = self._jobs.get(job_id)
        if job is not None and self._counts(job, batch, run_id):
            return StagingResult(state=job.state_of(batch))
        if self.staged_bytes + max(size, CHARGE_BYTES_MIN) > settings.staging_bytes_max:
            raise RequestError(limit_reached("staging_bytes_max", settings.staging_bytes_max, ROOM_HINT_MS))
        return None

    @staticmethod
    def _counts(job: Job, batch: int, run_id: str) -> bool:
        """Whether a commit of the batch counts already. Raises RequestError: the run is over, or the batch has to wait
        for the one before."""
        if job.state_of(batch) in (STAGED_PUBLISHED, STAGED_PUBLISHING):
            return True
        if run_id in job.dead_runs:
            raise _fenced(job.job_id, run_id, "it was aborted")
        if batch < job.batch:
            raise _fenced(job.job_id, run_id, f"batch {job.batch} has begun")
        if job.state == STAGED_PUBLISHING:
            raise RequestError(limit_reached(f"job {job.job_id}: batches published at a time", 1, ROOM_HINT_MS))
        return False

    def _stage(self, stage: StageBlock, stamped_ms: int, settings: Settings) -> StagingResult:
        size = len(stage.block)
        if self.holds(stage.job_id, stage.attempt, stage.sequence):
            job = self._jobs[stage.job_id]
            job.touched_ms = max(job.touched_ms, stamped_ms)
            return StagingResult(state=job.state_of(stage.batch))
        known = self.judge(stage.job_id, stage.batch, stage.run_id, size, settings)
        if known is not None:
            return known
        job = self._job(stage.job_id, settings)
        self._turn_to(job, stage.batch)
        attempt = job.attempts.get(stage.attempt)
        if attempt is None:
            attempt = job.attempts[stage.attempt] = Attempt(stage.run_id, stage.partition)
        elif (attempt.run_id, attempt.partition) != (stage.run_id, stage.partition):
            text = f"attempt {stage.attempt} belongs to another task"
            raise refused(pb.INVALID_FIELD, text, field="attempt", value=stage.attempt)
        if job.file is None:
            self._last_file += 1
            job.file_number = self._last_file
            job.file = StagedFile(self._disk, self._path(job.file_number))
        offset = job.file.append(stage.block)
        block = attempt.blocks[stage.sequence] = Block(offset, size, stage.rows, google_crc32c.value(stage.block))
        job.room_bytes += block.room_bytes
        self.room_bytes += block.room_bytes
        self._wait(job, job.waiting_rows + block.rows)
        job.state = STAGED_OPEN
        job.touched_ms = max(job.touched_ms, stamped_ms)
        charge = max(size, CHARGE_BYTES_MIN)
        job.charged_bytes += charge
        self.staged_bytes += charge
        return StagingResult(state=STAGED_OPEN)

    def _commit(self, commit: staging_pb2.CommitStagedRequest, stamped_ms: int, settings: Settings) -> StagingResult:
        job_id, batch = commit.job_id, commit.batch
        known = self._jobs.get(job_id)
        if known is not None and self._counts(known, batch, commit.run_id):
            if batch == known.batch and commit.fingerprint and known.fingerprint not in (0, commit.fingerprint):
                text = f"job {job_id} has been committed with other rows (batch {batch})"
                text = f"{text}: give these rows a job id of their own"
                raise refused(pb.NAME_TAKEN, text, field="job_id", value=job_id)
            return StagingResult(state=known.state_of(batch))
        plan: list[Block] = []
        held = known.attempts if known is not None and known.batch == batch else {}
        partitions = list(map(attrgetter("partition"), commit.attempts))
        if len(set(partitions)) < len(partitions):
            raise refused(pb.INVALID_FIELD, "attempts: two of one partition", field="attempts", limit="one a partition")
        if partitions and not held:
            raise _not_staged(job_id, f"nothing of partition {min(partitions)} is there")
        for number in sorted(range(len(partitions)), key=partitions.__getitem__):
            named = commit.attempts[number]
            attempt = held.get(named.attempt)
            wanted = (commit.run_id, named.partition, named.blocks, named.rows)
            if attempt is None:
                raise _not_staged(job_id, f"nothing of partition {named.partition} is there")
            blocks = [attempt.blocks[number] for number in sorted(attempt.blocks)]
            if (attempt.run_id, attempt.partition, len(blocks), attempt.rows) != wanted:
                what = f"of partition {named.partition} {attempt.rows} rows are there, {named.rows} were to be"
                raise _not_staged(job_id, what)
            plan += blocks
        job = self._job(job_id, settings)
        self._turn_to(job, batch)
        job.attempts = {}
        job.state, job.plan, job.position = STAGED_PUBLISHING, plan, 0
        self._publishing[job_id] = job
        job.rows, job.rows_published, job.rows_discarded = sum(block.rows for block in plan), 0, 0
        self._wait(job, job.rows)
        job.fingerprint, job.memory_ms = commit.fingerprint, commit.memory_ms
        job.touched_ms = max(job.touched_ms, stamped_ms)
        if not plan:
            self._finish(job)
        return StagingResult(state=job.state_of(batch))

    def _publish(
        self, command: staging_pb2.PublishStaged, stamped_ms: int, settings: Settings, publishing: Publishing
    ) -> StagingResult:
        job = self._jobs.get(command.job_id)
        if job is None:
            return StagingResult()
        due = job.state == STAGED_PUBLISHING and (job.batch, job.position) == (command.batch, command.position)
        if not due:
            return StagingResult(state=job.state_of(command.batch), position=job.position)
        block = job.plan[job.position]
        data = self._read(job, block)
        try:
            publish = parsed(Publish, data)
        except DecodeError:
            publish = Publish()  # no master writes such a block; its rows count as discarded
        publish.requests.append(PublishRequest(count=block.rows))
        result = publishing.apply(publish, stamped_ms, settings)
        outcome = result.requests[0]
        published = result.scheduled
        used = 0 if outcome.keys is None else int(np.count_nonzero(outcome.keys == KEY_USED_EXISTING))
        job.rows_published += published
        job.rows_discarded += block.rows - published - used
        job.position += 1
        self._wait(job, job.waiting_rows - block.rows)
        job.touched_ms = max(job.touched_ms, stamped_ms)
        if job.position == len(job.plan):
            self._finish(job)
        state = job.state_of(command.batch)
        return StagingResult(None, state, published, job.position, (publish, result))

    def _read(self, job: Job, block: Block) -> bytes:
        assert job.file is not None, "a committed block lies in a file"
        data = job.file.read(block.offset, block.bytes)
        if len(data) != block.bytes or google_crc32c.value(data) != block.crc:
            raise CorruptFileError(job.file.path, block.offset, "a staged block does not match its checksum", ADVICE)
        return data

    def _abort(self, abort: staging_pb2.AbortStagedRequest, stamped_ms: int, settings: Settings) -> StagingResult:
        job = self._job(abort.job_id, settings)
        state = job.state_of(abort.batch)
        if state in (STAGED_PUBLISHED, STAGED_PUBLISHING):
            return StagingResult(state=state)
        job.touched_ms = max(job.touched_ms, stamped_ms)
        if abort.run_id not in job.dead_runs:
            job.dead_runs = [*job.dead_runs[1 - DEAD_RUNS_MAX :], abort.run_id]
        if job.state == STAGED_OPEN:
            job.attempts = {n: attempt for n, attempt in job.attempts.items() if attempt.run_id != abort.run_id}
            self._wait(job, sum(attempt.rows for attempt in job.attempts.values()))
            if not job.attempts:
                self._drop(job)
        return StagingResult(state=job.state_of(abort.batch))

    def _expire(self, stamped_ms: int, settings: Settings) -> None:
        for job in [job for job in self._jobs.values() if _is_over(job, stamped_ms, settings)]:
            if job.state == STAGED_OPEN:
                job.attempts = {}
                self._drop(job)
            else:
                del self._jobs[job.job_id]

    # -- steps of them

    def _job(self, job_id: str, settings: Settings) -> Job:
        """The job, made if it is new. To make room, the job longest untouched goes, of those that are idle and have no
        memory time of their own. Raises RequestError: there are too many others."""
        job = self._jobs.get(job_id)
        if job is not None:
            return job
        if len(self._jobs) >= settings.staging_jobs_max:
            idle = [item for item in self._jobs.values() if item.state == STAGED_NONE and not item.memory_ms]
            if not idle:
                raise RequestError(limit_reached("staging_jobs_max", settings.staging_jobs_max, ROOM_HINT_MS))
            del self._jobs[min(idle, key=lambda item: (item.touched_ms, item.job_id)).job_id]
        job = self._jobs[job_id] = Job(job_id)
        return job

    def _turn_to(self, job: Job, batch: int) -> None:
        """Begin a later batch: drop what an earlier one left."""
        if batch != job.batch:
            job.attempts = {}
            self._drop(job)
            job.batch = batch

    def _drop(self, job: Job) -> None:
        """Drop all staged rows of a job."""
        job.state = STAGED_NONE
        self._publishing.pop(job.job_id, None)
        job.plan, job.position = [], 0
        if job.file is not None:
            self.doomed.append(job.file.path)
        job.file, job.file_number = None, 0
        self.staged_bytes -= job.charged_bytes
        self.room_bytes -= job.room_bytes
        job.charged_bytes = job.room_bytes = 0
        self._wait(job, 0)

    def _wait(self, job: Job, rows: int) -> None:
        """Of this job `rows` may yet become messages."""
        self.waiting_rows += rows - job.waiting_rows
        job.waiting_rows = rows

    def _finish(self, job: Job) -> None:
        job.published_through = job.batch
        self._drop(job)

    def _path(self, number: int) -> str:
        return f"{self.directory}/{number}"

    # -- for readers

    def holds(self, job_id: str, attempt: int, sequence: int) -> bool:
        """Whether a block is kept already: a repeat of it needs no room."""
        job = self._jobs.get(job_id)
        return job is not None and attempt in job.attempts and sequence in job.attempts[attempt].blocks

    def job(self, job_id: str) -> Job | None:
        """A remembered job, or None."""
        return self._jobs.get(job_id)

    def publishing(self) -> Iterator[Job]:
        """Jobs whose committed batch is not published yet."""
        return iter(self._publishing.values())

    def something_over(self, now_ms: int, settings: Settings) -> bool:
        """Whether an ExpireStaged command stamped now would change anything."""
        return any(_is_over(job, now_ms, settings) for job in self._jobs.values())

    def digest_parts(self) -> Iterator[bytes]:
        """The whole content in pieces, for a digest."""
        yield repr((self._last_file, self.staged_bytes)).encode()
        for job_id in sorted(self._jobs):
            yield _snapshot_of(self._jobs[job_id]).SerializeToString(deterministic=True)

    # -- checkpoints

    def files(self) -> list[StagedFile]:
        """The needed files; a file without a byte was never created."""
        return [job.file for job in self._jobs.values() if job.file is not None and job.file.bytes]

    def snapshot(self) -> StagingSnapshot:
        """A snapshot for `restore`. Its sizes hold once the files are synced."""
        return StagingSnapshot(last_file=self._last_file, jobs=[_snapshot_of(job) for job in self._jobs.values()])

    def restore(self, snapshot: StagingSnapshot) -> None:
        """Restore a snapshot. Raises CorruptFileError."""
        self._last_file = snapshot.last_file
        for item in snapshot.jobs:
            job = Job(dead_runs=list(item.dead_runs), **{name: getattr(item, name) for name in _AS_KEPT})
            job.plan = [Block(*row) for row in _rows(item.plan, 4)]
            for attempt in item.attempts:
                blocks = {row[0]: Block(*row[1:]) for row in _rows(attempt.blocks, 5)}
                job.attempts[attempt.attempt] = Attempt(attempt.run_id, attempt.partition, blocks)
            if item.file:
                job.file_number = item.file
                job.file = StagedFile(self._disk, self._path(item.file), item.file_bytes)
            self._jobs[job.job_id] = job
            if job.state == STAGED_PUBLISHING:
                self._publishing[job.job_id] = job
            self.staged_bytes += job.charged_bytes
            kept = [block for attempt in job.attempts.values() for block in attempt.blocks.values()]
            job.room_bytes = sum(block.room_bytes for block in (*job.plan, *kept))
            self.room_bytes += job.room_bytes
            self._wait(job, sum(block.rows for block in (*job.plan[job.position :], *kept)))


def _is_over(job: Job, now_ms: int, settings: Settings) -> bool:
    if job.state == STAGED_PUBLISHING:
        return False
    kept_ms = settings.staging_expiry_ms
    if job.state == STAGED_NONE and job.published_through >= 0:
        kept_ms = max(kept_ms, job.memory_ms or settings.staging_memory_ms)
    return now_ms - job.touched_ms >= kept_ms


def _rows(data: bytes, width: int) -> list[list[int]]:
    rows: list[list[int]] = np.frombuffer(data, "<u8").reshape(-1, width).tolist()
    return rows


def _packed(rows: Iterator[tuple[int, ...]]) -> bytes:
    return np.fromiter(itertools.chain.from_iterable(rows), "<u8").tobytes()


_AS_KEPT = (
    *("job_id", "batch", "state", "published_through", "position", "rows", "rows_published", "rows_discarded"),
    *("fingerprint", "memory_ms", "touched_ms", "charged_bytes", "owner"),
)
"""Fields that a snapshot has as the job has them."""


def _snapshot_of(job: Job) -> StagedJobSnapshot:
    return StagedJobSnapshot(
        dead_runs=job.dead_runs,
        plan=_packed(iter(job.plan)),
        file=job.file_number,
        file_bytes=job.file.bytes if job.file is not None else 0,
        attempts=[
            staging_pb2.StagedAttemptSnapshot(
                attempt=number,
                run_id=attempt.run_id,
                partition=attempt.partition,
                blocks=_packed((sequence, *block) for sequence, block in attempt.blocks.items()),
            )
            for number, attempt in job.attempts.items()
        ],
        **{name: getattr(job, name) for name in _AS_KEPT},
    )


PIECE_BYTES = 1 << 20
"""A write starts when this many bytes have gathered."""


class StagedSync:
    """Brings the bytes written so far to stable storage; made by `begin_fsync`."""

    def __init__(self, disk: Disk, path: str, bytes_wanted: int, bytes_written: int) -> None:
        self._disk = disk
        self.path = path
        self.bytes = bytes_wanted
        self._written = bytes_written

    def run(self) -> None:
        """Sync. Any thread may call it. Raises DiskError."""
        if self._written < self.bytes:
            raise DiskFullError(f"{self.path}: {self.bytes - self._written} bytes of it found no room")
        file = self._disk.open(self.path)
        try:
            file.fsync()
        finally:
            file.close()


class StagedFile:
    """The file that holds what one job has staged: blocks of bytes, one behind the other, written once.

    Invariants:
    - A block never changes; its offset is given by the log alone. The file holds whole blocks, the rest is in memory:
      at most PIECE_BYTES and one block, unless the disk is full (then the node takes nothing more on before long).
    - Writing cuts the file to where it goes on: replay after a restart regrows the same bytes over what a crash left.
    - A checkpoint writes what is in memory on the loop, before a worker fsyncs: the worker only ever fsyncs.

    Blocks carry no checksum of their own: a reader compares the CRC32C that it kept.
    """

    def __init__(self, disk: Disk, path: str, size: int = 0) -> None:
        """`size`: from the checkpoint. Raises CorruptFileError if the file is shorter."""
        self._disk = disk
        self.path = path
        self.bytes = size
        """Bytes of all blocks."""
        self._written = self._synced = size
        self._retry_at = 0
        self._tail: list[bytes] = []
        if size:
            found = disk.size(path) if disk.exists(path) else 0
            if found < size:
                raise CorruptFileError(path, found, f"the checkpoint counts {size} bytes of it", ADVICE)

    def append(self, block: bytes) -> int:
        """Add a block; returns its offset. Never fails: a full disk shows at the checkpoint."""
        offset = self.bytes
        self._tail.append(block)
        self.bytes += len(block)
        if self.bytes - max(self._written, self._retry_at) >= PIECE_BYTES:
            self._write()
        return offset

    def _write(self) -> None:
        if not self._tail:
            return
        try:
            file = self._disk.open(self.path, create=True)
            try:
                if file.size() > self._written:
                    file.truncate(self._written)
                if file.size() < self._written:
                    raise CorruptFileError(self.path, file.size(), f"{self._written} bytes of it were written", ADVICE)
                file.append_many(self._tail)
            finally:
                file.close()
        except DiskFullError:
            # The blocks are still in memory; the checkpoint will report the full disk.
            self._retry_at = self.bytes
            return
        self._written = self.bytes
        self._tail = []

    def read(self, offset: int, size: int) -> bytes:
        """Read one block."""
        if offset >= self._written:
            at = self._written
            for block in self._tail:
                if at == offset:
                    return block
                at += len(block)
            return b""
        file = self._disk.open(self.path)
        try:
            return file.read_at(offset, size)
        finally:
            file.close()

    # -- checkpoints

    def manifest_file(self) -> ManifestFile:
        """The file as it will be after a sync."""
        return ManifestFile(path=self.path, bytes=self.bytes)

    def needs_fsync(self) -> bool:
        """Whether some bytes are not known to be on stable storage."""
        return self._synced < self.bytes

    def begin_fsync(self) -> StagedSync:
        """Write the bytes in memory; returns the sync that a worker must run."""
        self._write()
        return StagedSync(self._disk, self.path, self.bytes, self._written)

    def finish_fsync(self, sync: StagedSync) -> None:
        """The sync ran without an error."""
        self._synced = max(self._synced, sync.bytes)
