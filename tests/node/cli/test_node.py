"""The subcommands about one node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tickwheel.node.cli.node import node_app


def test_check_lists_problems_and_exits_2(tmp_path: Path) -> None:
    """A wrong file: one line a problem, exit code 2, no traceback."""
    file = tmp_path / "node.toml"
    file.write_text("[raft]\nlease_ms = 0\n")
    result = CliRunner().invoke(node_app, ["config", "check", str(file), "--no-environment"])
    assert result.exit_code == 2
    assert "raft.lease_ms = 0" in result.output and "Traceback" not in result.output


def test_certs_then_check(tmp_path: Path) -> None:
    """Certificates that `certs` made satisfy `config check`."""
    made = CliRunner().invoke(node_app, ["certs", "--out", str(tmp_path), "--node", "n1=127.0.0.1", "--admin", "ops"])
    assert made.exit_code == 0, made.output
    file = tmp_path / "node.toml"
    lines = [
        f'{port}_{part}_file = "{tmp_path / name}"'
        for port in ("client", "peer")
        for part, name in (("cert", "n1.crt"), ("key", "n1.key"), ("ca", "ca.crt"))
    ]
    file.write_text('[cluster]\nid = "c"\n[node]\nid = "n1"\ndata_dir = "d"\n[tls]\n' + "\n".join(lines))
    result = CliRunner().invoke(node_app, ["config", "check", str(file), "--no-environment"])
    assert result.exit_code == 0, result.output


def test_certs_overwrites_nothing_unasked(tmp_path: Path) -> None:
    """Neither the certificate of a node that uses it, nor an authority whose key lies elsewhere."""
    arguments = ["certs", "--out", str(tmp_path / "certs"), "--node", "n1"]
    assert CliRunner().invoke(node_app, arguments).exit_code == 0
    before = (tmp_path / "certs" / "n1.key").read_bytes()
    again = CliRunner().invoke(node_app, arguments)
    assert again.exit_code == 1
    assert "n1.crt is there already" in again.stderr
    assert (tmp_path / "certs" / "n1.key").read_bytes() == before
    assert CliRunner().invoke(node_app, [*arguments, "--replace"]).exit_code == 0
    assert (tmp_path / "certs" / "n1.key").read_bytes() != before
    own = tmp_path / "own"
    own.mkdir()
    (own / "ca.crt").write_text("mine")
    done = CliRunner().invoke(node_app, ["certs", "--out", str(own), "--node", "n1"])
    assert done.exit_code == 1
    assert [path.name for path in own.iterdir()] == ["ca.crt"]
    assert (own / "ca.crt").read_text() == "mine"


def ended(process: subprocess.Popen[str], within_s: float) -> bool:
    """Whether the process ends within this time."""
    try:
        process.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def test_ctrl_c_while_a_node_starts_is_130(tmp_path: Path) -> None:
    """No traceback, whatever it is busy with: here with a configuration that is long in coming."""
    slow = tmp_path / "node.toml"
    os.mkfifo(slow)
    command = [sys.executable, "-m", "tickwheel.node.cli.main", "node", "--config", str(slow)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while (writes := open_if_read(slow)) is None:
        assert process.poll() is None and time.monotonic() < deadline
    # Python misses a signal that comes just before a blocking read begins; the next one interrupts the read.
    process.send_signal(signal.SIGINT)
    while not ended(process, within_s=2):
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
    said, complaint = process.communicate()
    os.close(writes)
    assert process.returncode == 130, complaint
    assert "Traceback" not in said + complaint


def open_if_read(pipe: Path) -> int | None:
    """The writing end; None while nobody reads."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "file is not a directory"),
        ("file/data", "file is not a directory"),
        ("dangling", "dangling is a link that leads nowhere"),
        ("dangling/data", "dangling is a link that leads nowhere"),
        ("x" * 300, "File name too long"),
        ("ring", "Too many levels of symbolic links"),
        ("there", ""),
        ("there/new/data", ""),
        ("link/data", ""),
        ("/root/tickwheel" if os.getuid() else "there", ""),
    ],
)
def test_a_data_directory_that_can_be_none_is_a_problem(name: str, said: str, tmp_path: Path) -> None:
    """The node refused what `config check` had accepted. What another user may not see counts as good."""
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    for link, target in (("dangling", "nowhere"), ("ring", "ring"), ("link", "there")):
        (tmp_path / link).symlink_to(target)
    file = tmp_path / "node.toml"
    file.write_text(f'[cluster]\nid = "c"\n[node]\nid = "n"\ndata_dir = "{tmp_path / name}"\n')
    result = CliRunner().invoke(node_app, ["config", "check", str(file), "--no-environment"])
    assert result.exit_code == (2 if said else 0), result.output
    assert said in result.output and ("1 problem(s)" in result.output) == bool(said)


def test_a_data_directory_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only file system is a problem. What this user cannot write to is none: the node's user may be another."""
    file = tmp_path / "node.toml"
    file.write_text(f'[cluster]\nid = "c"\n[node]\nid = "n"\ndata_dir = "{tmp_path / "data"}"\n')
    command = ["config", "check", str(file), "--no-environment"]
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    result = CliRunner().invoke(node_app, command)
    assert result.exit_code == 0 and "no problems" in result.output
    assert f"this user cannot write to {tmp_path}" in result.output
    assert json.loads(CliRunner().invoke(node_app, [*command, "--json"]).output)["remarks"]
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(f_flag=os.ST_RDONLY))
    result = CliRunner().invoke(node_app, command)
    assert result.exit_code == 2 and f"{tmp_path} is on a file system that is mounted read-only" in result.output
