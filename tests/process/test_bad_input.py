"""Bad input over the wire to three real nodes: refused with field, value and limit, and nothing else suffers."""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tickwheel.client import AsyncClient, NotFound, RequestRefused, SequenceError
from tickwheel.client.ids import text_of
from tickwheel.node.local_cluster import LocalCluster, free_ports
from tickwheel.proto import common_pb2, consumer_pb2, peer_pb2, scheduler_pb2
from tickwheel.proto.consumer_pb2_grpc import ConsumerStub
from tickwheel.proto.peer_pb2_grpc import PeerStub
from tickwheel.proto.scheduler_pb2_grpc import SchedulerStub

pytestmark = pytest.mark.asyncio(loop_scope="module")
MIB = 1 << 20
DAY_MS = 86_400_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Three nodes for all tests here; at the end they still run, and none has written a traceback."""
    async with LocalCluster(tmp_path_factory.mktemp("cluster"), 3) as started:
        yield started
        for node in started.nodes:
            assert node.running, f"{node.node_id} did not survive"
            for line in node.log_file.read_text(encoding="utf-8").splitlines():
                assert {"timestamp", "level", "event", "node", "term"} <= set(json.loads(line)), line
                assert "Traceback" not in line


@pytest_asyncio.fixture(loop_scope="module")
async def channel(cluster: LocalCluster) -> AsyncIterator[grpc.aio.Channel]:
    """To the master, without the client's own checks."""
    master = await cluster.master()
    options = [("grpc.max_send_message_length", 64 * MIB)]
    async with grpc.aio.insecure_channel(master.client_address, options=options) as opened:
        yield opened


def now_ms() -> int:
    """This machine's clock, which the nodes share."""
    return time.time_ns() // 1_000_000


def violated(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, dict[str, str]]:
    """Code and metadata (field, value, limit) of a typed error."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None, f"no details: {error.details()}"
    return error.code(), metadata_of(status)


def metadata_of(status: status_pb2.Status) -> dict[str, str]:
    """The ErrorInfo of a status."""
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details), status
    return {"reason": info.reason, **info.metadata}


async def refusal(stub: SchedulerStub, request: scheduler_pb2.ScheduleRequest) -> dict[str, str]:
    """What Schedule is refused for."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Schedule(request, timeout=20)  # type: ignore[misc]
    code, metadata = violated(caught.value)
    assert code is grpc.StatusCode.INVALID_ARGUMENT, caught.value
    return metadata


def request_of(**fields: object) -> scheduler_pb2.ScheduleRequest:
    """A right request with some fields changed."""
    message = {"topic": "t", "payload": b"x", "delay_ms": 3_600_000, **fields}
    if {"due_ms", "delay_level"} & set(fields):
        del message["delay_ms"]
    return scheduler_pb2.ScheduleRequest(message=common_pb2.Message(**message))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"due_ms": 253_402_300_800_000}, "due_ms"),
        ({"delay_ms": 1_101 * DAY_MS}, "delay_ms"),
        ({"delay_ms": -1}, "delay_ms"),
        ({"payload": b""}, "payload"),
        ({"payload": bytes(4 * MIB + 1)}, "payload"),
        ({"topic": ""}, "topic"),
        ({"topic": ".hidden"}, "topic"),
        ({"topic": "two words"}, "topic"),
        ({"topic": "t" * 200}, "topic"),
        ({"topic": "Thema-ä"}, "topic"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(f"{k}={str(v)[:12]}" for k, v in value.items()),
)
async def test_a_wrong_message_is_refused_with_field_value_and_limit(
    channel: grpc.aio.Channel, fields: dict[str, object], field: str
) -> None:
    """Far future, negative, empty, oversized, names that are none."""
    metadata = await refusal(SchedulerStub(channel), request_of(**fields))
    assert field in metadata["field"], metadata
    assert metadata["limit"], metadata
    assert "value" in metadata, metadata


