"""Deleting topics and groups: what they hold is told first, then cancelled and counted, through changes of master."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.node.core.schedule.test_pending import ask, core_of, counted, schedule
from tests.node.core.schedule.test_sweeps import came, finish, trio
from tests.node.core.trio import Client, World, digests
from tickwheel.client.cluster import TRY_TIMEOUT_S
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule import deleting, pending, sweeper
from tickwheel.node.core.watch.listings import groups_after, topics_after
from tickwheel.node.failure import Failure
from tickwheel.node.state.cluster import ClusterState
from tickwheel.node.state.schema import TOPIC_DEAD_LEVEL
from tickwheel.node.state.snapshot import restore
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2, dead_pb2
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.proto.scheduler_pb2 import MESSAGE_CANCELLED, SWEEP_FINISHED, SWEEP_RUNNING, SWEEP_STOPPED

HOUR_MS = 3_600_000


def delete_topic(world: World, name: str = "t", *, confirmed: bool = False) -> Any:
    """The answer of the master."""
    request = admin_pb2.DeleteTopicRequest(name=name, cancel_pending=confirmed)
    return ask(world, core_of(world).parts.deleter.topic(request))


def delete_group(world: World, name: str = "g", *, confirmed: bool = False) -> Any:
    """The answer of the master."""
    request = admin_pb2.DeleteGroupRequest(name=name, discard=confirmed)
    return ask(world, core_of(world).parts.deleter.group(request))


def state(world: World) -> Any:
    """Of the master; None while there is none."""
    master = world.master()
    return None if master is None or master.host is None else master.host.core.state


def removed_unsettled(world: World) -> int:
    """What the state counts as removed unsettled."""
    return int(state(world).removed_unsettled)


def test_a_topic_with_messages_goes_only_when_that_is_meant() -> None:
    """The refusal says how many; then they are cancelled, can be looked up as such, and are in no count; the name is
    free again, and others keep theirs."""
    world = World(1, config=replace(CoreConfig(), segment_bytes=1 << 20, events_bytes_max=1 << 20))
    world.elect()
    world.run(2_000)
    ids = schedule(world, [("t", HOUR_MS + n, "k", []) for n in range(50)] + [("u", HOUR_MS, "k", [])])
    refused = delete_topic(world)
    assert isinstance(refused, Failure) and refused.reason == common_pb2.WRONG_STATE
    assert (refused.metadata["pending"], refused.metadata["undelivered"]) == ("50", "0")
    assert counted(world, topic="t") == 50
    job = delete_topic(world, confirmed=True)
    assert (job.state, job.done, job.undelivered) == (SWEEP_FINISHED, 50, 0)
    assert counted(world) == 1
    found = ask(world, core_of(world).parts.requests.get(ids[7], False))
    assert found.state == MESSAGE_CANCELLED
    traced = ask(
        world,
        core_of(world).parts.tracer.trace(
            admin_pb2.TraceRequest(ids=[common_pb2.MessageId(hour=ids[7] >> 32, index=ids[7] & 0xFFFFFFFF)])
        ),
    )
    assert admin_pb2.TraceEvent.CANCELLED in [event.kind for event in traced.events]
    schedule(world, [("t", HOUR_MS, "k", [])])
    assert counted(world, topic="t") == 1
    world.run_until(lambda: len(digests(world)) == 1)


def test_an_empty_topic_or_group_goes_at_once_and_an_unknown_one_is_named() -> None:
    """What old clients do goes on: they confirm nothing."""
    world = trio()
    client = Client(world)
    client.consume()
    client.schedule([10])
    world.run_until(lambda: came(client) == 1)
    world.run(1_000)
    assert delete_group(world).state == SWEEP_FINISHED
    assert delete_topic(world).state == SWEEP_FINISHED
    for answer in (delete_topic(world), delete_group(world)):
        assert isinstance(answer, Failure) and answer.reason == common_pb2.UNKNOWN_NAME


def test_a_group_that_is_gone_leaves_nothing_in_the_delivery() -> None:
    """Groups that come and go for months would otherwise fill a master's memory."""
    world = trio()
    client = Client(world)
    client.consume()
    client.schedule([10])
    world.run_until(lambda: came(client) == 1)
    agenda = core_of(world).parts.delivery.agenda
    assert agenda._groups
    assert delete_group(world).state == SWEEP_FINISHED
    world.run(1_000)
    assert not (agenda._groups or agenda._passes or agenda._resting or agenda.woken)


