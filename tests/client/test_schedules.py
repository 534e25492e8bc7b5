"""The clients' side of recurring schedules, against a fake node: what travels, what comes back, what a repeat does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

import grpc
import pytest

from tests.client.fake_node import FakeNode, FakeState, status
from tickwheel.client import (
    AsyncClient,
    Client,
    Missed,
    NotFound,
    Overlap,
    PutResult,
    RequestRefused,
    RunCounts,
    RunOutcome,
    Schedule,
    ScheduleRun,
    ScheduleState,
)
from tickwheel.proto import common_pb2, schedules_pb2, schedules_pb2_grpc

HOUR_MS = 3_600_000
NINE = datetime(2026, 5, 5, 9, tzinfo=UTC)


class Plans(schedules_pb2_grpc.SchedulesServicer):
    """An honest small cluster: definitions by name, runs by request id, an hour between planned times, two runs a part
    of a backfill. Answers can be lost after the work."""

    def __init__(self) -> None:
        self.schedules: dict[str, schedules_pb2.Schedule] = {}
        self.revision = 0
        self.requests: dict[str, Any] = {}
        self.made: list[int] = []
        self.drop_answers = 0
        self.refused_from_ms = 1 << 60

    async def _fail(self, context: Any, code: grpc.StatusCode, reason: str, **metadata: str) -> None:
        data = status(code, reason, reason.lower(), **metadata).SerializeToString()
        await context.abort(code, reason.lower(), (("grpc-status-details-bin", data),))

    async def _answer(self, context: Any, answer: Any) -> Any:
        if self.drop_answers:
            self.drop_answers -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")
        return answer

    async def _known(self, name: str, context: Any) -> schedules_pb2.Schedule:
        if name not in self.schedules:
            await self._fail(context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_NAME")
        return self.schedules[name]

    async def Put(self, request: Any, context: Any) -> Any:
        name = request.definition.name
        before = self.schedules.get(name)
        if before is not None and before.definition == request.definition:
            return await self._answer(context, schedules_pb2.PutScheduleResponse(schedule=before))
        if before is not None and request.if_absent:
            await self._fail(context, grpc.StatusCode.ALREADY_EXISTS, "NAME_TAKEN")
        self.revision += 1
        made = schedules_pb2.Schedule(
            definition=request.definition,
            revision=self.revision,
            state=schedules_pb2.SCHEDULE_PAUSED if request.paused else schedules_pb2.SCHEDULE_ACTIVE,
        )
        self.schedules[name] = made
        answer = schedules_pb2.PutScheduleResponse(schedule=made, created=before is None, changed=True)
        return await self._answer(context, answer)

    async def Get(self, request: Any, context: Any) -> Any:
        found = await self._known(request.name, context)
        return schedules_pb2.GetScheduleResponse(schedule=found, upcoming_ms=[HOUR_MS, 2 * HOUR_MS])

    async def List(self, request: Any, context: Any) -> Any:
        names = sorted(name for name in self.schedules if name.startswith(request.prefix) and name > request.page_token)
        page = schedules_pb2.ListSchedulesResponse(next_page_token=names[1] if len(names) > 2 else "")
        for name in names[:2]:
            shown = page.schedules.add()
            shown.CopyFrom(self.schedules[name])
            if not request.content:
                shown.definition.ClearField("payload")
                shown.definition.ClearField("meta")
        return page

    async def Trigger(self, request: Any, context: Any) -> Any:
        await self._known(request.name, context)
        repeated = request.request_id in self.requests
        if not repeated:
            self.made.append(0)
            self.requests[request.request_id] = schedules_pb2.ScheduleRun(
                planned_ms=HOUR_MS,
                due_ms=HOUR_MS,
                id=common_pb2.MessageId(hour=1, index=len(self.made)),
                outcome=schedules_pb2.RUN_TRIGGERED,
            )
        run = self.requests[request.request_id]
        return await self._answer(context, schedules_pb2.TriggerScheduleResponse(run=run, repeated=repeated))

    async def Backfill(self, request: Any, context: Any) -> Any:
        await self._known(request.name, context)
        if request.request_id not in self.requests:
            if request.from_ms >= self.refused_from_ms:
                await self._fail(context, grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
            planned = [*range(-(-request.from_ms // HOUR_MS) * HOUR_MS, request.until_ms, HOUR_MS)]
            self.made += planned[:2]
            rest = planned[2] if len(planned) > 2 else 0
            self.requests[request.request_id] = schedules_pb2.BackfillScheduleResponse(
                made=len(planned[:2]), next_from_ms=rest
            )
        return await self._answer(context, self.requests[request.request_id])

    async def Pause(self, request: Any, context: Any) -> Any:
        return await self._known(request.name, context)

    async def Resume(self, request: Any, context: Any) -> Any:
        return await self._known(request.name, context)

    async def Delete(self, request: Any, context: Any) -> Any:
        deleted = self.schedules.pop(request.name, None) is not None
        return await self._answer(context, schedules_pb2.DeleteScheduleResponse(deleted=deleted))

    async def Preview(self, request: Any, context: Any) -> Any:
        times = [request.after_ms + number * HOUR_MS for number in range(request.times)]
        return schedules_pb2.PreviewScheduleResponse(planned_ms=times)


@pytest.fixture
async def plans() -> AsyncIterator[tuple[Plans, FakeNode]]:
    """A fake node that is master and has the service."""
    plans = Plans()
    node = FakeNode(FakeState(), "n1")
    node.services.append(lambda server: schedules_pb2_grpc.add_SchedulesServicer_to_server(plans, server))
    await node.start()
    node.lead()
    yield plans, node
    await node.stop()


@pytest.fixture
async def client(plans: tuple[Plans, FakeNode]) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(plans[1].address, timeout_s=5.0) as client:
        yield client


async def test_everything_that_is_put_comes_back(client: AsyncClient, plans: tuple[Plans, FakeNode]) -> None:
    """Datetimes, timedeltas and enums on both sides; a node's later outcome is unknown, not an error."""
    done = await client.schedules.put(
        "report",
        "reports",
        "go",
        cron="0 9 * * MON-FRI",
        zone="Europe/Berlin",
        start=NINE,
        end=NINE + timedelta(days=30),
        count=20,
        jitter=timedelta(seconds=30),
        missed=Missed.ALL,
        missed_window=timedelta(hours=2),
        late_max=timedelta(minutes=5),
        overlap=Overlap.SKIP,
        key="k",
        tags=["a", "b"],
        headers={"h": "v"},
        message_group="m",
        paused=True,
    )
    assert done == PutResult(done.schedule, created=True, changed=True)
    wire = plans[0].schedules["report"]
    wire.runs.add(planned_ms=1, outcome=schedules_pb2.RUN_MISSED, count=7, last_planned_ms=8)
    wire.runs.add(planned_ms=9, due_ms=10, id=common_pb2.MessageId(hour=2, index=3), outcome=99)
    wire.made = 5
    found = await client.schedules.get("report")
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    millisecond = timedelta(milliseconds=1)
    assert found == Schedule(
        name="report",
        topic="reports",
        revision=1,
        state=ScheduleState.PAUSED,
        cron="0 9 * * MON-FRI",
        zone="Europe/Berlin",
        start=NINE,
        end=NINE + timedelta(days=30),
        count=20,
        jitter=timedelta(seconds=30),
        missed=Missed.ALL,
        missed_window=timedelta(hours=2),
        late_max=timedelta(minutes=5),
        overlap=Overlap.SKIP,
        payload=b"go",
        key="k",
        tags=("a", "b"),
        headers={"h": "v"},
        message_group="m",
        counts=RunCounts(made=5),
        runs=(
            ScheduleRun(epoch + millisecond, RunOutcome.MISSED, count=7, last_planned=epoch + 8 * millisecond),
            ScheduleRun(epoch + 9 * millisecond, RunOutcome.UNKNOWN, "0-2-3", epoch + 10 * millisecond),
        ),
        upcoming=(epoch + timedelta(hours=1), epoch + timedelta(hours=2)),
    )


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({}, "cron"),
        ({"cron": "* * * * *", "every": timedelta(minutes=1)}, "cron"),
        ({"every": 60}, "every"),
        ({"cron": "* * * * *", "start": datetime(2026, 1, 1)}, "start"),
        ({"cron": "* * * * *", "end": datetime(2026, 1, 1)}, "end"),
        ({"cron": "* * * * *", "count": -1}, "count"),
        ({"cron": "* * * * *", "count": True}, "count"),
        ({"cron": "* * * * *", "jitter": timedelta(days=2)}, "jitter"),
        ({"cron": "* * * * *", "missed": "some"}, "missed"),
        ({"cron": "* * * * *", "zone": ""}, "zone"),
        ({"cron": "* * * * *", "overlap": "some"}, "overlap"),
        ({"cron": "* * * * *", "missed_window": timedelta(hours=1)}, "missed_window"),
        ({"cron": "* * * * *", "tags": "one"}, "tags"),
    ],
)
async def test_wrong_arguments_do_not_travel(
    client: AsyncClient, plans: tuple[Plans, FakeNode], wrong: dict[str, Any], field: str
) -> None:
    """The error names the argument, its value and what is allowed."""
    with pytest.raises(RequestRefused) as caught:
        await client.schedules.put("n", "t", b"x", **wrong)
    assert caught.value.field == field and caught.value.limit
    assert not plans[0].schedules


