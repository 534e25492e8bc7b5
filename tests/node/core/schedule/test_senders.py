"""Producer ids and sequences: whose they are, what a repeat is, and what a refusal says of them; on three nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.node.core.test_membership import add
from tests.node.core.test_when import change, schedule
from tests.node.core.trio import Node, World, digests
from tickwheel.node.core.delivery.sync import SyncState
from tickwheel.node.core.founding import ClusterFounding
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule.intake import IncomingBatch, from_batch, from_message
from tickwheel.node.core.schedule.publisher import BatchOutcome
from tickwheel.node.failure import Failure
from tickwheel.node.server import handlers
from tickwheel.node.server.callers import EVERYBODY
from tickwheel.node.state.producers import Sender
from tickwheel.node.state.results import AdminResult
from tickwheel.node.state.schema import PRODUCER_SHARES_LEVEL
from tickwheel.node.state.settings import Settings
from tickwheel.proto import common_pb2, scheduler_pb2
from tickwheel.proto.admin_pb2 import DeleteTopicRequest
from tickwheel.proto.common_pb2 import Message, MessageMeta
from tickwheel.proto.log_pb2 import AdminCommand

HOUR_MS = 3_600_000


def call(payload: bytes, sequence: int, topic: str = "t", **fields: Any) -> scheduler_pb2.ScheduleRequest:
    """One message of the producer `p`, in an hour."""
    message = Message(topic=topic, payload=payload, **(fields or {"delay_ms": HOUR_MS}))
    return scheduler_pb2.ScheduleRequest(message=message, producer_id="p", sequence=sequence)


def send(node: Node, batch: IncomingBatch) -> BatchOutcome | Failure:
    """Give a batch to a node and wait for its answer."""
    assert node.host is not None
    answers: list[BatchOutcome | Failure] = []
    node.host.core.parts.publisher.schedule(batch, Reply.either(answers.append))
    node.wake()
    node.world.run_until(lambda: bool(answers))
    return answers[0]


def owned(request: scheduler_pb2.ScheduleRequest, owner: str) -> IncomingBatch:
    """As the service makes it of a caller's request."""
    return replace(from_message(request, Settings()), owner=owner)


def elected(world: World) -> Node:
    """The first master, once it has heard of the others what they understand."""
    world.elect()
    world.run(200)
    return world.elect()


def taken(answer: BatchOutcome | Failure, field: str) -> None:
    """It was refused since id or sequence are another's."""
    assert isinstance(answer, Failure) and answer.reason == common_pb2.SEQUENCE_TAKEN, answer
    assert answer.metadata["field"] == field


def fail_over(world: World) -> Node:
    """Kill the master; the next one."""
    before = world.elect()
    before.kill()
    world.run_until(lambda: world.master() is not None)
    after = world.elect()
    before.start()
    return after


def test_a_repeat_with_other_content_is_refused_and_not_mixed_up() -> None:
    """P1: whoever used the sequence before, nobody's message is acknowledged with another's id; also after a failover,
    and after that of one that started anew from its checkpoint."""
    world = World(31)
    master = elected(world)
    first = schedule(master, call(b"attack", 1, "evil"))
    assert isinstance(first, BatchOutcome)
    taken(schedule(master, call(b"the victim's", 1)), "sequence")
    master = fail_over(world)
    taken(schedule(master, call(b"the victim's", 1)), "sequence")
    again = schedule(master, call(b"attack", 1, "evil"))
    assert isinstance(again, BatchOutcome) and again.repeated and again.ids.tolist() == first.ids.tolist()
    world.run(2_000)
    assert len(digests(world)) == 1


def test_checksums_do_not_wait_for_a_founder_that_is_away() -> None:
    """P1: one that died right after the founding may stay away for days. No message is taken for another meanwhile."""
    world = World(34)
    world.run_until(lambda: all(n.host and n.host.core.parts.founding.may_vote for n in world.nodes.values()), 50)
    world.nodes["c"].kill()
    master = elected(world)
    assert isinstance(schedule(master, call(b"attack", 1, "evil")), BatchOutcome)
    taken(schedule(master, call(b"the victim's", 1)), "sequence")


