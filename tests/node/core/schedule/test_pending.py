"""What is pending, asked of a node: exact by text where hashes collide, bounded, and refused in words."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from google.protobuf.internal.encoder import _VarintBytes as varint  # type: ignore[attr-defined]  # the wire, by hand

from tests.node.core.trio import World
from tickwheel.node.core import work as work_module
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.metas import meta_of
from tickwheel.node.core.promise import Promise, answer_of
from tickwheel.node.core.schedule import intake, pending
from tickwheel.node.failure import Failure
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.common_pb2 import MessageMeta
from tickwheel.storage.tags import key_hash
from tickwheel.wheel import queries
from tickwheel.wheel.units import CursorKey, ids_of

HOUR_MS = 3_600_000


def ask(world: World, work: Coroutine[Promise[Any], None, Any]) -> Any:
    """One call at the master, to its answer."""
    answers: list[Any] = []
    core_of(world).serving.start(work, answers.append)
    master = world.master()
    assert master is not None
    master.wake()
    world.run_until(lambda: bool(answers))
    return answers[0]


def core_of(world: World) -> NodeCore:
    """The master's core."""
    master = world.master()
    assert master is not None and master.host is not None
    return master.host.core


def schedule(world: World, messages: Sequence[tuple[str, int, str, Sequence[str]]]) -> list[int]:
    """Topic, delay, key and tags of each; their ids."""
    rows = [
        common_pb2.Message(
            topic=topic,
            payload=b"x" * 40,
            due_ms=world.now_ms + delay_ms,
            meta=common_pb2.MessageMeta(key=key, tags=tags),
        )
        for topic, delay_ms, key, tags in messages
    ]
    request = scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=rows))
    batch = intake.from_batch(request, core_of(world).state.settings)
    outcome = ask(world, answer_of(partial(core_of(world).parts.publisher.schedule, batch)))
    return [int(number) for number in outcome.ids]


def listed(world: World, **fields: Any) -> list[int]:
    """Ids of all pages."""
    found: list[int] = []
    request = scheduler_pb2.ListPendingRequest(**fields)
    while True:
        page = ask(world, core_of(world).parts.pending.page(request))
        assert isinstance(page, scheduler_pb2.ListPendingResponse), page
        found += [message.id.hour << 32 | message.id.index for message in page.messages]
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


def pages_of(world: World, **fields: Any) -> list[int]:
    """How many messages each page has."""
    sizes: list[int] = []
    request = scheduler_pb2.ListPendingRequest(**fields)
    while True:
        page = ask(world, core_of(world).parts.pending.page(request))
        assert isinstance(page, scheduler_pb2.ListPendingResponse), page
        sizes.append(len(page.messages))
        if not page.next_page_token:
            return sizes
        request.page_token = page.next_page_token


def counted(world: World, **fields: Any) -> int:
    """The total of all parts."""
    return sum(parts_of(world, **fields))


def parts_of(world: World, **fields: Any) -> list[int]:
    """The total of each part."""
    totals: list[int] = []
    request = scheduler_pb2.CountPendingRequest(**fields)
    while True:
        part = ask(world, core_of(world).parts.pending.count(request))
        assert isinstance(part, scheduler_pb2.CountPendingResponse), part
        assert part.total == sum(bucket.count for bucket in part.buckets)
        totals.append(part.total)
        if not part.next_page_token:
            return totals
        request.page_token = part.next_page_token


def test_an_hour_that_goes_takes_no_other_with_it() -> None:
    """While a step reads what it found, the first hour of it is dispatched, settled and removed: what lies in later
    hours is found all the same. A sweep would have passed it over and said that it had finished."""
    trio = World()
    trio.elect()
    trio.run(2_000)
    ids = schedule(trio, [("t", 5_000, "k", []), ("t", 5 * HOUR_MS, "k", []), ("t", 6 * HOUR_MS, "other", [])])
    master = trio.master()
    assert master is not None and master.host is not None
    core = master.host.core
    query = pending.make_query(core, scheduler_pb2.Selection(key="k"))
    answers: list[pending.Found | Failure] = []
    core.serving.start(pending.Finder(core).step(query, None, 100), answers.append)
    hour = (ids[0] >> 32) + 3
    core.wheel.dispatch(CursorKey(hour * HOUR_MS, 0))
    core.wheel.remove_hours(hour)
    trio.run_until(lambda: bool(answers))
    found = answers[0]
    assert isinstance(found, pending.Found)
    assert ids_of(found.units).tolist() == [ids[1]]
    assert found.next_key is None