async def test_words_are_policies(client: AsyncClient) -> None:
    """The value of an enum does as well as the member."""
    policies: dict[str, Any] = {"missed": "last", "overlap": "skip"}
    done = await client.schedules.put("n", "t", b"x", every=timedelta(hours=1), **policies)
    assert (done.schedule.missed, done.schedule.overlap) == (Missed.LAST, Overlap.SKIP)
    assert done.schedule.every == timedelta(hours=1) and done.schedule.cron == ""


async def test_lost_answers_repeat_nothing(client: AsyncClient, plans: tuple[Plans, FakeNode]) -> None:
    """Each call is repeated; each is carried out once."""
    plans[0].drop_answers = 1
    done = await client.schedules.put("n", "t", b"x", every=timedelta(hours=1))
    assert (done.schedule.revision, done.changed) == (1, False)
    plans[0].drop_answers = 1
    run = await client.schedules.trigger("n")
    assert run.id == "0-1-1" and run.outcome == RunOutcome.TRIGGERED
    assert plans[0].made == [0]
    plans[0].drop_answers = 1
    await client.schedules.backfill("n", NINE, NINE + timedelta(hours=2))
    assert len(plans[0].made) == 3
    plans[0].drop_answers = 1
    assert not await client.schedules.delete("n")
    assert not plans[0].schedules


