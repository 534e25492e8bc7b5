"""The verdict over a run, from its history alone: which promises were broken, and the figures.

Shares no code with a node: it reads what workload and supervisor wrote down. `verdict_messages.py` judges what became
of messages, `verdict_nodes.py` what the nodes said; this module puts both together, decides whether the run counts at
all, and gives the result its form. Most limits of P11 are judged by the simulation, which looks at them from inside.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tickwheel.chaos.live.history import Record
from tickwheel.chaos.live.verdict_messages import Messages
from tickwheel.chaos.live.verdict_nodes import Failover, FaultWindow, Nodes

PROMISES = {
    "P1": "no loss",
    "P2": "no invention",
    "P3": "never early",
    "P4": "soon, after the heal",
    "P5": "few duplicates",
    "P6": "monotone cursor",
    "P7": "one master",
    "P8": "same state",
    "P9": "definite cancel",
    "P10": "live",
    "P11": "bounded",
    "process": "nodes stay up",
    "audit": "the audit says the same",
    "clock": "the nodes say what is wrong with clocks",
}
"""Titles of the judged promises. `process`: a node ends if it is killed or its disk fails, and only then."""

RATE_LEAST = 100.0
"""Acknowledged messages in each full second before the first fault; under that a run is void."""
MARKS = ("run", "load", "heal", "drain", "drained", "end", "done")
SINGLE = ("run", "broken", "drained", "topics")
"""Records that are looked at once more after the whole was read."""
KEPT_MAX = 20
"""Broken promises told in words, for each promise; all are counted."""
RECOVERY_MS = 2_000.0
"""How long after a fault's end lateness still counts as inside its window."""
BUCKET_MS = 500.0


@dataclass(frozen=True, slots=True)
class Broken:
    """One broken promise."""

    promise: str
    at_s: float
    """Since the load began."""
    text: str


@dataclass(frozen=True, slots=True)
class Lateness:
    """Lateness of first deliveries, in ms."""

    messages: int = 0
    p50: float = 0.0
    p99: float = 0.0
    p99_9: float = 0.0
    worst: float = 0.0


@dataclass(slots=True)
class Series:
    """Over time, one value for each BUCKET_MS since the load began."""

    seconds: list[float] = field(default_factory=list)
    acknowledged: list[float] = field(default_factory=list)
    """Messages a second."""
    delivered: list[float] = field(default_factory=list)
    settled: list[float] = field(default_factory=list)
    late_p50: list[float | None] = field(default_factory=list)
    late_p99: list[float | None] = field(default_factory=list)
    late_worst: list[float | None] = field(default_factory=list)


