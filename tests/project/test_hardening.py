"""What is delivered for hosts: the unit's restrictions, and requirements by hash that are those of constraints.txt."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.project.imports import ROOT
from tickwheel.node.server import process

SERVICE = ROOT / "deploy" / "tickwheel.service"
EXPOSURE_MAX = 3.0
NEEDED = {
    "UMask": "0077",
    "StateDirectoryMode": "0700",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectKernelModules": "yes",
    "ProtectControlGroups": "yes",
    "RestrictNamespaces": "yes",
    "RestrictSUIDSGID": "yes",
    "LockPersonality": "yes",
    "MemoryDenyWriteExecute": "yes",
    "SystemCallArchitectures": "native",
}


def directives() -> dict[str, list[str]]:
    """Of the unit."""
    found: dict[str, list[str]] = {}
    for line in SERVICE.read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_takes_from_a_node_what_it_does_not_need() -> None:
    found = directives()
    assert {name: found.get(name) for name in NEEDED} == {name: [value] for name, value in NEEDED.items()}
    assert found["SystemCallFilter"][0] == "@system-service"
    assert found["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    # Its exit code is no main process's: RestartPreventExitStatus does not hold for it, and it is repeated for ever.
    assert "ExecStartPre" not in found


def test_systemd_itself_counts_the_unit_as_hardened() -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed; the directives are checked by themselves above")
    command = [analyze, "security", "--offline=true", "--no-pager", str(SERVICE)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if "offline" in said.stderr:
        pytest.skip(f"this systemd cannot look at a file: {said.stderr.strip()}")
    exposure = re.search(r"exposure level for tickwheel.service: ([0-9.]+)", said.stdout)
    assert exposure is not None, said.stdout + said.stderr
    assert float(exposure[1]) < EXPOSURE_MAX


def pinned(name: str) -> dict[str, list[str]]:
    """Hashes by `name==version`, with the marker of the Pythons that it is for."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.partition(" --hash")[0].strip(): re.findall(r"--hash\S+", line) for line in lines}


def constrained() -> set[str]:
    """What constraints.txt holds."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_requirements_are_the_versions_of_constraints_each_with_hashes() -> None:
    """Stale: somebody raised a version without `make constraints`."""
    for name in ("requirements.txt", "requirements-build.txt"):
        pins = pinned(name)
        assert pins and not set(pins) - constrained(), f"{name}: run `make constraints`"
        for pin, hashes in pins.items():
            assert hashes and all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", one) for one in hashes), pin


def test_requirements_hold_what_a_node_needs() -> None:
    """All that pyproject.toml requires without an extra, and what that leads to, as far as it is for this machine."""
    from importlib.metadata import distribution

    pins = {pin.partition("==")[0] for pin in pinned("requirements.txt")}
    waiting, seen = ["tickwheel"], set()
    while waiting:
        name = waiting.pop()
        for line in distribution(name).requires or []:
            wanted = Requirement(line)
            key = canonicalize_name(wanted.name)
            if key not in seen and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
                seen.add(key)
                waiting.append(key)
    assert seen == pins


@pytest.mark.parametrize("path", ["deploy/Containerfile", "docs/DEPLOY.md"])
def test_installations_go_by_hash(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert "--require-hashes" in text and "requirements.txt" in text and "--no-deps" in text


def test_a_vulnerability_is_reported_in_private_where_the_metadata_says() -> None:
    """Never in the public tracker; a package without the repository names the place too."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    text = (ROOT / "docs" / "SECURITY.md").read_text(encoding="utf-8").partition("## Reporting a vulnerability\n")[2]
    assert re.findall(r"\]\((https://[^)]*)\)", text) == [urls["Report a vulnerability"]]
    assert urls["Report a vulnerability"].startswith(urls["Homepage"] + "/security/")


def test_the_document_names_each_exit_code_and_the_unit_heeds_it() -> None:
    """The codes of process.py: after 1 a restart helps."""
    codes = {0, process.EXIT_FAILED, process.EXIT_CONFIG, process.EXIT_DATA, process.EXIT_REMOVED}
    text = (ROOT / "docs" / "DEPLOY.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d) \| .* \| (.*) \|$", text, re.MULTILINE))
    assert {int(code) for code in rows} == codes
    final = {int(code) for code, restart in rows.items() if restart.startswith("does not help")}
    assert final == {int(code) for code in directives()["RestartPreventExitStatus"][0].split()} == codes - {0, 1}
