"""Callbacks that come at an unlucky time: what another client changed meanwhile, what is lost while it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from tests.node.core.test_proposer import Calls
from tests.node.core.trio import Node, World
from tickwheel.node.core.config import CoreConfig
from tickwheel.node.core.delivery.consumers import ConsumerHandle
from tickwheel.node.core.delivery.retries import Leaving, RetryQueue
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.proposer import Proposer
from tickwheel.node.failure import Failure, RequestError, not_master
from tickwheel.node.state.results import SettleResult
from tickwheel.proto import admin_pb2, common_pb2, consumer_pb2
from tickwheel.proto.log_pb2 import LEASE_EXPIRED, SETTLE_RETRY, AdminCommand, Command, Dispatch, LogEntry
from tickwheel.replication.log import ProposalOutcome, ProposalResult, ReplicatedLog

DELETE = AdminCommand(delete_group=admin_pb2.DeleteGroupRequest(name="g"))


def delete_group(master: Node) -> None:
    """Ask for it, whatever becomes of it."""
    assert master.host is not None
    master.host.core.serving.start(master.host.core.parts.requests.admin(DELETE), lambda result: None)
    master.wake()


def opened(master: Node, answers: list[object]) -> None:
    """Open a consumer that creates its group."""
    assert master.host is not None
    request = consumer_pb2.OpenConsumer(group="g", topics=["t"], credits=1)
    master.host.core.serving.start(
        master.host.core.parts.consumers.open(request, lambda batch: None, lambda failure: None), answers.append
    )


def pulled(master: Node, answers: list[object]) -> None:
    """Pull for a group that this creates."""
    assert master.host is not None
    request = consumer_pb2.PullRequest(group="g", topics=["t"], messages_max=1, wait_ms=100)
    master.host.core.serving.start(master.host.core.parts.consumers.pull(request), answers.append)


@pytest.mark.parametrize("ask", [opened, pulled])
def test_a_group_deleted_as_it_is_created(ask: Callable[[Node, list[object]], None]) -> None:
    """Both stand in one entry of the log, so the group is gone when whoever wanted it hears that it was created."""
    world = World(11)
    master = world.elect()
    answers: list[object] = []
    ask(master, answers)
    delete_group(master)
    world.run(500)
    assert master.host is not None, master.fatal
    assert len(answers) == 1
    answer = answers[0]
    assert isinstance(answer, Failure) and answer.reason == common_pb2.UNKNOWN_NAME
    assert answer.metadata == {"field": "group", "value": "g"}


def test_a_consumer_of_a_deleted_group_goes_on_asking() -> None:
    """Its group goes while it is open: whatever it says then is answered, and the node goes on."""
    world = World(12)
    master = world.elect()
    sessions: list[object] = []
    opened(master, sessions)
    world.run(200)
    session = sessions[0]
    assert isinstance(session, ConsumerHandle)
    delete_group(master)
    world.run(200)
    answers: list[object] = []
    ids = np.ones(1, "<u8").tobytes()
    batch = consumer_pb2.SettleBatch(group="g", topic="t", ids=ids, attempts=np.ones(1, "<u4").tobytes())
    session.settle(batch, Reply.either(answers.append))
    with pytest.raises(RequestError):
        session.extend(consumer_pb2.ExtendBatch(group="g", topic="t", ids=ids, attempts=batch.attempts))
    session.credit(1)
    world.run(200)
    session.close()
    world.run(200)
    assert master.host is not None, master.fatal
    assert [isinstance(answer, Failure) for answer in answers] == [True]


def leaving(rows: int, tell: Callable[[SettleResult | Failure], None], topic_id: int = 1) -> Leaving:
    """Expired deliveries of a topic."""
    return Leaving(
        (1, topic_id),
        SETTLE_RETRY,
        np.zeros(rows, np.uint64),
        np.ones(rows, np.uint32),
        None,
        np.zeros(rows, np.int64),
        LEASE_EXPIRED,
        "x",
        Reply.either(tell),
    )


@pytest.mark.parametrize(("count", "rows"), [(300, 200), (40_000, 1)])
def test_mastership_is_lost_with_many_retries_waiting(count: int, rows: int) -> None:
    """Each command that is refused makes the queue submit its next one: they are answered in turn, not nested."""
    proposer = Proposer(CoreConfig(), 0, lambda: 0)
    proposer.term = 1
    queue = RetryQueue(proposer)
    ended: list[object] = []
    for _ in range(count):
        queue.add(leaving(rows, ended.append))
    failure = not_master(None, None)
    proposer.end(failure)
    queue.lose(failure)
    assert len(ended) == count and all(isinstance(answer, Failure) for answer in ended)
    assert queue.rows == 0


def test_whoever_submits_again_when_refused_is_answered_in_turn() -> None:
    """Any caller may; 10,000 refusals in a row do not nest, and keep their order."""
    proposer = Proposer(CoreConfig(), 0, lambda: 0)
    proposer.term = 1
    left = [10_000]
    order: list[str] = []

    def refused(result: object) -> None:
        assert isinstance(result, Failure)
        if left[0]:
            left[0] -= 1
            proposer.submit(Command(dispatch=Dispatch()), Reply.either(refused))
        order.append("again")

    proposer.submit(Command(dispatch=Dispatch()), Reply.either(refused))
    proposer.submit(Command(dispatch=Dispatch()), Reply.either(lambda result: order.append("other")))
    proposer.end(not_master(None, None))
    assert left == [0] and len(order) == 10_002
    assert order[1] == "other"


def test_retries_are_proposed_in_bounded_pieces() -> None:
    """By rows and by parts: a part of one row takes a node nearly as long as one of a hundred."""
    entries: list[LogEntry] = []
    waiting: list[Callable[[ProposalResult], None]] = []
    queue, proposer = queue_on(entries, waiting)
    queue.add(leaving(1, lambda result: None))
    for topic_id, rows in enumerate((50, 50, 50, *[1] * 100), 2):
        queue.add(leaving(rows, lambda result: None, topic_id))
    assert parts_of(entries, waiting, queue, proposer)[:4] == [[1], [50, 50, 28], [1] * 32, [1] * 32]


def test_deliveries_of_a_channel_share_a_part() -> None:
    """However many settlements they came in; channels take turns."""
    entries: list[LogEntry] = []
    waiting: list[Callable[[ProposalResult], None]] = []
    queue, proposer = queue_on(entries, waiting)
    queue.add(leaving(1, lambda result: None, 7))
    for _ in range(100):
        for topic_id in (1, 2):
            queue.add(leaving(1, lambda result: None, topic_id))
    assert parts_of(entries, waiting, queue, proposer) == [[1], [100, 28], [72]]


def parts_of(
    entries: list[LogEntry], waiting: list[Callable[[ProposalResult], None]], queue: RetryQueue, proposer: Proposer
) -> list[list[int]]:
    """The rows of each part, by command, until the queue is empty. The log refuses all."""
    while queue.rows:
        proposer.flush()
        waiting.pop(0)(ProposalResult(ProposalOutcome.QUEUE_FULL))
    commands = [command for entry in entries for command in entry.commands]
    return [[len(batch.ids) // 8 for batch in command.settle.batches] for command in commands]


def queue_on(entries: list[LogEntry], waiting: list[Callable[[ProposalResult], None]]) -> tuple[RetryQueue, Proposer]:
    """A queue over a log that notes its entries, and who waits for them."""

    class Log:
        def propose(self, entry: bytes, settled: Callable[[ProposalResult], None], voters: object) -> None:
            entries.append(LogEntry.FromString(entry))
            waiting.append(settled)

    proposer = Proposer(CoreConfig(gather_ms=0), 0, lambda: 1_000)
    proposer.attach(cast(ReplicatedLog, Log()), Calls())
    proposer.term = 1
    return RetryQueue(proposer), proposer


def test_a_retry_added_while_others_are_answered_is_proposed_once() -> None:
    """A caller hears of a refusal and tries again at once, while the command before is still being answered."""
    entries: list[LogEntry] = []
    waiting: list[Callable[[ProposalResult], None]] = []
    queue, proposer = queue_on(entries, waiting)
    ended: list[str] = []
    queue.add(leaving(1, lambda result: None))
    # Of one command: those that came while the first was under way.
    queue.add(leaving(1, lambda result: queue.add(leaving(1, lambda result: ended.append("again")))))
    queue.add(leaving(1, lambda result: ended.append("other")))
    while not ended or queue.rows:
        proposer.flush()
        waiting.pop(0)(ProposalResult(ProposalOutcome.QUEUE_FULL))
    rows = [len(batch.ids) // 8 for entry in entries for command in entry.commands for batch in command.settle.batches]
    assert sum(rows) == 4
    assert sorted(ended) == ["again", "other"]
