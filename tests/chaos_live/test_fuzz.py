"""The fuzzer: its calls follow from the seed and reach every method; a short run against real nodes holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

from tickwheel.chaos.fuzz.calls import RARE, Caller, Ended, methods
from tickwheel.chaos.fuzz.known import UNIQUE_KEYS, Known, hints_of
from tickwheel.chaos.fuzz.messages import Maker
from tickwheel.chaos.fuzz.run import FuzzConfig, Fuzzer, _explained
from tickwheel.node.local_cluster import LocalCluster
from tickwheel.proto import common_pb2
from tickwheel.proto.scheduler_pb2 import CancelRequest, GetRequest, RescheduleRequest

NOW_MS = 1_800_000_000_000


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


async def test_a_short_run_against_real_nodes(tmp_path: Path) -> None:
    """Every promise of the fuzzer after a few hundred calls."""
    told: list[str] = []
    async with LocalCluster(tmp_path / "nodes", 3) as cluster:
        config = FuzzConfig(seed=7, batches=2, batch_calls=250, idle_streams=20)
        report = await Fuzzer(cluster, config, told.append).run()
    assert not report.findings, "\n".join(report.findings)
    assert report.calls == 500 and report.batches == 2 == len(told)
    assert report.codes["OK"] > 20 and report.codes["INVALID_ARGUMENT"] > 50
    assert report.grown_bytes_max < 200 << 20, "of a few hundred calls nothing stays"


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