async def test_neither_or_both_of_the_times_is_refused(channel: grpc.aio.Channel) -> None:
    """A message without a time would be due never or at once: nobody guesses."""
    message = common_pb2.Message(topic="t", payload=b"x")
    metadata = await refusal(SchedulerStub(channel), scheduler_pb2.ScheduleRequest(message=message))
    assert "due" in metadata["field"] or "when" in metadata["field"], metadata


async def test_a_past_time_is_due_at_once(cluster: LocalCluster) -> None:
    """It is taken, delivered without delay, and its receipt tells the time that holds."""
    client = cluster.client()
    async with client.consumer("past", "past") as consumer:
        receipt = await client.schedule("past", b"late", due_ms=now_ms() - 10 * DAY_MS)
        async with asyncio.timeout(20):
            async for delivery in consumer:
                assert delivery.payload == b"late"
                assert receipt.due_ms <= now_ms()
                await delivery.ack()
                break


async def test_batches_above_the_limit_and_crooked_columns_are_refused(channel: grpc.aio.Channel) -> None:
    """The error stands in the receipt of its batch; the stream goes on and the next batch is taken."""
    call = SchedulerStub(channel).ScheduleStream()  # type: ignore[call-arg]  # written to, not iterated over
    due = struct.pack("<q", now_ms() + DAY_MS)

    def columns(count: int, **changed: bytes) -> scheduler_pb2.ScheduleBatch:
        content = {
            "topic": "columns", "due_ms": due * count, "payload_sizes": struct.pack("<I", 1) * count,
            "payloads": b"x" * count, **changed,
        }  # fmt: skip
        return scheduler_pb2.ScheduleBatch(columns=scheduler_pb2.ColumnBatch(**content))  # type: ignore[arg-type]

    crooked = [
        columns(10_001),
        columns(0),
        columns(2, due_ms=due),
        columns(2, due_ms=due + b"123"),
        columns(2, payload_sizes=struct.pack("<II", 1, 5)),
        columns(2, payload_sizes=b"\x01"),
        columns(2, delay_ms=due * 2),
        columns(2, metas=b"garbage"),
        scheduler_pb2.ScheduleBatch(),
        scheduler_pb2.ScheduleBatch(producer_id="no spaces please", sequence=1),
    ]
    for number, batch in enumerate(crooked):
        await call.write(batch)
        receipt = await call.read()
        assert isinstance(receipt, scheduler_pb2.BatchReceipt)
        assert not receipt.ids, number
        status = status_pb2.Status.FromString(receipt.error)
        assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], (number, status)
        assert metadata_of(status)["field"], number
    await call.write(columns(3))
    receipt = await call.read()
    assert isinstance(receipt, scheduler_pb2.BatchReceipt) and len(receipt.ids) == 24 and not receipt.error
    await call.done_writing()


async def test_repeats_are_answered_and_gaps_refused(channel: grpc.aio.Channel) -> None:
    """The same batch again (its answer was lost) gets the same ids; one out of order gets a typed error."""
    stub = SchedulerStub(channel)

    def numbered(sequence: int) -> scheduler_pb2.ScheduleRequest:
        request = request_of()
        request.producer_id, request.sequence = "producer-1", sequence
        return request

    first = await stub.Schedule(numbered(5), timeout=20)
    assert (await stub.Schedule(numbered(5), timeout=20)).id == first.id
    second = await stub.Schedule(numbered(6), timeout=20)
    assert second.id != first.id
    assert (await stub.Schedule(numbered(5), timeout=20)).id == first.id
    for sequence in (8, 100):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Schedule(numbered(sequence), timeout=20)
        code, metadata = violated(caught.value)
        assert code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OUT_OF_RANGE)
        assert "SEQUENCE" in metadata["reason"], metadata
    assert issubclass(SequenceError, Exception)


