"""The fingerprint of staged rows: the same for the same rows, however they are cut and ordered, and no other. A commit
that is accepted is never told as one that changed nothing."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.client.fake_node import FakeNode, FakeState, Refusal
from tickwheel.client import AsyncClient
from tickwheel.client.errors import OutcomeUnknown
from tickwheel.client.staging import Rows, StagedState
from tickwheel.proto import staging_pb2, staging_pb2_grpc

Row = tuple[int, bytes, bytes]
ROWS = st.lists(
    st.tuples(st.integers(0, 1 << 40), st.binary(min_size=1, max_size=9), st.binary(max_size=3)), max_size=9
)


def fingerprint(rows: list[Row], topic: str = "t") -> int:
    """Of rows of due time, payload and meta; without the column of metas where there are none."""
    metas = [meta for _, _, meta in rows]
    return Rows(
        topic,
        np.array([due_ms for due_ms, _, _ in rows], np.int64),
        np.array([len(payload) for _, payload, _ in rows], np.uint32),
        b"".join(payload for _, payload, _ in rows),
        np.array(list(map(len, metas)), np.uint32) if any(metas) else None,
        b"".join(metas),
    ).fingerprint()


@given(ROWS, st.randoms(use_true_random=False), st.integers(0, 9))
def test_order_and_blocks_do_not_matter(rows: list[Row], chance: object, cut: int) -> None:
    """Tasks of another run have other rows in another order, and blocks end elsewhere."""
    mixed = list(rows)
    chance.shuffle(mixed)  # type: ignore[attr-defined]
    assert (fingerprint(mixed[:cut]) + fingerprint(mixed[cut:])) % (1 << 64) == fingerprint(rows)


@given(ROWS, ROWS)
def test_other_rows_have_another_one(rows: list[Row], others: list[Row]) -> None:
    """Whatever differs: a time, a payload, a meta, where one ends, how many there are, the topic."""
    assume(sorted(rows) != sorted(others))
    assert fingerprint(rows) != fingerprint(others)
    assert not rows or fingerprint(rows) != fingerprint(rows, "u")


def test_it_stays_what_it_was() -> None:
    """A job that was published by one version may be run again by the next."""
    assert fingerprint([(1, b"a", b""), (2, b"bc", b"m")]) == 0x8228_9DC6_8D3E_8698


NO_MASTER = Refusal(grpc.StatusCode.UNAVAILABLE, "NO_MASTER", "no master", retry_after_ms="20")
NO_RIGHT = Refusal(grpc.StatusCode.PERMISSION_DENIED, "RIGHT_REQUIRED", "the token is not valid any more")
TIMEOUT_S = 0.2


class Publishing(staging_pb2_grpc.StagingServicer):
    """Accepts a commit, and refuses to say how far it is for a while."""

    def __init__(self) -> None:
        self.node = FakeNode(FakeState(), "n1")
        self.node.services.append(lambda server: staging_pb2_grpc.add_StagingServicer_to_server(self, server))
        self.refusal = NO_MASTER
        self.refused_s = 0.0
        self.until_s = 0.0

    async def Stage(self, request: Any, context: Any) -> Any:
        return staging_pb2.StagedJob(job_id=request.job_id, state=staging_pb2.STAGED_OPEN)

    async def Abort(self, request: Any, context: Any) -> Any:
        return staging_pb2.StagedJob(job_id=request.job_id)

    async def Commit(self, request: Any, context: Any) -> Any:
        self.until_s = time.monotonic() + self.refused_s
        return staging_pb2.StagedJob(job_id=request.job_id, state=staging_pb2.STAGED_PUBLISHING, rows=9)

    async def GetStagedJob(self, request: Any, context: Any) -> Any:
        if time.monotonic() < self.until_s:
            await self.node._refuse(context, self.refusal)
        return staging_pb2.StagedJob(job_id=request.job_id, state=staging_pb2.STAGED_PUBLISHED, rows=9)


@pytest.fixture
async def publishing() -> AsyncIterator[Publishing]:
    """A master that has the service."""
    made = Publishing()
    await made.node.start()
    made.node.lead()
    yield made
    await made.node.stop()


async def test_a_commit_waits_for_the_next_master(publishing: Publishing) -> None:
    """For as long as it may take to schedule the rows, and not for that of one call: whoever leads next goes on."""
    publishing.refused_s = 4 * TIMEOUT_S
    async with AsyncClient(publishing.node.address, timeout_s=TIMEOUT_S) as client:
        job = await client.staging.commit("j", "r", [])
    assert job.state is StagedState.PUBLISHED


@pytest.mark.parametrize("refusal", [NO_MASTER, NO_RIGHT])
async def test_a_commit_that_was_accepted_is_told_as_such(publishing: Publishing, refusal: Refusal) -> None:
    """With the error of the last call alone one would write the rows again, under another job id."""
    publishing.refusal, publishing.refused_s = refusal, 3_600
    async with AsyncClient(publishing.node.address, timeout_s=TIMEOUT_S) as client:
        with pytest.raises(OutcomeUnknown, match=f"job j is committed; 0 of 9 rows are scheduled so far; .*{refusal}"):
            await client.staging.commit("j", "r", [], publish_timeout_s=2 * TIMEOUT_S)