def test_two_of_one_sequence_in_one_entry_are_told_apart() -> None:
    """Nothing is remembered yet when both are proposed: apply compares them."""
    world = World(32)
    master = elected(world)
    schedule(master, call(b"0", 1))
    assert master.host is not None
    answers: list[BatchOutcome | Failure] = []
    for payload in (b"one", b"two", b"one"):
        master.host.core.parts.publisher.schedule(
            from_message(call(payload, 2), Settings()), Reply.either(answers.append)
        )
    master.wake()
    world.run_until(lambda: len(answers) == 3)
    assert isinstance(answers[0], BatchOutcome) and not answers[0].repeated
    taken(answers[1], "sequence")
    assert isinstance(answers[2], BatchOutcome) and answers[2].repeated


def test_an_id_belongs_to_who_used_it_first() -> None:
    """Another caller, also one who gives no name, is refused whatever the sequence, at any master. The owner goes on
    undisturbed."""
    world = World(33)
    master = elected(world)
    assert isinstance(send(master, owned(call(b"1", 1), "cn/victim")), BatchOutcome)
    taken(send(master, owned(call(b"x", 2), "cn/attacker")), "producer_id")
    taken(send(master, owned(call(b"1", 1), "cn/attacker")), "producer_id")
    taken(send(master, owned(call(b"x", 2), "")), "producer_id")
    taken(send(master, owned(call(b"1", 1), "")), "producer_id")
    master = fail_over(world)
    taken(send(master, owned(call(b"x", 2), "")), "producer_id")
    taken(send(master, owned(call(b"x", 2), "cn/attacker")), "producer_id")
    assert isinstance(send(master, owned(call(b"2", 2), "cn/victim")), BatchOutcome)
    world.run(2_000)
    assert len(digests(world)) == 1


def test_owners_of_one_entry_are_told_apart() -> None:
    """The first use of an id by two callers at once: one of them has it."""
    world = World(34)
    master = elected(world)
    schedule(master, call(b"0", 1))
    assert master.host is not None
    answers: list[BatchOutcome | Failure] = []
    for sequence, owner in ((1, "cn/a"), (2, "cn/b"), (2, "cn/a")):
        request = call(b"%d" % sequence, sequence)
        request.producer_id = "new"
        master.host.core.parts.publisher.schedule(owned(request, owner), Reply.either(answers.append))
    master.wake()
    world.run_until(lambda: len(answers) == 3)
    assert isinstance(answers[0], BatchOutcome) and isinstance(answers[2], BatchOutcome)
    taken(answers[1], "producer_id")


def test_a_delay_is_the_same_content_at_each_try() -> None:
    """It is resolved by another time at a repeat; the first time holds."""
    world = World(35)
    master = elected(world)
    first = schedule(master, call(b"x", 1, delay_ms=5_000))
    world.run(700)
    again = schedule(fail_over(world), call(b"x", 1, delay_ms=5_000))
    assert isinstance(first, BatchOutcome) and isinstance(again, BatchOutcome)
    assert again.repeated and again.due_ms.tolist() == first.due_ms.tolist()
    taken(schedule(world.elect(), call(b"x", 1, delay_ms=5_001)), "sequence")


def test_what_was_accepted_is_answered_whatever_has_become_of_its_topic() -> None:
    """A lost answer, then the topic is deleted: the repeat is told the truth, and is not refused."""
    world = World(36)
    master = elected(world)
    first = schedule(master, call(b"x", 1, "gone"))
    assert isinstance(first, BatchOutcome)
    change(master, topics_auto_create=False)
    done: list[AdminResult | Failure] = []
    assert master.host is not None
    master.host.core.serving.start(
        master.host.core.parts.requests.admin(AdminCommand(delete_topic=DeleteTopicRequest(name="gone"))), done.append
    )
    master.wake()
    world.run_until(lambda: bool(done))
    again = schedule(master, call(b"x", 1, "gone"))
    assert isinstance(again, BatchOutcome) and again.repeated and again.ids.tolist() == first.ids.tolist()
    refused = schedule(master, call(b"y", 2, "gone"))
    assert isinstance(refused, Failure) and refused.reason == common_pb2.UNKNOWN_NAME
    assert refused.metadata["accepted_sequence"] == "1", "sequence 2 surely was not accepted"


