"""Every error says what to do about it; shells complete what the command line knows."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tickwheel.client.errors import _TYPES, TRANSPORT
from tickwheel.node.cli import program as cli
from tickwheel.node.cli.hints import HINTS, hint_for
from tickwheel.proto.common_pb2 import ErrorReason

FOLDER = Path(cli.__file__).parent


def test_every_reason_has_a_hint() -> None:
    """Those that nodes give, those of gRPC, and the command line's own, wherever it prints an error."""
    calls = [
        call
        for file in FOLDER.glob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "fail"
    ]
    own = {call.args[1].value for call in calls if isinstance(call.args[1], ast.Constant)}
    assert {"BACKUP", "LOCAL_CLUSTER", "NODE_ENDED", "USAGE"} <= own
    named = {name for name, number in ErrorReason.items() if number}
    assert not (own | named | set(_TYPES) | set(TRANSPORT)) - set(HINTS)
    for reason, hint in HINTS.items():
        assert hint[0].islower() or hint.startswith(("`", "-")), reason
        assert not hint.endswith(".")


def test_hints_name_commands_that_exist() -> None:
    """Each `tickwheel ...` of a hint, down to its subcommand."""
    root: Any = typer.main.get_command(cli.app)
    for hint in HINTS.values():
        for words in re.findall(r"`tickwheel ([a-z -]+)", hint):
            name, *rest = [word for word in words.split() if not word.startswith("-")]
            if name == "COMMAND":
                continue
            context = typer.Context(root)
            _, command, _ = root.resolve_command(context, [name])
            for word in rest:
                assert word in command.commands, hint


def test_a_hint_fits_what_is_unknown(capfd: pytest.CaptureFixture[str]) -> None:
    """The command that lists topics for a topic; the same in JSON."""
    assert "topic list" in hint_for("UNKNOWN_NAME", {"field": "topic"})
    assert "context show" in hint_for("INVALID_FIELD", {"field": "tls.ca_file"})
    assert "--node n2" in hint_for("NODE_ENDED", {"node_id": "n2"})
    assert cli.run(["status", "-a", "127.0.0.1:1", "--json"]) == 3
    told = json.loads(capfd.readouterr().err)
    assert told["reason"] == "NO_MASTER" and "tickwheel" in told["hint"]


def test_variables_of_no_script_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell that asks for completions otherwise than the script does is told what is wrong."""
    monkeypatch.setenv("_TICKWHEEL_COMPLETE", "complete_bash")
    monkeypatch.delenv("COMP_WORDS", raising=False)
    for name, said in (("COMP_WORDS", "absent"), ("COMP_CWORD", "absent"), ("COMP_CWORD", "'x'")):
        assert cli.run([]) == 2
        assert f"{name}: {said}: as the script" in capsys.readouterr().err
        monkeypatch.setenv("COMP_CWORD" if name == "COMP_CWORD" else name, "x")


def test_a_shell_completes_commands_options_and_contexts(tmp_path: Path) -> None:
    """bash asks as it does at TAB; zsh and fish get a script of their own."""
    tickwheel = f"{sys.executable} -m tickwheel.node.cli.main"
    folder = tmp_path / "tickwheel"
    folder.mkdir()
    (folder / "contexts.json").write_text(
        '{"version": 1, "current": "", "contexts": {"production": {"addresses": "a:1"}}}'
    )
    program = f"""
tickwheel() {{ {tickwheel} "$@"; }}
eval "$({tickwheel} completion bash | sed 's/ \\$1 ) )/ {tickwheel.replace("/", chr(92) + "/")} ) )/')"
for words in "tickwheel cont" "tickwheel status --addr" "tickwheel context use pr" "tickwheel --context pr"; do
  COMP_WORDS=($words); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
  _tickwheel_completion tickwheel; echo "${{COMPREPLY[*]}}"
done
"""
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == ["context", "--addresses --address", "production", "production"], done
    for shell, word in (("zsh", "compdef"), ("fish", "complete --command tickwheel")):
        script = subprocess.run(
            [*tickwheel.split(), "completion", shell], capture_output=True, text=True, check=True, timeout=60
        )
        assert word in script.stdout
