"""The fuzzer: its calls follow from the seed and reach every method; a short run against real nodes holds."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tickwheel.chaos.fuzz.calls import RARE, Call, Caller, Ended, methods
from tickwheel.chaos.fuzz.known import SCHEDULES, TOPIC, UNIQUE_KEYS, Delivery, Known, fits_of, hints_of
from tickwheel.chaos.fuzz.mastership import LEASE_MS, Delay
from tickwheel.chaos.fuzz.messages import Maker
from tickwheel.chaos.fuzz.run import FuzzConfig, Fuzzer, _explained, asked, changed
from tickwheel.node.local_cluster import LocalCluster
from tickwheel.proto import common_pb2
from tickwheel.proto.consumer_pb2 import ExtendBatch, SettleBatch
from tickwheel.proto.scheduler_pb2 import CancelRequest, ColumnBatch, GetRequest, RescheduleRequest
from tickwheel.proto.schedules_pb2 import PauseScheduleRequest, PutScheduleRequest

NOW_MS = 1_800_000_000_000
SOON_S = 20.0
SHORT_GROWTH_BYTES_MAX = 200 << 20
"""Of a node, in 500 calls; about 50 MB are usual."""


def caller(seed: int) -> Caller:
    """Of a cluster of three."""
    rng = Random(seed)
    return Caller(rng, Maker(rng, NOW_MS), 3, frozenset({"n1"}))


def test_calls_follow_from_the_seed_and_reach_every_method() -> None:
    """So a batch can be played again; and a method that is added tomorrow is called."""
    first, again, other = ([made.call() for _ in range(3_000)] for made in (caller(1), caller(1), caller(2)))
    assert first == again != other
    called = {call.path for call in first}
    names = {path: method.name for path, method in methods()}
    assert {path for path, name in names.items() if name not in RARE} <= called
    assert set(RARE) <= set(names.values()) and min(RARE.values()) > 0, "the others come too, in a longer run"
    assert any(call.cut for call in first) and any(call.holds_open for call in first)
    assert any(len(body) > 1 << 20 for call in first for body in call.bodies)


def test_unique_keys_are_claimed_and_named() -> None:
    """A new field is covered at once, but chance alone gives keys that nobody holds."""
    maker = Maker(Random(1), NOW_MS, hints_of(Known(ids=[1, 2])))
    descriptors = [kind.DESCRIPTOR for kind in (common_pb2.Message, CancelRequest, RescheduleRequest, GetRequest)]
    made: dict[str, list[Any]] = {kind.name: [maker.message(kind) for _ in range(300)] for kind in descriptors}
    keyed = [message for message in made.pop("Message") if message.meta.unique_key in UNIQUE_KEYS[:-1]]
    assert {message.on_key_conflict for message in keyed} >= set(common_pb2.KeyConflict.values())
    assert {message.key_until_settled for message in keyed} == {False, True}
    for calls in made.values():
        by_key = [call for call in calls if call.HasField("key") and not call.HasField("id")]
        assert len(by_key) > 50 and any(call.key.unique_key == "u1" and call.key.topic == "t" for call in by_key)


def test_an_internal_error_counts_as_explained_only_if_a_log_has_its_id() -> None:
    """Otherwise nobody could find out what went wrong."""
    call = caller(1).call()
    logs = {"n1": "request failed id=0123456789abcdef"}
    assert _explained(Ended(call, "INTERNAL", "the node failed: 0123456789abcdef"), logs)
    assert not _explained(Ended(call, "INTERNAL", "the node failed: fedcba9876543210"), logs)
    assert not _explained(Ended(call, "INTERNAL", "Exception iterating requests!"), logs)


def delivered(first: int) -> Delivery:
    """Of 1,000 messages, whose attempts and positions follow from their ids."""
    ids: NDArray[np.uint64] = np.arange(first, first + 1_000, dtype="<u8")
    return Delivery(3, ids, (ids % 7).astype("<u4"), ids + np.uint64(5))


def test_extensions_and_settlements_name_what_was_delivered() -> None:
    """Chance gives no row whose id, attempt and position belong together, and never many."""
    maker = Maker(Random(2), NOW_MS, fits=fits_of(Known(deliveries=[delivered(10), delivered(5_000)]), NOW_MS))
    for kind in (ExtendBatch, SettleBatch):
        fitted: list[Any] = [maker.message(kind.DESCRIPTOR) for _ in range(150)]
        fitted = [made for made in fitted if made.ids and TOPIC in (made.topic, *getattr(made, "topics", ())[:1])]
        orders, counts = set(), set()
        for made in fitted:
            ids = np.frombuffer(made.ids, "<u8")
            assert ((ids >= 10) & (ids < 1_010) | (ids >= 5_000) & (ids < 6_000)).all()
            assert np.array_equal(np.frombuffer(made.attempts, "<u4"), ids % 7)
            assert not made.positions or np.array_equal(np.frombuffer(made.positions, "<u8"), ids + np.uint64(5))
            counts.add(len(ids))
            steps = np.diff(ids.astype(np.int64))
            orders.add("one" if not steps.any() else "in order" if (steps[:99] == 1).all() else "scattered")
        assert {1, 10_000, 10_001, 100_000, 100_001} <= counts and orders == {"one", "in order", "scattered"}
        if kind is ExtendBatch:
            assert {made.lease_ms for made in fitted} >= {43_200_000, 43_200_001}
        else:
            several = [made for made in fitted if made.topics]
            assert several and all(
                len(made.topic_counts) == len(made.epochs) == 4 * len(made.topics) for made in several
            )
            for made in several:
                assert np.frombuffer(made.topic_counts, "<u4").sum() == len(made.ids) // 8


def test_many_keys_of_one_batch_and_schedules_with_their_revisions() -> None:
    """Columns whose sizes add up; and a revision that a schedule has, or has no more."""
    known = Known(revisions=dict.fromkeys(SCHEDULES, 77))
    maker = Maker(Random(3), NOW_MS, hints_of(known), fits_of(known, NOW_MS))
    keys_of = set()
    for _ in range(60):
        made: Any = maker.message(ColumnBatch.DESCRIPTOR)
        if made.payloads[:1] != b"k" or not made.metas:
            continue
        ends = np.cumsum(np.frombuffer(made.meta_sizes, "<u4"))
        assert len(made.payloads) == len(ends) == len(made.due_ms) // 8 and ends[-1] == len(made.metas)
        metas = [common_pb2.MessageMeta.FromString(made.metas[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        keys_of.add((len(metas), len({meta.unique_key for meta in metas})))
    assert {(2_000, 2_000), (2_000, 1), (2_000, 3), (2_001, 2_001)} <= keys_of
    for kind in (PutScheduleRequest, PauseScheduleRequest):
        requests: list[Any] = [maker.message(kind.DESCRIPTOR) for _ in range(100)]
        named = [made for made in requests if getattr(made, "definition", made).name in SCHEDULES]
        assert len(named) > 50 and {0, 1, 77} <= {made.expected_revision for made in named}


def made_call(path: str, code: str, began_s: float, *bodies: bytes) -> Ended:
    """A call that took a tenth of a second."""
    return Ended(Call(0, path, False, False, bodies, 1.0), code, "", began_s, began_s + 0.1)


def test_a_change_of_the_master_is_told_with_its_calls_unless_one_asked_for_it() -> None:
    """What waited for a processor is the machine's; the rest of a delay is the node's."""
    transfer = "/tickwheel.v1.Admin/TransferMaster"
    assert asked([made_call(transfer, "DEADLINE_EXCEEDED", 1.0)]) and asked([made_call(transfer, "OK", 1.0)])
    assert not asked([made_call(transfer, "INVALID_ARGUMENT", 1.0), made_call("/x", "OK", 1.0)])
    delay = Delay("n2", 10.0, 10.9, 500.0, 150.0)
    assert round(delay.own_ms) == 250
    made = [made_call("/a/Extend", "OK", 9.9, bytes(5_000)), made_call("/a/Far", "OK", 3.0, bytes(9_000))]
    what = changed(3, 4, [delay], made)
    assert "from 3 to 4" in what and "n2 answered a probe after 900 ms" in what
    assert "/a/Extend of 5,000 bytes: OK" in what and "/a/Far of" not in what and "Extend 1, Far 1" in what


async def test_a_short_run_against_real_nodes(tmp_path: Path) -> None:
    """Every promise of the fuzzer after a few hundred calls; then it is told of a master whose process stood still."""
    told: list[str] = []
    async with LocalCluster(tmp_path / "nodes", 3) as cluster:
        config = FuzzConfig(seed=7, batches=2, batch_calls=250, idle_streams=20)
        report = await Fuzzer(cluster, config, told.append).run()
        assert not report.findings, "\n".join(report.findings)
        assert report.calls == 500 and report.batches == 2 == len(told)
        assert report.codes["OK"] > 20 and report.codes["INVALID_ARGUMENT"] > 50
        assert report.given >= 4_000
        assert report.grown_bytes_max < SHORT_GROWTH_BYTES_MAX

        fuzzer = Fuzzer(cluster, config, told.append)
        fuzzer._term = await fuzzer._highest_term() - 1
        fuzzer._probes.start()
        master = await cluster.wait_ready()
        cluster.signal_node(master, signal.SIGSTOP)
        await asyncio.sleep(2 * LEASE_MS / 1_000)
        cluster.signal_node(master, signal.SIGCONT)
        async with asyncio.timeout(SOON_S):
            while True:
                if any(delay.own_ms > LEASE_MS for delay in fuzzer._probes.delays):
                    break
                await asyncio.sleep(0.05)
        await fuzzer._check_mastership(2, [])
        fuzzer._probes.stop()
        assert [f"{master.node_id} answered a probe after" in one for one in fuzzer._report.findings] == [True]
        assert fuzzer._report.changes == fuzzer._report.findings


def test_sigterm_ends_its_nodes(tmp_path: Path) -> None:
    """A time limit around it leaves no cluster behind."""
    words = [
        "chaos",
        "fuzz",
        "--nodes",
        "1",
        "--batch",
        "10",
        "--calls",
        "1000000",
        "--idle",
        "1",
        "--dir",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "tickwheel.node.cli.main", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "batch 0" not in process.stdout.readline():
        assert process.poll() is None
    nodes = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert nodes
    process.terminate()
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in complaint, complaint
    assert not [node for node in nodes if Path(f"/proc/{node}").exists()]
