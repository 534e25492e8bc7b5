"""Concurrent calls of one client travel together, and each caller gets its own answer: nobody else's, and no second."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.fake_node import FakeNode, FakeState, Refusal, messages_of
from tests.client.virtual_time import run
from tickwheel.client import (
    AsyncClient,
    Client,
    ClientClosed,
    ClusterUnavailable,
    KeyTaken,
    LimitReached,
    NotFound,
    OutcomeUnknown,
    Receipt,
    RequestRefused,
    TickwheelError,
)
from tickwheel.client.cluster import Cluster
from tickwheel.client.errors import Fault
from tickwheel.client.ids import id64_of_text
from tickwheel.client.messages import row_of
from tickwheel.client.numbered import Numbered
from tickwheel.client.scheduling import Scheduling
from tickwheel.client.tries import TryFailedError
from tickwheel.proto import common_pb2, scheduler_pb2

CALLERS = 40
LONG_S = 60.0


def payload_of(state: FakeState, receipt: Receipt) -> bytes:
    """The payload of the message that a receipt names."""
    return state.messages[id64_of_text(receipt.id)][0].payload


async def schedule_all(client: AsyncClient, **options: Any) -> list[Receipt | BaseException]:
    """One message of each of CALLERS callers at once: the payload is the caller's number."""
    calls = (
        client.schedule(f"t{number % 3}", f"{number}", delay_ms=60_000, timeout_s=LONG_S, **options)
        for number in range(CALLERS)
    )
    return await asyncio.gather(*calls, return_exceptions=True)


