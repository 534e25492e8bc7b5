"""A mistake in any piece of serving a request fails that request, and its node goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import EncodeError

from tests.node.core.test_when import change, one
from tests.node.core.trio import Client, Node, World, digests
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.delivery.consumers import ConsumerHandle
from tickwheel.node.core.message_ids import message_id_of
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.proposer import Answer
from tickwheel.node.core.schedule.intake import from_batch, from_message
from tickwheel.node.core.serving import FATAL, OwnWorkError, Serving
from tickwheel.node.core.watch.disk_use import disk_use
from tickwheel.node.failure import Failure
from tickwheel.node.state.filtering import runs_of
from tickwheel.node.state.machine import StateMachine
from tickwheel.node.state.results import AdminResult, ImpossibleStateError
from tickwheel.node.state.snapshot import StateCheckpoint
from tickwheel.proto import (
    admin_pb2,
    common_pb2,
    consumer_pb2,
    scheduler_pb2,
    staging_pb2,
)
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.storage.disk import FsyncFailedError
from tickwheel.wheel.reads import Pinned

Done = Callable[[Any], None]
Start = Callable[[Node, Done], None]

COLUMNS = scheduler_pb2.ColumnBatch(
    topic="t",
    due_ms=np.full(2, 1_800_000_100_000, "<i8").tobytes(),
    payload_sizes=np.ones(2, "<u4").tobytes(),
    payloads=b"xy",
)
JOB: dict[str, Any] = {"job_id": "j", "run_id": "r"}
IDS: dict[str, Any] = {"ids": np.array([1], "<u8").tobytes(), "attempts": np.array([1], "<u4").tobytes()}
FIRST = 1_800_003_600_000 // 3_600_000 << 32
"""Id of the first message of an hour ahead."""


class Mistake(Exception):
    """What nobody thought of."""


def core_of(node: Node) -> NodeCore:
    """What services call."""
    assert node.host is not None, node.fatal
    return node.host.core


def contain(world: World) -> dict[str, BaseException]:
    """As a server does; what was reported, by id."""
    reported: dict[str, BaseException] = {}
    for node in world.nodes.values():
        core_of(node).serving.contain(reported.__setitem__)
    return reported


def ask(node: Node, start: Start) -> list[Any]:
    """Have a node serve a request; its answers, and the failures that it was told."""
    answers: list[Any] = []
    core_of(node).serving.run(answers.append, lambda: start(node, answers.append))
    node.wake()
    return answers


def settled(outcome: consumer_pb2.Outcome.ValueType) -> Start:
    """A settlement of the group g."""
    batch = consumer_pb2.SettleBatch(group="g", topic="t", outcome=outcome, **IDS)
    return lambda node, done: core_of(node).parts.consumers.settle(batch, Reply.either(done))


def scheduled(node: Node, done: Done) -> None:
    """One message."""
    core_of(node).parts.publisher.schedule(
        from_message(one(due_ms=node.world.now_ms + 60_000), core_of(node).state.settings), Reply.either(done)
    )


def staged(node: Node, done: Done) -> None:
    """A block of a bulk writer."""
    batch = from_batch(scheduler_pb2.ScheduleBatch(columns=COLUMNS), core_of(node).state.settings)
    request = staging_pb2.StageRequest(batch=1, attempt=1, sequence=1, columns=COLUMNS, **JOB)
    core_of(node).serving.start(core_of(node).parts.staging.stage(request, batch), done)


def consumed(node: Node, done: Done) -> None:
    """A consumer that creates its group."""
    request = consumer_pb2.OpenConsumer(group="new", topics=["new"], credits=1)
    core_of(node).serving.start(core_of(node).parts.consumers.open(request, lambda batch: None, done), done)


def pulled(node: Node, done: Done) -> None:
    """A pull that creates its group."""
    core_of(node).serving.start(
        core_of(node).parts.consumers.pull(
            consumer_pb2.PullRequest(group="pulling", topics=["t"], messages_max=1, wait_ms=50)
        ),
        done,
    )


ID = message_id_of(FIRST, 0)
SELECTION = scheduler_pb2.Selection(topic="t")
THROUGH_LOG: dict[str, Start] = {
    "schedule": scheduled,
    "ack": settled(consumer_pb2.ACK),
    "nack": settled(consumer_pb2.RETRY),
    "dead": settled(consumer_pb2.DEAD),
    "stage": staged,
    "sweep": lambda node, done: core_of(node).serving.start(
        core_of(node).parts.sweeper.begin_sweep(
            scheduler_pb2.BeginSweepRequest(job_id="s", selection=SELECTION, cancel=True)
        ),
        done,
    ),
    "consume": consumed,
    "pull": pulled,
}
"""Requests whose answer is a piece that runs when their entry is applied, one of each kind of callback. For all methods
of the client port: test_endpoint_mistakes.py."""

THROUGH_WORKERS: dict[str, Start] = {
    "list": lambda node, done: core_of(node).serving.start(
        core_of(node).parts.pending.page(scheduler_pb2.ListPendingRequest(content=True)), done
    ),
    "disk use": lambda node, done: core_of(node).serving.start(
        disk_use(core_of(node), core_of(node).parts.disk_room, admin_pb2.GetDiskUseRequest()), done
    ),
}
"""Requests whose answer is a piece that runs when a worker has read something."""


def world_with_messages() -> tuple[World, Node, dict[str, BaseException]]:
    """A cluster with a group, and a message an hour ahead."""
    world = World(21)
    master = world.elect()
    client = Client(world)
    client.settle = False
    client.schedule([3_600_000])
    world.run(200)
    created: list[AdminResult | Failure] = []
    create = admin_pb2.CreateGroupRequest(name="g", topics=["t"])
    core_of(master).serving.start(
        core_of(master).parts.requests.admin(AdminCommand(create_group=create)), created.append
    )
    master.wake()
    world.run(200)
    assert isinstance(created[0], AdminResult)
    return world, master, contain(world)


def raising(callback: Callable[..., Any], at: list[str]) -> Callable[..., Any]:
    """In its place, once: a mistake."""

    def piece(*args: Any) -> Any:
        if at:
            at.clear()
            raise Mistake
        return callback(*args)

    return piece


def raising_reply(reply: Reply[Any], at: list[str]) -> Reply[Any]:
    """In its place: a mistake in what is told first."""
    return Reply(raising(reply.done, at), raising(reply.fail, at))


def check_failed(world: World, master: Node, answers: list[Any], reported: dict[str, BaseException]) -> None:
    """The request was told of its mistake, and the cluster goes on."""
    assert master.host is not None, master.fatal
    failures = [answer for answer in answers if isinstance(answer, Failure) and answer.reason == common_pb2.NODE_FAULT]
    assert len(failures) == 1, answers
    assert isinstance(reported[failures[0].metadata["id"]], Mistake)
    after = ask(master, scheduled)
    world.run(500)
    assert len(after) == 1 and not isinstance(after[0], Failure)
    assert len(digests(world)) == 1


@pytest.mark.parametrize("kind", THROUGH_LOG)
def test_a_mistake_in_the_answer_to_what_was_applied(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback raises inside the tick that applies the entry: its caller alone is told."""
    world, master, reported = world_with_messages()
    assert master.host is not None
    proposer = master.host.core.proposer
    at = [kind]
    if kind == "schedule":
        publisher = master.host.core.parts.publisher
        publish = publisher.schedule
        monkeypatch.setattr(publisher, "schedule", lambda batch, reply: publish(batch, raising_reply(reply, at)))
    elif kind in ("nack", "dead"):
        add = master.host.core.parts.delivery.settlements.retries.add

        def broken(leaving: Any) -> None:
            leaving.reply = raising_reply(leaving.reply, at)
            add(leaving)

        monkeypatch.setattr(master.host.core.parts.delivery.settlements.retries, "add", broken)
    elif kind == "stage":
        staging = master.host.core.parts.staging
        monkeypatch.setattr(staging, "_describe", raising(staging._describe, at))
    else:
        submit = proposer.submit

        def submitted(command: Any, reply: Answer, *args: Any, **named: Any) -> None:
            wanted = kind not in ("consume", "pull") or command.admin.WhichOneof("body") == "create_group"
            submit(command, raising_reply(reply, at) if wanted and at else reply, *args, **named)

        monkeypatch.setattr(proposer, "submit", submitted)
    answers = ask(master, THROUGH_LOG[kind])
    world.run(1_000)
    assert not at, "the mistake was made"
    monkeypatch.undo()
    check_failed(world, master, answers, reported)