@dataclass(slots=True)
class Findings:
    """Findings by message id, which a second judge can confirm (`second_opinion.py`)."""

    lost: set[tuple[int, str]] = field(default_factory=set)
    """Id, group."""
    early: set[tuple[int, str]] = field(default_factory=set)
    duplicated: set[tuple[int, str, int]] = field(default_factory=set)
    """Id, group, attempt."""
    without_master_ms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """All that a report shows. Times in seconds since the load began, unless a name says otherwise."""

    run: dict[str, Any]
    void: str = ""
    """Why the run counts for nothing; empty if it counts."""
    broken: list[Broken] = field(default_factory=list)
    broken_counts: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    duplicates: dict[str, int] = field(default_factory=dict)
    outside: Lateness = field(default_factory=Lateness)
    inside: Lateness = field(default_factory=Lateness)
    """Lateness outside and inside the windows of faults."""
    failovers: list[dict[str, Any]] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    roles: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    heard_until: dict[str, float] = field(default_factory=dict)
    marks: dict[str, float] = field(default_factory=dict)
    series: Series = field(default_factory=Series)
    dead_letters: int = 0
    earliest_ms: float = 0.0
    """How much before its time by true time the earliest message came; 0: none did."""
    starved_share: float = 0.0
    """How much of the time the nodes were ready to run and had no processor."""
    unjudged_ms: list[float] = field(default_factory=list)
    """Times without a master over which P10 was not judged, since the nodes had no processor."""
    clock_error_ms: float = 0.0
    """How far a master said at most that its time might be off."""
    time_ahead_ms: float = 0.0
    """How far the time of a serving master was ahead of true time at most."""
    time_beyond_ms: float = 0.0
    """The same without what it said that its time might be off by."""
    healed_s: float | None = None
    statuses: int = 0
    findings: Findings = field(default_factory=Findings)
    """Not part of the report."""
    audit: dict[str, Any] = field(default_factory=dict)
    """The audit's figures and its disagreements; empty if it was not asked."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    """Expectations of a script and their outcomes; empty if no script was played."""

    @property
    def holds(self) -> bool:
        """Nothing was broken."""
        return not self.broken_counts

    @property
    def judged(self) -> list[str]:
        """The promises that this run was judged by."""
        asked = {"audit": bool(self.audit), "clock": bool(self.checks)}
        return [promise for promise in PROMISES if asked.get(promise, True) or promise in self.broken_counts]

    @property
    def without_effect(self) -> list[dict[str, Any]]:
        """Faults without evidence of an effect."""
        return [fault for fault in self.faults if not fault["count"]]

    @property
    def elections_without_fault(self) -> int:
        """Failovers that no fault explains."""
        return sum(not failover["cause"] for failover in self.failovers)

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        told = asdict(self)
        del told["findings"]
        return {
            **told,
            "holds": self.holds,
            "without_effect": [fault["number"] for fault in self.without_effect],
            "elections_without_fault": self.elections_without_fault,
        }


def judge(history: Iterable[Record]) -> Verdict:
    """The verdict over a whole history, sorted by time. Read once, since it may be large."""
    verdict = Verdict({})
    counts: Counter[str] = Counter()
    marks: dict[str, float] = {}
    records: list[Record] = []
    told: list[tuple[str, float, str]] = []
    last_ms = 0.0

    def broken(promise: str, at_ms: float, text: str) -> None:
        counts[promise] += 1
        if counts[promise] <= KEPT_MAX:
            told.append((promise, at_ms, text))

    messages, nodes = Messages(broken), Nodes(broken)
    for record in history:
        last_ms = record["t"]
        if record["k"] in MARKS:
            marks[record["k"]] = last_ms
        if record["k"] in SINGLE:
            records.append(record)
        messages.observe(record)
        nodes.observe(record)
    run = next((record for record in records if record["k"] == "run"), {})
    load_ms = marks.get("load", last_ms)
    verdict.run = {name: value for name, value in run.items() if name not in ("t", "k")}
    verdict.run["began_ms"] = run.get("t", 0.0)
    messages.finish(marks.get("end", last_ms), marks.get("heal", last_ms), nodes.clock_error_ms)
    failovers = nodes.finish(run.get("nodes", 0), load_ms, marks.get("drained", last_ms))
    verdict.broken = [Broken(promise, round((at_ms - load_ms) / 1_000, 3), text) for promise, at_ms, text in told]
    verdict.broken.sort(key=lambda one: one.at_s)
    verdict.broken_counts = dict(sorted(counts.items()))
    windows = list(nodes.faults.values())
    verdict.void = _void(records, messages, windows, marks)
    _fill(verdict, messages, nodes, failovers, records, load_ms)
    verdict.outside, verdict.inside = _lateness(messages, windows)
    verdict.series = _series(messages, load_ms, marks.get("end", last_ms))
    verdict.marks = {name: round((at_ms - load_ms) / 1_000, 3) for name, at_ms in marks.items()}
    return verdict


def _void(records: Iterable[Record], messages: Messages, faults: list[FaultWindow], marks: dict[str, float]) -> str:
    for record in records:
        if record["k"] == "broken":
            return f"the workload failed: {record['reason']}"
        if record["k"] == "drained" and record["code"] != 0:
            return f"the workload ended with code {record['code']}"
    missing = [name for name in ("load", "heal", "drained", "end") if name not in marks]
    if missing:
        return f"the run was not carried out to its end: no {', '.join(missing)}"
    first_ms = min((fault.from_ms for fault in faults), default=marks["heal"])
    seconds = int((first_ms - marks["load"]) // 1_000)
    if seconds < 1:
        return "the first fault came before a second of load had passed"
    rates = [0.0] * seconds
    for at_ms, count in messages.acknowledged_ms:
        place = int((at_ms - marks["load"]) // 1_000)
        if 0 <= place < seconds:
            rates[place] += count
    if min(rates) < RATE_LEAST:
        slowest = rates.index(min(rates))
        return (
            f"the load fell to {min(rates):,.0f} messages/s before the first fault (second {slowest + 1}); "
            f"at least {RATE_LEAST:g} are needed"
        )
    return ""


def _fill(
    verdict: Verdict,
    messages: Messages,
    nodes: Nodes,
    failovers: list[Failover],
    records: Sequence[Record],
    load_ms: float,
) -> None:
    def seconds(at_ms: float) -> float:
        return round((at_ms - load_ms) / 1_000, 3)

    verdict.counts = dict(messages.counts)
    verdict.duplicates = dict(messages.duplicates)
    verdict.findings = Findings(
        messages.lost, messages.early, messages.duplicated, [failover.without_ms for failover in failovers]
    )
    verdict.healed_s = nodes.healed_s
    verdict.statuses = nodes.statuses
    verdict.starved_share = round(nodes.starved_share(load_ms, math.inf), 3)
    verdict.unjudged_ms = [round(ms) for ms in nodes.unjudged_ms]
    verdict.earliest_ms = round(max(0.0, messages.earliest_ms), 1)
    verdict.time_ahead_ms, verdict.time_beyond_ms = nodes.ahead_ms, round(nodes.beyond_ms, 1)
    verdict.clock_error_ms = max(nodes.clock_errors_ms.values(), default=0.0)
    verdict.roles = {
        node: [(seconds(at_ms), role) for at_ms, role in told] for node, told in sorted(nodes.roles.items())
    }
    verdict.heard_until = {node: seconds(at_ms) for node, at_ms in nodes.last_heard_ms.items()}
    verdict.faults = [_told(window, seconds) for window in nodes.faults.values()]
    verdict.failovers = [
        {
            **_told(failover, seconds),
            "without_ms": round(failover.without_ms),
            "silence_ms": _silence(messages, failover),
        }
        for failover in failovers
    ]
    topics: dict[str, int] = next((record["topics"] for record in records if record["k"] == "topics"), {})
    verdict.dead_letters = sum(count for name, count in topics.items() if name.startswith("%"))


def _told(one: FaultWindow | Failover, seconds: Callable[[float], float]) -> dict[str, Any]:
    """Its fields, moments in seconds since the load began. A fault that has not ended ends at None."""
    told = asdict(one)
    for name in [name for name in told if name in ("from_ms", "until_ms", "at_ms")]:
        at_ms = told.pop(name)
        told[name.replace("_ms", "_s")] = None if math.isinf(at_ms) else seconds(at_ms)
    return told


def _silence(messages: Messages, failover: Failover) -> int | None:
    """Time from the last delivery of any older term to the first of the new one, ms."""
    first_ms = messages.first_of_term.get(failover.term)
    before = [at_ms for term, at_ms in messages.last_of_term.items() if term < failover.term]
    if first_ms is None or not before:
        return None
    return round(max(0.0, first_ms - max(before)))


def _figures(late: NDArray[np.float64]) -> Lateness:
    if not len(late):
        return Lateness()
    p50, p99, p99_9 = (round(float(value), 1) for value in np.percentile(late, (50, 99, 99.9)))
    return Lateness(len(late), p50, p99, p99_9, round(float(late.max()), 1))


def _lateness(messages: Messages, faults: list[FaultWindow]) -> tuple[Lateness, Lateness]:
    came, due, late = np.array(messages.lateness or np.zeros((0, 3))).T
    struck = np.zeros(len(late), bool)
    for fault in faults:
        struck |= (came >= fault.from_ms) & (due <= fault.until_ms + RECOVERY_MS)
    return _figures(late[~struck]), _figures(late[struck])


def _series(messages: Messages, load_ms: float, end_ms: float) -> Series:
    buckets = max(1, int((end_ms - load_ms) // BUCKET_MS) + 1)

    def rates(points: list[tuple[float, int]]) -> list[float]:
        sums = [0.0] * buckets
        for at_ms, count in points:
            place = int((at_ms - load_ms) // BUCKET_MS)
            if 0 <= place < buckets:
                sums[place] += count * 1_000 / BUCKET_MS
        return sums

    by_bucket: list[list[float]] = [[] for _ in range(buckets)]
    for at_ms, _, late_ms in messages.lateness:
        place = int((at_ms - load_ms) // BUCKET_MS)
        if 0 <= place < buckets:
            by_bucket[place].append(late_ms)

    def quantile(percent: float) -> list[float | None]:
        return [round(float(np.percentile(late, percent)), 1) if late else None for late in by_bucket]

    return Series(
        [round(place * BUCKET_MS / 1_000, 3) for place in range(buckets)],
        rates(messages.acknowledged_ms),
        rates(messages.got_ms),
        rates(messages.settled_ms),
        quantile(50),
        quantile(99),
        quantile(100),
    )