def test_a_refusal_says_nothing_while_that_could_become_untrue() -> None:
    """Another request of the producer is under way, or this node does not surely lead: no word of its sequences."""
    world = World(37)
    master = elected(world)
    schedule(master, call(b"0", 1))
    change(master, topics_auto_create=False)
    assert master.host is not None
    core = master.host.core
    failure = Failure(common_pb2.INVALID_FIELD, "x")
    assert core.parts.senders.told(Sender("p", 2), failure).metadata["accepted_sequence"] == "1"
    answers: list[BatchOutcome | Failure] = []
    core.parts.publisher.schedule(from_message(call(b"1", 2), Settings()), Reply.either(answers.append))
    assert "accepted_sequence" not in core.parts.senders.told(Sender("p", 2), failure).metadata
    master.wake()
    world.run_until(lambda: bool(answers))
    assert core.parts.senders.told(Sender("p", 3), failure).metadata["accepted_sequence"] == "2"
    slave = next(node for node in world.nodes.values() if node is not master)
    assert slave.host is not None
    assert "accepted_sequence" not in slave.host.core.parts.senders.told(Sender("p", 3), failure).metadata
    world.cut_off(master.name)
    world.run(2_000)
    assert "accepted_sequence" not in core.parts.senders.told(Sender("p", 3), failure).metadata


def move(
    node: Node, id64: int, sequence: int, delay_ms: int, producer_id: str = "p"
) -> scheduler_pb2.RescheduleResponse | Failure:
    """Reschedule as a producer without an owner."""
    assert node.host is not None
    request = scheduler_pb2.RescheduleRequest(
        id=common_pb2.MessageId(hour=id64 >> 32, index=id64 & 0xFFFF_FFFF), delay_ms=delay_ms,
        producer_id=producer_id, sequence=sequence,
    )  # fmt: skip
    answers: list[scheduler_pb2.RescheduleResponse | Failure] = []
    node.host.core.serving.start(handlers.reschedule(node.host.core, request, EVERYBODY), answers.append)
    node.wake()
    node.world.run_until(lambda: bool(answers))
    return answers[0]


def test_a_repeated_reschedule_is_told_its_own_success() -> None:
    """Not ALREADY_DISPATCHED when the message was delivered meanwhile, and not another delay; at any master."""
    world = World(38)
    master = elected(world)
    outcome = schedule(master, call(b"x", 1))
    assert isinstance(outcome, BatchOutcome)
    id64 = int(outcome.ids[0])
    first = move(master, id64, 2, 300)
    assert isinstance(first, scheduler_pb2.RescheduleResponse)
    assert (first.outcome, first.remembered) == (scheduler_pb2.RESCHEDULED, True)
    world.run(2_000)
    later = move(master, id64, 3, 500)
    assert isinstance(later, scheduler_pb2.RescheduleResponse)
    assert (later.outcome, later.remembered) == (scheduler_pb2.RESCHEDULE_ALREADY_DISPATCHED, False)
    assert move(master, id64, 2, 300) == first
    assert move(fail_over(world), id64, 2, 300) == first
    differs = move(world.elect(), id64, 2, 301)
    assert isinstance(differs, Failure) and differs.reason == common_pb2.SEQUENCE_TAKEN
    schedule(world.elect(), call(b"y", 3))
    world.run(2_000)
    assert len(digests(world)) == 1


def test_two_reschedules_of_one_sequence_under_way_are_one() -> None:
    """The log decides when the second comes before the first is applied."""
    world = World(39)
    master = elected(world)
    outcome = schedule(master, call(b"x", 1))
    assert isinstance(outcome, BatchOutcome) and master.host is not None
    id64 = int(outcome.ids[0])
    request = scheduler_pb2.RescheduleRequest(
        id=common_pb2.MessageId(hour=id64 >> 32, index=id64 & 0xFFFF_FFFF), delay_ms=9_000,
        producer_id="p", sequence=2,
    )  # fmt: skip
    answers: list[scheduler_pb2.RescheduleResponse | Failure] = []
    for _ in range(2):
        master.host.core.serving.start(handlers.reschedule(master.host.core, request, EVERYBODY), answers.append)
    master.wake()
    world.run_until(lambda: len(answers) == 2)
    assert answers[0] == answers[1] and master.host.core.wheel.pending == 1