def assert_own(state: FakeState, results: list[Receipt | BaseException], refused: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Every caller but the refused ones has the receipt of its own message, and each message is stored once."""
    for number, result in enumerate(results):
        if number in refused:
            assert isinstance(result, BaseException)
        else:
            assert isinstance(result, Receipt), result
            assert payload_of(state, result) == f"{number}".encode()
    stored = [state.messages[id64][0].payload for id64 in state.order]
    assert sorted(stored) == sorted(f"{number}".encode() for number in range(CALLERS) if number not in refused)


async def test_concurrent_schedules_are_one_batch(nodes: list[FakeNode]) -> None:
    """Different topics among them; what comes while batches are under way makes the next one."""
    node = nodes[0]
    async with AsyncClient(node.address) as client:
        assert_own(node.state, await schedule_all(client))
    assert node.batches == [CALLERS]


async def test_a_caller_alone_makes_a_plain_call(nodes: list[FakeNode]) -> None:
    """It waits for nobody, and needs nothing of nodes that older ones lack."""
    node = nodes[0]
    async with AsyncClient(node.address) as client:
        for number in range(3):
            receipt = await client.schedule("t", f"{number}", delay_ms=60_000)
            assert payload_of(node.state, receipt) == f"{number}".encode()
    assert node.batches == []
    assert len(node.sequences) == 3


async def test_one_bad_message_is_refused_alone(nodes: list[FakeNode]) -> None:
    """Its neighbours are stored, once, and it gets its own refusal."""
    node = nodes[0]
    async with AsyncClient(node.address) as client:
        good = schedule_all(client)
        bad = client.schedule(".wrong", b"bad", delay_ms=5)
        results, refused = await asyncio.gather(good, asyncio.gather(bad, return_exceptions=True))
    assert isinstance(refused[0], RequestRefused)
    assert_own(node.state, results)


@pytest.mark.parametrize("older", [False, True])
async def test_lost_answers_and_a_new_master_store_each_message_once(nodes: list[FakeNode], *, older: bool) -> None:
    """A batch goes again whole and under its number, also to a node of a version that takes batches by stream only."""
    state = nodes[0].state
    for node in nodes:
        node.drop_answers = 2
    nodes[1].older = older
    async with AsyncClient([node.address for node in nodes]) as client:
        calling = asyncio.ensure_future(schedule_all(client))
        await state.changed.wait()
        nodes[1].lead()
        assert_own(state, await calling)
    assert state.repeats


async def test_older_nodes_get_batches_by_stream(nodes: list[FakeNode]) -> None:
    """The method that they lack is asked for once, and a message that they refuse is refused alone."""
    node = nodes[0]
    node.older = True
    async with AsyncClient(node.address) as client:
        assert_own(node.state, await schedule_all(client))
        results = await asyncio.gather(
            client.schedule("t", b"good", delay_ms=5),
            client.schedule(".wrong", b"bad", delay_ms=5),
            return_exceptions=True,
        )
    assert isinstance(results[0], Receipt)
    assert isinstance(results[1], RequestRefused)


async def test_a_caller_that_leaves_harms_nobody(nodes: list[FakeNode]) -> None:
    """A message whose caller was cancelled before it was sent is not scheduled; the others of its batch are."""
    node = nodes[0]
    async with AsyncClient(node.address) as client:
        others = asyncio.ensure_future(schedule_all(client))
        leaving = asyncio.ensure_future(client.schedule("t", b"left", delay_ms=5))
        await asyncio.sleep(0)
        leaving.cancel()
        assert_own(node.state, await others)
        assert leaving.cancelled()


async def test_each_caller_has_a_deadline_of_its_own(nodes: list[FakeNode]) -> None:
    """At it a caller learns that nothing is known; its neighbour in the same batch waits on and gets its receipt."""
    node = nodes[0]
    async with AsyncClient([node.address for node in nodes]) as client:
        await client.schedule("t", b"warm", delay_ms=5)
        node.hangs = True
        patient = asyncio.ensure_future(client.schedule("t", b"patient", delay_ms=5, timeout_s=LONG_S))
        with pytest.raises(OutcomeUnknown):
            await client.schedule("t", b"hasty", delay_ms=5, timeout_s=0.5)
        assert not patient.done()
        nodes[1].lead()
        assert payload_of(node.state, await patient) == b"patient"


async def test_waiting_calls_learn_of_the_close(nodes: list[FakeNode]) -> None:
    """What was sent may have been accepted; what was not has certainly changed nothing."""
    node = nodes[0]
    client = AsyncClient(node.address)
    await client.schedule("t", b"warm", delay_ms=5)
    node.hangs = True
    calls = [asyncio.ensure_future(client.schedule("t", b"x", delay_ms=5))]
    for _ in range(3):
        for _ in range(3):
            await asyncio.sleep(0)
        calls.append(asyncio.ensure_future(client.schedule("t", b"x", delay_ms=5)))
    await asyncio.sleep(0)
    await client.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [OutcomeUnknown, OutcomeUnknown, ClientClosed, ClientClosed]


def test_threads_of_a_synchronous_client_share(address_of_node: tuple[str, FakeNode]) -> None:
    """Each thread gets the receipt of its own message."""
    address, node = address_of_node
    found: dict[int, bytes] = {}
    with Client(address) as client:

        def call(number: int) -> None:
            # Five times, and until some have travelled together: one thread may be done before the next one begins.
            for calls in itertools.count(1):
                receipt = client.schedule("t", f"{number}", delay_ms=60_000)
                found[number] = payload_of(node.state, receipt)
                if calls >= 5 and (node.batches or calls >= 5_000):
                    return

        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {number: f"{number}".encode() for number in range(8)}
    assert node.batches, "some of them travelled together"


@pytest.fixture
def address_of_node() -> Any:
    """A fake master on a loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> FakeNode:
        node = await FakeNode(FakeState(), "n1").start()
        node.lead()
        return node

    node = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    yield node.address, node
    asyncio.run_coroutine_threadsafe(node.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


# -- cancel and reschedule


def not_there() -> Refusal:
    return Refusal(grpc.StatusCode.NOT_FOUND, "UNKNOWN_NAME", "no such message")


@pytest.mark.parametrize("older", [False, True])
async def test_concurrent_cancels_are_one_call(nodes: list[FakeNode], *, older: bool) -> None:
    """Each has its own outcome; a lost answer repeats them; older nodes get one call each."""
    node = nodes[0]
    node.older = older
    async with AsyncClient(node.address) as client:
        receipts = await schedule_all(client)
        ids = [receipt.id for receipt in receipts if isinstance(receipt, Receipt)]
        node.batches.clear()
        node.drop_answers = 0 if older else 1
        outcomes = await asyncio.gather(*(client.cancel(message_id) for message_id in [*ids, "0-1-1"]))
    assert outcomes == ["CANCELLED"] * CALLERS + ["NOT_FOUND"]
    assert len(node.state.cancelled - {1 << 32 | 1}) == CALLERS
    if not older:
        assert node.batches[0] == CALLERS + 1


@pytest.mark.parametrize("older", [False, True])
async def test_concurrent_reschedules_are_one_call(nodes: list[FakeNode], *, older: bool) -> None:
    """Each under a number of its own, and one that is refused is refused alone."""
    node = nodes[0]
    node.older = older
    async with AsyncClient(node.address) as client:
        receipts = await schedule_all(client)
        ids = [receipt.id for receipt in receipts if isinstance(receipt, Receipt)]
        node.batches.clear()
        node.sequences.clear()
        if not older:
            node.refusals.extend([None, not_there()])
        moved = await asyncio.gather(
            *(client.reschedule(message_id, due_ms=number + 1) for number, message_id in enumerate(ids)),
            return_exceptions=True,
        )
    for number, (message_id, result) in enumerate(zip(ids, moved, strict=True)):
        if number == 1 and not older:
            assert isinstance(result, NotFound)
        else:
            assert result == ("RESCHEDULED", Receipt(message_id, number + 1))
    # On a busy machine a call may be tried twice.
    assert len(set(node.sequences)) == sum(isinstance(result, tuple) for result in moved)
    if not older:
        assert node.batches == [CALLERS]


async def test_a_caller_of_a_row_leaves_its_neighbours(nodes: list[FakeNode]) -> None:
    """The cancellation of one caller of a shared call ends neither the call nor its neighbours."""
    node = nodes[0]
    async with AsyncClient(node.address) as client:
        receipts = await schedule_all(client)
        ids = [receipt.id for receipt in receipts if isinstance(receipt, Receipt)]
        calls = [asyncio.ensure_future(client.cancel(message_id)) for message_id in ids]
        await asyncio.sleep(0)
        calls[0].cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert outcomes[1:] == ["CANCELLED"] * (CALLERS - 1)


# -- every caller its own answer, whatever happens


HOLDER = 7 << 32
"""The message that holds the keys of `Tries.taken`."""


@dataclass
class Tries:
    """A cluster whose answers to the tries of a client are given."""

    script: list[str]
    bad: set[str] = field(default_factory=set)
    limited: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    """Messages whose unique key another message holds."""
    accepted: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    contents: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)
    sent: list[tuple[float, frozenset[str]]] = field(default_factory=list)

    async def answer(self, request: Any, messages: list[common_pb2.Message]) -> list[int]:
        """Ids, HOLDER for a key that is taken; or the fault of this try."""
        fate = self.script.pop(0) if self.script else "ok"
        await asyncio.sleep(0.01)
        names = [message.payload.decode() for message in messages]
        producer, sequence = request.producer_id, request.sequence
        self.sent.append((asyncio.get_running_loop().time(), frozenset(names)))
        if fate == "not master":
            raise TryFailedError(Fault("NOT_MASTER", "not master"))
        if fate == "lost before":
            raise TryFailedError(Fault("UNAVAILABLE", "connection lost"))
        if fate == "hangs":
            await asyncio.sleep(2.0)
            raise TryFailedError(Fault("DEADLINE_EXCEEDED", "no answer"))
        known = {"accepted_sequence": str(self.last.get(producer, 0))} if fate != "unsure" else {}
        if (producer, sequence) not in self.accepted:
            if any(name in self.bad for name in names):
                raise TryFailedError(Fault("INVALID_FIELD", "bad", known))
            if any(name in self.limited for name in names) or fate == "limit":
                raise TryFailedError(Fault("LIMIT_REACHED", "full", {**known, "retry_after_ms": "100"}))
            assert self.last.get(producer, 0) == sequence - 1, "a lane goes on with the next sequence"
            placed = self.accepted[producer, sequence] = []
            for name in names:
                placed.append(HOLDER if name in self.taken else len(self.stored))
                self.stored += [] if name in self.taken else [name]
            self.contents[producer, sequence] = names
            self.last[producer] = sequence
        ids = self.accepted[producer, sequence]
        assert self.contents[producer, sequence] == names, "a number stands for one content"
        if fate == "lost after":
            raise TryFailedError(Fault("UNAVAILABLE", "connection lost"))
        return ids


class Stub:
    """The methods that schedule, answered by `Tries`."""

    def __init__(self, tries: Tries) -> None:
        self._tries = tries

    async def Schedule(self, request: Any, timeout: float) -> Any:  # noqa: ASYNC109
        (place,) = await self._tries.answer(request, [request.message])
        if place == HOLDER:
            refusal = Refusal(grpc.StatusCode.ALREADY_EXISTS, "KEY_TAKEN", "held", id="0-7-0", due_ms="5")
            told = grpc.aio.Metadata(("grpc-status-details-bin", refusal.status.SerializeToString()))
            raise grpc.aio.AioRpcError(refusal.code, grpc.aio.Metadata(), told, "held", "")
        return scheduler_pb2.ScheduleReceipt(id=common_pb2.MessageId(index=place))

    async def ScheduleMany(self, batch: Any, timeout: float) -> Any:  # noqa: ASYNC109
        ids = await self._tries.answer(batch, messages_of(batch))
        outcomes = bytes(common_pb2.KEY_REFUSED if place == HOLDER else common_pb2.KEY_FREE for place in ids)
        return scheduler_pb2.BatchReceipt(
            ids=b"".join(place.to_bytes(8, "little") for place in ids), key_outcomes=outcomes if any(outcomes) else b""
        )


class OneMaster(Cluster):
    """A cluster of one node without connections."""

    def __init__(self, tries: Tries) -> None:
        super().__init__(["127.0.0.1:1"])
        self._script_stub = Stub(tries)

    async def master(self, deadline: Any, *, patient: bool = False) -> str:
        if deadline.over:
            raise ClusterUnavailable("no master", "NO_MASTER")
        return "127.0.0.1:1"

    def channel(self, address: str) -> Any:
        return self

    def stub(self, kind: Any, channel: Any) -> Any:
        return self._script_stub

    async def _ask(self, address: str) -> list[tuple[int, str]]:
        return []


FATES = ["ok", "ok", "ok", "limit", "not master", "lost before", "lost after", "unsure", "hangs"]


@dataclass(frozen=True)
class Caller:
    """What one caller does."""

    after_ms: int
    timeout_s: float
    leaves_after_ms: int | None
    bad: bool
    limited: bool
    taken: bool


CALLER = st.builds(
    Caller,
    after_ms=st.integers(0, 60),
    timeout_s=st.sampled_from([0.015, 0.5, 30.0, 30.0]),
    leaves_after_ms=st.one_of(st.none(), st.none(), st.integers(0, 100)),
    bad=st.sampled_from([False, False, False, True]),
    limited=st.sampled_from([False, False, False, True]),
    taken=st.sampled_from([False, False, False, True]),
)


@settings(max_examples=150)
@given(st.lists(CALLER, min_size=1, max_size=12), st.lists(st.sampled_from(FATES), max_size=20))
def test_every_caller_gets_its_own_answer(callers: list[Caller], script: list[str]) -> None:
    """Whoever leaves or comes to its deadline, and whatever becomes of the tries. A receipt names the caller's own
    message; a definite error means that the message is not stored and never will be; nothing is stored twice; and who
    asked for nothing wrong and has time is answered with a receipt. A key that is taken is an answer too, to the
    caller's own message."""
    names = [f"m{number}" for number in range(len(callers))]
    tries = Tries(
        list(script),
        bad={name for name, caller in zip(names, callers, strict=True) if caller.bad},
        limited={name for name, caller in zip(names, callers, strict=True) if caller.limited},
        taken={name for name, caller in zip(names, callers, strict=True) if caller.taken},
    )

    async def call(scheduling: Scheduling, name: str, caller: Caller) -> Receipt:
        await asyncio.sleep(caller.after_ms / 1_000)
        row = row_of("t" if caller.after_ms % 2 else "u", name, due_ms=5, unique_key=name if caller.taken else None)
        if caller.leaves_after_ms is None:
            return await scheduling.schedule(row, caller.timeout_s)
        async with asyncio.timeout(caller.leaves_after_ms / 1_000):
            return await scheduling.schedule(row, caller.timeout_s)

    async def scene() -> list[Receipt | BaseException]:
        cluster = OneMaster(tries)
        scheduling = Scheduling(cluster, Numbered(cluster), "")
        calls = (call(scheduling, name, caller) for name, caller in zip(names, callers, strict=True))
        results = await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(60)
        assert not scheduling._calls
        assert not scheduling._batches
        scheduling.close()
        await cluster.close()
        return results

    results = run(scene())
    assert len(set(tries.stored)) == len(tries.stored), "nothing is stored twice"
    for name, caller, result in zip(names, callers, results, strict=True):
        if isinstance(result, Receipt):
            assert tries.stored[id64_of_text(result.id)] == name
        elif isinstance(result, KeyTaken):
            assert caller.taken and (result.id, result.unique_key) == ("0-7-0", name)
            assert name not in tries.stored
        elif isinstance(result, RequestRefused):
            assert caller.bad
            assert name not in tries.stored
        elif isinstance(result, ClusterUnavailable | LimitReached):
            assert name not in tries.stored, "certainly nothing was done"
        elif isinstance(result, TimeoutError):
            assert caller.leaves_after_ms is not None
        else:
            assert isinstance(result, OutcomeUnknown), repr(result)
        has_time = caller.timeout_s == 30.0 and caller.leaves_after_ms is None
        if has_time and not (caller.bad or caller.limited) and not isinstance(result, TickwheelError):
            assert isinstance(result, Receipt) and not caller.taken
        if caller.bad and has_time:
            assert isinstance(result, RequestRefused | OutcomeUnknown | LimitReached)


@pytest.mark.parametrize(
    ("fate", "error", "sent_again"),
    [("lost after", OutcomeUnknown, {"m0", "m1"}), ("not master", ClusterUnavailable, {"m1"})],
)
def test_a_message_whose_caller_has_left(fate: str, error: type[TickwheelError], sent_again: set[str]) -> None:
    """It stays in a batch that may have been accepted, for a sequence stands for one content. It is taken out of one
    that certainly was not, for its caller was told that nothing was done."""
    tries = Tries([fate])

    async def scene() -> list[Receipt | BaseException]:
        cluster = OneMaster(tries)
        scheduling = Scheduling(cluster, Numbered(cluster), "")
        calls = (
            scheduling.schedule(row_of("t", f"m{n}", due_ms=5), timeout_s) for n, timeout_s in enumerate((0.011, 30))
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
        scheduling.close()
        await cluster.close()
        return results

    left, answered = run(scene())
    assert isinstance(left, error)
    assert isinstance(answered, Receipt)
    assert tries.stored[id64_of_text(answered.id)] == "m1"
    assert [names for _, names in tries.sent] == [{"m0", "m1"}, sent_again]


def test_a_limited_message_does_not_hold_its_neighbours() -> None:
    """They are stored within a few pauses, although it is refused until its deadline."""
    tries = Tries([], limited={"m3"})

    async def scene() -> tuple[list[float], BaseException]:
        cluster = OneMaster(tries)
        scheduling = Scheduling(cluster, Numbered(cluster), "")
        began_s = asyncio.get_running_loop().time()
        took: list[float] = []

        async def call(number: int) -> None:
            await scheduling.schedule(row_of("t", f"m{number}", due_ms=5), 30.0)
            took.append(asyncio.get_running_loop().time() - began_s)

        results = await asyncio.gather(*(call(number) for number in range(64)), return_exceptions=True)
        scheduling.close()
        await cluster.close()
        return took, next(result for result in results if result is not None)

    took, error = run(scene())
    assert isinstance(error, LimitReached)
    assert len(took) == 63
    assert max(took) < 5.0
