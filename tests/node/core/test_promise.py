"""Coroutines of the core: resumed in the call that keeps their promise, refused by exception, contained like
callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tickwheel.node.core.promise import Promise, answer_of
from tickwheel.node.core.serving import Serving
from tickwheel.node.failure import Failure, RequestError, invalid
from tickwheel.proto import common_pb2

REFUSAL = invalid("field", 1, "0").failure


def test_a_coroutine_is_resumed_where_its_promise_is_kept() -> None:
    """Not in a later turn: what happens between two promises is one step of the one who keeps the first."""
    first, second = Promise[int](), Promise[int]()
    answers: list[int | Failure] = []
    seen: list[str] = []

    async def request() -> int:
        one = await first
        seen.append("between")
        return one + await second

    Serving(lambda bits: 0).start(request(), answers.append)
    assert not seen
    first.keep(1)
    assert seen == ["between"] and not answers
    second.keep(2)
    assert answers == [3]


def test_kept_promises_do_not_suspend() -> None:
    """A loop over answers that come at once neither nests nor waits."""

    async def at_once() -> int:
        promise = Promise[int]()
        promise.keep(1)
        return await promise

    async def request() -> int:
        return sum([await at_once() for _ in range(10_000)])

    answers: list[Any] = []
    Serving(lambda bits: 0).start(request(), answers.append)
    assert answers == [10_000]


def test_a_failure_is_raised_and_answered() -> None:
    """The coroutine may catch it; else it is the answer."""
    promise = Promise[int]()
    other = Failure(common_pb2.WRONG_STATE, "caught")

    async def request() -> int:
        try:
            await answer_of(lambda reply: reply.fail(other))
        except RequestError as error:
            assert error.failure is other
        return await promise

    answers: list[Any] = []
    Serving(lambda bits: 0).start(request(), answers.append)
    promise.refuse(REFUSAL)
    assert answers == [REFUSAL]


def test_an_error_in_a_later_step_fails_the_request_alone() -> None:
    """Whoever keeps the promise is not concerned."""
    serving, reported = Serving(lambda bits: 7), []
    serving.contain(lambda error_id, error: reported.append(error))
    promise, answers = Promise[int](), list[Any]()

    async def request() -> int:
        return 1 // await promise

    serving.run(answers.append, lambda: serving.start(request(), answers.append))
    promise.keep(0)
    assert [type(error) for error in reported] == [ZeroDivisionError]
    assert [answer.reason for answer in answers] == [common_pb2.NODE_FAULT]


def test_a_worker_s_error_is_raised_where_it_is_awaited() -> None:
    """The coroutine decides what it means."""
    promise, answers = Promise[int](), list[Any]()

    async def request() -> str:
        try:
            await promise
        except OSError as error:
            return str(error)
        return "read"

    Serving(lambda bits: 0).start(request(), answers.append)
    promise.answered(None, OSError("no such file"))
    assert answers == ["no such file"]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_coroutine_whose_promise_cannot_be_kept_is_closed(at_once: bool) -> None:
    """A mistake before the promise is kept: what the request holds is given back, and its caller is told once."""
    serving = Serving(lambda bits: 7)
    serving.contain(lambda error_id, error: None)
    answers: list[Any] = []
    held: list[str] = []
    kept: list[Callable[[int], None]] = []

    def mistaken(promise: Promise[int]) -> None:
        def piece(divisor: int) -> None:
            promise.keep(1 // divisor)

        kept.append(serving.bound(piece))
        if at_once:
            kept[0](0)

    async def request() -> int:
        held.append("place")
        try:
            promise = Promise[int]()
            mistaken(promise)
            return await promise
        finally:
            held.remove("place")

    serving.run(answers.append, lambda: serving.start(request(), answers.append))
    kept[0](0)
    assert not held
    assert {answer.reason for answer in answers} == {common_pb2.NODE_FAULT}
    kept[0](1)
    assert not held and answers[-1].reason == common_pb2.NODE_FAULT, "a late answer resumes nothing"