def test_many_in_one_call_are_one_entry_and_answered_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them is refused for is its own; the commands of all others share an entry. A repeat of the whole call
    moves nothing again."""
    world = World(40)
    master = elected(world)
    assert master.host is not None
    core = master.host.core
    outcome = send(master, from_batch(columns_of([HOUR_MS + n for n in range(6)]), Settings()))
    assert isinstance(outcome, BatchOutcome)
    ids = [common_pb2.MessageId(hour=number >> 32, index=number & 0xFFFF_FFFF) for number in outcome.ids.tolist()]
    entries: list[list[str]] = []
    sound = core.proposer._sound_entry

    def noted(commands: Any, now_ms: int) -> bytes | None:
        entries.append([command.WhichOneof("body") for command in commands])
        return sound(commands, now_ms)

    monkeypatch.setattr(core.proposer, "_sound_entry", noted)

    def ask(coroutine: Any) -> Any:
        answers: list[Any] = []
        core.serving.start(coroutine, answers.append)
        master.wake()
        world.run_until(lambda: bool(answers))
        return answers[0]

    cancels = scheduler_pb2.CancelManyRequest(ids=[*ids[:3], common_pb2.MessageId(hour=5, index=5)])
    cancelled = ask(handlers.cancel_many(core, cancels, EVERYBODY))
    done, none = scheduler_pb2.CANCELLED, scheduler_pb2.NOT_FOUND
    assert [result.outcome for result in cancelled.results] == [done, done, done, none]
    moves = scheduler_pb2.RescheduleManyRequest()
    for number, message_id in enumerate([*ids[3:], ids[0]]):
        moves.requests.add(id=message_id, delay_ms=HOUR_MS, producer_id=f"p{number}", sequence=1)
    moves.requests[1].delay_ms = -1
    moved = ask(handlers.reschedule_many(core, moves, EVERYBODY))
    assert [result.response.outcome for result in moved.results] == [
        scheduler_pb2.RESCHEDULED, 0, scheduler_pb2.RESCHEDULED, scheduler_pb2.RESCHEDULE_CANCELLED,
    ]  # fmt: skip
    assert [bool(result.error) for result in moved.results] == [False, True, False, False]
    assert [entry for entry in entries if "cancel" in entry] == [["cancel"] * 3]
    assert [entry for entry in entries if "reschedule" in entry] == [["reschedule"] * 3]
    del moves.requests[3]
    again = ask(handlers.reschedule_many(core, moves, EVERYBODY))
    assert list(again.results) == list(moved.results)[:3]
    too_many = ask(handlers.cancel_many(core, scheduler_pb2.CancelManyRequest(), EVERYBODY))
    assert isinstance(too_many, Failure) and too_many.metadata["field"] == "ids"


def columns_of(delays_ms: list[int]) -> scheduler_pb2.ScheduleBatch:
    """Messages of one byte, of no producer."""
    count = len(delays_ms)
    columns = scheduler_pb2.ColumnBatch(
        topic="t",
        delay_ms=np.array(delays_ms, "<i8").tobytes(),
        payload_sizes=np.ones(count, "<u4").tobytes(),
        payloads=b"x" * count,
    )
    return scheduler_pb2.ScheduleBatch(columns=columns)


def test_checksums_wait_until_all_members_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a rolling upgrade nothing stands in the log that an older member cannot read; then it begins by itself."""
    answer = SyncState.incoming

    def older(self: SyncState, peer_id: str, frame: Any) -> Any:
        reply = answer(self, peer_id, frame)
        reply.sync_reply.log_level = 0
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(SyncState, "incoming", older)
        patch.setattr(ClusterFounding, "disk_of", lambda self, node_id: "")  # it recorded no founding
        world = World(40)
        master = world.elect()
        assert master.host is not None
        schedule(master, call(b"x", 1))
        other = schedule(master, call(b"y", 1))
        assert isinstance(other, BatchOutcome) and other.repeated, (
            "as before: the number of messages is all that counts"
        )
        assert not master.host.core.state.producers.stated
    world.run(200)
    schedule(master, call(b"x", 2))
    assert master.host.core.state.producers.stated
    taken(schedule(master, call(b"y", 2)), "sequence")


def test_who_may_have_been_forgotten_is_not_said_to_be_unknown() -> None:
    """Beyond `producers_max` an unknown producer may be one that was forgotten."""
    world = World(41)
    master = elected(world)
    assert master.host is not None
    failure = Failure(common_pb2.INVALID_FIELD, "x")
    assert master.host.core.parts.senders.told(Sender("q", 1), failure).metadata["accepted_sequence"] == "0"
    change(master, producers_max=1)
    schedule(master, call(b"x", 1))
    assert "accepted_sequence" not in master.host.core.parts.senders.told(Sender("q", 1), failure).metadata


