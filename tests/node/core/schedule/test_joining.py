"""Messages of many callers that go into the log as one request: each is judged and told as if it were alone."""

from __future__ import annotations

from itertools import count, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.node.core.test_serving import Mistake, contain
from tests.node.core.test_when import change
from tests.node.core.trio import Node, World
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.fair_queue import Waiting
from tickwheel.node.core.schedule.intake import (
    KIND_DELAY,
    KIND_DUE,
    KIND_LEVEL,
    IncomingBatch,
    Row,
    from_batch,
    from_message,
    row_of,
)
from tickwheel.node.core.schedule.joining import BYTES_JOINED_MAX, ROWS_JOINED_MAX, RowCaller
from tickwheel.node.core.schedule.publisher import REFUSALS_MAX
from tickwheel.node.failure import Failure, RequestError
from tickwheel.node.state.settings import Settings
from tickwheel.proto import common_pb2, scheduler_pb2

HOUR_MS = 3_600_000
Told = tuple[int, int, int, int] | Failure

LIMITS = Settings(batch_messages_max=3, payload_bytes_max=10)
WORLD = World(70)
"""Shared: the tests leave nothing behind but messages."""


def core_of(node: Node) -> NodeCore:
    assert node.host is not None, node.fatal
    return node.host.core


def begin(node: Node, rows: list[Row], clients: list[str] | str = "", actor: str = "") -> list[list[Told]]:
    """Schedule rows in one pass of the loop; what each caller is told, later."""
    told: list[list[Told]] = [[] for _ in rows]
    publisher = core_of(node).parts.publisher
    for row, heard, client in zip(
        rows, told, [clients] * len(rows) if isinstance(clients, str) else clients, strict=True
    ):
        caller = RowCaller(lambda *placed, heard=heard: heard.append(placed), heard.append)
        core_of(node).serving.run(caller.fail, lambda: publisher.schedule_row(row, client, actor, caller))  # noqa: B023
    node.wake()
    return told


def send(world: World, node: Node, rows: list[Row], client: str = "", actor: str = "") -> list[Told]:
    """As `begin`; each caller is told exactly once."""
    told = begin(node, rows, client, actor)
    world.run_until(lambda: all(told))
    world.run(50)
    assert all(len(heard) == 1 for heard in told)
    return [heard[0] for heard in told]


def shown(row: Row, told: Told, now_ms: int) -> Any:
    """What must not depend on company."""
    if isinstance(told, Failure):
        return told.reason, told.metadata["field"]
    number, due_ms, level, delay_ms = told
    assert number
    if row.kind == KIND_DUE:
        assert due_ms == max(row.when, due_ms)
        return max(row.when, now_ms) == max(due_ms, now_ms), level, delay_ms
    return 0 <= due_ms - now_ms - (row.when if row.kind == KIND_DELAY else delay_ms) < 1_000, level, delay_ms


def content(world: World, node: Node, number: int) -> tuple[str, bytes]:
    """Topic and payload of a message."""
    found: list[Any] = []
    core = core_of(node)
    core.serving.start(core.parts.requests.get(number, content=True), found.append)
    node.wake()
    world.run_until(lambda: bool(found))
    assert not isinstance(found[0], Failure), found
    return found[0].message.topic, found[0].message.payload


@pytest.mark.parametrize("given", [["aba", "b", "acc"], ["a", "b", "a"], ["bb", "b"], ["ab"], ["c", "ca"]])
def test_a_message_keeps_its_topic_in_whatever_company(given: list[str]) -> None:
    """Batches of one topic and of several, and single messages, in one entry and not in the order of their times."""
    master = WORLD.elect()
    core = core_of(master)
    told: list[Any] = []
    when_ms = WORLD.now_ms + 2 * HOUR_MS
    for topics in given:
        wire = scheduler_pb2.ScheduleBatch()
        for topic in topics:
            when_ms -= 7
            wire.rows.messages.add(topic=topic, payload=topic.encode(), due_ms=when_ms)
        core.parts.publisher.schedule(from_batch(wire, core.state.settings), Reply(told.append, told.append))
    rows = [Row(topic, KIND_DUE, when_ms + 3, topic.encode()) for topic in "cab"]
    heard = begin(master, rows)
    WORLD.run_until(lambda: all(heard) and len(told) == len(given))
    numbers = [number for outcome in told for number in outcome.ids.tolist()] + [one[0][0] for one in heard]  # type: ignore[index]
    for number, topic in zip(numbers, [*"".join(given), *"cab"], strict=True):
        assert content(WORLD, master, number) == (topic, topic.encode())


