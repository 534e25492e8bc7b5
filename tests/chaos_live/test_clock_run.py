"""The cases of the clock on real nodes: one of them played, and how they are judged, on histories made by hand."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.chaos_live.stories import BEGAN_MS, Story, good
from tickwheel.chaos.cli import app
from tickwheel.chaos.live.clock_cases import CASES
from tickwheel.chaos.live.clock_run import add_checks, flow_of, judge_stretch, play, print_rows, row_of
from tickwheel.chaos.live.clock_stage import Check, Stretch, value_of
from tickwheel.chaos.live.cluster import ChaosCluster
from tickwheel.chaos.live.faults import wrong_clock
from tickwheel.chaos.live.page import page
from tickwheel.chaos.live.report import replay_command
from tickwheel.chaos.live.verdict import Verdict, judge

HOUR_MS = 3_600_000


@pytest.mark.slow
async def test_the_masters_clock_steps_while_real_nodes_are_under_load(tmp_path: Path) -> None:
    """Ten minutes ahead: nothing is early by true time, messages go on, and every node says whose clock is wrong, in
    status, metrics and log."""
    verdict = await play(CASES["step-ahead"], tmp_path, 250.0)
    assert [(one.promise, one.text) for one in verdict.broken] == []
    assert not verdict.void
    [step] = verdict.faults
    assert (step["kind"], step["detail"]) == ("step", "+600,000 ms")
    assert step["count"] > 0
    told = " ".join(check["what"] for check in verdict.checks)
    assert all(
        where in told
        for where in ("status of n1", "metrics of", "log of", "status and health of the master", "messages come")
    )
    assert verdict.earliest_ms <= verdict.clock_error_ms + 5
    assert verdict.counts["acknowledged"] > 500


def _flowing(*, from_ms: float, until_ms: float) -> Story:
    """A request every 100 ms, whose message comes 50 ms later; in between they come all at once at the end."""
    story = Story()
    for number in range(100):
        at_ms = number * 100.0
        story.ack(at_ms + 5, story.send(at_ms, at_ms + 20, [number]), [number])
        story.got(until_ms if from_ms <= at_ms < until_ms else at_ms + 50, "steady", [number])
    return story


def _stretch(from_ms: float, until_ms: float, *, delivers: bool) -> Stretch:
    return Stretch("", BEGAN_MS + from_ms, BEGAN_MS + until_ms, delivers)


def test_a_stretch_in_which_messages_must_come_sees_that_none_does() -> None:
    """A cluster that stands still while it must not would pass otherwise; so would one that only starts to."""
    flow = flow_of(_flowing(from_ms=2_000, until_ms=9_500).sorted())
    assert judge_stretch(_stretch(0, 2_000, delivers=True), flow)[0]
    assert not judge_stretch(_stretch(2_000, 5_000, delivers=True), flow)[0]
    assert judge_stretch(_stretch(5_000, 8_000, delivers=True), flow)[0], "a little late"
    assert not judge_stretch(_stretch(-13_000, 2_000, delivers=True), flow)[0]


def test_a_stretch_in_which_nothing_may_come_sees_one_message() -> None:
    """What became due before it may still come then; what becomes due in it may not, and schedules are accepted."""
    story = _flowing(from_ms=2_000, until_ms=9_000)
    stretch = _stretch(2_000, 5_000, delivers=False)
    story.got(2_500, "moody", [5])
    assert judge_stretch(stretch, flow_of(story.sorted()))[0]
    story.got(4_000, "moody", [25])
    assert not judge_stretch(stretch, flow_of(story.sorted()))[0]
    story.drop(lambda record: record["k"] in ("ack", "got") and record["t"] > BEGAN_MS + 2_000)
    assert not judge_stretch(stretch, flow_of(story.sorted()))[0], "nothing was accepted"


def _judged(story: Story, *checks: Check) -> Verdict:
    verdict = judge(story.sorted())
    stage: Any = SimpleNamespace(checks=list(checks), stretches=[])
    add_checks(verdict, stage, flow_of([]), BEGAN_MS)
    return verdict


def test_what_a_node_did_not_say_breaks_the_case() -> None:
    """It is told with what was seen instead, in the report too; what was said as expected breaks nothing."""
    verdict = _judged(good(), Check(BEGAN_MS + 2_000, "status: AGREED", True, "n1 AGREED"))
    assert verdict.holds
    verdict = _judged(good(), Check(BEGAN_MS + 2_000, "log of n1: warned", False, "not by n1"))
    assert verdict.broken_counts == {"clock": 1}
    assert verdict.broken[0].text == "log of n1: warned; seen: not by n1"
    text = page(verdict)
    assert "What was expected" in text
    assert "not so" in text
    assert "the nodes say what is wrong with clocks" in text
    assert "the nodes say what is wrong with clocks" not in page(judge(good().sorted()))


@pytest.mark.parametrize(("ahead_ms", "error_ms", "broken"), [(30, 28.0, False), (30, 24.0, True), (-500, 2.0, False)])
def test_a_master_ahead_of_true_time_by_more_than_it_says(ahead_ms: int, error_ms: float, broken: bool) -> None:
    """Seen though no message happened to be early; being behind makes nothing early."""
    story = good()
    story.status(3_000, "n1", "MASTER", 1, clock=ahead_ms, error=error_ms)
    assert ("clock" in _judged(story).broken_counts) is broken


def test_a_master_that_waits_for_a_time_to_go_by_is_not_called_dead() -> None:
    """P10 is not broken while no majority of the clocks can agree; it is when they can."""
    story = good()
    story.drop(lambda record: record["k"] == "status" and record["t"] > BEGAN_MS)
    story.status(15_900, "n2", "MASTER", 2)
    story.status(100, "n1", "MASTER", 1)
    assert "P10" in judge(story.sorted()).broken_counts
    story.tell(1_000, "agreement", holds=False)
    story.tell(15_000, "agreement", holds=True)
    assert "P10" not in judge(story.sorted()).broken_counts


async def test_a_clock_goes_back_to_where_it_stood(tmp_path: Path) -> None:
    """All are an hour wrong, one by ten minutes more: the end of that fault leaves the hour."""
    cluster = ChaosCluster(tmp_path, 1, 1)
    [node] = cluster.nodes
    cluster.turn(node, offset_ms=-HOUR_MS)
    fault = wrong_clock(cluster, [node], offset_ms=600_000)
    await fault.begin()
    assert cluster.knobs(node).offset_ms == 600_000 - HOUR_MS
    await fault.end()
    assert cluster.knobs(node).offset_ms == -HOUR_MS


def test_a_number_of_a_metrics_page() -> None:
    """The one with these labels, or none."""
    text = (
        "# HELP skew_seconds x\n# TYPE skew_seconds gauge\n"
        'skew_seconds{peer="n1"} 0.25\nskew_seconds{peer="n2"} -3600.0\n'
    )
    assert value_of(text, "skew_seconds", {"peer": "n2"}) == -HOUR_MS / 1_000
    assert value_of(text, "skew_seconds", {"peer": "n3"}) is None


def test_the_table_says_which_case_broke_and_how_to_play_it_again() -> None:
    """One line a case."""
    verdict = _judged(good(), Check(BEGAN_MS, "x", False, "y"))
    verdict.run["case"] = "survivors"
    console = Console(width=160)
    with console.capture() as captured:
        print_rows([row_of(CASES["survivors"], verdict), row_of(CASES["drift-fast"], _judged(good()))], console)
    lines = captured.get().splitlines()
    assert re.search(r"survivors\s.*1 of 2\s+clock broken", lines[1])
    assert re.search(r"drift-fast\s.*1 of 1\s+held", lines[2])
    assert replay_command(verdict) == "tickwheel chaos clock --case survivors --rate 240"


def test_the_command_names_its_cases_and_refuses_others(tmp_path: Path) -> None:
    """Before anything is begun."""
    listed = CliRunner().invoke(app, ["clock", "--list"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in CASES)
    refused = CliRunner().invoke(app, ["clock", "--case", "noon", "--dir", str(tmp_path / "x")])
    assert refused.exit_code == 2
    assert not (tmp_path / "x").exists()