@pytest.mark.parametrize("kind", THROUGH_WORKERS)
def test_a_mistake_in_the_answer_to_what_was_read(kind: str) -> None:
    """The callback raises in what follows on a worker's result."""
    world, master, reported = world_with_messages()
    assert master.host is not None
    serving = master.host.core.serving
    bound = serving.bound
    at = [kind]
    serving.bound = lambda callback: bound(raising(callback, at) if serving.caller is not None else callback)  # type: ignore[method-assign]
    answers = ask(master, THROUGH_WORKERS[kind])
    world.run(1_000)
    del serving.bound
    assert not at, "the mistake was made"
    check_failed(world, master, answers, reported)
    again = ask(master, THROUGH_WORKERS[kind])
    world.run(500)
    assert len(again) == 1 and not isinstance(again[0], Failure)


def test_calls_that_failed_take_no_place() -> None:
    """ListPending serves so many at a time: one that a mistake ended is not among them."""
    world, master, _ = world_with_messages()
    assert master.host is not None
    core = master.host.core
    at: list[str] = []
    core.background.scan = raising(core.background.scan, at)  # type: ignore[method-assign]
    for _ in range(100):
        at.append("list")
        ask(master, THROUGH_WORKERS["list"])
    answers = ask(master, THROUGH_WORKERS["list"])
    world.run(500)
    assert [type(answer) for answer in answers] == [scheduler_pb2.ListPendingResponse]


