"""The names that documents give exist: fields of the configuration, metrics, and other names in code. Values that stand
beside a name are those of the code."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.imports import FOLDERS, ROOT, modules
from tickwheel.node.config.read import environment_name, specs
from tickwheel.node.config.sections import NodeConfig
from tickwheel.node.metrics import METRICS
from tickwheel.node.state.settings import Settings

DOCUMENTS = [ROOT / "README.md", ROOT / "replication/DESIGN.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_OTHERS = {
    "BENCHMARK.md": {"io_submit"},
    "COMING_FROM.md": None,
    "HTTP.md": {"OTEL_"},
    "MONITORING.md": {"retention_removed"},
    "PIPELINE.md": {"current_timestamp", "unix_millis"},
    "WORDS.md": None,
    "transport.md": {"https_proxy"},
}
"""Names of other systems, parts of names, and names that are not used, by document; None: anything is."""
ATTRIBUTES = {"delivery.unique_key"}
"""Of objects that are called as a section is."""
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "Mi": 1 << 20}


def in_prose() -> Iterator[tuple[str, str]]:
    """Each document's name, and its text without blocks of code."""
    for path in DOCUMENTS:
        yield path.name, re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def text_of_the_code() -> str:
    """All of it, and what is deployed."""
    kinds = {".proto", ".toml", ".yaml", ".yml", ".js", ".json", ".service", ".sh", ".tpl"}
    paths: list[Path] = [path for folder in FOLDERS for _, path in modules(folder)]
    paths += [
        path
        for folder in ("proto", "console/static", "deploy", "scripts", "examples", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in kinds | {".py"}
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in [*paths, ROOT / "pyproject.toml", ROOT / "Makefile"])


def known_names() -> set[str]:
    """All words of the code, and names that it puts together."""
    words = set(re.findall(r"\w+", text_of_the_code()))
    words |= {environment_name(name) for name in specs()}
    words |= {spec.exposed_name + end for spec in METRICS for end in ("", "_info", "_bucket", "_sum", "_count")}
    words |= {f"TICKWHEEL_TLS_{name}" for name in ("CA", "CERT", "KEY", "NAME")}
    words |= {"tickwheel_gateway_posts_total", "tickwheel_gateway_requests_total"}
    words |= {path.stem for path in (ROOT / "tests").rglob("*.py")}
    return words


def test_names_exist() -> None:
    """Those with an underscore, in the text between backticks."""
    known, wrong = known_names(), []
    for document, text in in_prose():
        allowed = OF_OTHERS.get(document, set())
        if allowed is None:
            continue
        for span in re.findall(r"`([^`\n]+)`", text):
            for name in re.findall(r"\b[A-Za-z]\w*_\w*", span):
                begins = name.endswith("_") and any(word.startswith(name) for word in known)  # as `tickwheel_bulk_...`
                if name not in known and name not in allowed and not begins:
                    wrong.append(f"{document}: {name}")
    assert not wrong


def test_fields_of_the_configuration_exist() -> None:
    """`section.field`, wherever the section is one."""
    fields = set(specs())
    sections = {name.partition(".")[0] for name in fields}
    wrong = [
        f"{document}: {name}"
        for document, text in in_prose()
        for name in re.findall(r"`([a-z]+\.[a-z]+_[a-z_]+)`", text)
        if name.partition(".")[0] in sections and name not in fields | ATTRIBUTES
    ]
    assert not wrong


def constants() -> dict[str, set[int]]:
    """Constants of the code that are whole numbers."""
    found: dict[str, set[int]] = {}
    for folder in FOLDERS:
        for _, path in modules(folder):
            for name, value in re.findall(
                r"^([A-Z][A-Z0-9_]+)(?:: [\w\[\]]+)? = ([\d_]+(?: << \d+)?)$",
                path.read_text(encoding="utf-8"),
                re.MULTILINE,
            ):
                number, _, shift = value.partition(" << ")
                found.setdefault(name, set()).add(int(number) << int(shift or 0))
    return found


def test_values_beside_names_are_those_of_the_code() -> None:
    """`NAME` (1,000), for constants, replicated settings and fields of the configuration."""
    known = constants()
    for setting in dataclasses.fields(Settings):
        if isinstance(setting.default, int):
            known.setdefault(setting.name, set()).add(setting.default)
    for section, fields in dataclasses.asdict(NodeConfig()).items():
        for name, default in fields.items():
            if isinstance(default, int):
                known.setdefault(f"{section}.{name}", set()).add(default)
                known.setdefault(name, set()).add(default)
    wrong, compared = [], 0
    for document, text in in_prose():
        for name, value, unit in re.findall(r"`([\w.]+)` \(([\d,]+)(?: (KiB|MiB|GiB|Mi|ms))?[);,]", text):
            if name in known:
                compared += 1
                if int(value.replace(",", "")) * UNITS.get(unit, 1) not in known[name]:
                    wrong.append(f"{document}: {name} ({value} {unit}), in the code {sorted(known[name])}")
    assert not wrong
    assert compared > 20


@pytest.mark.parametrize("place", ["Makefile", "docs/TESTING.md"])
def test_the_example_of_narrower_tests_runs_some(place: str) -> None:
    """It ran none, and so it failed."""
    found = re.findall(r'ARGS="(tests/\S+) -k (\w+)"', (ROOT / place).read_text(encoding="utf-8"))
    assert found
    for folder, word in found:
        tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / folder).glob("test_*.py"))
        assert re.search(rf"def test_\w*{word}", tests), f"{place}: {folder} -k {word}"
