"""Staged rows: published exactly once, by the commit, whatever is repeated, late, aborted or restarted in between."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.counting import calls_of
from tests.node.state.driver import HOUR_0, Driver, admin
from tickwheel.node.state import staging
from tickwheel.proto import admin_pb2, staging_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.log_pb2 import Command, LogEntry, Publish
from tickwheel.proto.staging_pb2 import STAGED_NONE, STAGED_OPEN, STAGED_PUBLISHED, STAGED_PUBLISHING


def block(rows: int, payload: bytes = b"x", topic_id: int = 1) -> bytes:
    """A staged block of equal rows."""
    return Publish(
        due_ms=np.full(rows, HOUR_0, "<i8").tobytes(),
        topic_ids=np.array([topic_id], "<u4").tobytes(),
        sizes=np.full(rows, len(payload), "<u4").tobytes(),
        records=payload * rows,
    ).SerializeToString()


class Bulk(Driver):
    """A driver that speaks of jobs, with stamps of its own."""

    now_ms = 1_000
    owner = ""
    """The user who sends."""

    def one(self, **body: Any) -> Any:
        """One staging command in an entry of its own."""
        command = Command(staging=staging_pb2.StagingCommand(owner=self.owner, **body))
        entry = LogEntry(format_version=1, term=self.term, stamped_ms=self.now_ms, commands=[command])
        entry = LogEntry.FromString(entry.SerializeToString())
        self.log.append(entry)
        return self.state.apply(len(self.log), entry.term, entry)[0]

    def stage(
        self, attempt: int, sequence: int = 0, *, partition: int = 0, run: str = "r", rows: int = 3, batch: int = 0,
        job: str = "j", data: bytes | None = None,
    ) -> Any:  # fmt: skip
        """Stage one block."""
        return self.one(
            stage=staging_pb2.StageBlock(
                job_id=job, batch=batch, run_id=run, partition=partition, attempt=attempt, sequence=sequence,
                rows=rows, block=block(rows) if data is None else data,
            )
        )  # fmt: skip

    def commit(
        self, *named: tuple[int, int, int, int], run: str = "r", batch: int = 0, job: str = "j", **facts: int
    ) -> Any:
        """Commit (partition, attempt, blocks, rows)."""
        attempts = [staging_pb2.StagedAttempt(partition=p, attempt=a, blocks=b, rows=r) for p, a, b, r in named]
        request = staging_pb2.CommitStagedRequest(job_id=job, batch=batch, run_id=run, attempts=attempts, **facts)
        return self.one(commit=request)

    def abort(self, run: str = "r", batch: int = 0, job: str = "j") -> Any:
        """Abort a run."""
        return self.one(abort=staging_pb2.AbortStagedRequest(job_id=job, batch=batch, run_id=run))

    def publish(self, position: int, batch: int = 0, job: str = "j") -> Any:
        """Publish the block at a position."""
        return self.one(publish=staging_pb2.PublishStaged(job_id=job, batch=batch, position=position))

    @property
    def pending(self) -> int:
        """Messages in the wheel."""
        return self.wheel.pending


@pytest.fixture
def bulk() -> Bulk:
    """A cluster with one topic."""
    driver = Bulk()
    driver.create()
    return driver


def test_a_commit_of_what_is_not_staged_is_refused_without_a_look_at_each_attempt(bulk: Bulk) -> None:
    """The refusal names the first partition that is missing, whatever the order. A commit of 100,000 attempts of which
    none was staged took each node 170 ms."""
    named = [(partition, 1_000 + partition, 1, 3) for partition in range(20_000, 7, -1)]
    attempts = [staging_pb2.StagedAttempt(partition=p, attempt=a, blocks=b, rows=r) for p, a, b, r in named]
    commit = staging_pb2.StagingCommand(
        commit=staging_pb2.CommitStagedRequest(job_id="j", run_id="r", attempts=attempts)
    )
    for staged, missing in (([], 8), ([(8, 1_008)], 9), ([(9, 1_009)], 10)):
        for partition, attempt in staged:
            bulk.stage(attempt, partition=partition)
        assert f"partition {missing} " in bulk.commit(*named).failure.message
        assert calls_of(lambda: bulk.state.staging.apply(commit, 2_000, bulk.state.settings, cast(Any, None))) < 100


def test_only_the_named_attempts_are_published_and_once(bulk: Bulk) -> None:
    """Of two attempts at a partition (a retry, or a speculative one) the commit counts; publishing repeats nothing."""
    assert bulk.stage(11).state == STAGED_OPEN
    bulk.stage(12, rows=3)
    bulk.stage(12, 1, rows=2)
    bulk.stage(20, partition=1, rows=4)
    assert bulk.commit((0, 12, 2, 5), (1, 20, 1, 4)).state == STAGED_PUBLISHING
    assert bulk.publish(1).published == 0, "not its turn"
    assert [bulk.publish(n).published for n in (0, 0, 1, 1, 2, 2)] == [3, 0, 2, 0, 4, 0]
    assert bulk.pending == 9
    assert bulk.commit((0, 12, 2, 5)).state == STAGED_PUBLISHED
    assert bulk.commit((0, 11, 1, 3), run="another").state == STAGED_PUBLISHED
    assert bulk.stage(30, run="another").state == STAGED_PUBLISHED, "a task of a repeated job learns that it may stop"
    assert bulk.state.staging.staged_bytes == 0


def test_a_job_is_its_users_alone(bulk: Bulk) -> None:
    """Another user neither adds rows, nor commits nothing in its name beforehand, nor fences its runs; a restart keeps
    that, and a caller who may do anything is no other user."""
    bulk.owner = "shop"
    assert bulk.stage(5).state == STAGED_OPEN
    bulk.owner = "thief"
    attempts = [
        bulk.stage(5, 1),
        bulk.stage(6),
        bulk.stage(5),
        bulk.abort("r"),
        bulk.commit(),
        bulk.commit((0, 5, 1, 3)),
    ]
    assert [result.failure.reason for result in attempts] == [pb.NAME_TAKEN] * 6
    assert bulk.commit(job="mine").state == STAGED_PUBLISHED
    bulk.restart()
    bulk.owner = "shop"
    assert bulk.commit((0, 5, 1, 3)).state == STAGED_PUBLISHING
    refused = bulk.commit(job="mine")
    assert refused.failure.reason == pb.NAME_TAKEN, "told, where it was taken for published before"
    bulk.owner = ""
    assert bulk.commit(job="mine").state == STAGED_PUBLISHED


def test_a_block_that_comes_twice_counts_once_and_order_does_not_matter(bulk: Bulk) -> None:
    """A client repeats what it had no answer for, several blocks at a time."""
    for sequence in (2, 0, 2, 1, 0):
        assert bulk.stage(5, sequence, rows=sequence + 1).failure is None
    assert bulk.commit((0, 5, 3, 6)).state == STAGED_PUBLISHING
    assert sum(bulk.publish(n).published for n in range(3)) == 6


@pytest.mark.parametrize(
    "named",
    [[(0, 5, 2, 6)], [(0, 5, 1, 4)], [(0, 6, 1, 3)], [(1, 5, 1, 3)], [(0, 5, 1, 3), (0, 7, 1, 3)]],
    ids=["blocks", "rows", "attempt", "partition", "twice"],
)
def test_a_commit_of_what_is_not_there_changes_nothing(bulk: Bulk, named: list[tuple[int, int, int, int]]) -> None:
    """A lost block must fail the job, not be left out of it."""
    bulk.stage(5)
    bulk.stage(7)
    assert bulk.commit(*named).failure is not None
    assert bulk.commit((0, 5, 1, 3)).state == STAGED_PUBLISHING


def test_an_aborted_run_is_fenced_and_another_one_may_succeed(bulk: Bulk) -> None:
    """Tasks outlive a cancelled job by seconds; the same job, run again, must work."""
    bulk.stage(5, run="first")
    bulk.stage(6, run="second")
    assert bulk.abort("first").failure is None
    assert bulk.stage(5, 1, run="first").failure.reason == pb.WRONG_STATE
    assert bulk.commit((0, 5, 1, 3), run="first").failure.reason == pb.WRONG_STATE
    assert bulk.commit((0, 6, 1, 3), run="second").state == STAGED_PUBLISHING
    assert bulk.publish(0).published == 3


def test_an_abort_that_comes_first_fences_too(bulk: Bulk) -> None:
    """The abort of a cancelled job can overtake the first block of a task."""
    bulk.abort("r")
    assert bulk.stage(5).failure.reason == pb.WRONG_STATE


def test_an_abort_never_undoes_a_commit(bulk: Bulk) -> None:
    """Spark aborts after a commit whose answer was lost."""
    bulk.stage(5)
    bulk.commit((0, 5, 1, 3))
    assert bulk.abort().state == STAGED_PUBLISHING
    bulk.publish(0)
    assert bulk.abort().state == STAGED_PUBLISHED
    assert bulk.pending == 3


def test_batches_of_a_stream_go_forward_only(bulk: Bulk) -> None:
    """A replayed micro-batch is recognised by its number, also if later ones came; an empty one counts too."""
    bulk.stage(5, batch=4)
    bulk.commit((0, 5, 1, 3), batch=4)
    assert bulk.stage(6, batch=5).failure.reason == pb.LIMIT_REACHED, "its predecessor is still being published"
    bulk.publish(0, batch=4)
    assert bulk.commit(batch=5).state == STAGED_PUBLISHED
    for batch in (3, 4, 5):
        assert bulk.stage(7, batch=batch, run="replay").state == STAGED_PUBLISHED
    assert bulk.stage(8, batch=6).state == STAGED_OPEN
    assert bulk.stage(9, batch=7).state == STAGED_OPEN
    assert bulk.stage(8, 1, batch=6).failure.reason == pb.WRONG_STATE, "a later batch has begun"


def test_what_nobody_touches_expires_and_a_finished_job_is_remembered_longer(bulk: Bulk) -> None:
    """A dead driver's rows must not fill the room for ever, and a repeat of a job must still be recognised."""
    settings = admin_pb2.Settings(staging_expiry_ms=60_000, staging_memory_ms=600_000)
    bulk.apply(admin(settings=settings))
    bulk.stage(5, job="dead")
    bulk.stage(5, job="done")
    bulk.commit((0, 5, 1, 3), job="done")
    bulk.publish(0, job="done")
    bulk.now_ms += 59_999
    bulk.one(expire=staging_pb2.ExpireStaged())
    assert bulk.state.staging.staged_bytes > 0
    assert not bulk.state.staging.something_over(bulk.now_ms, bulk.state.settings)
    bulk.now_ms += 1
    assert bulk.state.staging.something_over(bulk.now_ms, bulk.state.settings)
    bulk.one(expire=staging_pb2.ExpireStaged())
    assert bulk.state.staging.staged_bytes == 0
    failure = bulk.commit((0, 5, 1, 3), job="dead").failure
    assert failure.reason == pb.WRONG_STATE and "expired" in failure.message
    assert bulk.stage(6, job="done").state == STAGED_PUBLISHED
    bulk.now_ms += 600_000
    bulk.one(expire=staging_pb2.ExpireStaged())
    assert bulk.state.staging.job("done") is None