WHENS = st.one_of(
    st.tuples(st.just(KIND_DUE), st.sampled_from([1, HOUR_MS, 1 << 50])),  # ahead of now; the last one is too far
    st.tuples(st.just(KIND_DELAY), st.sampled_from([HOUR_MS, 2 * HOUR_MS, 1 << 50])),
    st.tuples(st.just(KIND_LEVEL), st.sampled_from([17, 18, 99])),
)
ROWS = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), WHENS, st.sampled_from(["x", "y"])), max_size=24)


@given(ROWS)
@example([("a", (KIND_DUE, when), "x") for when in (1, 1 << 50, HOUR_MS, 1 << 50, 1)])
@example([("a", (KIND_DELAY, when), "x") for when in (1 << 50, HOUR_MS)])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_company_changes_nothing(drawn: list[tuple[str, tuple[int, int], str]]) -> None:
    """Good and bad ones of several clients, at once and one by one: the same answers, and each id names its message."""
    master, rows, clients = WORLD.elect(), [], []
    for number, (topic, (kind, when), client) in enumerate(drawn):
        if kind == KIND_DUE and when < 1 << 50:
            when += WORLD.now_ms + HOUR_MS
        rows.append(Row(topic, kind, when, b"%s %d" % (topic.encode(), number)))
        clients.append(client)
    told = begin(master, rows, clients)
    now_ms = WORLD.now_ms
    WORLD.run_until(lambda: all(told))
    together = [shown(row, heard[0], now_ms) for row, heard in zip(rows, told, strict=True)]
    alone = []
    for row, client in zip(rows, clients, strict=True):
        now_ms = WORLD.now_ms
        alone.append(shown(row, send(WORLD, master, [row], client)[0], now_ms))
    assert together == alone
    for row, heard in zip(rows, told, strict=True):
        if not isinstance(heard[0], Failure):
            assert content(WORLD, master, heard[0][0]) == (row.topic, row.payload)


def test_rows_of_a_topic_are_one_request_of_the_log() -> None:
    """Whatever number of callers; another topic, kind, client or user is another request."""
    master = WORLD.elect()
    core, due_ms = core_of(master), WORLD.now_ms + HOUR_MS
    send(WORLD, master, [Row("t", KIND_DUE, due_ms, b"x"), Row("u", KIND_DUE, due_ms, b"x")])
    publisher = core.parts.publisher
    same = Row("t", KIND_DUE, due_ms, b"x")
    told: list[Any] = []
    caller = RowCaller(lambda *placed: told.append(placed), told.append)
    for row, client, actor in (
        *[(same, "", "")] * 5,
        (Row("u", KIND_DUE, due_ms, b"x"), "", ""),
        (Row("t", KIND_DELAY, HOUR_MS, b"x"), "", ""),
        *[(same, "c", "")] * 2,
        (same, "c", "user"),
    ):
        publisher.schedule_row(row, client, actor, caller)
    assert publisher.waiting.requests == 10
    taken = publisher.take(1 << 20)
    assert taken is not None and publisher.waiting == Waiting()
    assert [request.count for request in taken[0].publish.requests] == [5, 1, 1, 2, 1]
    assert not told