async def test_unknown_ids_are_not_found(cluster: LocalCluster, channel: grpc.aio.Channel) -> None:
    """Cancel, reschedule and get of what never was: definite answers."""
    stub = SchedulerStub(channel)
    known = await stub.Schedule(request_of(), timeout=20)
    for hour, index in ((1, 1), (known.id.hour, 4_000_000_000), (known.id.hour + 5_000, 0)):
        unknown = common_pb2.MessageId(wheel_group=known.id.wheel_group, hour=hour, index=index)
        cancel = await stub.Cancel(scheduler_pb2.CancelRequest(id=unknown), timeout=20)
        assert cancel.outcome == scheduler_pb2.NOT_FOUND
        moved = await stub.Reschedule(scheduler_pb2.RescheduleRequest(id=unknown, delay_ms=5_000), timeout=20)
        assert moved.outcome == scheduler_pb2.RESCHEDULE_NOT_FOUND
        with pytest.raises(NotFound):
            await cluster.client().get(text_of(unknown))


async def test_cancel_is_definite_before_and_after_dispatch(cluster: LocalCluster) -> None:
    """CANCELLED twice for one that is pending, ALREADY_DISPATCHED for one that has been delivered."""
    client = cluster.client()
    pending = await client.schedule("cancel", b"never", delay_ms=3_600_000)
    assert await client.cancel(pending.id) == "CANCELLED"
    assert await client.cancel(pending.id) == "CANCELLED"
    async with client.consumer("cancel", "cancel") as consumer:
        sent = await client.schedule("cancel", b"now", delay_ms=1)
        async with asyncio.timeout(20):
            async for delivery in consumer:
                assert delivery.payload == b"now"
                await delivery.ack()
                break
        assert await client.cancel(sent.id) == "ALREADY_DISPATCHED"


@pytest.mark.parametrize(
    ("group", "topics", "credits", "lease_ms", "field"),
    [
        ("bad group", ["t"], 10, 0, "group"),
        ("", ["t"], 10, 0, "group"),
        ("g", ["no such topic!"], 10, 0, "topic"),
        ("g", ["t"], 10, 1, "lease_ms"),
        ("g", ["t"], 2_000_000, 0, "credits"),
    ],
)
async def test_a_wrong_consumer_is_refused(
    channel: grpc.aio.Channel, group: str, topics: list[str], credits: int, lease_ms: int, field: str
) -> None:
    """Illegal names, a lease and credits outside their bounds."""
    opening = consumer_pb2.OpenConsumer(group=group, topics=topics, credits=credits, lease_ms=lease_ms)
    call = ConsumerStub(channel).Consume()  # type: ignore[call-arg]  # written to, not iterated over
    await call.write(consumer_pb2.ConsumeRequest(open=opening))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    code, metadata = violated(caught.value)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert field in metadata["field"], metadata


async def test_crooked_settlements_are_refused_and_the_stream_lives(channel: grpc.aio.Channel) -> None:
    """Ids without attempts, half an element, an unknown group: an error in the receipt."""
    await SchedulerStub(channel).Schedule(request_of(topic="settled"), timeout=20)
    call = ConsumerStub(channel).Consume()  # type: ignore[call-arg]  # written to, not iterated over
    opening = consumer_pb2.OpenConsumer(group="settler", topics=["settled"])
    await call.write(consumer_pb2.ConsumeRequest(open=opening))
    opened = await call.read()
    assert isinstance(opened, consumer_pb2.ConsumeResponse) and opened.HasField("opened")
    ids, attempts = struct.pack("<Q", 7), struct.pack("<I", 1)
    wrong = [
        consumer_pb2.SettleBatch(sequence=1, group="settler", topic="settled", outcome=consumer_pb2.ACK, ids=ids),
        consumer_pb2.SettleBatch(
            sequence=2, group="settler", topic="settled", outcome=consumer_pb2.ACK, ids=b"123", attempts=attempts
        ),
        consumer_pb2.SettleBatch(
            sequence=3, group="other", topic="settled", outcome=consumer_pb2.ACK, ids=ids, attempts=attempts
        ),
    ]
    for batch in wrong:
        await call.write(consumer_pb2.ConsumeRequest(settle=batch))
        answer = await call.read()
        assert isinstance(answer, consumer_pb2.ConsumeResponse)
        assert answer.settled.sequence == batch.sequence
        assert status_pb2.Status.FromString(answer.settled.error).code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    call.cancel()