def test_room_is_bounded_and_small_blocks_are_charged(bulk: Bulk) -> None:
    """A million blocks of one row would take memory on every node."""
    bulk.apply(admin(settings=admin_pb2.Settings(staging_bytes_max=1 << 20)))
    answers = [bulk.stage(5, n, rows=1) for n in range(20)]
    kept = (1 << 20) // staging.CHARGE_BYTES_MIN
    assert [a.failure is None for a in answers] == [True] * kept + [False] * (20 - kept)
    assert answers[-1].failure.reason == pb.LIMIT_REACHED
    bulk.abort()
    assert bulk.stage(6, run="again").state == STAGED_OPEN


def test_jobs_are_bounded_and_the_oldest_idle_one_goes(bulk: Bulk) -> None:
    """Job ids come from outside."""
    bulk.apply(admin(settings=admin_pb2.Settings(staging_jobs_max=2)))
    bulk.commit(job="a")
    bulk.now_ms += 1
    bulk.stage(5, job="b")
    bulk.stage(5, job="c")
    assert bulk.state.staging.job("a") is None
    assert bulk.stage(5, job="d").failure.reason == pb.LIMIT_REACHED, "the others hold rows"


def test_a_job_with_a_time_of_its_own_is_forgotten_by_age_alone(bulk: Bulk) -> None:
    """However many others come: 28 hours of writes without a name must not make a named one happen again."""
    settings = admin_pb2.Settings(staging_jobs_max=3, staging_expiry_ms=60_000, staging_memory_ms=60_000)
    bulk.apply(admin(settings=settings))
    bulk.commit(job="named", memory_ms=600_000)
    for number in range(20):
        bulk.now_ms += 1
        assert bulk.commit(job=f"other-{number}").state == STAGED_PUBLISHED
    assert bulk.commit((0, 9, 1, 1), job="named", memory_ms=600_000).state == STAGED_PUBLISHED
    bulk.checkpoint()
    bulk.restart(Random(3))
    bulk.now_ms = 1_000 + 599_999
    bulk.one(expire=staging_pb2.ExpireStaged())
    assert [bulk.state.staging.job(job) is None for job in ("named", "other-19")] == [False, True]
    for job in ("second", "third"):
        bulk.commit(job=job, memory_ms=600_000)
    assert bulk.commit(job="fourth").failure.reason == pb.LIMIT_REACHED, "none of them makes room"
    bulk.now_ms += 1
    bulk.one(expire=staging_pb2.ExpireStaged())
    assert bulk.state.staging.job("named") is None
    assert bulk.commit(job="fourth").state == STAGED_PUBLISHED


