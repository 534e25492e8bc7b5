"""What is imported when: help and a node start at once, because neither loads what it does not use."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import typer

from tickwheel.node.cli.commands import APPS, PANELS, every, load, others
from tickwheel.node.cli.program import app

NOT_BY_HELP = ("grpc", "numpy", "google.protobuf", "cryptography", "prometheus_client", "tickwheel.client", "pydantic")
NOT_BY_A_NODE = (
    *("tickwheel.client", "tickwheel.chaos", "tickwheel.pipeline", "tickwheel.bench"),
    *("tickwheel.node.local_cluster", "tickwheel.node.certs", "tickwheel.node.cli.output", "rich.progress"),
)
ARGUMENTS = {
    "help": ["--help"],
    "version": ["--version"],
    "help of a node": ["node", "--help"],
    "a mistyped command": ["shedule"],
}


def imported_by(code: str) -> set[str]:
    """All modules that are imported once a program has run."""
    program = f"{code}\nimport json, sys; print('\\n' + json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("named", ARGUMENTS)
def test_help_imports_little(named: str) -> None:
    """Neither the client nor anything that is slow to load."""
    found = imported_by(f"from tickwheel.node.cli.program import run; run({ARGUMENTS[named]!r})")
    unused = NOT_BY_HELP if named != "help of a node" else ("grpc", "cryptography", "tickwheel.client")
    assert not found & set(unused)


def test_a_node_imports_what_it_runs() -> None:
    """No client, no other command, nothing that only a terminal or an operator needs."""
    code = "import tickwheel.node.cli.program\nfrom tickwheel.node.cli.commands import load\nload('node')\n"
    found = imported_by(f"{code}import tickwheel.node.server.process")
    assert not found & set(NOT_BY_A_NODE)


def test_the_command_starts_a_node_without_colours_and_certificates() -> None:
    """structlog would load rich for tracebacks; only a node with TLS reads certificates. Its arguments are plain."""
    found = imported_by("from tickwheel.node.cli.program import run; run(['node', '--set', 'node.id='])")
    assert "tickwheel.node.server.process" in found, "the configuration is refused after the imports"
    assert not found & {"rich", "rich.console", "cryptography.x509", "pydantic"}


@pytest.mark.parametrize("name", every())
def test_help_says_what_the_command_says(name: str) -> None:
    """The first paragraph of its own help."""
    root: Any = typer.main.get_command(app)
    assert root.commands[name].help == " ".join((load(name).help or "").partition("\n\n")[0].split())


def test_every_command_is_in_the_table() -> None:
    """None that an app has is left out."""
    for place, commands in APPS.items():
        module, _, attribute = place.partition(":")
        root = typer.Typer()
        root.callback()(lambda: None)
        root.add_typer(getattr(import_module(f"tickwheel.node.cli.{module}"), attribute))
        found: Any = typer.main.get_command(root)
        assert set(found.commands) == set(commands)


def test_every_command_has_one_heading() -> None:
    """Help lists each once; one of another distribution is below "Other programs"."""
    named = [name for names in PANELS.values() for name in names.split()]
    assert sorted(named) == sorted([*every(), *others()])
