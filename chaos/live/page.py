"""The report of a run as one page of HTML that needs nothing else: no script from elsewhere, no font, no image.

Owns the page's words, tables and colours; `timeline.py` draws the picture in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from tickwheel.chaos.live.report import FaultRow, fault_rows, headline, key_figures, replay_command
from tickwheel.chaos.live.timeline import draw
from tickwheel.chaos.live.verdict import PROMISES, Lateness, Verdict

STYLE_FILE = Path(__file__).with_name("page.css")
SCRIPT_FILE = Path(__file__).with_name("page.js")

ROLE_KEYS = (
    ("master", "master, serving"),
    ("aligning", "master, not serving"),
    ("slave", "slave"),
    ("candidate", "candidate"),
    ("recovering", "recovering"),
    ("halted", "takes no part"),
    ("silent", "silent"),
)
LINE_KEYS = (
    ("k-acknowledged", "acknowledged"),
    ("k-delivered", "delivered, all groups"),
    ("k-p50", "lateness p50"),
    ("k-p99", "p99"),
    ("k-worst", "worst"),
    ("k-broken", "broken promise"),
)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], kinds: Sequence[str] = ()) -> str:
    """Cells that start with "<" are HTML already. `kinds`: a class for each column."""
    kinds = kinds or [""] * len(head)

    def cell(tag: str, value: object, kind: str) -> str:
        text = str(value)
        return f'<{tag} class="{kind}">{text if text.startswith("<") else escape(text)}</{tag}>'

    parts = ["<table><thead><tr>", *(cell("th", name, kind) for name, kind in zip(head, kinds, strict=True))]
    parts.append("</tr></thead><tbody>")
    for row in rows:
        parts += ["<tr>", *(cell("td", value, kind) for value, kind in zip(row, kinds, strict=True)), "</tr>"]
    parts.append("</tbody></table>")
    return "".join(parts)


def _badge(text: str, kind: str) -> str:
    return f'<span class="badge {kind}">{escape(text)}</span>'


def _promises(verdict: Verdict) -> str:
    rows = []
    for promise in verdict.judged:
        words = PROMISES[promise]
        count = verdict.broken_counts.get(promise, 0)
        state = (
            _badge(f"broken {count:,} times" if count > 1 else "broken once", "bad")
            if count
            else _badge("held", "good")
        )
        rows.append((promise if promise.startswith("P") else "", words, state))
    return _table(("", "promise", "verdict"), rows)


def _broken(verdict: Verdict) -> str:
    if not verdict.broken:
        return ""
    rows = [(f"{one.at_s:.3f}", one.promise, f"<pre>{escape(one.text)}</pre>") for one in verdict.broken]
    return (
        "<section class='wide'><h2>What was broken</h2>" + _table(("s", "", "what"), rows, ("n", "", "")) + "</section>"
    )


def _checks(verdict: Verdict) -> str:
    if not verdict.checks:
        return ""
    rows = [
        (
            f"{check['at_s']:.1f}",
            check["what"],
            _badge("as expected", "good") if check["passed"] else _badge("not so", "bad"),
            check["seen"],
        )
        for check in verdict.checks
    ]
    head = ("at s", "expected", "", "seen")
    return f"<section class='wide'><h2>What was expected</h2>{_table(head, rows, ('n', '', '', ''))}</section>"


def _lateness(verdict: Verdict) -> str:
    def row(name: str, late: Lateness) -> tuple[object, ...]:
        return (
            name,
            f"{late.messages:,}",
            *(f"{value:,.0f}" for value in (late.p50, late.p99, late.p99_9, late.worst)),
        )

    rows = [row("outside faults", verdict.outside), row("inside", verdict.inside)]
    return _table(("lateness, ms", "messages", "p50", "p99", "p99.9", "worst"), rows, ("", "n", "n", "n", "n", "n"))


def _duplicates(verdict: Verdict) -> str:
    rows: list[tuple[object, ...]] = [
        (reason, f"{count:,}") for reason, count in sorted(verdict.duplicates.items(), key=lambda item: -item[1])
    ]
    return _table(("delivered again because", "deliveries"), rows or [("never", "0")], ("", "n"))


def _clock(verdict: Verdict) -> str:
    rows = (
        ("earliest message, before its time by true time", f"{verdict.earliest_ms:,.0f}"),
        ("most that a master said its time might be off", f"{verdict.clock_error_ms:,.0f}"),
        ("most that a serving master's time was ahead", f"{verdict.time_ahead_ms:,.0f}"),
        ("of that, beyond what it said", f"{verdict.time_beyond_ms:,.0f}"),
    )
    return _table(("clock", "ms"), rows, ("", "n"))


def _audit(verdict: Verdict) -> str:
    told = verdict.audit
    if not told:
        return ""
    rows = [
        ("scheduled", f"{told['scheduled']:,}"),
        ("lost", f"{told['lost']:,}"),
        ("early by true time", f"{told['early']:,}"),
        ("twice under one attempt", f"{told['duplicated']:,}"),
        ("without a master, ms", f"{told['without_master_ms']:,}"),
    ]
    return f"<h2>The audit's count</h2>{_table(('', ''), rows, ('', 'n'))}"


def _failovers(verdict: Verdict) -> str:
    longest = max((failover["without_ms"] for failover in verdict.failovers), default=1) or 1

    def row(failover: dict[str, Any]) -> tuple[object, ...]:
        silence = failover["silence_ms"]
        length = max(1, round(140 * failover["without_ms"] / longest))
        return (
            f"{failover['at_s']:.1f}",
            f"{failover['old']} → {failover['new']}",
            failover["term"],
            f"{failover['without_ms']:,}",
            f'<i class="length" style="width:{length}px"></i>',
            "" if silence is None else f"{silence:,}",
            failover["cause"] or _badge("no fault", "warn"),
        )

    head = ("at s", "master", "term", "without a master, ms", "", "no delivery, ms", "faults at that time")
    return _table(head, map(row, verdict.failovers), ("n", "line", "n", "n", "", "n", ""))


def _faults(rows: Iterable[FaultRow]) -> str:
    def cells(row: FaultRow) -> tuple[object, ...]:
        state = f"{row.effective} of {row.injected}"
        seen = state if row.effective == row.injected else _badge(state, "warn" if row.effective else "bad")
        return (f'<i class="dot f-{row.family}"></i> {escape(row.kind)}', seen, f"{row.evidence:,}", row.unit)

    return _table(("fault", "with effect", "seen", "of what"), map(cells, rows), ("", "", "n", ""))


def _data(verdict: Verdict) -> str:
    """The data that the crosshair reads, as JSON."""
    series = verdict.series
    data = {
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
    return json.dumps(data, separators=(",", ":")).replace("</", "<\\/")


def page(verdict: Verdict) -> str:
    """The whole document."""
    picture = draw(verdict)
    title, kind, words = headline(verdict)
    when = datetime.fromtimestamp(verdict.run.get("began_ms", 0) / 1_000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    run = verdict.run
    case = run.get("case", "")
    heading = f"tickwheel chaos clock: {case}" if case else "tickwheel chaos run"
    drawn = "" if case else f"faults {', '.join(run.get('families', [])) or 'none'}, seed {run.get('seed')}, "
    about = (
        f"{run.get('nodes', 0)} nodes, {run.get('seconds', 0):g} s of load at {run.get('rate', 0):g} messages/s, "
        f"{drawn}{when}"
    )
    tiles = "".join(
        f'<div class="tile {tile.kind}"><b>{escape(tile.value)}</b><span>{escape(tile.name)}</span></div>'
        for tile in key_figures(verdict)
    )
    keys = "".join(f'<span><i class="key r-{role}"></i>{text}</span>' for role, text in ROLE_KEYS)
    keys += "".join(f'<span><i class="key {kind_}"></i>{text}</span>' for kind_, text in LINE_KEYS)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>tickwheel chaos: {escape(title)}</title><style>{STYLE_FILE.read_text(encoding="utf-8")}</style></head>
<body><main>
<header><h1>{escape(heading)}</h1><span class="verdict {kind}">{escape(title)}</span></header>
<p class="about">{escape(about)}</p><p class="words">{escape(words)}</p>
<div class="tiles">{tiles}</div>
<section class="wide"><div class="picture">{picture.gutter}<div class="scroll">{picture.plot}</div></div>
<div class="keys">{keys}</div><div id="tip" hidden></div></section>
{_broken(verdict)}{_checks(verdict)}
<div class="columns"><section><h2>Promises</h2>{_promises(verdict)}
<h2>Duplicates</h2>{_duplicates(verdict)}<h2>Time</h2>{_clock(verdict)}{_audit(verdict)}</section>
<section><h2>Faults</h2>{_faults(fault_rows(verdict))}<h2>Lateness</h2>{_lateness(verdict)}</section></div>
<section class="wide"><h2>Failovers</h2>{_failovers(verdict)}</section>
<footer>Again: <code>{escape(replay_command(verdict))}</code></footer>
</main><script>const run={{seconds:{picture.seconds},width:{picture.width},...{_data(verdict)}}};
{SCRIPT_FILE.read_text(encoding="utf-8")}</script></body></html>
"""


def write_files(verdict: Verdict, directory: Path) -> None:
    """`report.json` and `report.html`."""
    (directory / "report.json").write_text(json.dumps(verdict.as_json(), indent=1), encoding="utf-8")
    (directory / "report.html").write_text(page(verdict), encoding="utf-8")
