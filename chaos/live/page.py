"""The report of a run as one page of HTML that needs nothing else: no script from elsewhere, no font, no image.

The template page.html.jinja has the page's words and tables; `timeline.py` draws the picture in it.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tickwheel.chaos.live.report import fault_rows, headline, key_figures, replay_command
from tickwheel.chaos.live.timeline import draw
from tickwheel.chaos.live.verdict import PROMISES, Verdict

FOLDER = Path(__file__).parent

KEYS = (
    ("r-master", "master, serving"),
    ("r-aligning", "master, not serving"),
    ("r-slave", "slave"),
    ("r-candidate", "candidate"),
    ("r-recovering", "recovering"),
    ("r-halted", "takes no part"),
    ("r-silent", "silent"),
    ("k-acknowledged", "acknowledged"),
    ("k-delivered", "delivered, all groups"),
    ("k-p50", "lateness p50"),
    ("k-p99", "p99"),
    ("k-worst", "worst"),
    ("k-broken", "broken promise"),
)
"""Class and name of the colours of roles and lines."""


def _script_data(verdict: Verdict) -> dict[str, Any]:
    """The values that the crosshair reads."""
    series = verdict.series
    return {
        "step": series.seconds[1] - series.seconds[0] if len(series.seconds) > 1 else 1,
        "acknowledged": series.acknowledged,
        "delivered": series.delivered,
        "p50": series.late_p50,
        "p99": series.late_p99,
        "worst": series.late_worst,
        "roles": verdict.roles,
        "faults": [
            [fault["from_s"], fault["until_s"], f"{fault['kind']} {', '.join(fault['struck'])}"]
            for fault in verdict.faults
        ],
    }


def _about(run: dict[str, Any]) -> str:
    """Size, load and time of the run in one line."""
    when = datetime.fromtimestamp(run.get("began_ms", 0) / 1_000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    families = ", ".join(run.get("families", [])) or "none"
    drawn = "" if run.get("case") else f"faults {families}, seed {run.get('seed')}, "
    return (
        f"{run.get('nodes', 0)} nodes, {run.get('seconds', 0):g} s of load at {run.get('rate', 0):g} messages/s, "
        f"{drawn}{when}"
    )


def page(verdict: Verdict) -> str:
    """The whole document."""
    files = FileSystemLoader(FOLDER)
    environment = Environment(
        loader=files, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = lambda value: f"{value:,.0f}"
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    title, kind, words = headline(verdict)
    picture = draw(verdict)
    case = verdict.run.get("case", "")
    duplicates = sorted(verdict.duplicates.items(), key=lambda item: -item[1])
    return environment.get_template("page.html.jinja").render(
        verdict=verdict,
        title=title,
        kind=kind,
        words=words,
        heading=f"tickwheel chaos clock: {case}" if case else "tickwheel chaos run",
        about=_about(verdict.run),
        tiles=key_figures(verdict),
        picture=picture,
        keys=KEYS,
        promises=PROMISES,
        duplicates=[(reason, f"{count:,}") for reason, count in duplicates] or [("never", "0")],
        faults=fault_rows(verdict),
        longest=max((failover["without_ms"] for failover in verdict.failovers), default=1) or 1,
        command=replay_command(verdict),
        data={"seconds": picture.seconds, "width": picture.width, **_script_data(verdict)},
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        script=(FOLDER / "page.js").read_text(encoding="utf-8"),
    )


def write_files(verdict: Verdict, directory: Path) -> None:
    """`report.json` and `report.html`."""
    (directory / "report.json").write_text(json.dumps(verdict.as_json(), indent=1), encoding="utf-8")
    (directory / "report.html").write_text(page(verdict), encoding="utf-8")
