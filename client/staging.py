"""Exactly-once bulk writes: a writer stages the rows of one attempt of a task, then the job commits or aborts.

A block keeps its number until it is answered, so a repeat after a lost answer or at another master is recognized.
Errors are those of the client; RequestRefused with WRONG_STATE means that the run is over.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tickwheel.client.answers import reader
from tickwheel.client.backoff import Backoff, Deadline
from tickwheel.client.calls import ServiceCalls
from tickwheel.client.errors import ClusterUnavailable, LimitReached, OutcomeUnknown, TickwheelError
from tickwheel.client.moments import span_ms_of
from tickwheel.client.requests import request_of
from tickwheel.client.unique_keys import NO_RULE, KeyRule
from tickwheel.proto import staging_pb2
from tickwheel.proto.scheduler_pb2 import ColumnBatch
from tickwheel.proto.staging_pb2_grpc import StagingStub

TRY_TIMEOUT_S = 10.0
"""Time-out of one try of a block, which waits behind others for the disks of a majority."""
POLL_S_MAX = 0.5


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of one topic as columns of n elements."""

    topic: str
    due_ms: NDArray[np.int64]
    sizes: NDArray[np.uint32]
    payloads: bytes
    meta_sizes: NDArray[np.uint32] | None = None
    metas: bytes = b""
    key_rule: KeyRule = NO_RULE
    """Of those whose meta has a unique key."""

    def fingerprint(self) -> int:
        """The sum of a 64-bit hash of each row, modulo 2^64. It does not depend on blocks or the order of rows."""
        rows = _checksums(self.payloads, self.sizes)
        if self.meta_sizes is not None:
            rows = rows ^ _checksums(self.metas, self.meta_sizes) * _ODD
        rows = _mixed(_mixed(rows) ^ self.due_ms.astype(np.uint64) * _ODD)
        topic = self.topic.encode()
        rows = _mixed(rows ^ _checksums(topic, np.array([len(topic)], np.uint32)))
        return int(rows.sum(dtype=np.uint64))


def rows_message(rows: Rows) -> ColumnBatch:
    """Rows for a node."""
    return ColumnBatch(
        topic=rows.topic,
        due_ms=rows.due_ms.astype("<i8", copy=False).tobytes(),
        payload_sizes=rows.sizes.astype("<u4", copy=False).tobytes(),
        payloads=rows.payloads,
        meta_sizes=b"" if rows.meta_sizes is None else rows.meta_sizes.astype("<u4", copy=False).tobytes(),
        metas=rows.metas,
        on_key_conflict=rows.key_rule.conflict,
        key_until_settled=rows.key_rule.until_settled,
    )


_ODD = np.uint64(0x9E37_79B9_7F4A_7C15)