async def test_a_slow_consumer_gets_what_it_has_credit_for_and_no_more(cluster: LocalCluster) -> None:
    """Credits stop the node: of 500 due messages a consumer with 20 credits that settles nothing holds 20."""
    client = cluster.client()
    async with client.producer() as producer:
        await producer.schedule_many("slow", [(now_ms(), bytes(1_000)) for _ in range(500)])
    master = await cluster.master()
    async with grpc.aio.insecure_channel(master.client_address) as opened:
        call = ConsumerStub(opened).Consume()  # type: ignore[call-arg]  # written to, not iterated over
        opening = consumer_pb2.OpenConsumer(group="slow", topics=["slow"], credits=20)
        await call.write(consumer_pb2.ConsumeRequest(open=opening))
        held = 0
        while held < 20:
            answer = await call.read()
            assert isinstance(answer, consumer_pb2.ConsumeResponse)
            held += len(answer.deliver.ids) // 8
        assert held == 20
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await call.read()
        call.cancel()


async def test_what_a_dead_consumer_held_is_delivered_again(cluster: LocalCluster) -> None:
    """It dies while it holds messages: another of its group gets them, as a second attempt."""
    client = cluster.client()
    async with client.producer() as producer:
        await producer.schedule_many("dies", [(now_ms(), b"%d" % number) for number in range(10)])
    async with AsyncClient(cluster.addresses) as dying:
        consumer = dying.consumer("dies", "dies", lease=timedelta(seconds=1))
        await consumer.__aenter__()
        seen: set[bytes] = set()
        async with asyncio.timeout(20):
            async for delivery in consumer:
                seen.add(delivery.payload)
                if len(seen) == 10:
                    break
        # Gone without a word: what it held is neither settled nor given back by itself.
    again: dict[bytes, int] = {}
    async with client.consumer("dies", "dies") as consumer, asyncio.timeout(20):
        async for delivery in consumer:
            again[delivery.payload] = delivery.attempt
            await delivery.ack()
            if len(again) == 10:
                break
    assert min(again.values()) >= 2


async def test_a_peer_of_another_format_or_cluster_is_refused_with_a_reason(cluster: LocalCluster) -> None:
    """What dials the peer port and is no peer learns why, and nothing it says is taken."""
    node = cluster.nodes[0]
    hello = {
        "cluster_id": cluster.cluster_id, "sender_id": "n2", "receiver_id": node.node_id, "format_version": 1,
        "hello": peer_pb2.Hello(peer_address="127.0.0.1:1"),
    }  # fmt: skip
    wrong: list[tuple[dict[str, object], str]] = [
        ({"format_version": 99}, "upgrade one step at a time"),
        ({"cluster_id": "other"}, "this is cluster"),
        ({"receiver_id": "n9"}, "check the addresses"),
        ({"sender_id": node.node_id}, "two nodes are named"),
        ({"sender_id": "n7"}, "not a member"),
    ]
    async with grpc.aio.insecure_channel(node.peer_address) as opened:

        async def answer_to(changed: dict[str, object]) -> peer_pb2.PeerFrame:
            call = PeerStub(opened).Exchange()  # type: ignore[call-arg]  # written to, not iterated over
            await call.write(peer_pb2.PeerFrame(**{**hello, **changed}))  # type: ignore[arg-type]
            answer = await call.read()
            call.cancel()
            assert isinstance(answer, peer_pb2.PeerFrame)
            return answer

        for changed, words in wrong:
            answer = await answer_to(changed)
            assert words in answer.refused.reason, answer
            assert not answer.refused.final
        async with asyncio.timeout(20):  # the master records the disks of the members within a second or so
            while True:
                answer = await answer_to({"disk_uuid": "another disk"})
                assert "another disk" in answer.refused.reason, answer  # never let in, not even before
                if answer.refused.final:
                    break
                await asyncio.sleep(0.1)


