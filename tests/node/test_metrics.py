"""Metrics: the table becomes a page that Prometheus reads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tickwheel.node.metrics import METRICS, HistogramValue, MetricValue, reference, registry_of


def page() -> bytes:
    """What Prometheus reads, with a value for every metric."""
    values: dict[str, MetricValue] = {}
    for spec in METRICS:
        values[spec.name] = {tuple("x" for _ in spec.labels): 2.0} if spec.labels else 2.0
        if spec.kind == "histogram":
            values[spec.name] = HistogramValue((0.001, 0.01), (1, 2, 3), 0.5)
    return generate_latest(registry_of(lambda: values))


def test_page_parses_with_every_metric() -> None:
    """Each metric of the table comes out under its name with its labels."""
    families = list(text_string_to_metric_families(page().decode()))
    samples = {sample.name: sample for family in families for sample in family.samples}
    assert samples["tickwheel_lateness_seconds_count"].value == 6
    assert samples["tickwheel_scheduled_messages_total"].value == 2
    assert samples["tickwheel_peer_connected"].labels == {"peer": "x"}
    assert len(families) == len(METRICS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: apt install prometheus)")
def test_promtool_finds_nothing_to_say() -> None:
    """Names, units, types and help texts of every metric."""
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=page(), capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_reference_is_fresh() -> None:
    """docs/METRICS.md is what the table says."""
    assert (Path(__file__).parents[2] / "docs" / "METRICS.md").read_text(encoding="utf-8") == reference()