class Stream:
    """A consumer as its stream is."""

    def __init__(self, master: Node) -> None:
        self.got: list[bytes] = []
        self.ended: list[Failure] = []
        self.session: ConsumerHandle | None = None
        request = consumer_pb2.OpenConsumer(group="g", topics=["t"], credits=100, lease_ms=1_000)
        core_of(master).serving.run(
            self.ended.append,
            lambda: core_of(master).serving.start(
                core_of(master).parts.consumers.open(request, self.deliver, self.ended.append), self.opened
            ),
        )
        master.wake()

    def opened(self, session: ConsumerHandle | Failure) -> None:
        assert isinstance(session, ConsumerHandle), session
        self.session = session

    def deliver(self, batch: consumer_pb2.DeliverBatch) -> None:
        self.got.append(batch.records)


@pytest.mark.parametrize("where", ["_serve", "_send", "deliver"])
def test_a_mistake_in_a_delivery_ends_the_streams_of_its_group(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half handed out: the consumers are told, another one gets what was due, nothing is lost, nothing is out twice."""
    world, master, reported = world_with_messages()
    assert master.host is not None
    stream = Stream(master)
    world.run(200)
    core = master.host.core
    at = [where]
    if where == "deliver":
        session = core.parts.delivery.sessions.of_group(1)[0]
        session.deliver = core.serving.of(stream.ended.append, raising(stream.deliver, at))
    else:
        # What gathers batches was given `_send` when it was made.
        owner = core.parts.delivery._handing if where == "_send" else core.parts.delivery
        monkeypatch.setattr(owner, where, raising(getattr(owner, where), at))
    client = Client(world)
    client.settle = False
    client.schedule([300] * 5)
    if where == "_serve":
        core.parts.delivery.wake_group(1)
    world.run(1_000)
    monkeypatch.undo()
    assert not at and master.host is not None
    assert [failure.reason for failure in stream.ended] == [common_pb2.NODE_FAULT]
    assert isinstance(reported[stream.ended[0].metadata["id"]], Mistake)
    if stream.session is not None:
        stream.session.close()
    other = Stream(master)
    world.run(4_000)
    assert b"".join(other.got) == b"m0m1m2m3m4"
    assert not other.ended and not master.fatal


def test_a_lease_whose_return_fails_is_returned_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran out: the message comes again though the first try went wrong."""
    world, master, _ = world_with_messages()
    assert master.host is not None
    stream = Stream(master)
    client = Client(world)
    client.schedule([100])
    world.run(600)
    assert len(stream.got) == 1
    at = ["give_back"]
    returns = master.host.core.parts.delivery._returns
    monkeypatch.setattr(returns, "give_back", raising(returns.give_back, at))
    world.run(30_000)
    assert not at and master.host is not None, master.fatal
    assert len(stream.got) == 2


def test_a_mistake_in_the_rates_ends_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node would end in the same second: they count the same. The rates start again from zero."""
    world, master, reported = world_with_messages()
    assert master.host is not None
    counts = master.host.core.parts.counts
    at = ["add"]
    monkeypatch.setattr(counts._sums, "add", raising(counts._sums.add, at))
    client = Client(world)
    client.consume()
    client.schedule([100])
    world.run(3_000)
    assert not at and len(reported) == 1 and not master.fatal
    assert not client.lost()
    client.schedule([100])
    world.run(2_000)
    assert counts.in_all_per_second()[0] > 0


def test_a_step_of_a_sweep_is_repeated() -> None:
    """It failed by a mistake: found anew after a pause, and the job ends."""
    world, master, reported = world_with_messages()
    assert master.host is not None
    core = master.host.core
    at = ["scan"]
    core.background.scan = raising(core.background.scan, at)  # type: ignore[method-assign]
    ask(master, THROUGH_LOG["sweep"])
    world.run(3_000)
    assert not at and len(reported) == 1 and core.parts.sweeper.failures == 1
    job = core.state.sweeps.get("s")
    assert job is not None and job.state == scheduler_pb2.SWEEP_FINISHED


# -- Serving by itself


def test_the_own_work_of_a_node_ends_it() -> None:
    """Whoever's request brought it about: its state may be half changed."""
    serving = Serving(lambda bits: 1)
    serving.contain(lambda error_id, error: None)
    told: list[Failure] = []

    def wrong() -> None:
        raise Mistake

    with pytest.raises(OwnWorkError):
        serving.run(told.append, lambda: serving.own(wrong))
    with pytest.raises(Mistake):
        serving.own(wrong)
    with pytest.raises(Mistake):
        serving.bound(wrong)()
    assert not told and serving.caller is None


@pytest.mark.parametrize("own", [False, True])
def test_a_failed_sync_fails_the_request_and_makes_the_node_leave(own: bool) -> None:
    """Whoever's request met it, in its own work or the node's: nothing may rely on that file any more."""
    serving = Serving(lambda bits: 1)
    serving.contain(lambda error_id, error: None)
    told: list[Failure] = []

    def wrong() -> None:
        raise FsyncFailedError("x")

    serving.run(told.append, lambda: serving.own(wrong) if own else wrong())
    assert [failure.reason for failure in told] == [common_pb2.NODE_FAULT]
    assert isinstance(serving.stuck_by, FsyncFailedError) and "x" in serving.stuck


@pytest.mark.parametrize("error", [MemoryError(), EncodeError("Failed to serialize proto")])
def test_want_of_memory_fails_the_request_and_is_no_mistake(error: Exception) -> None:
    """The caller was told of a bug, under a code that no client repeats for. A part may be done: it is no refusal."""
    serving = Serving(lambda bits: 1)
    serving.contain(lambda error_id, error: None)
    told: list[Failure] = []

    def wants() -> None:
        raise error

    serving.run(told.append, wants)
    [failure] = told
    assert failure.reason == common_pb2.OUTCOME_UNKNOWN and "no memory" in failure.message
    assert failure.metadata["retry_after_ms"]
    with pytest.raises(OwnWorkError) as raised:
        serving.run(told.append, lambda: serving.own(wants))
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", [MemoryError, EncodeError])
def test_want_of_memory_does_not_count_against_an_entry(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node ended with 3, the code for what a restart does not help, and named an entry that could not be applied;
    for such entries operators are told to leave them out."""
    world = World()
    client = Client(world)
    world.elect()

    def wants(*_: object) -> None:
        raise error

    monkeypatch.setattr(StateMachine, "apply", wants)
    client.schedule([1_000])
    with pytest.raises(error):
        world.run(1_000)
    assert not any(node.fatal for node in world.nodes.values())


@pytest.mark.parametrize("error", [MemoryError, EncodeError])
def test_want_of_memory_in_a_worker_is_not_taken_for_damage(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a merge or a checkpoint: the node ended with 3, and its service did not start it again."""
    world = World(config=replace(CoreConfig(), checkpoint_entries=5))
    client = Client(world)
    world.elect()

    def wants(_: object) -> None:
        raise error

    monkeypatch.setattr(StateCheckpoint, "run", wants)

    def until_it_ends() -> None:
        for _ in range(10):
            client.schedule([60_000])
            world.run(500)

    with pytest.raises(OwnWorkError, match="the checkpoint failed") as raised:
        until_it_ends()
    assert isinstance(raised.value.__cause__, error) and not any(node.fatal for node in world.nodes.values())


@pytest.mark.parametrize("error", [ImpossibleStateError("x"), OwnWorkError("x")])
def test_what_is_fatal_passes(error: Exception) -> None:
    """No request takes it for its own."""
    assert isinstance(error, FATAL)
    serving = Serving(lambda bits: 1)
    serving.contain(lambda error_id, error: None)

    def wrong() -> None:
        raise error

    with pytest.raises(type(error)):
        serving.run(lambda failure: None, wrong)


def test_a_callback_belongs_to_whose_piece_handed_it_on() -> None:
    """Also when another request's piece calls it, and after it nobody's runs."""
    serving = Serving(lambda bits: 1)
    serving.contain(lambda error_id, error: None)
    told: list[str] = []
    kept: list[Callable[[], None]] = []

    def wrong() -> None:
        raise Mistake

    serving.run(lambda failure: told.append("one"), lambda: kept.append(serving.bound(wrong)))
    serving.run(lambda failure: told.append("other"), lambda: kept[0]())
    assert told == ["one"] and serving.caller is None and serving.faults == 1


@pytest.mark.parametrize("observer", ["counts", "topic_pending", "events"])
def test_a_mistake_in_noting_what_was_applied_ends_nobody(observer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be met on every node, and again at each start: nothing replicated depends on it. Counts may be wrong,
    messages come."""
    world = World(29, config=CoreConfig(segment_bytes=1 << 20, events_bytes_max=8 << 20))
    master = world.elect()
    reported = contain(world)

    def broken(*_: Any) -> None:
        raise Mistake

    assert master.host is not None
    part = getattr(master.host.core.parts, observer)
    monkeypatch.setattr(type(part), "applied", broken)
    client = Client(world)
    client.consume()
    client.schedule([100])
    world.run_until(lambda: bool(client.acked) and not client.lost())
    world.run_until(lambda: len(digests(world)) == 1)
    assert world.master() is master
    assert reported and all(isinstance(error, Mistake) for error in reported.values())


def test_a_mistake_while_what_was_dispatched_is_handed_out_begins_its_groups_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The streams of the topic's groups end, and whoever comes again gets the message; the master stays."""
    world = World(23)
    master = world.elect()
    contain(world)
    assert master.host is not None
    delivery = master.host.core.parts.delivery
    at = ["once"]
    monkeypatch.setattr(delivery.channels.recent, "add", raising(delivery.channels.recent.add, at))
    client = Client(world)
    client.consume()
    world.run(100)
    client.schedule([100])
    world.run_until(lambda: not at)
    world.run_until(lambda: bool(client.acked) and not client.lost())
    world.run_until(lambda: len(digests(world)) == 1)
    assert world.master() is master and not client.repeated()


def test_a_removal_that_was_never_proposed_is_proposed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake comes after retention has noted that a removal is under way."""
    world, master, reported = world_with_messages()
    assert master.host is not None
    core = master.host.core
    retention, kept = core.parts.retention, core.state.hour_min_kept
    monkeypatch.setattr(retention, "hours_below", lambda now_ms: (0, kept + 1))
    submit, removals = core.proposer.submit, list[Any]()

    def first_fails(command: Any, *others: Any, **named: Any) -> None:
        if command.admin.HasField("remove_hours"):
            removals.append(command)
            if len(removals) == 1:
                raise Mistake
        submit(command, *others, **named)

    monkeypatch.setattr(core.proposer, "submit", first_fails)
    for tries in (1, 2):
        retention._next_ms = 0
        world.run_until(lambda: len(removals) == tries, 3_000)  # noqa: B023  # called within the round
    assert [type(error) for error in reported.values()] == [Mistake] and not master.fatal


def test_a_mistake_in_a_count_of_pending_messages_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, master, reported = world_with_messages()
    monkeypatch.setattr(Pinned, "known", raising(Pinned.known, ["at"]))
    change(master, topic_pending_max="t=10")
    world.run_until(lambda: core_of(master).parts.topic_pending.counted, 10_000)
    assert [type(error) for error in reported.values()] == [Mistake] and not master.fatal
    assert core_of(master).parts.topic_pending.fullest(9) == {"t": (1, 10)}


def test_a_mistake_in_a_filter_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that starts in the past: what its filter rejects is settled all the same."""
    world, master, reported = world_with_messages()
    client = Client(world)
    client.schedule([50] * 20)
    world.run(1_000)
    monkeypatch.setattr("tickwheel.node.core.delivery.filter_skips.runs_of", raising(runs_of, ["at"]))
    request = admin_pb2.CreateGroupRequest(name="f", topics=["t"], filter="a", start_from=consumer_pb2.EARLIEST)
    ask(
        master,
        lambda node, done: core_of(node).serving.start(
            core_of(node).parts.requests.admin(AdminCommand(create_group=request)), done
        ),
    )
    state = core_of(master).state
    world.run_until(lambda: state.group_id("f") is not None)
    world.run_until(lambda: state.group_owed(state.group_id("f") or 0)["undelivered"] == 0, 10_000)
    assert [type(error) for error in reported.values()] == [Mistake] and not master.fatal


@pytest.mark.parametrize("part", ["retention", "staging"])
def test_a_mistake_in_what_a_master_does_by_itself_is_tried_again(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention and the publishing of a staged job go on after one that failed."""
    world, master, reported = world_with_messages()
    assert master.host is not None
    core = master.host.core
    at = [part]
    if part == "retention":
        monkeypatch.setattr(core.parts.retention, "hours_below", raising(core.parts.retention.hours_below, at))
        core.parts.retention._next_ms = 0
        world.run_until(lambda: not at, 3_000)
        again = ["again"]
        monkeypatch.setattr(core.parts.retention, "hours_below", raising(core.parts.retention.hours_below, again))
        world.run_until(lambda: not again, 2 * core.config.retention_period_ms)
    else:
        monkeypatch.setattr(core.parts.staging, "_submit_publish", raising(core.parts.staging._submit_publish, at))
        staged = ask(master, THROUGH_LOG["stage"])
        world.run(300)
        assert not isinstance(staged[0], Failure), staged
        attempts = [staging_pb2.StagedAttempt(partition=0, attempt=1, blocks=1, rows=2)]
        commit = staging_pb2.CommitStagedRequest(batch=1, **JOB, attempts=attempts)
        committed = ask(
            master, lambda node, done: core_of(node).serving.start(core_of(node).parts.staging.commit(commit), done)
        )
        world.run_until(lambda: not at, 3_000)
        asked = staging_pb2.GetStagedJobRequest(job_id="j", batch=1)

        def published() -> bool:
            answers = ask(
                master, lambda node, done: core_of(node).serving.start(core_of(node).parts.staging.job(asked), done)
            )
            return bool(answers) and answers[0].rows_published == 2

        world.run_until(published, 5_000)
        assert committed
    assert any(isinstance(error, Mistake) for error in reported.values())
    assert master.host is not None, master.fatal
    world.run_until(lambda: len(digests(world)) == 1)
