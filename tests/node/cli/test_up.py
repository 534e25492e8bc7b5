"""`tickwheel up` as a process: comes up, says where, stops on a signal, takes its data up again."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from tests.process.commands import COMMAND, commands_here
from tickwheel.client import Client

UP = ("up", "--nodes", "1", "--port", "0", "--json", "--data")
LOOK_S = 0.02
"""Between two looks at what a process has done."""


def started(data: Path) -> tuple[subprocess.Popen[str], dict[str, object]]:
    """The process, and what it printed once ready."""
    process = subprocess.Popen([*COMMAND, *UP, str(data)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
    """The message of the first run is pending in the second; no node process is left. A second Ctrl-C does not wait for
    a node that hangs, and says so."""
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
    status = Path(f"/proc/{nodes[0]['pid']}/status")
    os.kill(nodes[0]["pid"], signal.SIGSTOP)
    while "\nState:\tT" not in status.read_text():  # or it might take the next signal first
        time.sleep(LOOK_S)
    process.send_signal(signal.SIGINT)
    while not has_pending(status, signal.SIGTERM):
        assert process.poll() is None
        time.sleep(LOOK_S)
    process.send_signal(signal.SIGINT)
    complaint = process.communicate(timeout=60)[1]
    assert (process.returncode, json.loads(complaint)["reason"]) == (1, "NODE_KILLED")
    assert "node n1 was killed before it had stopped" in complaint
    assert not status.exists()


def has_pending(status: Path, number: signal.Signals) -> bool:
    """Whether a signal waits for a process that does not run."""
    (mask,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("ShdPnd:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_data_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """--fresh removes only what `up` noted; a configuration of somebody's node makes no local cluster."""
    deploy = tmp_path / "deploy"
    deploy.mkdir()
    (deploy / "node.toml").write_text('[node]\nid = "n1"\ndata_dir = "/var/lib/tickwheel"\n')
    done = run_up(tmp_path, "--fresh")
    assert done.returncode == 1
    assert "left alone" in done.stderr
    assert (deploy / "node.toml").exists()


def test_a_running_cluster_keeps_data_and_ports(tmp_path: Path) -> None:
    """A second `up` is refused: --fresh on the same directory, with `up` or its nodes alone left; and other data on the
    ports that are taken, which are named. The nodes of a command that was killed stop."""
    process, said = started(tmp_path / "data")
    nodes = said["nodes"]
    assert isinstance(nodes, list)
    port = nodes[0]["client_address"].rpartition(":")[2]
    try:
        assert "another command runs the cluster" in refused(tmp_path / "data", "--fresh")
        said_no = refused(tmp_path / "other", "--port", port)
        assert f"port {port} cannot be used for clients of n1" in said_no
        os.kill(nodes[0]["pid"], signal.SIGSTOP)
        process.kill()
        process.communicate()
        assert "a node is running on" in refused(tmp_path / "data", "--fresh")
        told = json.loads(refused(tmp_path / "data"))["error"]
        assert told.endswith(f"was killed. Stop them: kill {nodes[0]['pid']}"), told
        node = os.pidfd_open(nodes[0]["pid"])
    finally:
        os.kill(nodes[0]["pid"], signal.SIGCONT)
    assert select.select([node], [], [], 20.0)[0], "it ends without the command, as by a SIGTERM"
    os.close(node)
    assert "node has stopped" in (tmp_path / "data" / "n1" / "node.log").read_text()
    assert (tmp_path / "data" / "n1" / "data" / "identity").exists()


def refused(data: Path, *arguments: str) -> str:
    """What a refused `up` says."""
    done = run_up(data, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def run_up(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`up` until it ends, which it must."""
    return commands_here().run([*UP, str(data), *arguments], folder=data.parent, environment=os.environ)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_it_is_ready_ends_it_and_its_nodes(tmp_path: Path, number: signal.Signals) -> None:
    """Exit code 130, no traceback, no process left. SIGHUP comes when its terminal is closed."""
    process = subprocess.Popen(
        [*COMMAND, *UP, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Under nohup these tests ignore SIGHUP, and what they start would do so, too.
        preexec_fn=partial(signal.signal, number, signal.SIG_DFL),
    )
    log = tmp_path / "n1" / "node.log"
    while not log.exists():
        assert process.poll() is None
        time.sleep(LOOK_S)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (nodes := children.read_text().split()):
        assert process.poll() is None
        time.sleep(LOOK_S)
    process.send_signal(number)
    said, complaint = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
    assert "Traceback" not in complaint and "Traceback" not in log.read_text()
    assert not [node for node in nodes if Path(f"/proc/{node}").exists()]


def test_one_node_that_was_killed_starts_again(tmp_path: Path) -> None:
    """`up` says what it does while it starts, and how a node that ended comes back; the node that is started again
    joins the one that still runs. An unknown node and one that runs are refused."""
    command = [*COMMAND, "up", "--nodes", "2", "--port", "0", "--data", str(tmp_path / "data")]
    errors = tmp_path / "errors"
    with errors.open("w") as told:
        first = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=told, text=True)
        assert first.stdout is not None
        said = json.loads(first.stdout.readline())
    try:
        assert "has no node n9: there are n1, n2" in refused(tmp_path / "data", "--node", "n9")
        assert "cannot be used for clients of n2" in refused(tmp_path / "data", "--node", "n2")
        os.kill(said["nodes"][1]["pid"], signal.SIGKILL)
        while "up --node n2" not in errors.read_text():
            assert first.poll() is None
            time.sleep(LOOK_S)
        again = subprocess.Popen([*command, "--node", "n2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert again.stdout is not None
        while (line := again.stdout.readline()) and "Ready" not in line:
            pass
        assert line, again.communicate(timeout=60)[1]
        with Client(said["addresses"]) as client:
            client.schedule("kept", "x", delay_ms=3_600_000)
        again.send_signal(signal.SIGINT)
        steps = again.communicate(timeout=60)[1]
        assert again.returncode == 0
        assert "n2 started as process" in steps  # the steps after it may pass between two looks
    finally:
        assert stopped(first) == 1, "a node of it had ended"