def _checksums(data: bytes, sizes: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Two checksums of each piece, mixed; 0 for an empty piece."""
    ends = itertools.accumulate(sizes.tolist(), initial=0)
    pieces = [data[at:end] for at, end in itertools.pairwise(ends)]
    found = np.array([google_crc32c.value(piece) for piece in pieces], np.uint64)
    found |= np.array([zlib.crc32(piece) for piece in pieces], np.uint64) << np.uint64(32)
    return _mixed(found)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every bit depends on every bit; 0 stays 0."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))


class StagedState(StrEnum):
    """How far a batch of a job is."""

    NONE = "none"
    """Nothing is known of it: not begun, aborted, expired or forgotten."""
    OPEN = "open"
    """Rows are staged, nothing is committed."""
    PUBLISHING = "publishing"
    """Committed; its rows are being scheduled."""
    PUBLISHED = "published"
    """All its rows are scheduled."""
    UNKNOWN = "unknown"
    """Of a node of a later version."""


@dataclass(frozen=True, slots=True)
class StagedJob:
    """A batch of a job, and what the cluster takes. Row counts are those of the commit; 0 before the last batch."""

    job_id: str
    batch: int
    """0 for a job that happens once, else the number of the micro-batch."""
    state: StagedState
    rows: int
    """Rows in all."""
    rows_published: int
    """Rows scheduled so far."""
    rows_discarded: int
    """Rows that were not scheduled: their topic was deleted, or another message holds their unique key."""
    staged_bytes: int
    """Of all jobs together."""
    staged_bytes_max: int
    """The most that all jobs together may stage."""
    batch_messages_max: int
    """Rows that the cluster takes in a block."""
    payload_bytes_max: int
    delay_max: timedelta
    """How far ahead of `now` a due time may lie."""
    now: datetime
    """The cluster's time, in UTC."""
    wait: timedelta
    """If rows were reserved: how long to wait before they are staged."""


@dataclass(frozen=True, slots=True)
class StagedAttempt:
    """One task's try at its part of the rows, for the commit."""

    partition: int
    attempt: int
    """Random number of the attempt; not 0."""
    blocks: int
    rows: int


staged_job_of = reader(StagedJob, staging_pb2.StagedJob)


class StagingClient(ServiceCalls[StagingStub]):
    """The staging calls of one cluster."""

    _service = StagingStub

    async def job(self, job_id: str, batch: int = 0, timeout_s: float | None = None) -> StagedJob:
        """The state of a job, and the cluster's limits. Raises ClusterUnavailable, which names the addresses asked."""
        request = request_of(staging_pb2.GetStagedJobRequest, job_id=job_id, batch=batch)
        return staged_job_of(await self._ask(lambda stub: stub.GetStagedJob, request, timeout_s=timeout_s))

    async def reserve(self, job_id: str, rows: int, rows_per_s: int) -> float:
        """Reserve `rows` at the job's rate. Returns the seconds to wait before staging them.

        Keeps all writers of the job together below `rows_per_s`, if each asks before it stages.
        """
        request = request_of(staging_pb2.GetStagedJobRequest, job_id=job_id, reserve_rows=rows, rows_per_s=rows_per_s)
        return (await self._ask(lambda stub: stub.GetStagedJob, request)).wait_ms / 1_000

    async def _stage(self, request: staging_pb2.StageRequest) -> StagedJob:
        return staged_job_of(await self._ask(lambda stub: stub.Stage, request, try_timeout_s=TRY_TIMEOUT_S))

    async def commit(
        self,
        job_id: str,
        run_id: str,
        attempts: Sequence[StagedAttempt],
        batch: int = 0,
        *,
        publish_timeout_s: float = 600.0,
        memory: timedelta | None = None,
        fingerprint: int = 0,
    ) -> StagedJob:
        """Schedule the rows that these attempts staged. Returns once all of them are scheduled.

        `rows_discarded` counts rows that were not scheduled, since their topic was deleted after they were staged, or
        another message holds their unique key. Rows that use the existing message (USE_EXISTING) are not counted.

        `memory`: how long the job is recognized once it is published; None: while it is among the last
        `staging_jobs_max`, at most for `staging_memory`. `fingerprint`: of all rows of the job; 0: not compared.

        Raises RequestRefused with NAME_TAKEN if the job was committed with another fingerprint. Raises OutcomeUnknown
        if the job is not published yet or cannot be asked any more, or if it is not known whether the commit was
        accepted: repeat it. Any other error means that the commit was not accepted.
        """
        request = staging_pb2.CommitStagedRequest(
            job_id=job_id,
            batch=batch,
            run_id=run_id,
            attempts=[staging_pb2.StagedAttempt(**asdict(attempt)) for attempt in attempts],
            memory_ms=span_ms_of("memory", memory) if memory is not None else 0,
            fingerprint=fingerprint,
        )
        job = staged_job_of(await self._ask(lambda stub: stub.Commit, request, try_timeout_s=TRY_TIMEOUT_S))
        deadline = Deadline(publish_timeout_s)
        backoff = Backoff(max_s=POLL_S_MAX)
        why, final = "", False
        while job.state is not StagedState.PUBLISHED:
            if deadline.over or final:
                text = f"job {job_id} is committed; {job.rows_published} of {job.rows} rows are scheduled so far{why}"
                raise OutcomeUnknown(text, "OUTCOME_UNKNOWN", {"rows_published": str(job.rows_published)})
            await backoff.pause(deadline)
            try:
                job = await self.job(job_id, batch, timeout_s=max(POLL_S_MAX, min(self._timeout_s, deadline.left_s)))
                why = ""
            except (ClusterUnavailable, LimitReached) as error:  # whoever leads next goes on with it
                why = f"; how far it is cannot be told: {error}"
            except TickwheelError as error:
                why, final = f"; how far it is cannot be asked any more: {error}", True
        return job

    async def abort(self, job_id: str, run_id: str, batch: int = 0) -> StagedJob:
        """Drop the staged rows of a run, and refuse blocks that it still sends. Never undoes a commit."""
        request = request_of(staging_pb2.AbortStagedRequest, job_id=job_id, batch=batch, run_id=run_id)
        return staged_job_of(await self._ask(lambda stub: stub.Abort, request))

    def attempt(
        self,
        job_id: str,
        run_id: str,
        partition: int,
        batch: int = 0,
        *,
        in_flight_max: int = 4,
        fingerprinted: bool = False,
    ) -> StagedAttemptWriter:
        """A writer for one attempt at one partition. `fingerprinted`: it sums up the fingerprint of its rows."""
        return StagedAttemptWriter(self._stage, job_id, run_id, partition, batch, in_flight_max, fingerprinted)


class StagedAttemptWriter:
    """Stages blocks, up to `in_flight_max` at once. `finish` returns the attempt for the commit.

    A block whose answer is LimitReached found the cluster's space for staged rows full until the deadline.
    """

    def __init__(
        self,
        stage: Callable[[staging_pb2.StageRequest], Awaitable[StagedJob]],
        job_id: str,
        run_id: str,
        partition: int,
        batch: int,
        in_flight_max: int,
        fingerprinted: bool,
    ) -> None:
        self._send = stage
        self._names = (job_id, run_id, partition, batch)
        self.job_id = job_id
        self.attempt = secrets.randbits(63) | 1
        self.blocks = 0
        self.rows = 0
        self.published_before = False
        """Whether the batch was committed before: then no row of this attempt counts."""
        self.fingerprint = 0
        """Fingerprint of all rows written so far, even of those not sent because of `published_before`."""
        self._fingerprinted = fingerprinted
        self._room = asyncio.Semaphore(in_flight_max)
        self._under_way: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    async def write(self, rows: Rows) -> None:
        """Stage rows. Waits while too many blocks are under way. Raises the error of an earlier block."""
        if self._fingerprinted:
            self.fingerprint = (self.fingerprint + rows.fingerprint()) % (1 << 64)
        if self.published_before:
            return
        await self._room.acquire()
        self._raise()
        job_id, run_id, partition, batch = self._names
        request = staging_pb2.StageRequest(
            job_id=job_id,
            batch=batch,
            run_id=run_id,
            partition=partition,
            attempt=self.attempt,
            sequence=self.blocks,
            columns=rows_message(rows),
        )
        self.blocks += 1
        self.rows += len(rows.due_ms)
        task = asyncio.ensure_future(self._stage(request))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _stage(self, request: staging_pb2.StageRequest) -> None:
        try:
            job = await self._send(request)
            if job.state in (StagedState.PUBLISHING, StagedState.PUBLISHED):
                self.published_before = True
        except Exception as error:
            self._error = self._error or error
        finally:
            self._room.release()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    async def finish(self) -> StagedAttempt:
        """Wait for all blocks and return the attempt for the commit. Raises the error of any block."""
        while self._under_way:
            await asyncio.wait(set(self._under_way))
        self._raise()
        return StagedAttempt(partition=self._names[2], attempt=self.attempt, blocks=self.blocks, rows=self.rows)
