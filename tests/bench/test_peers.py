"""tickwheel beside other systems: results are read and shown as they are, and nothing is left out in silence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tickwheel.bench.peers import __main__ as peers
from tickwheel.bench.peers import tools
from tickwheel.bench.peers.outcome import (
    FULL,
    PACED,
    SCHEDULE,
    Outcome,
    ResultError,
    Spent,
    outcome,
    record,
    table,
    warnings,
)
from tickwheel.bench.peers.systems import Load, StartError, System

RESULT: dict[str, Any] = {
    "accepted": 1_000,
    "failed": 0,
    "sent_s": 2.0,
    "delivered": 999,
    "repeats": 3,
    "missing": 1,
    "late_ms": {"-1": 1, "5": 989, "100": 9},
    "arrived_10ms": {str(200 + place): 10 for place in range(100)},
}
SPENT = Spent(wall_s=4.0, servers_s=1.998, load_s=0.999, machine_s=3.0, elections=2)
QUIET = Spent(wall_s=4.0, servers_s=2.0, load_s=1.0, machine_s=3.0, elections=None)


def of(case: str, spent: Spent = SPENT, system: str = "one", **changes: object) -> Outcome:
    """The outcome of a result with changes."""
    return outcome(system, case, 5_000.0, json.dumps(RESULT | changes), spent)


def test_a_result_becomes_rates_quantiles_and_processor_time() -> None:
    """Lateness by its histogram, the rate without ramps, processor time a thousand delivered messages."""
    one = of(PACED)
    assert (one.accepted_rate, round(one.delivered_rate, 6), one.delivered) == (500.0, 1_000.0, 999)
    assert (one.late_p50_ms, one.late_p99_ms, one.late_p99_9_ms, one.late_max_ms) == (5.0, 5.0, 100.0, 100.0)
    assert (one.early, one.repeats, one.missing, one.elections) == (1, 3, 1, 2)
    assert (round(one.servers_s, 9), round(one.load_s, 9)) == (2.0, 1.0)
    assert round(of(SCHEDULE, late_ms={}, arrived_10ms={}).load_s, 9) == 0.999


@pytest.mark.parametrize(
    "line",
    [
        *("", "{", "[]", "3", json.dumps(RESULT | {"late_ms": 3}), json.dumps(RESULT | {"late_ms": {"x": 1}})),
        json.dumps({name: value for name, value in RESULT.items() if name != "repeats"}),
        json.dumps(RESULT | {"delivered": 0}),
    ],
)
def test_what_is_no_result_is_refused(line: str) -> None:
    """A load program that counts nothing has measured nothing."""
    with pytest.raises(ResultError):
        outcome("one", PACED, 5_000.0, line, SPENT)


def test_a_record_is_json_for_everyone() -> None:
    """A lateness of nothing is null."""
    kept = json.loads(record(of(SCHEDULE, late_ms={}, arrived_10ms={}), {"cpus": 2}), parse_constant=pytest.fail)
    assert kept["late_p50_ms"] is None and kept["accepted"] == 1_000 and kept["cpus"] == 2


def cells(text: str, label: str) -> list[str]:
    """Of the row that begins so."""
    [row] = [line for line in text.splitlines() if line.startswith(f"| {label} ")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_table_has_a_row_for_everyone() -> None:
    """Medians of rates, sums of what must not happen; who was slower than asked, and who was not measured, and why."""
    outcomes = [of(PACED), of(PACED, accepted=12_000), of(PACED, accepted=11_000), of(FULL), of(SCHEDULE)]
    outcomes += [of(PACED, QUIET, "two", accepted=10_000)]
    text = table(
        [("one", "the first"), ("two", "the second"), ("three", "the third")],
        outcomes,
        {"three": "go is | not\n installed"},
        5_000.0,
    )
    assert len({line.count("|") for line in text.splitlines()}) == 1
    first = ["the first", "500", "1,000", "5", "5, 5 (sent 500/s)", "15", "10", "5", "2.000 + 1.000", "2.000 + 1.000"]
    assert cells(text, "the first") == first
    assert cells(text, "the second")[4:8] == ["5, 5", "3", "-", "1"]
    assert cells(text, "the third")[1] == "not measured: go is / not installed"


def test_figures_beside_other_work_are_told() -> None:
    """As are messages that came early, and those that were refused."""
    busy = Spent(wall_s=4.0, servers_s=2.0, load_s=1.0, machine_s=5.0, elections=0)
    assert warnings([of(PACED, QUIET, late_ms={"5": 999})]) == []
    worth_less, refused, early = warnings([of(PACED, QUIET, late_ms={"5": 999}), of(PACED, busy, failed=7)])
    assert "in 1 of 2 loads, at most 0.5 (one, paced)" in worth_less
    assert refused == "one, paced: 7 messages were not accepted"
    assert early == "one, paced: 1 messages came before their time"


def test_systems_are_chosen_by_name_or_by_how_they_begin() -> None:
    """In any order, each once; a name that means nothing is refused."""
    assert [one.name for one in peers.chosen("redis, tickwheel-go nats tickwheel-go-rows")] == [
        *("redis", "tickwheel-go-calls", "tickwheel-go-stream", "tickwheel-go-rows", "nats"),
    ]
    assert len(peers.chosen("tickwheel nats redis rocketmq")) == len(peers.CONTENDERS)
    with pytest.raises(ValueError, match="kafka"):
        peers.chosen("nats kafka")


class Pretended(System):
    """No servers, and a load program of a few lines."""

    name = "pretended"
    acknowledged = "nothing"
    program = ""
    problem: Exception | None = None

    def prepare(self) -> str:
        return "1"

    async def start(self) -> None:
        if self.problem is not None:
            raise self.problem

    async def elections(self) -> int | None:
        return 7

    async def command(self, load: Load, window: int) -> list[str]:
        return [sys.executable, "-c", self.program, *load.arguments("here", self.mode, window)]


STEPS = "print('BEGIN', flush=True); input(); print('END', flush=True); input();"
GOOD = f"{STEPS} print('RESULT', '''{json.dumps(RESULT)}''')"


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    """The only system there is; its results go to a folder of the test."""
    one = type("One", (Pretended,), {"program": GOOD})
    monkeypatch.setattr(peers, "CONTENDERS", {"pretended": peers.Contender("pretended", "pretended", one, "", 1)})
    monkeypatch.setattr(tools, "BUILD", tmp_path / "build")
    monkeypatch.setattr(peers, "RESULTS", tmp_path / "results" / "peers.jsonl")
    return one


def test_a_run_is_a_line_for_each_case(pretended: type[Pretended], capsys: pytest.CaptureFixture[str]) -> None:
    """The table is printed, with what an acknowledgement means; directories are gone."""
    assert peers.main(["--seconds", "1", "--runs", "2"]) == 0
    kept = [json.loads(line) for line in peers.RESULTS.read_text(encoding="utf-8").splitlines()]
    assert [line["case"] for line in kept] == [PACED, FULL, SCHEDULE] * 2
    assert {(line["system"], line["version"], line["elections"]) for line in kept} == {("pretended", "1", 0)}
    printed = capsys.readouterr().out
    assert cells(printed, "pretended")[5] == "18"
    assert "pretended 1: acknowledged means nothing" in printed
    assert not list(tools.BUILD.iterdir())


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('out of sorts')", "out of sorts"),
        (STEPS, "ended with code 0"),
        ("print('RESULT {}')", "ended with code 0"),
        (GOOD.replace("accepted", "excepted"), "not a result"),
    ],
)
def test_a_load_that_fails_is_told(
    pretended: type[Pretended], program: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the exit code, and where its row would be."""
    pretended.program = program
    assert peers.main(["--quick", "--systems", "pretended"]) == peers.EXIT_FAILED
    printed = capsys.readouterr().out
    assert said in printed
    assert said in cells(printed, "pretended")[1]
    assert not peers.RESULTS.exists()