def flood(node: Node, owner: str, producers: int) -> None:
    """So many messages of one caller, each under a fresh producer id."""
    assert node.host is not None
    answers: list[BatchOutcome | Failure] = []
    for number in range(producers):
        request = call(b"flood", 1)
        request.producer_id = f"flood-{number}"
        node.host.core.parts.publisher.schedule(owned(request, owner), Reply.either(answers.append))
    node.wake()
    node.world.run_until(lambda: len(answers) == producers)
    assert all(isinstance(answer, BatchOutcome) for answer in answers)


def by_owner(node: Node) -> bool:
    """Whether its log says that producers are forgotten by owner."""
    assert node.host is not None
    return node.host.core.state.producers.by_owner


def test_a_flood_of_ids_makes_nobody_elses_repeat_a_second_message() -> None:
    """P5: the victim's answer is lost, then somebody uses more fresh ids than are remembered; the repeat is recognised,
    by a later master and by a node that starts from its checkpoint, and the id stays the victim's."""
    world = World(43)
    master = elected(world)
    change(master, producers_max=20)
    first = send(master, owned(call(b"victim's", 1), "cn/victim"))
    assert isinstance(first, BatchOutcome)
    flood(master, "cn/attacker", 60)
    for _ in range(2):
        taken(send(master, owned(call(b"x", 2), "cn/attacker")), "producer_id")
        again = send(master, owned(call(b"victim's", 1), "cn/victim"))
        assert isinstance(again, BatchOutcome) and again.repeated and again.ids.tolist() == first.ids.tolist()
        master = fail_over(world)
    assert isinstance(send(master, owned(call(b"next", 2), "cn/victim")), BatchOutcome)
    world.run(2_000)
    assert all(by_owner(node) for node in world.nodes.values()) and len(digests(world)) == 1


def test_large_batches_make_nobody_elses_repeat_a_second_message() -> None:
    """P5: nor do more message ids than are remembered; SEQUENCE_FORGOTTEN would be the answer."""
    world = World(44)
    master = elected(world)
    change(master, producer_window_ids=1_000)
    first = send(master, owned(call(b"victim's", 1), "cn/victim"))
    assert isinstance(first, BatchOutcome)
    for sequence in range(1, 6):
        request = columns_of([HOUR_MS] * 900)
        request.producer_id, request.sequence = "large", sequence
        assert isinstance(send(master, replace(from_batch(request, Settings()), owner="cn/attacker")), BatchOutcome)
    again = send(master, owned(call(b"victim's", 1), "cn/victim"))
    assert isinstance(again, BatchOutcome) and again.repeated and again.ids.tolist() == first.ids.tolist()
    world.run(200)
    assert len(digests(world)) == 1