def test_a_page_keeps_what_did_not_go() -> None:
    """While the metas of a page are read, the first hour of it is dispatched, settled and removed: the other messages
    are shown, with their metas. The page was empty, and whoever went on from its token never saw them."""
    trio = World()
    trio.elect()
    trio.run(2_000)
    ids = schedule(trio, [("t", 5_000, "gone", []), ("t", 5 * HOUR_MS, "k", []), ("t", 6 * HOUR_MS, "l", [])])
    master = trio.master()
    assert master is not None and master.host is not None
    core = master.host.core
    units = core.wheel.reads.lookup(np.array(ids, np.uint64))
    units.run()
    answers: list[Any] = []
    hour = (ids[0] >> 32) + 3
    core.wheel.dispatch(CursorKey(hour * HOUR_MS, 0))
    core.wheel.remove_hours(hour)
    for content in (False, True):
        core.serving.start(core.parts.pending.describe(units.units, content, True), answers.append)
        trio.run_until(lambda: len(answers) == 1)
        messages = answers.pop().messages
        assert [(message.id.hour << 32 | message.id.index, message.meta.key) for message in messages] == [
            (ids[1], "k"),
            (ids[2], "l"),
        ]
        assert [len(message.payload) for message in messages] == [40 * content] * 2


@pytest.fixture(scope="module")
def world() -> tuple[World, list[int], list[tuple[str, int, str, list[str]]]]:
    """Three nodes and some messages, scheduled while the hashes of all keys and the masks of all tags are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intake, "hashes_of", lambda texts: np.full(len(texts), 7, np.uint64))
        patch.setattr(intake, "tag_masks", lambda hashes, counts: np.full(len(counts), (1 << 64) - 1, np.uint64))
        trio = World()
        trio.elect()
        trio.run(2_000)
        messages = [
            (f"t{n % 2}", 60_000 + n * 90_000, f"order-{n % 5}" if n % 7 else "", [f"tag{n % 3}", "all"])
            for n in range(60)
        ]
        ids = schedule(trio, messages)
    return trio, ids, messages


@pytest.fixture
def collisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks hashes as badly."""
    monkeypatch.setattr(pending, "key_hash", lambda key: 7)
    monkeypatch.setattr(pending, "tag_mask", lambda tags: 0b111)


