"""Real processes, shortly: a run with faults from start to verdict, and one loss of the master measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tickwheel.chaos.live.history import read_history
from tickwheel.chaos.live.losses import Kind, measure
from tickwheel.chaos.live.losses_report import as_json
from tickwheel.chaos.live.page import write_files
from tickwheel.chaos.live.plan import ANY, MASTER, SLAVE, Fault
from tickwheel.chaos.live.second_opinion import export
from tickwheel.chaos.live.supervisor import RunOptions, Supervisor

SECONDS = 6.5


@pytest.mark.slow
async def test_a_short_run_under_faults_holds_its_promises(tmp_path: Path) -> None:
    """A slave loses what it was to sync, the master is killed, another one cut off one way, a disk is full: each has an
    effect that is seen, who cannot sync stops, a new master serves, nothing is lost, early or different, the history is
    exported for the audit, and the report is there."""
    faults = [
        Fault(1, "failed-sync", SLAVE, 2.0, 0.8, 4),
        Fault(2, "kill-master", MASTER, 2.8, 1.0, 1),
        Fault(3, "disk-full", ANY, 3.3, 2.2, 2),
        Fault(4, "one-way", MASTER, 4.2, 1.2, 3),
    ]
    options = RunOptions(tmp_path, 1, SECONDS, ("kill", "disk", "partition"), rate=300.0, ahead_ms=2_000)
    verdict = await Supervisor(options).run(faults)
    told = [(one.promise, one.text) for one in verdict.broken]
    assert told == []
    assert not verdict.void
    counts = {fault["kind"]: fault["count"] for fault in verdict.faults}
    assert list(counts) == ["failed-sync", "kill-master", "disk-full", "one-way"]
    assert counts["kill-master"] == counts["failed-sync"] == 1
    assert verdict.failovers
    assert verdict.counts["acknowledged"] > SECONDS * 100
    kinds = {record["k"] for record in read_history([tmp_path / "supervisor.jsonl", tmp_path / "workload.jsonl"])}
    records = {"send", "ack", "again", "got", "settle", "settled", "status", "digest", "majority", "memory", "end"}
    assert records <= kinds
    assert export(tmp_path) is not None
    write_files(verdict, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["holds"]


@pytest.mark.slow
async def test_a_loss_is_measured_step_by_step(tmp_path: Path) -> None:
    """Nothing passes to or from the master for a while: the steps of the way back are seen, add up, and nothing is
    lost. Without the proxy before the clients they would hear of the loss at once, which is not what is measured."""
    losses = await measure(tmp_path, Kind.DROP, 1, 1_000.0)
    [loss] = losses.losses
    steps = [loss.detection_ms, loss.election_ms, loss.alignment_ms, loss.delivery_ms]
    assert None not in steps
    assert sum(step for step in steps if step is not None) == pytest.approx(loss.total_ms)
    assert loss.new
    assert loss.new != loss.old
    assert loss.total_ms > 300, "quicker than a lease: it was not cut off"
    assert losses.lost == losses.early == 0
    assert losses.acknowledged > 1_000
    assert sum(losses.duplicates.values()) == losses.delivered - losses.acknowledged
    assert as_json(losses)["steps"]["total_ms"]["p50"] > 0