async def test_a_long_backfill_goes_in_parts(client: AsyncClient, plans: tuple[Plans, FakeNode]) -> None:
    """Of which each is asked for under an id of its own. After an error the next call goes on where it stood."""
    await client.schedules.put("n", "t", b"x", every=timedelta(hours=1))
    assert await client.schedules.backfill("n", NINE, NINE + timedelta(hours=5), request_id="r") == 5
    assert [*plans[0].requests] == ["r", "r.1", "r.2"]
    plans[0].made.clear()
    begin = NINE + timedelta(days=1)
    plans[0].refused_from_ms = round((begin + timedelta(hours=2)).timestamp() * 1_000)
    with pytest.raises(RequestRefused) as caught:
        await client.schedules.backfill("n", begin, begin + timedelta(hours=5), request_id="s")
    facts = caught.value.metadata
    assert (facts["made"], facts["request_id"]) == ("2", "s.1")
    plans[0].refused_from_ms = 1 << 60
    onward = datetime.fromtimestamp(int(facts["next_from_ms"]) / 1_000, UTC)
    assert await client.schedules.backfill("n", onward, begin + timedelta(hours=5), request_id="s.1") == 3
    assert len(plans[0].made) == len({*plans[0].made}) == 5


async def test_request_ids_leave_room_for_parts(client: AsyncClient) -> None:
    """Too long or empty is refused here."""
    for wrong in ("", "x" * 59):
        with pytest.raises(RequestRefused, match="request_id"):
            await client.schedules.trigger("n", request_id=wrong)


async def test_lists_by_pages(client: AsyncClient) -> None:
    """By prefix, in order, with content only if asked for."""
    for name in ("b2", "a1", "b1", "b3", "b4"):
        await client.schedules.put(name, "t", b"x", every=timedelta(hours=1), key="k")
    found = [schedule async for schedule in client.schedules.list("b")]
    assert [schedule.name for schedule in found] == ["b1", "b2", "b3", "b4"]
    assert all(schedule.payload is None and not schedule.key for schedule in found)
    full = [schedule async for schedule in client.schedules.list("a", content=True)]
    assert [(schedule.payload, schedule.key) for schedule in full] == [(b"x", "k")]


async def test_preview_and_errors(client: AsyncClient) -> None:
    """Aware times; a name that is not known is NotFound, a name that is taken RequestRefused."""
    times = await client.schedules.preview(cron="0 * * * *", after=NINE, times=2)
    assert times == (NINE, NINE + timedelta(hours=1))
    for times_wrong in (0, 1_001):
        with pytest.raises(RequestRefused, match="times"):
            await client.schedules.preview(cron="0 * * * *", times=times_wrong)
    with pytest.raises(NotFound):
        await client.schedules.get("none")
    await client.schedules.put("n", "t", b"x", cron="0 * * * *")
    with pytest.raises(RequestRefused) as caught:
        await client.schedules.put("n", "t", b"y", cron="0 * * * *", if_absent=True)
    assert caught.value.reason == "NAME_TAKEN"


async def test_the_synchronous_client_does_the_same(plans: tuple[Plans, FakeNode]) -> None:
    """With the same arguments and types."""

    def work() -> list[str]:
        with Client(plans[1].address) as client:
            assert_type(client.schedules.put("n", "t", b"x", cron="0 * * * *"), PutResult)
            assert_type(client.schedules.get("n"), Schedule)
            assert_type(client.schedules.trigger("n"), ScheduleRun)
            return [schedule.name for schedule in client.schedules.list()]

    assert await asyncio.to_thread(work) == ["n"]
