"""The audit's opinion of a live run, held against the verdict: two judges that share no code but the history.

Owns the comparison. The audit runs on Spark, in a process of its own (`python -m tickwheel.chaos.live.second_opinion
DIR`): Java is begun by a fork, which the threads of gRPC would not survive. What both count: which messages a group
never got, which came more than EARLY_MS before their time by true time, whatever the nodes knew of theirs, which came
to a group twice under one attempt, and for how long there was no master.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tickwheel.chaos.live.verdict import Broken, Findings, Verdict

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tickwheel.chaos.live.audit_export import Exported

EVENTS, REPORT = "events", "audit"
"""Folders of a run's directory: what the audit reads, and what it writes."""
EARLY_MS = 5
AUDIT_S_MAX = 600.0
MASTER_MS = 250.0
"""Most that the two may differ by at each failover: the verdict ignores an old master once a new one was heard."""
TOLD_MAX = 3


class AuditFailed(Exception):
    """There is no second opinion; the text says why."""


@dataclass(slots=True)
class Opinion:
    """The findings of the audit, and its differences from the verdict."""

    scheduled: int
    findings: Findings
    differences: list[str] = field(default_factory=list)


def compare(of_verdict: Findings, of_audit: Findings) -> list[str]:
    """Their differences, in words; empty if they agree."""
    differences = []
    for name in ("lost", "early", "duplicated"):
        one, other = getattr(of_verdict, name), getattr(of_audit, name)
        for who, alone in (("verdict", one - other), ("audit", other - one)):
            if alone:
                some = ", ".join(map(str, sorted(alone)[:TOLD_MAX]))
                differences.append(f"{name}: {len(alone):,} for the {who} alone, such as {some}")
    gaps, others = of_verdict.without_master_ms, of_audit.without_master_ms
    if abs(sum(gaps) - sum(others)) > MASTER_MS * max(1, len(gaps), len(others)):
        told = f"{sum(gaps):,.0f} ms in {len(gaps)} times for the verdict, {sum(others):,.0f} ms in {len(others)}"
        differences.append(f"time without a master: {told} for the audit")
    return differences


def check_extra() -> None:
    """Raises AuditFailed if the audit could not run on this machine."""
    try:
        from tickwheel.pipeline.session import NoJavaError, find_java
    except ImportError as error:
        raise AuditFailed(f"the audit needs the extra spark (pip install 'tickwheel[spark]'): {error}") from error
    try:
        find_java()
    except NoJavaError as error:
        raise AuditFailed(str(error)) from error


def export(directory: Path) -> Exported | None:
    """The history of a run as events, in its directory; None without pyarrow."""
    try:
        from tickwheel.chaos.live.audit_export import export_history
    except ImportError:
        return None
    return export_history(directory, directory / EVENTS)


def findings_of(answer: dict[str, Any]) -> Findings:
    """The findings in an answer of `judged`, for `compare`."""
    return Findings(
        {(id64, group) for id64, group in answer["lost"]},
        {(id64, group) for id64, group in answer["early"]},
        {(id64, group, attempt) for id64, group, attempt in answer["duplicated"]},
        answer["without_master_ms"],
    )


def opinion(directory: Path, exported: Exported, verdict: Verdict) -> Opinion:
    """Run the audit over what was exported, and compare. Raises AuditFailed."""
    load_ms = verdict.run["began_ms"] + 1_000 * (verdict.marks.get("load", 0.0) - verdict.marks.get("run", 0.0))
    command = [sys.executable, "-P", "-m", __name__, str(directory), str(exported.until_ms), str(int(load_ms))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=AUDIT_S_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise AuditFailed(f"the audit did not end within {AUDIT_S_MAX:g} s") from error
    if done.returncode:
        raise AuditFailed(f"the audit ended with code {done.returncode}: {done.stderr[-500:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found = findings_of(answer)
    return Opinion(answer["scheduled"], found, compare(verdict.findings, found))


def add_opinion(verdict: Verdict, second: Opinion) -> None:
    """Add the opinion to the verdict. Any disagreement breaks the run, whichever of the two is wrong."""
    found = second.findings
    verdict.audit = {
        "scheduled": second.scheduled,
        "lost": len(found.lost),
        "early": len(found.early),
        "duplicated": len(found.duplicated),
        "without_master_ms": round(sum(found.without_master_ms)),
        "differences": second.differences,
    }
    for difference in second.differences:
        verdict.broken.append(
            Broken("audit", verdict.marks.get("end", 0.0), f"audit and verdict disagree: {difference}")
        )
        verdict.broken_counts["audit"] = verdict.broken_counts.get("audit", 0) + 1


def judged(spark: SparkSession, events: Path, until_ms: int, load_ms: int, report_to: Path) -> dict[str, Any]:
    """The audit's answer over exported events, as JSON has it; its report lies in `report_to` afterwards."""
    from tickwheel.pipeline.audit import AuditConfig, audit, report

    found = audit(spark.read.parquet(str(events)), AuditConfig(until_ms, EARLY_MS))
    report(found, report_to)
    return {
        "scheduled": found.scheduled,
        "lost": [[row.id, row.group] for row in found.lost.collect()],
        "early": [[row.id, row.group] for row in found.early.select("id", "group").distinct().collect()],
        "duplicated": [[row.id, row.group, row.attempt] for row in found.duplicated.collect()],
        "without_master_ms": [until - begin for _, begin, until in found.without_master if until >= load_ms],
    }


def main() -> int:
    """Audit one run's events; one line of JSON."""
    from tickwheel.pipeline.session import SessionConfig, build_session

    directory, until_ms, load_ms = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    spark = build_session(SessionConfig(master="local[2]", quick=True, shuffle_partitions=4))
    try:
        print(json.dumps(judged(spark, directory / EVENTS, until_ms, load_ms, directory / REPORT)))
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