def test_other_rows_under_the_same_id_are_refused(bulk: Bulk) -> None:
    """They would be acknowledged and never scheduled. While the rows are being published, after it and after a
    restart; without a fingerprint nothing is compared, and a later batch has one of its own."""
    bulk.stage(5)
    assert bulk.commit((0, 5, 1, 3), fingerprint=7).state == STAGED_PUBLISHING
    assert bulk.commit((0, 5, 1, 3), fingerprint=8, run="other").failure.reason == pb.NAME_TAKEN
    bulk.publish(0)
    bulk.checkpoint()
    bulk.restart(Random(3))
    failure = bulk.commit(fingerprint=8, run="other").failure
    assert failure.reason == pb.NAME_TAKEN and "job j has been committed with other rows" in failure.message
    for fingerprint in (7, 0):
        assert bulk.commit(fingerprint=fingerprint, run="again").state == STAGED_PUBLISHED
    assert bulk.commit(batch=1, fingerprint=8).state == STAGED_PUBLISHED
    assert bulk.commit(fingerprint=8).state == STAGED_PUBLISHED, "of an earlier batch it is not kept"


def test_rows_of_a_deleted_topic_are_counted_as_discarded(bulk: Bulk) -> None:
    """As with messages that are pending when their topic goes."""
    bulk.stage(5)
    bulk.apply(admin(delete_topic=admin_pb2.DeleteTopicRequest(name="orders")))
    bulk.commit((0, 5, 1, 3))
    assert bulk.publish(0).state == STAGED_PUBLISHED
    job = bulk.state.staging.job("j")
    assert job is not None and (job.rows, job.rows_published, job.rows_discarded) == (3, 0, 3)


