"""What the client says of a request is true: accepted, surely not accepted, or not known; and why nobody is reached."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.client.fake_node import FakeNode, FakeState, Refusal
from tests.transport.served import serving
from tickwheel.client import (
    AsyncClient,
    Client,
    ClientClosed,
    ClusterUnavailable,
    NotFound,
    OutcomeUnknown,
    RequestRefused,
    SequenceTaken,
    TlsFiles,
)
from tickwheel.client.cluster import TRY_TIMEOUT_S, WATCH_PERIOD_S, Cluster
from tickwheel.client.errors import Fault
from tickwheel.client.lanes import Doubt
from tickwheel.node.certs import issue, make_certificates, open_authority
from tickwheel.node.tls import NODE_UNIT, PortFiles, server_context
from tickwheel.transport.channel import NO_CONNECTION
from tickwheel.transport.server import Server

LONG_S = 60.0
"""A deadline that no test waits for."""
SOON_S = 30.0
"""What is well under LONG_S, on the slowest machine."""
SAID_S = 2.0 + 10.0
"""Within which docs/CLIENT.md promises the reason, and what a loaded machine adds."""


def no_topic(**metadata: str) -> Refusal:
    """As a node refuses a topic that was deleted."""
    return Refusal(grpc.StatusCode.NOT_FOUND, "UNKNOWN_NAME", "no such topic", field="topic", **metadata)


def payloads(state: FakeState) -> list[bytes]:
    """What is stored, in order."""
    return [state.messages[id64][0].payload for id64 in state.order]


async def test_refusal_after_a_lost_answer_is_not_the_whole_truth(nodes: list[FakeNode]) -> None:
    """The first message was accepted: that is not known, and the next one has a number of its own and is stored."""
    node = nodes[0]
    async with AsyncClient(node.address, timeout_s=LONG_S) as client:
        await client.schedule("t", b"warm", delay_ms=60_000)
        node.drop_answers = 1
        node.refusals.extend([None, no_topic()])
        with pytest.raises(OutcomeUnknown) as caught:
            await client.schedule("t", b"first", delay_ms=60_000)
        assert caught.value.metadata["refusal"] == "UNKNOWN_NAME"
        await client.schedule("t", b"second", delay_ms=60_000)
    assert payloads(node.state) == [b"warm", b"first", b"second"]


async def test_refusal_that_names_the_last_accepted_sequence_is(nodes: list[FakeNode]) -> None:
    """The node says that no try was accepted: the refusal holds, and the number is used again."""
    node = nodes[0]
    lost = Refusal(grpc.StatusCode.UNAVAILABLE, "OUTCOME_UNKNOWN", "mastership was lost")
    async with AsyncClient(node.address, timeout_s=LONG_S) as client:
        await client.schedule("t", b"warm", delay_ms=60_000)
        node.refusals.extend([lost, no_topic(accepted_sequence="1")])
        with pytest.raises(NotFound):
            await client.schedule("t", b"first", delay_ms=60_000)
        await client.schedule("t", b"second", delay_ms=60_000)
        assert node.sequences[-1] == (node.sequences[0][0], 2)
        node.refusals.extend([lost, no_topic(accepted_sequence="3")])
        with pytest.raises(OutcomeUnknown):
            await client.schedule("t", b"third", delay_ms=60_000)
        await client.schedule("t", b"fourth", delay_ms=60_000)
        assert node.sequences[-1][0] != node.sequences[0][0], "that producer id is in doubt"


async def test_producer_tells_a_refusal_from_a_lost_answer(nodes: list[FakeNode]) -> None:
    """A batch that may have been accepted is not said to be refused; what comes behind it arrives."""
    node = nodes[0]
    async with AsyncClient(node.address) as client, client.producer() as producer:
        await producer.schedule("t", b"warm", delay_ms=60_000)
        node.refusals.append(Refusal(grpc.StatusCode.UNAVAILABLE, "OUTCOME_UNKNOWN", "mastership was lost"))
        node.refusals.append(no_topic())
        with pytest.raises(OutcomeUnknown):
            await producer.schedule("t", b"first", delay_ms=60_000)
        await producer.schedule("t", b"second", delay_ms=60_000)
        node.refusals.append(no_topic())
        with pytest.raises(NotFound):
            await producer.schedule("t", b"third", delay_ms=60_000)
        await producer.schedule("t", b"fourth", delay_ms=60_000)
    assert payloads(node.state) == [b"warm", b"second", b"fourth"]


async def test_a_number_that_is_taken_is_left(nodes: list[FakeNode]) -> None:
    """A lane that a restored cluster does not know is left for a new one; one that is another's says so at once."""
    node = nodes[0]
    gap = Refusal(grpc.StatusCode.FAILED_PRECONDITION, "SEQUENCE_GAP", "gap", expected="1")
    taken = Refusal(grpc.StatusCode.ALREADY_EXISTS, "SEQUENCE_TAKEN", "taken", field="sequence")
    async with AsyncClient(node.address) as client:
        node.refusals.append(taken)
        with pytest.raises(SequenceTaken):
            await client.schedule("t", b"0", delay_ms=60_000)
        await client.schedule("t", b"1", delay_ms=60_000)
        node.refusals.append(gap)
        await client.schedule("t", b"2", delay_ms=60_000)
    assert payloads(node.state) == [b"1", b"2"]
    assert len({name for name, _ in node.sequences}) == 3


