"""The outcome of a run of a load program: from the line that it prints to a record, and from records to the table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tickwheel.bench.measure import Counts, quantile, spread_out, steady_rate

BUCKET_S = 0.01
"""Width of a bucket of `arrived_10ms`."""
PACED, FULL, SCHEDULE = "paced", "full", "schedule"
"""Loads: sent at a given rate and delivered; sent as fast as accepted and delivered; sent as fast as accepted and due
much later."""
BEHIND_SHARE = 0.98
"""If less than this share of the wanted rate was sent, the table names the rate."""
BUSY_CORES = 0.2
"""If other processes kept more cores than this busy, the table says so."""
PROBLEM_CHARACTERS_MAX = 200
DASH = "-"


class ResultError(Exception):
    """A load program printed no usable result."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What was spent between the lines BEGIN and END."""

    wall_s: float
    servers_s: float
    """Processor time, as in the two fields below."""
    load_s: float
    machine_s: float
    elections: int | None
    """Counted from before the warm-up. None: the system holds none."""

    @property
    def others_cores(self) -> float:
        """Cores that were kept busy by something other than servers and load."""
        return max(0.0, self.machine_s - self.servers_s - self.load_s) / self.wall_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. Processor time is in seconds for a thousand messages."""

    system: str
    case: str
    rate_asked: float
    accepted: int
    failed: int
    accepted_rate: float
    delivered: int
    delivered_rate: float
    repeats: int
    missing: int
    early: int
    late_p50_ms: float
    late_p99_ms: float
    late_p99_9_ms: float
    late_max_ms: float
    elections: int | None
    servers_s: float
    load_s: float
    others_cores: float


def outcome(system: str, case: str, rate_asked: float, line: str, spent: Spent) -> Outcome:
    """The outcome by the JSON that follows RESULT. Raises ResultError."""
    try:
        said = json.loads(line)
        late: Counts = said["late_ms"]
        arrived: Counts = said["arrived_10ms"]
        accepted, failed, delivered = int(said["accepted"]), int(said["failed"]), int(said["delivered"])
        sent_s, repeats, missing = float(said["sent_s"]), int(said["repeats"]), int(said["missing"])
        buckets, numbers = spread_out(arrived)
        lateness, counts = spread_out(late)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultError(f"{system}, {case}: not a result: {line[:200]!r}") from error
    messages = accepted if case == SCHEDULE else delivered
    if not messages or sent_s <= 0:
        raise ResultError(f"{system}, {case}: none of {accepted + failed} messages was {_done(case)}")
    return Outcome(
        system=system,
        case=case,
        rate_asked=rate_asked,
        accepted=accepted,
        failed=failed,
        accepted_rate=accepted / sent_s,
        delivered=delivered,
        delivered_rate=steady_rate(buckets * BUCKET_S, numbers),
        repeats=repeats,
        missing=missing,
        early=int(counts[lateness < 0].sum()),
        late_p50_ms=quantile(late, 0.5),
        late_p99_ms=quantile(late, 0.99),
        late_p99_9_ms=quantile(late, 0.999),
        late_max_ms=quantile(late, 1.0),
        elections=spent.elections,
        servers_s=spent.servers_s / messages * 1_000,
        load_s=spent.load_s / messages * 1_000,
        others_cores=spent.others_cores,
    )


def _done(case: str) -> str:
    return "accepted" if case == SCHEDULE else "delivered"


def record(one: Outcome, settings: dict[str, object]) -> str:
    """A line of JSON; a figure without values is null."""
    values = {name: None if value != value else value for name, value in asdict(one).items()}
    return json.dumps({**settings, **values})


def table(order: Sequence[tuple[str, str]], outcomes: Sequence[Outcome], problems: dict[str, str], rate: float) -> str:
    """Markdown: a row for each system of `order` (name, label). It has the medians of its runs, and sums of what should
    be 0; or, from `problems`, why it was not measured."""
    head = (
        "system",
        "scheduled /s",
        "end to end /s",
        "p99 ms late",
        f"at {rate:,.0f}/s: p50, p99 ms late",
        "repeats",
        "elections",
        "missing",
        f"CPU s per 1,000 at {rate:,.0f}/s: servers + load",
        "at full rate",
    )
    rows: list[Sequence[str]] = [head, ["---"] * len(head)]
    for name, label in order:
        own = [one for one in outcomes if one.system == name]
        if own:
            rows.append((label, *_cells(own)))
        else:
            why = " ".join(problems.get(name, "not run").replace("|", "/").split())[:PROBLEM_CHARACTERS_MAX]
            rows.append((label, f"not measured: {why}", *[""] * (len(head) - 2)))
    widths = [max(len(row[place]) for row in rows if not row[1].startswith("not ")) for place in range(len(head))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cells(own: Sequence[Outcome]) -> list[str]:
    def of(case: str) -> list[Outcome]:
        return [one for one in own if one.case == case]

    def median(case: str, value: Callable[[Outcome], float], text: Callable[[float], str]) -> str:
        values = [value(one) for one in of(case)]
        values = [value for value in values if value == value]
        return text(statistics.median(values)) if values else DASH

    def total(value: Callable[[Outcome], int | None]) -> str:
        values = [count for one in own if (count := value(one)) is not None]
        return f"{sum(values):,}" if values else DASH

    def whole(value: float) -> str:
        return f"{value:,.0f}"

    def fine(value: float) -> str:
        return f"{value:.3f}"

    sent = [one.accepted_rate for one in of(PACED) if one.accepted_rate < BEHIND_SHARE * one.rate_asked]
    slower = f" (sent {statistics.median(sent):,.0f}/s)" if sent else ""
    p50, p99 = median(PACED, lambda one: one.late_p50_ms, whole), median(PACED, lambda one: one.late_p99_ms, whole)
    return [
        median(SCHEDULE, lambda one: one.accepted_rate, whole),
        median(FULL, lambda one: one.delivered_rate, whole),
        median(FULL, lambda one: one.late_p99_ms, whole),
        f"{p50}, {p99}{slower}",
        total(lambda one: one.repeats),
        total(lambda one: one.elections),
        total(lambda one: one.missing),
        *(
            f"{median(case, lambda one: one.servers_s, fine)} + {median(case, lambda one: one.load_s, fine)}"
            for case in (PACED, FULL)
        ),
    ]


def warnings(outcomes: Sequence[Outcome]) -> list[str]:
    """Reasons to trust the figures less."""
    found = []
    busy = [one for one in outcomes if one.others_cores > BUSY_CORES]
    if busy:
        most = max(busy, key=lambda one: one.others_cores)
        found.append(
            f"something else took more than {BUSY_CORES} cores in {len(busy)} of {len(outcomes)} loads, "
            f"at most {most.others_cores:.1f} ({most.system}, {most.case}): trust such figures less"
        )
    for one in outcomes:
        if one.failed:
            found.append(f"{one.system}, {one.case}: {one.failed:,} messages were not accepted")
        if one.early:
            found.append(f"{one.system}, {one.case}: {one.early:,} messages came before their time")
    return found
