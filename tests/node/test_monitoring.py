"""The files for Prometheus and Grafana: what they name exists, every alert is tested and explained.

Read here without a library for YAML: the files are written so plainly that a line tells what it is, and this test keeps
them so. promtool reads them as Prometheus does, where it is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tickwheel.node.metrics import METRICS, TIME_BOUNDS_MS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
GUIDE = ROOT / "docs" / "MONITORING.md"
DASHBOARD = ROOT / "deploy" / "grafana" / "tickwheel.json"

OF_PROMETHEUS = {"up": frozenset[str](), "ALERTS": frozenset({"alertname", "alertstate"})}
"""Series that Prometheus itself makes."""
OF_TARGETS = frozenset({"job", "instance"})
"""Labels that a scrape adds to each series."""
SEVERITIES = {"critical", "warning", "info"}

_NAME = re.compile(r"\b(?:tickwheel_\w+|process_\w+|up)\b")
_LABEL = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


def series_labels() -> dict[str, frozenset[str]]:
    """Each series that a node serves, with its own labels."""
    found: dict[str, frozenset[str]] = dict(OF_PROMETHEUS)
    for spec in METRICS:
        labels, name = frozenset(spec.labels), spec.exposed_name
        if spec.kind == "histogram":
            found |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            found[name + ("_info" if spec.kind == "info" else "")] = labels
    return found


SERIES = series_labels()


def faults(expression: str) -> list[str]:
    """Series and labels of an expression that no node serves."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expression)
    used = _NAME.findall(bare)
    found = [f"no metric {name}" for name in used if name not in SERIES]
    own = [SERIES[name] for name in used if name in SERIES]
    for name, selector in re.findall(r"(\w+)\{([^}]*)\}", expression):
        known = SERIES.get(name, frozenset()) | OF_TARGETS
        found += [f"{name} has no label {label}" for label in _LABEL.findall(selector) if label not in known]
    for group in _GROUPING.findall(bare):
        for label in filter(None, (part.strip() for part in group.split(","))):
            if label not in OF_TARGETS and not any(label in labels for labels in own):
                found.append(f"no label {label} in {used}")
    return found if used else [*found, "it names no metric"]


@dataclass
class Alert:
    """One of alerts.yml."""

    name: str
    keys: dict[str, str] = field(default_factory=dict)


def alerts() -> list[Alert]:
    """Of alerts.yml, in its order."""
    found: list[Alert] = []
    key = ""
    for line in (FOLDER / "alerts.yml").read_text(encoding="utf-8").splitlines():
        start = re.fullmatch(r"      - alert: (\w+)", line)
        entry = re.fullmatch(r" {8,10}(\w+):(?: (.*))?", line)
        if start:
            found.append(Alert(start[1]))
        elif found and entry:
            key = entry[1]
            text = entry[2] or ""
            found[-1].keys[key] = text[1:-1].replace("''", "'") if text.startswith("'") else text.removeprefix("|-")
        elif found and line.startswith(" " * 10):
            found[-1].keys[key] += line.strip() + "\n"
    return found


ALERTS = alerts()


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_names_what_exists_and_says_what_to_do(alert: Alert) -> None:
    """Metrics, labels, the labels in its texts, its severity, and a section of the guide."""
    assert faults(alert.keys["expr"]) == []
    assert alert.keys["severity"] in SEVERITIES
    assert re.fullmatch(r"\d+[smhd]", alert.keys.get("for", "0s"))
    grouped = {label.strip() for group in _GROUPING.findall(alert.keys["expr"]) for label in group.split(",")}
    kept = grouped or OF_TARGETS
    for text in (alert.keys["summary"], alert.keys["description"]):
        assert text
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= kept, text
    assert len(alert.keys["description"]) > 40
    anchor = alert.keys["runbook_url"].rpartition("/")[2]
    assert anchor == f"MONITORING.md#{alert.name.lower()}"


def test_every_alert_is_explained_and_tested_and_nothing_else_is() -> None:
    """The guide has a section for each alert; alerts_test.yml makes each one fire."""
    names = [alert.name for alert in ALERTS]
    assert len(names) == len(set(names)) > 30
    explained = re.findall(r"^### (Tickwheel\w+)$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert explained == names
    tested = (FOLDER / "alerts_test.yml").read_text(encoding="utf-8")
    assert set(re.findall(r'labels: \'\{alertname="(\w+)"\}', tested)) == set(names)
    for name, labels in re.findall(r"series: '(\w+)\{([^}]*)\}'", tested):
        assert set(_LABEL.findall(labels)) <= SERIES[name] | OF_TARGETS, (name, labels)


def test_links_of_the_guide_lead_somewhere() -> None:
    """Each points to a file, and to a heading in it."""
    for target in re.findall(r"\]\(([^)]+)\)", GUIDE.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (GUIDE.parent / path) if path else GUIDE
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in headings}, target


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Those that show something."""
    return (panel for panel in board["panels"] if panel["type"] != "row")


def plain(expression: str) -> str:
    """Without Grafana's own variables."""
    return expression.replace("$__rate_interval", "5m").replace("$job", "j").replace("$instance", "i")


def test_the_dashboard_shows_what_exists() -> None:
    """Metrics and labels of each query, variable and legend; each panel says what it shows and draws from the chosen
    data source; none lies over another."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [annotation["expr"] for annotation in board["annotations"]["list"] if "expr" in annotation]
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    for panel in panels(board):
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            used = {label for name in _NAME.findall(target["expr"]) for label in SERIES.get(name, ())} | OF_TARGETS
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= used, target
            expressions.append(target["expr"])
    assert [fault for expression in expressions for fault in faults(plain(expression))] == []
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert set(variables) == {"datasource", "job", "instance"} and variables["datasource"]["type"] == "datasource"
    for name in ("job", "instance"):
        metric, label = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", variables[name]["definition"]).groups()  # type: ignore[union-attr]
        assert metric in SERIES and label in OF_TARGETS


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(tickwheel_no_such_total[5m])", "no metric tickwheel_no_such_total"),
        ('tickwheel_state{role="x"}', "tickwheel_state has no label role"),
        ("sum by (le) (rate(tickwheel_lateness_seconds_count[5m]))", "no label le in"),
        ("tickwheel_lateness_seconds", "no metric tickwheel_lateness_seconds"),
        ("vector(1)", "it names no metric"),
    ],
)
def test_the_check_finds_what_is_wrong(expression: str, fault: str) -> None:
    """A check that finds nothing proves nothing."""
    assert any(fault in found for found in faults(expression))


def test_thresholds_lie_on_bounds_of_their_histograms() -> None:
    """A percentile between two bounds is a guess; an alert compares with a bound."""
    bounds_s = [bound / 1_000 for bound in TIME_BOUNDS_MS]
    for alert in ALERTS:
        for metric, limit in re.findall(
            r"rate\((\w+)_bucket\[\w+\]\)\)\) > ([\d.]+)", alert.keys["expr"].replace("\n", " ")
        ):
            assert float(limit) in bounds_s, (alert.name, metric)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: apt install prometheus)")
def test_promtool_agrees() -> None:
    """Prometheus reads rules and scrape configuration, and each alert fires when it should and not before."""
    for command in (
        ("check", "rules", "alerts.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "alerts_test.yml"),
    ):
        done = subprocess.run(
            ["promtool", *command], cwd=FOLDER, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
