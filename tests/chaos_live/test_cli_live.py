"""`tickwheel chaos run` where the machine has not what an option needs: said before anything is begun."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tickwheel.chaos.cli import app
from tickwheel.chaos.live import namespaces

EXIT_VOID = 3


def _run(directory: Path, option: str) -> str:
    done = CliRunner().invoke(app, ["run", option, "--dir", str(directory)])
    assert done.exit_code == EXIT_VOID, done.output
    assert not list(directory.glob("nodes/*/node.log")), "nodes were begun"
    return " ".join(done.output.split())


def test_an_audit_without_java_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after half an hour; and it says what to install."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    said = _run(tmp_path / "run", "--audit")
    assert "could not be carried out" in said
    assert "openjdk" in said


def test_namespaces_that_are_refused_name_both_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not root learns how to do it, or how to do without."""
    monkeypatch.setattr(namespaces, "TUN_DEVICE", tmp_path / "none")
    said = _run(tmp_path / "run", "--netns")
    assert "unshare --user --map-root-user" in said
    assert "without --netns a TCP proxy stands" in said