def test_files_go_with_the_checkpoint_after_their_job(bulk: Bulk) -> None:
    """Not before: a replay from the earlier checkpoint may need them."""
    bulk.stage(5)
    bulk.checkpoint()
    [name] = bulk.disk.list("state/staging")
    bulk.commit((0, 5, 1, 3))
    bulk.publish(0)
    assert bulk.disk.list("state/staging") == [name]
    bulk.restart(Random(3))
    assert bulk.state.staging.job("j").published_through == 0  # type: ignore[union-attr]
    bulk.checkpoint()
    assert bulk.disk.list("state/staging") == []


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("stage"), st.integers(1, 4), st.integers(0, 2), st.integers(1, 4)),
        st.tuples(st.just("commit"), st.integers(0, 1), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("publish"), st.integers(0, 5), st.just(0), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 1), st.just(0), st.just(0)),
        st.tuples(st.just("expire"), st.integers(0, 1), st.just(0), st.just(0)),
        st.tuples(st.just("checkpoint"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 99), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(STEPS, st.integers(1, 4096))
def test_any_history_publishes_a_batch_once_and_restarts_change_nothing(
    steps: Sequence[tuple[str, int, int, int]], piece_bytes: int
) -> None:
    """Against what was told: a batch's messages are those of its first commit. A node that crashed and restarted from
    any checkpoint has the digest of one that never did, and a checkpoint names every file it needs."""
    before, staging.PIECE_BYTES = staging.PIECE_BYTES, piece_bytes
    try:
        _run(steps)
    finally:
        staging.PIECE_BYTES = before


def _run(steps: Sequence[tuple[str, int, int, int]]) -> None:
    bulk, steady = Bulk(), Bulk()
    for node in (bulk, steady):
        node.create()
        node.apply(admin(settings=admin_pb2.Settings(staging_expiry_ms=60_000, staging_memory_ms=60_000)))
    rows: dict[tuple[int, int], int] = {}
    committed: int | None = None
    published = 0
    for kind, a, b, c in steps:
        if kind == "checkpoint":
            bulk.checkpoint()
            assert bulk.manifest is not None
            for file in bulk.manifest.files:
                assert bulk.disk.size(file.path) >= file.bytes
            continue
        if kind == "restart":
            bulk.restart(Random(a))
            continue
        results = []
        for node in (bulk, steady):
            if kind == "stage":
                # Attempts 1, 2 of run x, 3, 4 of run y; a sequence always has the same rows.
                results.append(node.stage(a, b, run="xy"[(a - 1) // 2], rows=c, data=block(c, b"%d" % a)))
            elif kind == "commit":
                names = [
                    (0, n, len(mine), sum(mine))
                    for n in (2 * a + 1, 2 * a + 2)
                    if b & n and (mine := [r for (attempt, _), r in rows.items() if attempt == n])
                ][:1]
                results.append(node.commit(*names, run="xy"[a]))
            elif kind == "publish":
                results.append(node.publish(a))
            elif kind == "abort":
                results.append(node.abort("xy"[a]))
            else:
                node.now_ms += 60_000 * a
                results.append(node.one(expire=staging_pb2.ExpireStaged()))
        assert repr(results[0]) == repr(results[1])
        result = results[0]
        if kind == "stage" and result.state == STAGED_OPEN:
            rows.setdefault((a, b), c)
        if kind == "commit" and result.failure is None and committed is None:
            committed = sum(names[0][3:]) if names else 0
        published += result.published
        job = steady.state.staging.job("j")
        if job is None or job.state == STAGED_NONE:
            rows.clear()
        elif kind == "abort":
            rows = {key: r for key, r in rows.items() if "xy"[(key[0] - 1) // 2] != "xy"[a]}
        if job is None:
            assert committed in (None, published)
            committed, published = None, 0
        assert published <= (committed or 0)
        if job is not None and job.published_through == 0:
            assert published == committed
    assert bulk.state.digest().digest == steady.state.digest().digest
    bulk.checkpoint()
    bulk.restart()
    assert bulk.state.digest().parts == steady.state.digest().parts
    # A checkpoint does not know of the blocks of dropped attempts.
    assert 0 <= bulk.state.staging.room_bytes <= steady.state.staging.room_bytes
