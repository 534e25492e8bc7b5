"""What a run of a load program came to: from the line that it prints to a record, and from records to the table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tickwheel.bench.measure import Counts, quantile, spread_out, steady_rate

BUCKET_S = 0.01
"""Width of a bucket of `arrived_10ms`."""
PACED, FULL, SCHEDULE = "paced", "full", "schedule"
"""At a given rate, delivered; as fast as they are accepted, delivered; as fast as they are accepted, due much later."""
BEHIND_SHARE = 0.98
"""Sent at less than this of the rate asked for: the table says at which."""
BUSY_CORES = 0.2
"""Of others on the machine; with more, the table says so."""
PROBLEM_CHARACTERS_MAX = 200
DASH = "-"


class ResultError(Exception):
    """A load program did not say what it came to."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Between BEGIN and END."""

    wall_s: float
    servers_s: float
    """Of processor."""
    load_s: float
    machine_s: float
    elections: int | None
    """From before the warm-up on."""

    @property
    def others_cores(self) -> float:
        """Processors that something else than servers and load kept busy."""
        return max(0.0, self.machine_s - self.servers_s - self.load_s) / self.wall_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. Times in ms, processor time in seconds a thousand messages."""

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
    """From what stands behind RESULT. Raises ResultError."""
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
    """A line of JSON; what there was nothing of is null."""
    values = {name: None if value != value else value for name, value in asdict(one).items()}
    return json.dumps({**settings, **values})


def table(order: Sequence[tuple[str, str]], outcomes: Sequence[Outcome], problems: dict[str, str], rate: float) -> str:
    """Markdown: a row for each system of `order` (name, label) with medians of its runs, and what must not be counted
    over all of them; or, by `problems`, why there is nothing."""
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
    """What makes figures worth less."""
    found = []
    busy = [one for one in outcomes if one.others_cores > BUSY_CORES]
    if busy:
        most = max(busy, key=lambda one: one.others_cores)
        found.append(
            f"something else took more than {BUSY_CORES} cores in {len(busy)} of {len(outcomes)} loads, "
            f"at most {most.others_cores:.1f} ({most.system}, {most.case}): such figures are worth less"
        )
    for one in outcomes:
        if one.failed:
            found.append(f"{one.system}, {one.case}: {one.failed:,} messages were not accepted")
        if one.early:
            found.append(f"{one.system}, {one.case}: {one.early:,} messages came before their time")
    return found
