"""`tickwheel up` as a process: comes up, says where, stops on a signal, takes its data up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tickwheel.client import Client

COMMAND = [sys.executable, "-m", "tickwheel.node.cli", "up", "--nodes", "1", "--port", "0", "--json", "--data"]


def started(data: Path) -> tuple[subprocess.Popen[str], dict[str, object]]:
    """The process, and what it printed once ready."""
    process = subprocess.Popen([*COMMAND, str(data)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate()[1])
    return process, json.loads(line)


def stopped(process: subprocess.Popen[str]) -> int:
    """Its exit code after Ctrl-C."""
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    return process.returncode


def test_up_stops_on_ctrl_c_and_starts_again_on_its_data(tmp_path: Path) -> None:
    """The message of the first run is pending in the second; no node process is left."""
    process, said = started(tmp_path / "data")
    addresses = said["addresses"]
    assert isinstance(addresses, list)
    with Client(addresses) as client:
        receipt = client.schedule("kept", "x", delay_ms=3_600_000)
    assert stopped(process) == 0
    process, again = started(tmp_path / "data")
    assert again["addresses"] == addresses
    nodes = again["nodes"]
    assert isinstance(nodes, list)
    with Client(addresses) as client:
        assert client.get(receipt.id, content=True).payload == b"x"
        assert [message.id for message in client.list_pending("kept")] == [receipt.id]
    assert stopped(process) == 0
    assert not Path(f"/proc/{nodes[0]['pid']}").exists()


def test_data_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """--fresh removes only what is a local cluster."""
    (tmp_path / "letters").write_text("mine")
    done = subprocess.run(
        [*COMMAND, str(tmp_path), "--fresh"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert done.returncode == 2
    assert "left alone" in done.stderr
    assert (tmp_path / "letters").read_text() == "mine"