@pytest.mark.parametrize(
    ("problem", "code"),
    [(StartError("no"), peers.EXIT_FAILED), (tools.MissingError("javac is not installed"), peers.EXIT_MISSING)],
)
def test_a_system_that_does_not_start_is_told(
    pretended: type[Pretended], problem: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that misses a program of this machine has an exit code of its own, and says which."""
    pretended.problem = problem
    assert peers.main(["--quick", "--systems", "pretended"]) == code
    assert cells(capsys.readouterr().out, "pretended")[1] in (
        f"not measured: {problem}",
        f"not measured: run 1: {problem}",
    )


def test_what_was_measured_before_a_failure_is_kept(
    pretended: type[Pretended], capsys: pytest.CaptureFixture[str]
) -> None:
    """One case of three that fails takes nothing from the others, and is told."""
    pretended.program = f"import sys; sys.exit('over') if float(sys.argv[3]) == 0 else 0; {GOOD}"
    assert peers.main(["--seconds", "1", "--runs", "1", "--rate", "700"]) == peers.EXIT_FAILED
    printed = capsys.readouterr().out
    assert cells(printed, "pretended")[1:4] == ["-", "-", "-"] and cells(printed, "pretended")[4].startswith("5, 5")
    assert "pretended failed, run 1: full: the load program ended with code 1: over" in printed
    assert len(peers.RESULTS.read_text(encoding="utf-8").splitlines()) == 1


def test_what_is_missing_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a place to get it; a build that fails says how it ended."""
    monkeypatch.setattr(tools, "BUILD", tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    for fetch in (tools.nats_server, lambda: tools.go_load("twload"), tools.rocketmq_classpath):
        with pytest.raises(tools.MissingError, match=r"is not installed .*apt install"):
            fetch()
    with pytest.raises(tools.MissingError, match="such and such"):
        tools.run(sys.executable, "-c", "import sys; sys.exit('such and such')")
    with pytest.raises(tools.MissingError, match="no-such-program"):
        tools.run("no-such-program")


def test_versions_are_pinned() -> None:
    """Of everything that is fetched."""
    for package in (tools.NATS_SERVER, tools.PROTOC_GEN_GO, tools.PROTOC_GEN_GO_GRPC):
        assert package.partition("@")[2].startswith("v")
    assert all("==" in package for package in (*tools.REDIS_CLIENT, tools.REDIS_SERVER))
    assert tools.rocketmq_version().count(".") == 2
    assert {"nats.go", "grpc", "protobuf"} <= {
        line.split()[0].rpartition("/")[2]
        for line in (tools.SOURCES / "go" / "go.mod").read_text(encoding="utf-8").splitlines()
        if line.startswith("\t")
    }


@pytest.mark.slow
async def test_tickwheel_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three real nodes and the load program of the Python client: all that was accepted comes, once."""
    monkeypatch.setattr(tools, "BUILD", tmp_path)
    contender = peers.CONTENDERS["tickwheel-rows"]
    async with peers.serving(contender) as (system, _):
        one = await peers.measure(contender, system, PACED, Load("deliver", 1.0, 300.0, 64))
    assert 0 < one.accepted == one.delivered
    assert (one.missing, one.failed, one.early) == (0, 0, 0)
    assert one.servers_s > 0 and one.load_s > 0