def test_what_waits_together_is_bounded() -> None:
    """By rows and by bytes: so one refusal or answer never holds the loop."""
    master = WORLD.elect()
    publisher = core_of(master).parts.publisher
    due_ms = WORLD.now_ms + HOUR_MS
    send(WORLD, master, [Row("t", KIND_DUE, due_ms, b"x")])
    caller = RowCaller(lambda *placed: None, lambda failure: None)
    for _ in range(ROWS_JOINED_MAX + 1):
        publisher.schedule_row(Row("t", KIND_DUE, due_ms, b"x"), "", "", caller)
    taken = publisher.take(1 << 20)
    assert taken is not None
    assert [request.count for request in taken[0].publish.requests] == [ROWS_JOINED_MAX, 1]
    for size in (BYTES_JOINED_MAX // 2, BYTES_JOINED_MAX // 2, 1):
        publisher.schedule_row(Row("t", KIND_DUE, due_ms, bytes(size)), "", "", caller)
    taken = publisher.take(1 << 20)
    assert taken is not None and [request.count for request in taken[0].publish.requests] == [1, 2]


def test_rows_and_batches_of_a_topic_keep_their_order() -> None:
    """What comes later has a higher id at the same time, whether it came alone or in a batch."""
    master = WORLD.elect()
    core, due_ms = core_of(master), WORLD.now_ms + 5 * HOUR_MS
    order: dict[int, int] = {}
    """Id of each message, by its place in the order of arrival."""
    came = count()

    def batch(size: int, topic: str) -> IncomingBatch:
        columns = scheduler_pb2.ColumnBatch(
            topic=topic,
            due_ms=np.full(size, due_ms, "<i8").tobytes(),
            payload_sizes=np.ones(size, "<u4").tobytes(),
            payloads=b"y" * size,
        )
        return from_batch(scheduler_pb2.ScheduleBatch(columns=columns), LIMITS)

    def rows(size: int, kind: int = KIND_DUE, client: str = "") -> None:
        for place in islice(came, size):
            caller = RowCaller(lambda number, *_, place=place: order.update({place: number}), lambda failure: None)
            core.parts.publisher.schedule_row(Row("o", kind, due_ms, b"x"), client, "", caller)

    def many(size: int, topic: str = "o") -> None:
        places = list(islice(came, size)) if topic == "o" else []

        def done(outcome: Any) -> None:
            order.update(zip(places, outcome.ids.tolist(), strict=False))

        core.parts.publisher.schedule(batch(size, topic), Reply.either(done))

    rows(2)
    many(3)
    rows(2)
    rows(1, client="c")
    rows(1)
    many(1, topic="other")
    rows(2)
    many(2)
    rows(1)
    master.wake()
    WORLD.run_until(lambda: len(order) == 14)
    ids = [order[place] for place in sorted(order)]
    assert ids == sorted(ids)


@pytest.mark.parametrize("limit", ["client_quotas", "topic_quotas", "pending_max"])
def test_quotas_count_each_call(limit: str) -> None:
    """Rows that come together are admitted one by one: two of them where two have room."""
    world = World(71)
    master = world.elect()
    row = Row("q", KIND_DUE, world.now_ms + HOUR_MS, b"x")
    send(world, master, [row])
    values = {"client_quotas": "*=2", "topic_quotas": "q=2", "pending_max": core_of(master).wheel.pending + 2}
    change(master, **{limit: values[limit]})
    world.run(2_000)
    told = send(world, master, [row] * 5, client="c")
    assert [isinstance(answer, Failure) for answer in told] == [False, False, True, True, True]
    assert core_of(master).parts.flow.refused == {limit: 3}


@pytest.mark.parametrize("where", ["judged", "told"])
def test_a_mistake_over_one_row_fails_this_row_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is judged, and while its caller is told: its neighbours are placed."""
    world = World(72)
    master = world.elect()
    reported = contain(world)
    due_ms = world.now_ms + HOUR_MS
    rows = [Row("t", KIND_DUE, due_ms, payload) for payload in (b"good", b"bad", b"fine")]
    publisher = core_of(master).parts.publisher
    if where == "judged":
        find_due = publisher._find_due

        def stumbling(request: Any, now_ms: int) -> None:
            if b"bad" in request.batch.records:
                raise Mistake
            find_due(request, now_ms)

        monkeypatch.setattr(publisher, "_find_due", stumbling)
        told = begin(master, rows)
    else:
        told = [[], [], []]

        def stumble(*placed: int) -> None:
            raise Mistake

        for row, heard in zip(rows, told, strict=True):
            placed = stumble if row.payload == b"bad" else lambda *placed, heard=heard: heard.append(placed)
            core_of(master).parts.publisher.schedule_row(row, "", "", RowCaller(placed, heard.append))
        master.wake()
    world.run_until(lambda: all(told))
    world.run(50)
    good, bad, fine = told
    assert len(good) == len(fine) == 1 and not isinstance(good[0], Failure) and not isinstance(fine[0], Failure)
    assert len(bad) == 1 and isinstance(bad[0], Failure) and bad[0].reason == common_pb2.NODE_FAULT
    assert reported and core_of(master).wheel.pending == (2 if where == "judged" else 3)


def test_who_waits_when_mastership_ends_is_told() -> None:
    """None of it was proposed: each caller may send it to the next master."""
    world = World(73)
    master = world.elect()
    publisher = core_of(master).parts.publisher
    told = begin(master, [Row("t", KIND_DUE, world.now_ms + HOUR_MS, b"x")] * 3)
    core_of(master).parts.mastership.step_down()
    assert all(len(heard) == 1 and isinstance(heard[0], Failure) for heard in told)
    assert publisher.waiting == Waiting()


def test_rows_of_a_topic_that_must_not_be_are_refused() -> None:
    """All that wait for it, and nobody else."""
    world = World(74)
    master = world.elect()
    change(master, topics_max=1)
    due_ms = world.now_ms + HOUR_MS
    assert not isinstance(send(world, master, [Row("t", KIND_DUE, due_ms, b"x")])[0], Failure)
    rows = [Row(topic, KIND_DUE, due_ms, b"x") for topic in ("t", "new", "t", "new")]
    refused = [isinstance(told, Failure) for told in send(world, master, rows)]
    assert refused == [False, True, False, True]


MESSAGES = st.builds(
    common_pb2.Message,
    topic=st.sampled_from(["t", "", "no good"]),
    payload=st.sampled_from([b"", b"x", bytes(20)]),
    due_ms=st.none() | st.sampled_from([-(1 << 51), -1, 0, 5, 1 << 51]),
    jitter_ms=st.sampled_from([0, 0, 0, 5, 1 << 30]),
    meta=st.none() | st.builds(common_pb2.MessageMeta, key=st.sampled_from(["", "k"])),
)
TEXTS = st.sampled_from(["", "", "a", "a" * 128])


@given(MESSAGES, TEXTS, TEXTS, TEXTS, st.booleans())
def test_a_row_is_what_the_whole_intake_takes(
    message: common_pb2.Message, producer: str, client: str, owner: str, unary: bool
) -> None:
    """`row_of` accepts nothing that the whole intake refuses, and reads the same."""
    fields: dict[str, Any] = {"producer_id": producer, "client_name": client, "producer_owner": owner}
    if unary:
        request: Any = scheduler_pb2.ScheduleRequest(message=message, **fields)
    else:
        request = scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=[message]), **fields)
    row = row_of(request, LIMITS)
    try:
        batch = from_message(request, LIMITS) if unary else from_batch(request, LIMITS)
    except RequestError:
        assert row is None
        return
    if row is not None:
        assert not producer and (batch.topics, batch.kinds) == ([row.topic], row.kind)
        assert (batch.when.tolist(), batch.records) == ([row.when], row.payload)
        assert batch.metas is None and not batch.jitter_ms


def test_a_single_row_on_a_stream_is_a_row() -> None:
    """Of a batch without a producer id; two rows, columns and a producer's row are batches."""
    message = common_pb2.Message(topic="t", payload=b"x", due_ms=5)

    def rows(count: int, **fields: Any) -> scheduler_pb2.ScheduleBatch:
        return scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=[message] * count), **fields)

    assert row_of(rows(1), LIMITS) == Row("t", KIND_DUE, 5, b"x")
    for other in (rows(0), rows(2), rows(1, producer_id="p", sequence=1), scheduler_pb2.ScheduleBatch()):
        assert row_of(other, LIMITS) is None


