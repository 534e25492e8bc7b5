"""Report of a measurement of losses: the figures of each step, and the sources of duplicates."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console

from tickwheel.chaos.live.losses import Kind, Losses
from tickwheel.chaos.printing import bare_table, headed

STEPS = (
    ("detection_ms", "detection"),
    ("election_ms", "election"),
    ("alignment_ms", "alignment"),
    ("delivery_ms", "first delivery"),
    ("total_ms", "in all"),
    ("silence_ms", "longest silence"),
)


def _figures(losses: Losses, name: str) -> dict[str, float]:
    values = losses.values(name)
    if not len(values):
        return {}
    named = (("least", 0), ("p50", 50), ("p90", 90), ("p99", 99), ("most", 100))
    return {label: round(float(np.percentile(values, percent)), 1) for label, percent in named}


def as_json(losses: Losses) -> dict[str, Any]:
    """Everything but the single deliveries."""
    return {
        "kind": losses.kind.value,
        "rate": losses.rate,
        "rounds": len(losses.losses),
        "seconds": round(losses.seconds, 1),
        "steps": {name: _figures(losses, name) for name, _ in STEPS},
        "losses": [
            {
                "old": loss.old,
                "new": loss.new,
                "term": loss.term,
                "duplicates": loss.duplicates,
                "starved_share": round(loss.starved_share, 3),
                **{name: None if getattr(loss, name) is None else round(getattr(loss, name), 1) for name, _ in STEPS},
            }
            for loss in losses.losses
        ],
        "acknowledged": losses.acknowledged,
        "delivered": losses.delivered,
        "lost": losses.lost,
        "lost_told": losses.lost_told,
        "early": losses.early,
        "duplicates": losses.duplicates,
        "unasked_elections": losses.unasked_elections,
    }


def print_losses(losses: Losses, console: Console) -> None:
    """The tables."""
    what = "handovers" if losses.kind is Kind.HANDOVER else f"losses ({losses.kind.value})"
    table = bare_table((f"{len(losses.losses)} {what}, ms", "seen", "least", "p50", "p90", "p99", "most"), range(1, 7))
    for name, label in STEPS:
        figures = _figures(losses, name)
        cells = (f"{figures[key]:,.0f}" if figures else "" for key in ("least", "p50", "p90", "p99", "most"))
        table.add_row(label, f"{len(losses.values(name))}", *cells, style="bold" if name == "total_ms" else "")
    console.print(table)
    sums = f"{losses.acknowledged:,} acknowledged in {losses.seconds:,.0f} s, lost {losses.lost:,}"
    sums += f", early {losses.early:,}, elections that nobody asked for {losses.unasked_elections}"
    console.print(f"\n{sums}", highlight=False)
    for text in losses.lost_told:
        console.print(headed("lost", "bold red", f" {text}"), highlight=False)
    starved = losses.values("starved_share")
    if len(starved):
        shares = f"{float(np.median(starved)):.0%} of the time at the median, {float(starved.max()):.0%} at most"
        console.print(f"the other nodes waited for a processor {shares}", highlight=False)
    console.print(f"delivered again: {sum(losses.duplicates.values()):,}", highlight=False)
    for source, count in sorted(losses.duplicates.items(), key=lambda item: -item[1]):
        console.print(f"  {count:,} {source}", highlight=False)
