"""Consumers' streams: a caller that is gone before the core answers, and users that lose a right."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tickwheel.node.core.promise import Promise
from tickwheel.node.core.serving import Serving
from tickwheel.node.failure import Failure, RequestError, not_master
from tickwheel.node.server.callers import Caller
from tickwheel.node.server.calls import Calls
from tickwheel.node.server.consumer_stream import ConsumerStream, ConsumerStreams
from tickwheel.node.state.rights import AccessControl
from tickwheel.proto import common_pb2, consumer_pb2
from tickwheel.proto.access_pb2 import RIGHT_CONSUME, AccessCommand, AccessRole, Grant, StoredUser

SERVER = Path(__file__).parents[3] / "node" / "server"


def failed(error: BaseException) -> None:
    """The process would end."""
    raise AssertionError("the node must go on") from error


class Session:
    """One open consumer; only whether it was closed or suspended."""

    closed = False
    suspended = False
    deliver: Any
    ran_out: Any

    def suspend(self) -> None:
        """See ConsumerHandle."""
        self.suspended = True

    def resume(self) -> bool:
        """See ConsumerHandle."""
        self.suspended = False
        return True

    def close(self) -> None:
        """See ConsumerSession."""
        self.closed = True

    def opened(self) -> consumer_pb2.Opened:
        """See ConsumerSession."""
        return consumer_pb2.Opened()


class Core:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.opened: Promise[Session] = Promise()
        self.serving = Serving(lambda bits: 0)
        self.parts = self.consumers = self

    async def open(self, request: object, deliver: Any, closed: object, actor: str, ran_out: Any) -> Session:
        """See ConsumerRequests."""
        session = await self.opened
        session.deliver, session.ran_out = deliver, ran_out
        return session


@pytest.mark.parametrize("answer", [Session(), not_master(None, None)])
async def test_a_caller_that_goes_while_its_group_is_created(answer: Session | Failure) -> None:
    """The answer comes in the very pass of the loop in which the call was cancelled, before the stream hears of that.

    It must not raise inside the core, and nobody may be left holding a session.
    """
    core = Core()
    calls = Calls(lambda: cast(Any, core), lambda: None, lambda wait_ms: None, failed)
    anybody = Caller("", "none", True, AccessControl(), lambda: False)
    stream = ConsumerStream(calls, 1 << 20, anybody, consumer_pb2.OpenConsumer(group="g"), lambda: None)
    opening = asyncio.ensure_future(stream.open())
    await asyncio.sleep(0)
    assert not opening.done()
    opening.cancel()
    if isinstance(answer, Failure):
        core.opened.refuse(answer)
    else:
        core.opened.keep(answer)
    with pytest.raises(asyncio.CancelledError):
        await opening
    stream.close()
    assert isinstance(answer, Failure) or answer.closed
    assert stream.opened() is None


class State:
    """One group; how often its topics were asked for."""

    asked = 0

    def group_id(self, name: str) -> int:
        """See StateView."""
        return 1

    def group_topics(self, group_id: int) -> list[int]:
        """See StateView."""
        self.asked += 1
        return [1, 2]

    def topic_name(self, topic_id: int) -> str:
        """See StateView."""
        return f"t-{topic_id}"


class Connection:
    """Asked whether its other side answers."""

    def __init__(self) -> None:
        self.asking: list[Callable[[], None]] = []

    def ask(self, answers: Callable[[], None]) -> None:
        """See ServerConnection."""
        self.asking.append(answers)


class Node:
    """Consumers of users whose role lets them consume all topics, of a core that serves each at once."""

    def __init__(self) -> None:
        core = self.core = Core()
        core.state = self.state = State()  # type: ignore[attr-defined]
        self.streams = ConsumerStreams(
            Calls(lambda: cast(Any, core), lambda: None, lambda wait_ms: None, failed), 1 << 20
        )
        self.control = AccessControl()
        grant = Grant(rights=[RIGHT_CONSUME], topics=["t-*"], groups=["g"])
        self._apply(AccessCommand(set_role=AccessRole(name="r", grants=[grant])))

    def _apply(self, command: AccessCommand) -> None:
        assert self.control.apply(command, 0, rights_on=False).failure is None

    def set_roles(self, user: str, *roles: str) -> None:
        """Set a user."""
        self._apply(AccessCommand(set_user=StoredUser(name=user, roles=roles)))

    async def open(
        self, user: str, connection: Connection | None = None, reads: asyncio.Event | None = None
    ) -> asyncio.Task[None]:
        """A consumer of the user that is served until it ends. It takes what is written as long as `reads` is set."""
        opened = asyncio.Event()
        self.core.opened = Promise()
        self.core.opened.keep(Session())

        class Context:
            server_connection = connection or Connection()

            async def write(self, response: consumer_pb2.ConsumeResponse) -> None:
                if opened.is_set() and reads is not None:
                    await reads.wait()
                opened.set()

        async def requests() -> AsyncIterator[consumer_pb2.ConsumeRequest]:
            yield consumer_pb2.ConsumeRequest(open=consumer_pb2.OpenConsumer(group="g"))
            await asyncio.Event().wait()

        caller = Caller(user, "certificate", False, self.control, lambda: True)
        serving = asyncio.create_task(self.streams.serve(requests(), caller, cast(Any, Context())))
        serving.add_done_callback(lambda task: opened.set())
        await opened.wait()
        assert not serving.done()
        return serving


async def lost_its_right(serving: asyncio.Task[None]) -> bool:
    """Wait until the stream has ended; whether because its user may not consume."""
    with pytest.raises(RequestError) as caught:
        await serving
    return caught.value.failure.reason == common_pb2.RIGHT_REQUIRED


async def end(*serving: asyncio.Task[None]) -> None:
    """The callers are gone."""
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


async def test_a_change_of_rights_is_judged_once_for_all_consumers_alike_and_stream_by_stream() -> None:
    """Whoever lost the right is ended, the others stay; the topics of a group are gone through once for each rights."""
    node = Node()
    node.set_roles("ann", "r")
    node.set_roles("bob", "r")
    stay = [await node.open("ann") for _ in range(20)]
    go = [await node.open("bob") for _ in range(20)]
    node.set_roles("bob")
    node.state.asked = turns = 0
    looking = asyncio.create_task(node.streams.look())
    while not looking.done():
        turns += 1
        await asyncio.sleep(0)
    await looking
    assert turns > 40 and node.state.asked == 2
    assert all([await lost_its_right(serving) for serving in go])
    assert not any(serving.done() for serving in stay)
    await end(*stay)


async def test_streams_and_rights_may_change_while_streams_are_looked_at() -> None:
    """The rest is judged by the newest rights, those passed by the next look; streams that end or open are no error."""
    node = Node()
    for name in ("ann", "bob"):
        node.set_roles(name, "r")
    go = [await node.open("ann") for _ in range(20)]
    looking = asyncio.create_task(node.streams.look())
    await asyncio.sleep(0)
    assert not looking.done()
    gone = go.pop()
    gone.cancel()
    node.set_roles("ann")
    stays = await node.open("bob")
    await looking
    open_yet = [stream for stream in node.streams._all() if stream.failure is None]
    assert len(open_yet) <= 2  # of bob, and the one of ann that had its turn before the change
    await node.streams.look()
    assert all([await lost_its_right(serving) for serving in go])
    assert not stays.done()
    await end(gone, stays)


async def sessions_of(node: Node, *places: tuple[Connection, asyncio.Event | None]) -> tuple[list[Session], Any]:
    """Consumers on these connections, and what serves them."""
    node.set_roles("ann", "r")
    sessions, serving = [], []
    for connection, reads in places:
        serving.append(await node.open("ann", connection, reads))
        sessions.append(await node.core.opened)
    return sessions, serving


async def turns() -> None:
    """Let every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_lease_that_runs_out_suspends_all_consumers_of_its_connection_until_it_answers() -> None:
    """One question, whatever else runs out meanwhile. Consumers of other connections go on."""
    node = Node()
    here, there = Connection(), Connection()
    sessions, serving = await sessions_of(node, (here, None), (here, None), (there, None))
    first, second, other = sessions
    first.ran_out()
    second.ran_out()
    assert first.suspended and second.suspended and not other.suspended and len(here.asking) == 1
    here.asking.pop()()
    assert not first.suspended and not second.suspended
    second.ran_out()
    assert first.suspended and second.suspended and len(here.asking) == 1
    await end(*serving)
    here.asking.pop()()
    assert not node.streams._streams and not node.streams._asked and not there.asking


async def test_a_consumer_that_does_not_read_gets_nothing_until_it_has_read_what_waits() -> None:
    """Its connection answers, so others on it go on; further messages would only wait behind those that it has not
    read."""
    node = Node()
    connection, reads = Connection(), asyncio.Event()
    sessions, serving = await sessions_of(node, (connection, reads), (connection, None))
    deaf, other = sessions
    for _ in range(3):
        deaf.deliver(consumer_pb2.DeliverBatch(ids=bytes(8)))
    other.deliver(consumer_pb2.DeliverBatch(ids=bytes(8)))
    await turns()
    deaf.ran_out()
    connection.asking.pop()()
    assert deaf.suspended and not other.suspended
    reads.set()
    await turns()
    assert not deaf.suspended
    await end(*serving)


def test_futures_get_their_results_in_one_place() -> None:
    """Each other place would have to think of the caller that is gone, and one did not."""
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(SERVER.rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"\.set_(result|exception)\b", line) and path.name != "resolving.py"
    ]
    assert found == []
