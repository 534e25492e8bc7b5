"""The page of the alerts: what each says, and the way to what to do."""

from __future__ import annotations

import re

import yaml

from scripts.docs_site.markdown import plain
from scripts.docs_site.pages import ROOT


def alerts() -> dict[str, str]:
    """Every alert with what it says and the way to what to do."""
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    lines = ["# Alerts\n", "Each alert of `deploy/prometheus/alerts.yml`. Its name leads to what to do.\n"]
    for group in rules["groups"]:
        lines.append(f"## {group['name'].removeprefix('tickwheel-').capitalize()}\n")
        lines.append("| alert | severity | fires after | says |\n|---|---|---|---|")
        for rule in group["rules"]:
            name = rule["alert"]
            says = re.sub(r"\{\{ \$(?:labels\.)?(\w+).*?\}\}", r"<\1>", rule["annotations"]["summary"])
            anchor = rule["annotations"]["runbook_url"].partition("#")[2]
            after = rule.get("for", "at once")
            lines.append(
                f"| [{name}](monitoring.md#{anchor}) | {rule['labels']['severity']} | {after} | {plain(says)} |"
            )
        lines.append("")
    return {"alerts.md": "\n".join(lines)}