def test_a_long_deletion_is_answered_before_the_client_repeats_the_call() -> None:
    """With its state so far; it then goes on. An answer after that time would reach nobody."""
    world = trio(step_messages=1)
    schedule(world, [("t", HOUR_MS, "k", [])] * 1_000)
    began_ms = core_of(world).steady_ms()
    job = delete_topic(world, confirmed=True)
    assert job.state == SWEEP_RUNNING and 0 < job.done < 1_000
    assert core_of(world).steady_ms() - began_ms < TRY_TIMEOUT_S * 1_000
    assert finish(world, job.job_id).done == 1_000


def test_what_was_dispatched_and_not_settled_is_told_and_counted() -> None:
    """For a topic and for a group; a group's dead letters and retries too."""
    world = trio()
    client = Client(world)
    client.settle = False
    client.consume()
    client.schedule([10] * 5)
    world.run_until(lambda: came(client) == 5)
    refused = delete_topic(world)
    assert isinstance(refused, Failure) and refused.metadata["undelivered"] == "5"
    refused = delete_group(world)
    assert isinstance(refused, Failure) and refused.metadata["undelivered"] == "5"
    before = removed_unsettled(world)
    job = delete_group(world, confirmed=True)
    assert (job.state, job.undelivered) == (SWEEP_FINISHED, 5)
    assert removed_unsettled(world) == before + 5
    world.run_until(lambda: len(digests(world)) == 1)


def test_retries_of_a_group_go_with_it() -> None:
    """A retry that waits is cancelled and in no count; other groups keep theirs."""
    world = trio()
    client = Client(world)
    client.outcome = consumer_pb2.RETRY
    client.consume()
    client.schedule([10] * 3)
    world.run_until(lambda: counted(world) == 3)
    refused = delete_group(world)
    assert isinstance(refused, Failure) and int(refused.metadata["retries"]) == 3
    job = delete_group(world, confirmed=True)
    assert (job.state, job.done) == (SWEEP_FINISHED, 3)
    assert counted(world) == 0
    world.run_until(lambda: len(digests(world)) == 1)


def undertaker(world: World, group: str, topic: str) -> None:
    """Open a consumer that declares each message dead."""
    client = Client(world)
    client.group, client.topics = group, [topic]
    client.outcome = consumer_pb2.DEAD
    client.consume()
    world.run_until(lambda: client.session is not None)


def die(world: World, *topics: str) -> None:
    """Let messages die in this order, and wait until group g has all letters."""
    before = dead_count(world, "g")
    for count, topic in enumerate(topics, before + 1):
        schedule(world, [(topic, 10, "k", [])])
        world.run_until(partial(has_letters, world, count))


def has_letters(world: World, count: int) -> bool:
    """Whether group g has so many dead letters."""
    return dead_count(world, "g") == count


def dead_count(world: World, group: str) -> int:
    """Dead letters of a group; 0 without a master or a group."""
    found = state(world)
    held = None if found is None else found.groups.named(group)
    return 0 if held is None else int(held.dead.count)


def listed(world: World, group: str) -> list[str]:
    """Topics of a group's dead letters, oldest first."""
    answer = ask(world, core_of(world).parts.dead.list(dead_pb2.ListDeadRequest(group=group)))
    return [letter.topic for letter in answer.letters]


