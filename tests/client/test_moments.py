"""Times as people say them: aware datetimes and timedeltas, beside milliseconds, wherever a time is taken or given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.fake_node import FakeNode
from tickwheel.client import (
    AsyncClient,
    Client,
    DeadCause,
    DeadLetter,
    ExponentialBackoff,
    Message,
    MessageState,
    RequestRefused,
    RetryPolicy,
    Selection,
    StartFrom,
    Sweep,
    SweepState,
)
from tickwheel.client.messages import KIND_DELAY, KIND_DUE, KIND_LEVEL, when_of
from tickwheel.client.moments import moment_of, ms_of, range_ms, span_ms_of
from tickwheel.client.retrying import policy_message, policy_of
from tickwheel.client.states import start_of
from tickwheel.proto import consumer_pb2

NAIVE = datetime(2030, 1, 1, 12)
AWARE = datetime(2030, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
AWARE_MS = 1_893_492_000_000
ZONES = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(st.datetimes(datetime(1900, 1, 1), datetime(2500, 1, 1), timezones=ZONES))
def test_a_datetime_becomes_the_millisecond_at_it_or_after_it(moment: datetime) -> None:
    """Never an earlier one, or a message would come too early; back again it is the same moment."""
    ms = ms_of("at", moment)
    assert timedelta(0) <= moment_of(ms) - moment < timedelta(milliseconds=1)
    assert ms_of("at", moment_of(ms)) == ms


@given(st.integers(-(1 << 62), 1 << 62))
def test_every_time_of_a_node_can_be_shown(ms: int) -> None:
    """What no datetime can hold becomes the first or the last."""
    moment = moment_of(ms)
    assert moment.tzinfo is UTC
    assert (moment < moment_of(0)) == (ms < 0)


@given(st.timedeltas())
def test_spans_are_rounded_up(span: timedelta) -> None:
    """A delay below a millisecond is one."""
    ms = span_ms_of("delay", span)
    assert 0 <= ms * 1_000 - span // timedelta(microseconds=1) < 1_000


def test_each_way_to_say_when() -> None:
    """One of five; a zone counts."""
    assert when_of(AWARE, None, None, None, None) == (KIND_DUE, AWARE_MS)
    assert when_of(None, timedelta(seconds=1.5), None, None, None) == (KIND_DELAY, 1_500)
    assert when_of(None, None, 7, None, None) == (KIND_DUE, 7)
    assert when_of(None, None, None, 0, None) == (KIND_DELAY, 0)
    assert when_of(None, None, None, None, 3) == (KIND_LEVEL, 3)


def wrong_times(client: Client) -> list[tuple[str, Callable[[], object]]]:
    """(argument, call) for each place where a datetime is taken, with a naive one."""
    at: Any = {"at": NAIVE}
    everything = Selection("t")
    with client.producer() as producer:
        return [
            ("at", lambda: client.schedule("t", b"x", **at)),
            ("at", lambda: producer.send("t", b"x", **at)),
            ("at", lambda: producer.schedule("t", b"x", **at)),
            ("at", lambda: producer.schedule_many("t", [(NAIVE, b"x")])),
            ("at", lambda: client.reschedule("0-1-1", **at)),
            ("at", lambda: client.sweeps.reschedule(everything, **at)),
            ("due_from", lambda: list(client.list_pending(due_from=NAIVE))),
            ("due_before", lambda: client.count_pending(due_before=NAIVE)),
            ("due_from", lambda: Selection(due_from=NAIVE)),
            ("start_from", lambda: client.consumer("g", "t", start_from=NAIVE)),
            ("start_from", lambda: client.admin.create_group("g", ["t"], start_from=NAIVE)),
            ("start_from", lambda: client.admin.reset_group("g", NAIVE)),
            ("before", lambda: client.access.audit(before=NAIVE)),
        ]


def test_a_naive_datetime_is_refused_everywhere() -> None:
    """It could mean any zone. The error names the argument and says what to do; nothing travels."""
    with Client("127.0.0.1:9") as client:
        for field, call in wrong_times(client):
            with pytest.raises(RequestRefused, match="with a time zone") as caught:
                call()
            assert caught.value.field == field
            assert "2030" in caught.value.value


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({}, "when"),
        ({"at": AWARE, "due_ms": 1}, "when"),
        ({"at": AWARE, "delay": timedelta(1)}, "when"),
        ({"at": "tomorrow"}, "at"),
        ({"at": AWARE_MS}, "at"),
        ({"delay": 5}, "delay"),
        ({"delay": timedelta(seconds=-1)}, "delay"),
        ({"delay_ms": 1.5}, "delay_ms"),
        ({"delay_ms": 1, "jitter": 5}, "jitter"),
    ],
)
def test_a_wrong_time_is_refused_with_its_argument(wrong: dict[str, Any], field: str) -> None:
    """Before it travels, also of a type that a hurried caller may give."""
    with Client("127.0.0.1:9") as client, pytest.raises(RequestRefused) as caught:
        client.schedule("t", b"x", **wrong)
    assert caught.value.field == field and caught.value.limit


@pytest.mark.parametrize(
    ("wrong", "limit"),
    [
        ({"delay": timedelta(seconds=-1)}, "0 or longer"),
        ({"delay_ms": 0, "jitter": timedelta(days=2)}, "0 to 24 hours"),
    ],
)
def test_a_span_out_of_bounds_is_told_without_milliseconds(wrong: dict[str, Any], limit: str) -> None:
    """The caller gave none, in Python and over HTTP."""
    with Client("127.0.0.1:9") as client, pytest.raises(RequestRefused) as caught:
        client.schedule("t", b"x", **wrong)
    assert caught.value.limit == limit and "000" not in caught.value.value


def test_bounds_are_given_once() -> None:
    """As datetimes or as milliseconds; a selection shows both."""
    assert range_ms(AWARE, None, 0, 9) == (AWARE_MS, 9)
    with pytest.raises(RequestRefused, match="due_ms_max"):
        range_ms(None, AWARE, 0, 9)
    with pytest.raises(RequestRefused, match="due_ms_min"):
        range_ms(AWARE, None, 9, 0)
    chosen = Selection("t", due_from=AWARE)
    assert (chosen.due_ms_min, chosen.due_from, chosen.due_before) == (AWARE_MS, AWARE, None)
    assert chosen == Selection("t", due_ms_min=AWARE_MS)


def test_places_of_a_group() -> None:
    """A StartFrom, its text, or a datetime; anything else is refused with what there is."""
    assert start_of(StartFrom.LATEST, 0) == (consumer_pb2.LATEST, 0) == start_of("latest", 0)
    assert start_of(AWARE, 0) == (consumer_pb2.TIME, AWARE_MS) == start_of(StartFrom.TIME, AWARE_MS)
    with pytest.raises(RequestRefused, match="earliest, latest, time or a datetime"):
        start_of("soon", 0)
    with pytest.raises(RequestRefused, match="start_ms"):
        start_of(AWARE, 5)


def test_a_retry_policy_for_nodes() -> None:
    """Timedeltas become milliseconds; no policy stays none."""
    backoff = ExponentialBackoff(initial=timedelta(seconds=0.5), maximum=timedelta(minutes=1), jitter=0.25)
    policy = RetryPolicy(backoff=backoff, attempts_max=8)
    wire = policy_message(policy)
    assert wire is not None and policy_of(wire) == policy
    assert (wire.exponential.initial_ms, wire.exponential.factor) == (500, 2.0)
    assert (wire.exponential.max_ms, wire.exponential.jitter, wire.attempts_max) == (60_000, 0.25, 8)
    plain = policy_message(RetryPolicy(attempts_max=3))
    assert plain is not None and not plain.HasField("exponential") and policy_message(None) is None
    with pytest.raises(RequestRefused, match="initial"):
        policy_message(RetryPolicy(backoff=ExponentialBackoff(initial=5, maximum=timedelta(1))))  # type: ignore[arg-type]


async def test_what_was_asked_comes_back_as_datetimes(nodes: list[FakeNode]) -> None:
    """Receipts, messages and deliveries say when, beside the milliseconds; one due time is one whole moment."""
    at = datetime.now(UTC) - timedelta(seconds=1)
    async with AsyncClient(nodes[0].address) as client:
        receipt = await client.schedule("t", b"x", at=at)
        assert timedelta(0) <= receipt.due - at < timedelta(milliseconds=1) and receipt.delay == timedelta(0)
        [message] = [message async for message in client.list_pending("t")]
        assert message.due == receipt.due == moment_of(receipt.due_ms)
        async with client.producer() as producer:
            [future] = await producer.schedule_many("t", [(at, b"y"), (receipt.due_ms, b"z")])
            await future
        async with client.consumer("g", "t", messages_max=3) as consumer:
            deliveries = [delivery async for delivery in consumer]
            assert [delivery.due for delivery in deliveries] == [receipt.due] * 3
            assert deliveries[0].batch.lease_until.tzinfo is UTC


async def test_columns_take_whole_numbers_only(nodes: list[FakeNode]) -> None:
    """numpy would make some integer of a fraction or a datetime64."""
    import numpy as np

    async with AsyncClient(nodes[0].address) as client, client.producer() as producer:
        wrong: list[Any] = [[1.5], np.array(["2030-01-01"], "datetime64[us]"), [1 << 80], [True], [1e300]]
        for due_ms in wrong:
            with pytest.raises(RequestRefused, match="whole numbers"):
                await producer.schedule_columns("t", due_ms, [1], b"x")
        due_ms = np.full(2, 1_900_000_000_000.0)
        receipt = await (await producer.schedule_columns("t", due_ms, np.ones(2), b"xy"))
        assert len(receipt.ids) == 2
        with pytest.raises(RequestRefused, match="whole numbers"):
            await producer.schedule_many("t", [("soon", b"x")])  # type: ignore[list-item]


def test_results_show_datetimes() -> None:
    """Each time of a result is an aware datetime too; what has not happened has none."""
    message = Message("0-1-1", "t", 1_000, 500, 0, MessageState.PENDING, scheduled_ms=250)
    assert (message.due, message.due_requested) == (moment_of(1_000), moment_of(500))
    assert message.scheduled_at == moment_of(250)
    letter = DeadLetter(1, "0-1-1", "t", DeadCause.REFUSED, "", 1, 500, 2_000, 0, key="k")
    assert (letter.first_due, letter.died_at, letter.key) == (moment_of(500), moment_of(2_000), "k")
    running = Sweep("job", SweepState.RUNNING, "cancel", Selection("t"), 7, 0, 0, 0, 0, 0, 0, 0)
    assert (running.begun_at, running.ended_at) == (moment_of(7), None)
    ended = replace(running, state=SweepState.FINISHED, ended_ms=9)
    assert ended.ended_at == moment_of(9)