@pytest.mark.usefixtures("collisions")
@pytest.mark.parametrize("narrow", [False, True])
def test_text_decides_where_hashes_collide(world: Any, narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tag, key, prefix and topic together: exactly those, though every hash is the same; also in tiny steps."""
    if narrow:
        monkeypatch.setattr(queries, "EXAMINED_MAX", 5)
        monkeypatch.setattr(queries, "WINDOW_UNITS_FIRST", 2)
        monkeypatch.setattr(pending, "MATCHES_MAX", 3)
        monkeypatch.setattr(pending, "STEPS_MAX", 2)
    trio, ids, messages = world
    cases: list[tuple[dict[str, str], Callable[[str, str, list[str]], bool]]] = [
        ({}, lambda topic, key, tags: True),
        ({"tag": "tag1"}, lambda topic, key, tags: "tag1" in tags),
        ({"tag": "none"}, lambda topic, key, tags: False),
        ({"key": "order-3"}, lambda topic, key, tags: key == "order-3"),
        ({"key": "order"}, lambda topic, key, tags: False),
        ({"key_prefix": "order-"}, lambda topic, key, tags: key.startswith("order-")),
        (
            {"topic": "t1", "tag": "tag2", "key_prefix": "order-4"},
            lambda topic, key, tags: topic == "t1" and "tag2" in tags and key == "order-4",
        ),
    ]
    for fields, holds in cases:
        expected = [
            number for number, (topic, _, key, tags) in zip(ids, messages, strict=True) if holds(topic, key, tags)
        ]
        assert listed(trio, page_size=4, **fields) == expected, fields
        for bucket_ms in (1_000, HOUR_MS):
            assert counted(trio, partial=True, bucket_ms=bucket_ms, **fields) == len(expected), fields
        assert counted(trio, **fields) == len(expected), fields


def test_metas_without_payloads(world: Any) -> None:
    """`meta` brings key and tags and no payload; `content` both."""
    trio, _, messages = world
    for content in (False, True):
        request = scheduler_pb2.ListPendingRequest(page_size=3, meta=True, content=content)
        page = ask(trio, core_of(trio).parts.pending.page(request))
        assert [message.meta.key for message in page.messages] == [key for _, _, key, _ in messages[:3]]
        assert [message.payload for message in page.messages] == [b"x" * 40 if content else b""] * 3


def test_a_page_with_contents_has_a_bound_in_bytes(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand payloads of megabytes do not make one answer; nothing is left out for that."""
    trio, ids, _ = world
    monkeypatch.setattr(pending, "ANSWER_BYTES_MAX", 60)
    asks: tuple[dict[str, Any], ...] = ({"content": True}, {"meta": True})
    for asked in asks:
        request = scheduler_pb2.ListPendingRequest(**asked)
        page = ask(trio, core_of(trio).parts.pending.page(request))
        assert 1 <= len(page.messages) < 10
        assert listed(trio, **asked) == ids


def test_workers_decode_the_metas(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are compared and those that are shown: a thousand with thousands of headers held up the core's thread
    for more than half a second."""
    trio, ids, messages = world
    master = trio.master()
    assert master is not None
    working: list[bool] = []
    decoded: list[bool] = []
    submit = master.submit

    def submitted(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        def run() -> Any:
            working.append(True)
            try:
                return work()
            finally:
                working.pop()

        submit(run, done)

    def noted(data: bytes) -> MessageMeta:
        decoded.append(bool(working))
        return meta_of(data)

    monkeypatch.setattr(work_module, "MADE_AT_ONCE_BYTES", 0)  # all of them are small
    monkeypatch.setattr(master, "submit", submitted)
    monkeypatch.setattr(pending, "meta_of", noted)
    expected = [number for number, (_, _, key, _) in zip(ids, messages, strict=True) if key]
    assert listed(trio, key_prefix="order-", meta=True) == expected
    assert counted(trio, key_prefix="order-") == len(expected)
    shown = ask(trio, core_of(trio).parts.requests.get(expected[0], True))
    assert shown.message.meta.key.startswith("order-")
    assert all(decoded) and len(decoded) >= 3 * len(expected) + 1


def test_metas_that_nobody_can_decode_end_no_listing() -> None:
    """They came with bundles, or by an earlier version: the message is there, without a meta or what is not known."""
    trio = World()
    trio.elect()
    groups = varint(900 << 3 | 3) * 99 + varint(900 << 3 | 4) * 99
    meta = b"\x0a\x01k" + groups
    assert MessageMeta.FromString(meta).key == "k"
    for record, key in ((b"\xff" * len(meta), ""), (meta, "k")):
        columns = intake.MetaColumns.none(1)
        columns.sizes[0], columns.key_hashes[0] = len(record), key_hash("k")
        batch = intake.IncomingBatch(
            producer_id="",
            sequence=0,
            count=1,
            topics=["deep"],
            topic_of=None,
            when=np.array([trio.now_ms + 60_000], np.int64),
            kinds=intake.KIND_DUE,
            sizes=np.array([len(record) + 1], np.uint32),
            records=record + b"x",
            metas=columns,
        )
        outcome = ask(trio, answer_of(partial(core_of(trio).parts.publisher.schedule, batch)))
        asks: tuple[dict[str, Any], ...] = ({"content": True}, {"meta": True}, {"key": "k"}, {"key_prefix": "k"})
        for asked in asks:
            request = scheduler_pb2.ListPendingRequest(topic="deep", **asked)
            answer = ask(trio, core_of(trio).parts.pending.page(request))
            read = scheduler_pb2.ListPendingResponse.FromString(answer.SerializeToString())
            assert all(m.meta.SerializeToString() in (b"", b"\x0a\x01k") for m in read.messages)
            assert key == "k" or "content" not in asked or read.messages[-1].meta == MessageMeta()
        assert ask(trio, core_of(trio).parts.requests.get(int(outcome.ids[0]), True)).message.payload == b"x"


def test_the_longest_key_selects_its_message() -> None:
    """Whatever can be scheduled can be listed and swept by; keys above 1,024 bytes were refused there."""
    trio = World()
    trio.elect()
    trio.run(2_000)
    key = "\U0001d11e" * intake.KEY_LENGTH_MAX
    made = schedule(trio, [("long", HOUR_MS, key, []), ("long", HOUR_MS, key[:-1], [])])
    assert listed(trio, key=key) == made[:1]
    assert listed(trio, key_prefix=key[:-1]) == made
    request = scheduler_pb2.BeginSweepRequest(job_id="long", cancel=True, selection=scheduler_pb2.Selection(key=key))
    ask(trio, core_of(trio).parts.sweeper.begin_sweep(request))
    trio.run_until(lambda: len(listed(trio, key=key)) == 0)
    assert listed(trio, key_prefix=key[:-1]) == made[1:]


def test_bad_questions_are_told_what_is_wrong(world: Any) -> None:
    """Each names its field, and no step is taken."""
    trio, _, _ = world
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("topic", {"topic": "unknown"}),
        ("page_token", {"page_token": "99999999999999999.0"}),
        ("page_token", {"page_token": "0.9999999999"}),
        ("tag", {"tag": "x" * 4_097}),
        ("key", {"key": "ä" * 4_097}),
        ("key_prefix", {"key_prefix": "x" * 4_097}),
        ("due_ms_min", {"due_ms_min": -1}),
        ("due_ms_max", {"due_ms_max": 1 << 62}),
        ("page_token", {"page_token": "x"}),
        ("page_token", {"page_token": "1.99999999999"}),
        ("page_size", {"page_size": 1_001}),
    ]
    for field, fields in wrong:
        request = scheduler_pb2.ListPendingRequest(**fields)
        answer = ask(trio, core_of(trio).parts.pending.page(request))
        assert isinstance(answer, Failure) and answer.metadata["field"] == field, answer
    odd = scheduler_pb2.CountPendingRequest(bucket_ms=7)
    answer = ask(trio, core_of(trio).parts.pending.count(odd))
    assert isinstance(answer, Failure) and answer.metadata["field"] == "bucket_ms"


def test_calls_under_way_are_bounded(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is told to come later; when the others are answered there is room again."""
    trio, ids, _ = world
    monkeypatch.setattr(pending, "CALLS_MAX", 2)
    answers: list[Any] = []
    for _ in range(3):
        core_of(trio).serving.start(
            core_of(trio).parts.pending.count(scheduler_pb2.CountPendingRequest()), answers.append
        )
    assert isinstance(answers[0], Failure) and answers[0].reason == common_pb2.LIMIT_REACHED
    trio.run_until(lambda: len(answers) == 3)
    assert counted(trio) == len(ids)


def test_too_many_buckets_only_in_parts(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer has a bound; who takes parts gets them all."""
    trio, ids, _ = world
    monkeypatch.setattr(pending, "BUCKETS_MAX", 7)
    request = scheduler_pb2.CountPendingRequest(bucket_ms=1_000)
    answer = ask(trio, core_of(trio).parts.pending.count(request))
    assert isinstance(answer, Failure) and answer.metadata["field"] == "bucket_ms"
    assert counted(trio, bucket_ms=1_000, partial=True) == len(ids)


@pytest.mark.parametrize("fields", [{"topic": "t1"}, {"tag": "tag1"}])
def test_a_partial_count_ends_with_its_time(
    world: Any, fields: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever watches a count sees it grow: an answer has one step, if that took its time, and the next goes on behind
    it. Who wants the whole count still gets it with one answer."""
    monkeypatch.setattr(queries, "EXAMINED_MAX", 5)
    monkeypatch.setattr(queries, "WINDOW_UNITS_FIRST", 2)
    monkeypatch.setattr(pending, "MATCHES_MAX", 3)
    trio = world[0]
    whole = counted(trio, **fields)
    parts = parts_of(trio, partial=True, bucket_ms=1_000, **fields)
    monkeypatch.setattr(pending, "CALL_MS", 0)
    more = parts_of(trio, partial=True, bucket_ms=1_000, **fields)
    assert sum(more) == sum(parts) == whole and len(more) > len(parts)
    assert len(parts_of(trio, **fields)) == 1 and counted(trio, **fields) == whole


@pytest.mark.parametrize("fields", [{"topic": "t1"}, {"tag": "none"}, {"key_prefix": "nobody"}])
def test_a_page_ends_with_its_time(world: Any, fields: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for something rare or absent is answered after one step if that took its time, and the next call goes on
    from there: no call examines all that is pending."""
    monkeypatch.setattr(queries, "EXAMINED_MAX", 5)
    monkeypatch.setattr(queries, "WINDOW_UNITS_FIRST", 2)
    monkeypatch.setattr(pending, "MATCHES_MAX", 3)
    trio = world[0]
    whole = pages_of(trio, page_size=1_000, **fields)
    monkeypatch.setattr(pending, "CALL_MS", 0)
    more = pages_of(trio, page_size=1_000, **fields)
    assert sum(more) == sum(whole) and len(more) > len(whole)