async def test_a_client_of_a_deposed_master_is_sent_to_the_new_one(cluster: LocalCluster) -> None:
    """A typed error with the new master's address; a client that knows the old one alone goes there by itself."""
    old = await cluster.master()
    async with AsyncClient([old.client_address]) as client, grpc.aio.insecure_channel(old.client_address) as opened:
        await client.schedule("t", b"before", delay_ms=60_000)
        handed = await client.admin.transfer()
        new = cluster.node(handed.master_id)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await SchedulerStub(opened).Schedule(request_of(), timeout=20)
        code, metadata = violated(caught.value)
        assert code is grpc.StatusCode.UNAVAILABLE and metadata["reason"] == "NOT_MASTER", (code, metadata)
        assert new.client_address in metadata.values(), metadata
        assert (await client.schedule("t", b"after", delay_ms=60_000)).id
    await cluster.wait_ready()


async def test_a_second_node_under_a_members_id_ends(cluster: LocalCluster, tmp_path: Path) -> None:
    """It has another disk: it ends with 3 and says what to do; the first does not notice."""
    text = cluster.nodes[1].config_file.read_text(encoding="utf-8")
    here = cluster.nodes[1]
    addresses = {"client": here.client_address, "peer": here.peer_address, "metrics": here.metrics_address}
    for (name, address), port in zip(addresses.items(), free_ports(3), strict=True):
        moved = f'{name}_bind = "127.0.0.1:{port}"'
        if name != "metrics":  # it calls itself what the member is called
            moved += f'\n{name}_advertised = "{address}"'
        text = text.replace(f'{name}_bind = "{address}"', moved)
    text = text.replace(str(here.directory.resolve() / "data"), str(tmp_path / "data"))
    (tmp_path / "node.toml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "tickwheel.node.cli.main", "node", "--config", str(tmp_path / "node.toml")]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )
    said = done.stdout + done.stderr
    assert done.returncode == 3 and "another disk" in said and "Traceback" not in said, done
    await cluster.wait_ready()


async def test_garbage_on_both_ports_harms_nobody(cluster: LocalCluster, tmp_path: Path) -> None:
    """Bytes that are no gRPC at all."""
    for address in (cluster.nodes[0].client_address, cluster.nodes[0].peer_address):
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.0\r\n\r\n" + bytes(range(256)) * 100)
        await writer.drain()
        writer.close()
    receipt = await cluster.client().schedule("t", b"still here", delay_ms=60_000)
    assert receipt.id


@pytest.mark.parametrize("address", ["", "y", "host:", ":7700", "host:0", "host:65536", "ho st:7700", "host:7700/x"])
@pytest.mark.parametrize("field", ["peer_address", "client_address"])
async def test_a_member_has_addresses_that_can_be_dialled(cluster: LocalCluster, field: str, address: str) -> None:
    """Clients learn the members' addresses from every node: one that is none would reach all of them."""
    places = {"peer_address": "127.0.0.1:1", "client_address": "127.0.0.1:2", field: address}
    async with AsyncClient(cluster.addresses) as client:
        with pytest.raises(RequestRefused) as caught:
            await client.admin.add_member("n9", places["peer_address"], places["client_address"])
        assert caught.value.metadata["field"] == f"member.{field}" and caught.value.metadata["value"] == address
        assert "n9" not in [peer.node_id for peer in (await client.admin.master_status()).peers]