def test_dead_letters_of_a_group_go_with_it() -> None:
    """The refusal says how many; they are counted in the job and in the total."""
    world = trio()
    undertaker(world, "g", "t")
    die(world, "t", "t", "t")
    refused = delete_group(world)
    assert isinstance(refused, Failure) and refused.reason == common_pb2.WRONG_STATE
    assert (refused.metadata["dead"], refused.metadata["undelivered"]) == ("3", "0")
    assert "3 dead" in refused.message
    before = removed_unsettled(world)
    job = delete_group(world, confirmed=True)
    assert (job.state, job.dead) == (SWEEP_FINISHED, 3)
    assert removed_unsettled(world) == before + 3
    world.run_until(lambda: len(digests(world)) == 1)


@pytest.mark.parametrize("at_a_time", [65_536, 3])
def test_dead_letters_of_a_topic_go_with_it_in_every_group(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal says how many; confirmed, they are gone and counted, and those of other topics stay. It takes as many
    turns and steps as there are letters, of whatever topic."""
    monkeypatch.setattr(deleting, "LETTERS_MAX", at_a_time)
    monkeypatch.setattr(sweeper, "LETTERS_MAX", at_a_time)
    world = trio()
    for group, topic in (("g", "t"), ("g", "u"), ("h", "t")):
        undertaker(world, group, topic)
    die(world, "u", "u", "t", "t", "u", "t", "t")
    world.run_until(lambda: dead_count(world, "h") == 4)
    refused = delete_topic(world)
    assert isinstance(refused, Failure) and refused.reason == common_pb2.WRONG_STATE
    assert (refused.metadata["pending"], refused.metadata["undelivered"]) == ("0", "0")
    assert refused.metadata["dead"] == "8" and "8 dead" in refused.message
    before = removed_unsettled(world)
    job = delete_topic(world, confirmed=True)
    assert (job.state, job.done, job.undelivered, job.dead) == (SWEEP_FINISHED, 0, 0, 8)
    assert (job.steps > 1) == (at_a_time == 3)
    assert removed_unsettled(world) == before + 8
    assert listed(world, "g") == ["u", "u", "u"] and listed(world, "h") == []
    schedule(world, [("t", HOUR_MS, "k", [])])
    refused = delete_topic(world)
    assert (refused.metadata["pending"], refused.metadata["dead"]) == ("1", "0"), (
        "the name exists anew, without the letters of the first"
    )
    world.run_until(lambda: len(digests(world)) == 1)


def test_masters_die_while_dead_letters_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one looks again. Each letter is counted once, also those that come while the deletion runs."""
    monkeypatch.setattr(pending, "MATCHES_MAX", 7)
    monkeypatch.setattr(sweeper, "LETTERS_MAX", 1)
    world = trio(1, 7)
    for topic in ("t", "u"):
        undertaker(world, "g", topic)
    die(world, "t", "u", "t", "t", "u", "t")
    schedule(world, [("t", HOUR_MS + n * 60_000, "k", []) for n in range(100)])
    core_of(world).serving.start(
        core_of(world).parts.deleter.topic(admin_pb2.DeleteTopicRequest(name="t", cancel_pending=True)), lambda _: None
    )
    world.run_until(partial(has_come_to, world, 2))
    assert 0 < next(iter(state(world).sweeps)).dead < 4
    master = world.master()
    assert master is not None
    master.kill()
    world.run_until(lambda: world.master() is not None)
    master.start()
    schedule(world, [("u", 10, "k", [])])
    ended = finish(world, next(iter(state(world).sweeps)).job_id)
    assert (ended.state, ended.done, ended.dead) == (SWEEP_FINISHED, 100, 4)
    world.run_until(lambda: state(world) is not None and len(digests(world)) == 1)
    world.run_until(lambda: dead_count(world, "g") == 3)
    assert listed(world, "g") == ["u", "u", "u"]


@pytest.mark.parametrize("several", [False, True], ids=["one topic", "several topics"])
@pytest.mark.parametrize("outcome", [consumer_pb2.ACK, consumer_pb2.RETRY])
def test_what_a_deleted_group_held_is_not_settled_for_one_of_its_name(
    several: bool, outcome: consumer_pb2.Outcome.ValueType
) -> None:
    """The group is made again, to start over, while consumers of the one before still hold messages."""
    world = World(1)
    world.elect()
    topics = ["t", "u"] if several else ["t"]
    for group in ("g", "other"):
        made(world, group, topics)
    schedule(world, [(topic, 50 + number, "k", []) for number in range(3) for topic in topics])
    world.run(500)
    consumers = core_of(world).parts.consumers

    def pulled(topic: str) -> consumer_pb2.DeliverBatch:
        request = consumer_pb2.PullRequest(group="g", topics=[topic], messages_max=10, wait_ms=100, lease_ms=5_000)
        batch: consumer_pb2.DeliverBatch = ask(world, consumers.pull(request))
        return batch

    held = [pulled(topic) for topic in topics]
    assert [len(batch.ids) for batch in held] == [3 * 8] * len(topics)
    assert delete_group(world, confirmed=True).state == SWEEP_FINISHED
    made(world, "g", topics)
    late = consumer_pb2.SettleBatch(sequence=1, group="g", outcome=outcome)
    for name in ("ids", "attempts", "positions"):
        setattr(late, name, b"".join(getattr(batch, name) for batch in held))
    if several:
        late.topics.extend(topics)
        late.topic_counts = np.full(2, 3, "<u4").tobytes()
        late.epochs = np.array([batch.epoch for batch in held], "<u4").tobytes()
    else:
        late.topic, late.epoch = "t", held[0].epoch
    answers: list[Any] = []
    consumers.settle(late, Reply.either(answers.append))
    world.run_until(lambda: bool(answers))
    assert (answers[0].settled, answers[0].stale) == (0, 3 * len(topics))
    again = [pulled(topic) for topic in topics]
    assert [batch.ids for batch in again] == [batch.ids for batch in held]
    extension = consumer_pb2.ExtendBatch(group="g", topic="t", ids=again[0].ids, attempts=again[0].attempts)
    for batch, extended in (held[0], 0), (again[0], 3):
        extension.epoch = batch.epoch
        assert consumers.extend(extension).extended == extended


def made(world: World, group: str, topics: list[str]) -> None:
    command = AdminCommand(create_group=admin_pb2.CreateGroupRequest(name=group, topics=topics))
    ask(world, core_of(world).parts.requests.admin(command))


@pytest.mark.parametrize("settles", [True, False], ids=["all settled", "some out"])
def test_consumers_of_a_group_hear_that_it_is_gone(settles: bool) -> None:
    """They would wait for ever: the group of that name that others create is another one."""
    world = trio()
    client = Client(world)
    client.settle = settles
    client.consume()
    schedule(world, [("t", 10, "k", [])])
    world.run_until(lambda: came(client) == 1)
    told: list[Failure] = []
    assert client.session is not None
    client.session.session.closed = told.append
    assert delete_group(world, confirmed=True).state == SWEEP_FINISHED
    assert [(failure.reason, failure.metadata["field"]) for failure in told] == [(common_pb2.UNKNOWN_NAME, "group")]


def test_a_delivery_that_is_declared_dead_while_its_topic_goes_leaves_no_letter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was handed out before the deletion began; it counts as a dead letter, and once."""
    monkeypatch.setattr(pending, "MATCHES_MAX", 7)
    world = trio(1, 7)
    client = Client(world)
    client.settle = False
    client.consume()
    [number] = schedule(world, [("t", 10, "k", [])])
    world.run_until(lambda: came(client) == 1)
    schedule(world, [("t", HOUR_MS + n * 60_000, "k", []) for n in range(100)])
    core_of(world).serving.start(
        core_of(world).parts.deleter.topic(admin_pb2.DeleteTopicRequest(name="t", cancel_pending=True)), lambda _: None
    )
    world.run_until(partial(has_come_to, world, 3))
    assert client.session is not None
    settle = consumer_pb2.SettleBatch(
        group="g", topic="t", outcome=consumer_pb2.DEAD,
        ids=number.to_bytes(8, "little"), attempts=(1).to_bytes(4, "little"),
    )  # fmt: skip
    answers: list[object] = []
    client.session.settle(settle, Reply(answers.append, answers.append))
    world.run_until(lambda: bool(answers))
    ended = finish(world, next(iter(state(world).sweeps)).job_id)
    assert (ended.state, ended.done, ended.undelivered, ended.dead) == (SWEEP_FINISHED, 100, 0, 1)
    assert dead_count(world, "g") == 0
    world.run_until(lambda: len(digests(world)) == 1)


def test_dead_letters_go_with_their_topic_only_if_every_member_can_apply_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member of an earlier version would stop at such an entry. Topics without letters are deleted as it does it."""
    world = trio()
    undertaker(world, "g", "t")
    undertaker(world, "h", "u")
    die(world, "t")
    core = core_of(world)
    monkeypatch.setattr(core.parts.deleter, "_all_understand", lambda level: level < TOPIC_DEAD_LEVEL)
    assert delete_topic(world).metadata["dead"] == "1"
    assert delete_topic(world, confirmed=True).reason == common_pb2.RECOVERING
    early = delete_topic(world, "u", confirmed=True)
    assert (early.state, early.with_dead) == (SWEEP_FINISHED, False)
    monkeypatch.undo()
    job = delete_topic(world, confirmed=True)
    assert (job.state, job.dead, job.with_dead) == (SWEEP_FINISHED, 1, True)


@pytest.mark.parametrize("seed", range(2))
def test_masters_die_in_the_middle_of_a_deletion(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one carries it on; meanwhile the topic takes nothing; each message is counted once."""
    monkeypatch.setattr(pending, "MATCHES_MAX", 7)
    world = trio(seed, 7)
    schedule(world, [("t", HOUR_MS + n * 60_000, "k", []) for n in range(100)])
    answers: list[Any] = []
    core_of(world).serving.start(
        core_of(world).parts.deleter.topic(admin_pb2.DeleteTopicRequest(name="t", cancel_pending=True)), answers.append
    )
    for steps in (3, 6):
        world.run_until(partial(has_come_to, world, steps))
        assert refused_while_closing(world)
        master = world.master()
        assert master is not None
        master.kill()
        world.run_until(lambda: world.master() is not None)
        master.start()
        world.heal()
    job_id = next(iter(state(world).sweeps)).job_id
    ended = finish(world, job_id)
    assert (ended.state, ended.done) == (SWEEP_FINISHED, 100)
    world.run_until(lambda: state(world) is not None and len(digests(world)) == 1)
    assert counted(world) == 0
    assert state(world).topic_id("t") is None


def has_come_to(world: World, steps: int) -> bool:
    """Whether the master's first job has made so many steps."""
    found = state(world)
    return found is not None and any(job.steps >= steps for job in found.sweeps)


def refused_while_closing(world: World) -> bool:
    """What is scheduled for the topic while it goes is refused."""
    client = Client(world)
    client.schedule([HOUR_MS])
    world.run_until(lambda: bool(client.refused or client.acked))
    return bool(client.refused)


def test_a_deletion_can_be_stopped_and_the_topic_stays() -> None:
    """Paused, with what was not cancelled yet; it takes messages again."""
    world = trio(1, 7)
    schedule(world, [("t", HOUR_MS + n * 60_000, "k", []) for n in range(100)])
    answers: list[Any] = []
    core_of(world).serving.start(
        core_of(world).parts.deleter.topic(admin_pb2.DeleteTopicRequest(name="t", cancel_pending=True)), answers.append
    )
    world.run_until(lambda: any(job.steps >= 2 for job in state(world).sweeps))
    job_id = next(iter(state(world).sweeps)).job_id
    stopped = ask(world, core_of(world).parts.sweeper.stop(job_id))
    assert stopped.state == SWEEP_STOPPED
    world.run_until(lambda: bool(answers))
    left = counted(world, topic="t")
    assert left == 100 - stopped.done
    assert state(world).topic_paused(state(world).topic_id("t"))
    schedule(world, [("t", HOUR_MS, "k", [])])
    assert counted(world, topic="t") == left + 1


def test_a_deletion_goes_on_from_a_checkpoint() -> None:
    """Who restarts from one refuses messages for the topic as before."""
    world = trio(1, 7)
    schedule(world, [("t", HOUR_MS + n * 60_000, "k", []) for n in range(100)])
    core_of(world).serving.start(
        core_of(world).parts.deleter.topic(admin_pb2.DeleteTopicRequest(name="t", cancel_pending=True)), lambda _: None
    )
    world.run_until(lambda: any(job.steps >= 2 for job in state(world).sweeps))
    core = world.master().host.core  # type: ignore[union-attr]
    checkpoint = core.state.begin_checkpoint()
    checkpoint.run()
    again = ClusterState(core.disk, "state")
    restore(again, checkpoint.manifest.state)
    topic = again.topics.named("t")
    assert topic is not None and topic.closing and topic.paused
    core.state.abandon_checkpoint(checkpoint)


def test_a_repeat_of_a_deletion_gets_the_answer_of_the_first() -> None:
    """Its answer was lost: the repeat is told that it is done, also when the name exists anew by then."""
    world = trio()
    client = Client(world)
    client.consume()
    client.schedule([10])
    world.run_until(lambda: came(client) == 1)
    world.run(1_000)
    group = admin_pb2.DeleteGroupRequest(name="g", request_id=0xABC)
    topic = admin_pb2.DeleteTopicRequest(name="t", request_id=0xABC)
    for request, delete in ((group, "delete_group"), (topic, "delete_topic")):

        def asked(request: Any = request, delete: str = delete) -> Any:
            return ask(
                world,
                getattr(core_of(world).parts.deleter, delete.removeprefix("delete_"))(request),
            )

        first = asked()
        assert first.state == SWEEP_FINISHED
        assert asked() == first
        other = type(request)(name=request.name, request_id=0xDEF)
        assert asked(other).reason == common_pb2.UNKNOWN_NAME, "another call"
        if delete == "delete_topic":
            schedule(world, [("t", HOUR_MS, "k", [])])
            assert asked() == first
            assert counted(world, topic="t") == 1, "the repeat took what came after the first for its own"


def test_a_listing_skips_nothing_when_a_name_is_created_anew_in_a_pause() -> None:
    """By rising id: a name that came back with a higher id comes behind the others, and must not lead past them."""
    world = trio()
    for name in ("a", "b", "c"):
        ask(world, core_of(world).parts.requests.admin(admin(topic=name)))
        ask(world, core_of(world).parts.requests.admin(admin(group=name)))
    topics, groups = topics_after(core_of(world)), groups_after(core_of(world))
    before = [next(topics).name, next(groups).name]
    delete_group(world, "b")
    delete_topic(world, "b")
    ask(world, core_of(world).parts.requests.admin(admin(topic="b")))
    ask(world, core_of(world).parts.requests.admin(admin(group="b")))
    assert before == ["a", "a"]
    assert [topic.name for topic in topics] == [group.name for group in groups] == ["c", "b"]


def admin(topic: str = "", group: str = "") -> AdminCommand:
    """The command that creates a topic or a group of topic c."""
    if topic:
        return AdminCommand(create_topic=admin_pb2.CreateTopicRequest(name=topic))
    return AdminCommand(create_group=admin_pb2.CreateGroupRequest(name=group, topics=["c"]))