async def test_cancelled_call_leaves_its_lane_in_doubt(nodes: list[FakeNode]) -> None:
    """Nobody knows what became of a call that its caller gave up: its sequence is not used again."""
    node = nodes[0]
    async with AsyncClient(node.address) as client:
        await client.schedule("t", b"warm", delay_ms=60_000)
        node.hangs = True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.schedule("t", b"x", delay_ms=60_000), 0.05)
        node.hangs = False
        await client.schedule("t", b"y", delay_ms=60_000)
    assert node.sequences[0][0] != node.sequences[-1][0]


async def test_lost_answer_of_a_reschedule_is_told_its_success(nodes: list[FakeNode]) -> None:
    """The repeat has the number of the first try; the next request has the next one."""
    node = nodes[0]
    async with AsyncClient(node.address) as client:
        receipt = await client.schedule("t", b"x", delay_ms=60_000)
        node.drop_answers = 1
        outcome, moved = await client.reschedule(receipt.id, due_ms=5)
        assert (outcome, moved and moved.id) == ("RESCHEDULED", receipt.id)
        assert (await client.reschedule(receipt.id, due_ms=6))[0] == "CANCELLED"
        await client.schedule("t", b"y", delay_ms=60_000)
    name = node.sequences[0][0]
    assert node.sequences == [(name, 1), (name, 2), (name, 2), (name, 3), (name, 3)]


def test_what_a_refusal_says_of_earlier_tries() -> None:
    """The whole table of `Doubt`: after a lost try, after none; refusals with and without certainty."""
    lost = Fault("UNAVAILABLE", "Socket closed")
    not_sent = Fault("UNAVAILABLE", f"{NO_CONNECTION}refused")
    refused = Fault("INVALID_FIELD", "no")
    certain = Fault("INVALID_FIELD", "no", {"accepted_sequence": "6"})
    behind = Fault("INVALID_FIELD", "no", {"accepted_sequence": "7"})
    gap, taken = Fault("SEQUENCE_GAP", ""), Fault("SEQUENCE_TAKEN", "")
    forgotten, unknown = Fault("SEQUENCE_FORGOTTEN", ""), Fault("OUTCOME_UNKNOWN", "")
    for tries, doubt in [
        ([refused], False), ([not_sent], False), ([not_sent, refused], False), ([lost], True), ([unknown], True),
        ([lost, refused], True), ([lost, not_sent], True), ([lost, certain], False), ([lost, behind], True),
        ([lost, gap], False), ([lost, taken], False), ([lost, forgotten], True), ([refused, lost, refused], True),
        ([lost, Fault("LIMIT_REACHED", "")], True), ([lost, Fault("NOT_MASTER", "")], True),
    ]:  # fmt: skip
        judged = Doubt(7)
        for fault in tries:
            judged.sending()
            judged.refused(fault)
        assert judged.exists is doubt, tries
        assert isinstance(judged.error(tries[-1]), OutcomeUnknown) is doubt, tries
    judged = Doubt(7)
    judged.sending()
    assert judged.exists, "from the moment it is sent"
    judged.refused(forgotten)
    assert not isinstance(judged.error(forgotten), OutcomeUnknown), "somebody else's: this was the first try"


# -- following the master


async def test_a_hint_is_followed_whatever_the_term() -> None:
    """NOT_MASTER names the master without a term: while none is known that is where to go."""
    cluster = Cluster(["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"])
    cluster.learn("127.0.0.1:1", 5)
    cluster.learn("127.0.0.1:2")
    assert cluster._master == "127.0.0.1:1", "a hint does not replace one that is known"
    cluster.forget("127.0.0.1:1")
    cluster.learn("127.0.0.1:2")
    assert cluster._master == "127.0.0.1:2"
    cluster.learn("127.0.0.1:3", 4)
    assert cluster._master == "127.0.0.1:2"
    cluster.learn("127.0.0.1:3", 6)
    assert cluster._master == "127.0.0.1:3"
    await cluster.close()