def test_the_old_order_of_forgetting_holds_until_all_members_know_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member of the version before forgets as it always did, and must have the same state. Once it is upgraded, the
    new order begins by itself, with a reschedule as well as with a message."""
    answer = SyncState.incoming

    def older(self: SyncState, peer_id: str, frame: Any) -> Any:
        reply = answer(self, peer_id, frame)
        if self._core.identity.node_id == "c":
            reply.sync_reply.log_level = PRODUCER_SHARES_LEVEL - 1
        return reply

    world = World(45)
    with monkeypatch.context() as patch:
        patch.setattr(SyncState, "incoming", older)
        world.run_until(lambda: all(n.host and n.host.core.parts.founding.may_vote for n in world.nodes.values()), 50)
        world.nodes["c"].kill()
        master = elected(world)
        world.nodes["c"].start()
        world.run(500)
        assert world.master() is master
        change(master, producers_max=20)
        first = send(master, owned(call(b"x", 1), "cn/victim"))
        assert isinstance(first, BatchOutcome)
        flood(master, "cn/attacker", 60)
        assert not by_owner(master)
        again = send(master, owned(call(b"x", 1), "cn/victim"))
        assert isinstance(again, BatchOutcome) and not again.repeated, "as before"
    world.run(200)
    moved = move(master, int(again.ids[0]), 1, HOUR_MS, "mover")
    assert isinstance(moved, scheduler_pb2.RescheduleResponse) and moved.remembered
    assert by_owner(master)
    flood(master, "cn/attacker", 60)
    again = send(master, owned(call(b"x", 1), "cn/victim"))
    assert isinstance(again, BatchOutcome) and again.repeated
    world.run(200)
    assert all(by_owner(node) for node in world.nodes.values()) and len(digests(world)) == 1


METAS = st.builds(
    MessageMeta,
    key=st.sampled_from(("", "k")),
    tags=st.lists(st.sampled_from(("a", "b")), max_size=2),
    headers=st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(("", "v")), max_size=6),
)


def serialized(meta: MessageMeta, backwards: bool) -> bytes:
    """The same meta as another client may write it: fields and headers in another order."""
    if not backwards:
        return bytes(meta.SerializeToString())
    parts = [
        MessageMeta(headers={name: value}).SerializeToString() for name, value in reversed(list(meta.headers.items()))
    ]
    return b"".join(
        [*parts, MessageMeta(tags=meta.tags).SerializeToString(), MessageMeta(key=meta.key).SerializeToString()]
    )


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=9), METAS), min_size=1, max_size=5),
    st.sampled_from(("due_ms", "delay_ms", "delay_level")),
    st.integers(0, 20),
    st.integers(0, 3),
    st.booleans(),
    st.data(),
)
def test_rows_and_columns_of_the_same_messages_have_one_checksum(
    rows: list[tuple[bytes, MessageMeta]], when: str, value: int, jitter_ms: int, backwards: bool, data: st.DataObject
) -> None:
    """However a client writes them; and any other content has another one."""
    count = len(rows)
    due: dict[str, Any] = {when: value}
    messages = [Message(topic="t", payload=payload, meta=meta, jitter_ms=jitter_ms, **due) for payload, meta in rows]
    column = {"due_ms": "due_ms", "delay_ms": "delay_ms", "delay_level": "delay_levels"}[when]
    metas = [serialized(meta, backwards) for _, meta in rows]
    times: dict[str, Any] = {column: np.full(count, value, "<u4" if when == "delay_level" else "<i8").tobytes()}
    columns = scheduler_pb2.ColumnBatch(
        topic="t",
        payload_sizes=np.array([len(payload) for payload, _ in rows], "<u4").tobytes(),
        payloads=b"".join(payload for payload, _ in rows),
        meta_sizes=np.array([len(meta) for meta in metas], "<u4").tobytes(),
        metas=b"".join(metas),
        jitter_ms=jitter_ms,
        **times,
    )
    fields: dict[str, Any] = {"producer_id": "p", "sequence": 1}
    in_rows = from_batch(
        scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=messages), **fields), Settings()
    )
    in_columns = from_batch(scheduler_pb2.ScheduleBatch(columns=columns, **fields), Settings())
    assert in_rows.checksum is not None and in_rows.checksum == in_columns.checksum
    if count == 1:
        alone = from_message(scheduler_pb2.ScheduleRequest(message=messages[0], **fields), Settings())
        assert alone.checksum == in_rows.checksum
    changed = data.draw(st.sampled_from(("payload", "topic", "when", "jitter", "key", "count")))
    if changed == "payload":
        messages[0].payload += b"!"
    elif changed == "topic":
        messages[0].topic = "u"
    elif changed == "when":
        setattr(messages[0], when, value + 1)
    elif changed == "jitter":
        messages[0].jitter_ms += 1
    elif changed == "key":
        messages[0].meta.key += "!"
    else:
        messages.append(messages[0])
    other = from_batch(
        scheduler_pb2.ScheduleBatch(rows=scheduler_pb2.RowBatch(messages=messages), **fields), Settings()
    )
    assert other.checksum != in_rows.checksum


def test_a_learner_that_has_said_nothing_does_not_hold_checksums_up() -> None:
    """It was just added, and nobody has heard from it yet. Two programs with one producer id by accident are told all
    the same; the second one's message was taken for a repeat of the first one's."""
    world = World(42)
    master = world.elect()
    assert master.host is not None
    core, answers = master.host.core, list[object]()
    core.serving.start(core.parts.requests.admin(add("n4")), answers.append)
    master.wake()
    world.run_until(lambda: bool(answers))
    assert any(member.learner for member in core.log.members()) and not core.state.producers.stated
    schedule(master, call(b"x", 1))
    assert core.state.producers.stated
    taken(schedule(master, call(b"y", 1)), "sequence")
