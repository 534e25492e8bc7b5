"""The table of results in docs/BENCHMARK.md: what bench/results keeps, so that the two cannot differ. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tickwheel.bench.figures import COLUMNS, number_text

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
HEAD = "| load | measured (target) | day | load average before |\n|---|---|---|---|"
_LABELS = {name: label.removesuffix(" ms").removesuffix(" /s") for name, label in COLUMNS.items()}
_UNITS = {"msg": "", "msg/s": "/s", "call/s": "/s", "unit/s": " units/s", "x": "x", "": ""}


def results_table(records: Iterable[Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """Markdown: a row for each load, but for those that are only parts of others: no target, no rate, no lateness.

    Records are those of `bench/results/latest.json`; titles say what each case does, on a row before its loads.
    """
    cases: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for record in records:
        cases.setdefault(record["case"], {}).setdefault(record["load"], []).append(record)
    lines = [HEAD]
    for case, loads in cases.items():
        lines.append(f"| **{titles[case]}** | | | |")
        shown = {load: figures for load, figures in loads.items() if any(map(_counts, figures))} or loads
        for load, figures in shown.items():
            settings = figures[0]["settings"]
            before = settings["load_before"]
            text = ", ".join(_text(figure) for figure in figures)
            lines.append(f"| {load} | {text} | {settings['day']} | {'-' if before is None else before} |")
    return "\n".join(lines)


def with_table(document: str, table: str) -> str:
    """The document with the table between its marks. Raises ValueError if it lacks them."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the document has no {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n\n{table}\n\n{END}{tail}"


def _counts(record: Mapping[str, Any]) -> bool:
    return bool(record["target"]) or record["figure"] in COLUMNS


def _text(record: Mapping[str, Any]) -> str:
    name, unit, value = record["figure"], record["unit"], record["value"]
    number = "none" if value is None else number_text(value) + _UNITS.get(unit, f" {unit}")
    target = f" ({record['target']})" if record["target"] else ""
    return f"{_LABELS.get(name, name.replace('_', ' '))} {number}{target}"