async def test_a_cluster_of_a_lower_term_is_followed(nodes: list[FakeNode]) -> None:
    """Restored or founded anew at the same addresses, it begins with term 1."""
    state = nodes[0].state
    state.term = 50
    async with AsyncClient([node.address for node in nodes], timeout_s=LONG_S) as client:
        await client.schedule("t", b"x", delay_ms=60_000)
        state.term = 0
        nodes[1].lead()
        await nodes[0].stop()
        async with asyncio.timeout(SOON_S):
            await client.schedule("t", b"y", delay_ms=60_000)
    assert payloads(state) == [b"x", b"y"]


async def test_a_call_leaves_a_master_that_hangs(nodes: list[FakeNode]) -> None:
    """As streams do: once another node leads, not when the try has taken its time."""
    async with AsyncClient([node.address for node in nodes]) as client:
        await client.schedule("t", b"x", delay_ms=60_000)
        nodes[0].hangs = True
        calling = asyncio.ensure_future(client.schedule("t", b"y", delay_ms=60_000, timeout_s=LONG_S))
        nodes[1].lead()
        began = asyncio.get_running_loop().time()
        await calling
        assert asyncio.get_running_loop().time() - began < TRY_TIMEOUT_S
    assert payloads(nodes[0].state) == [b"x", b"y"]


async def test_a_handover_waits_for_its_answer(nodes: list[FakeNode]) -> None:
    """The client hears of the new master first, as it does where the handover takes long."""
    nodes[0].heir = nodes[1]
    async with AsyncClient([node.address for node in nodes]) as client:
        handing_over = asyncio.ensure_future(client.admin.transfer())
        await client.schedule("t", b"x", delay_ms=60_000)
        while nodes[0].state.master is not nodes[1]:
            await nodes[0].state.changed.wait()
        await client.schedule("t", b"y", delay_ms=60_000)
        assert not (await asyncio.wait({handing_over}, timeout=2 * WATCH_PERIOD_S))[0]
        nodes[0].handed_over.set()
        assert (await handing_over).master_id == nodes[1].name