def test_refusals_do_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """One good row among 256 too far ahead made one step of the master refuse all that waited: 50,000 took 8 s."""
    node = WORLD.elect()
    publisher = core_of(node).parts.publisher
    good = Row("a", KIND_DUE, WORLD.now_ms + HOUR_MS, b"x")
    far = Row("a", KIND_DUE, 1 << 49, b"x")
    assert not isinstance(send(WORLD, node, [good])[0], Failure)
    take, steps = publisher.take, []

    def counted(bytes_max: int) -> Any:
        before = publisher.waiting.requests
        taken = take(bytes_max)
        steps.append(before - publisher.waiting.requests)
        return taken

    monkeypatch.setattr(publisher, "take", counted)
    told = send(WORLD, node, [good if number % 256 == 0 else far for number in range(2_048)])
    assert sum(not isinstance(answer, Failure) for answer in told) == 8
    assert max(steps) <= ROWS_JOINED_MAX + REFUSALS_MAX


def test_a_mistake_in_one_request_leaves_the_others_of_its_entry_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of an entry are made of all its requests; those that can be made without the one go into the log."""
    world = World(71)
    master = world.elect()
    due_ms = world.now_ms + HOUR_MS
    topics = ["t", "u", "broken", "v", "w"]
    rows = [Row(topic, KIND_DUE, due_ms, b"x") for topic in topics]
    send(world, master, rows)  # creates the topics
    reported = contain(world)
    publisher = core_of(master).parts.publisher
    publish_of, tries = publisher.publish_of, list[int]()

    def stumbling(batches: list[IncomingBatch], dues: Any) -> Any:
        tries.append(len(batches))
        if any("broken" in one.topics for one in batches):
            raise Mistake
        return publish_of(batches, dues)

    monkeypatch.setattr(publisher, "publish_of", stumbling)
    told = send(world, master, rows)
    assert len(topics) in tries, "they did not wait for one entry together"
    failed = [topic for topic, answer in zip(topics, told, strict=True) if isinstance(answer, Failure)]
    assert failed == ["broken"] and told[2].reason == common_pb2.NODE_FAULT  # type: ignore[union-attr]
    assert all(isinstance(error, Mistake) for error in reported.values())
    monkeypatch.undo()
    assert not any(isinstance(answer, Failure) for answer in send(world, master, rows))