# -- connecting


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of a cluster, and in `other` those of another one."""
    directory = tmp_path_factory.mktemp("certificates")
    for path in (directory, directory / "other"):
        path.mkdir(exist_ok=True)
        make_certificates(path, {"n1": ["localhost"]}, ["app"], [], 1)
    return directory


@pytest.fixture
async def ports(certificates: Path) -> AsyncIterator[dict[str, int]]:
    """A port without TLS, one with, and one where nobody listens."""
    read = Path.read_bytes
    pair = (read(certificates / "n1.key"), read(certificates / "n1.crt"))
    credentials = grpc.ssl_server_credentials([pair], read(certificates / "ca.crt"), require_client_auth=True)
    plain, secure = grpc.aio.server(), grpc.aio.server()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        closed = nobody.getsockname()[1]
    found = {
        "plain": plain.add_insecure_port("127.0.0.1:0"),
        "tls": secure.add_secure_port("127.0.0.1:0", credentials),
        "closed": closed,
    }
    await asyncio.gather(plain.start(), secure.start())
    yield found
    await asyncio.gather(plain.stop(None), secure.stop(None))


@pytest.mark.parametrize(
    ("port", "tls", "words"),
    [
        ("closed", None, "connection refused"),
        ("tls", None, "it uses TLS"),
        ("plain", ("", "", "localhost"), "does not use TLS"),
        ("tls", ("", "", "wrong.example"), "not in the node's certificate"),
        ("tls", ("other", "", "localhost"), r"is not accepted \(unable to get local issuer certificate\)"),
        ("tls", ("", "other", "localhost"), "wants a certificate"),
        ("plain", None, "no client port"),
    ],
)
async def test_failing_to_connect_says_why_and_soon(
    ports: dict[str, int], certificates: Path, port: str, tls: tuple[str, str, str] | None, words: str
) -> None:
    """In the words of what to change, long before the deadline of the call; for a call and for a stream."""
    files = None
    if tls is not None:
        ca, own, name = certificates / tls[0], certificates / tls[1], tls[2]
        files = TlsFiles(ca / "ca.crt", own / "app.crt", own / "app.key", name)
    address = f"127.0.0.1:{ports[port]}"
    async with AsyncClient(address, tls=files, timeout_s=LONG_S) as client:
        with pytest.raises(ClusterUnavailable, match=words) as caught:
            async with asyncio.timeout(SAID_S):
                await client.schedule("t", b"x", delay_ms=1)
        assert address in str(caught.value)
        if tls is not None:
            async with client.producer() as producer, asyncio.timeout(SAID_S):
                with pytest.raises(ClusterUnavailable, match=words):
                    await producer.schedule("t", b"x", delay_ms=1)


@pytest.mark.parametrize(
    ("node", "own", "words"),
    [
        ("ended", "app", "the node's certificate has expired, or this machine's clock is ahead"),
        ("n1", "ended", "its ca_file has signed and that is valid now by the node's clock"),
    ],
)
async def test_a_certificate_that_has_ended_is_named(
    certificates: Path, tmp_path: Path, node: str, own: str, words: str
) -> None:
    """The node's as well as the client's, which the node refuses without a word."""
    issue(open_authority(certificates, 1), tmp_path, "ended", NODE_UNIT, ["localhost"], 0)
    pairs = {name: (tmp_path if name == "ended" else certificates) / name for name in (node, own)}
    crt, key = (pairs[node].with_suffix(suffix).read_bytes() for suffix in (".crt", ".key"))
    ca = certificates / "ca.crt"
    files = TlsFiles(ca, pairs[own].with_suffix(".crt"), pairs[own].with_suffix(".key"), "localhost")
    context = server_context(PortFiles(key, crt, ca.read_bytes()), required=True)
    async with serving(Server(), context) as address, AsyncClient(address, tls=files, timeout_s=LONG_S) as client:
        with pytest.raises(ClusterUnavailable, match=words):
            await client.schedule("t", b"x", delay_ms=1)


def test_certificates_that_cannot_be_used_are_refused(certificates: Path) -> None:
    """As the client is made, by the field that is at fault."""
    ca, cert, key = certificates / "ca.crt", certificates / "app.crt", certificates / "app.key"
    broken = certificates / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    for files, field in [
        (TlsFiles(ca, cert), "tls.key_file"),
        (TlsFiles(ca, None, key), "tls.cert_file"),
        (TlsFiles(ca, cert, certificates / "other" / "app.key"), "tls.cert_file"),
        (TlsFiles(ca, cert, certificates / "absent"), "tls.key_file"),
        (TlsFiles(ca, broken, key), "tls.cert_file"),
        (TlsFiles(broken), "tls.ca_file"),
        (TlsFiles(certificates / "absent"), "tls.ca_file"),
    ]:
        with pytest.raises(RequestRefused) as caught:
            Client("127.0.0.1:1", tls=files)
        assert caught.value.field == field
    assert TlsFiles(ca, cert, key).context() is not None


# -- closed

ARGUMENTS: dict[str, Any] = {
    "str": "0-1-1",
    "int": 1,
    "bytes | str": b"x",
    "bool": False,
    "datetime": datetime.now(UTC),
}


def sample(annotation: str) -> Any:
    """A value that a parameter takes; None: there is no sample."""
    return ARGUMENTS.get(annotation, [] if annotation.startswith("Sequence") else None)


async def test_a_closed_client_refuses_on_every_method() -> None:
    """Of itself and of all its parts, the next one that is added too: with a typed error, and at once."""
    client = AsyncClient("127.0.0.1:1", timeout_s=LONG_S)
    await client.close()
    await client.close()
    tried = 0
    own = [part for name, part in vars(client).items() if not name.startswith("_") and hasattr(part, "__dict__")]
    for part in (client, *own):
        if isinstance(part, Cluster):
            continue
        for name, method in inspect.getmembers(part, inspect.ismethod):
            if name.startswith("_") or name in ("close", "attempt", "know_all"):
                continue
            wanted = inspect.signature(method).parameters
            named = [p for p in wanted.values() if p.kind is not p.VAR_KEYWORD]
            values = {p.name: sample(p.annotation) for p in named if p.default is p.empty}
            values |= {"due_ms": 5} if {"due_ms", "options", "when"} & set(wanted) else {}
            values |= {"cron": "0 9 * * *"} if "cron" in wanted else {}
            values |= {"handle": "1@127.0.0.1:7700"} if "handle" in values else {}
            if any(value is None for value in values.values()) or name == "reset_group":
                continue
            async with asyncio.timeout(SOON_S):
                with pytest.raises(ClientClosed):
                    if inspect.isasyncgenfunction(method):
                        await anext(method(**values))
                    elif inspect.iscoroutinefunction(method):
                        await method(**values)
                    else:
                        method(**values)
            tried += 1
    assert tried > 25


def test_a_closed_synchronous_client_refuses() -> None:
    """Its thread has ended: nothing waits for an answer that cannot come."""
    client = Client("127.0.0.1:1")
    consumer = client.consumer("g", "t")
    client.close()
    client.close()
    for work in (
        lambda: client.schedule("t", b"x", delay_ms=1),
        lambda: client.cancel("0-1-1"),
        lambda: client.get("0-1-1"),
        lambda: client.consumer("g", "t"),
        lambda: client.sweeps.list(),
        lambda: consumer.next(1.0),
    ):
        with pytest.raises(ClientClosed):
            work()
    consumer.close()
