"""Node processes that must not start: a port in use, data in use, another cluster's data."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from tests.process.commands import commands_here
from tickwheel.node.config import read_config
from tickwheel.node.local_cluster import LocalCluster, LocalNode, free_ports
from tickwheel.node.metrics import METRICS
from tickwheel.node.server import house, process
from tickwheel.node.server.ports import ThreadExecutor
from tickwheel.proto.peer_pb2 import Hello, PeerFrame
from tickwheel.replication.frames import FORMAT_VERSION
from tickwheel.storage.disk import DiskError, DiskFullError, FsyncFailedError


def start(*settings: str) -> subprocess.CompletedProcess[str]:
    """Start a node that is expected to refuse; its exit code and what it says."""
    flags = [part for setting in settings for part in ("--set", setting)]
    return commands_here().run(["node", *flags], folder=Path.cwd(), environment=os.environ)


async def page(node: LocalNode, path: str = "/metrics") -> str:
    """The node's metrics, as Prometheus reads them; or another page of that port, with its head."""
    reader, writer = await asyncio.open_connection(*node.metrics_address.rsplit(":", 1))
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    text = (await reader.read()).decode()
    writer.close()
    return text


async def probed(node: LocalNode, path: str, *, code: int) -> str:
    """The answer to a probe, once it has this code. A slave is ready after the master: it must hear of it first."""
    while True:
        answer = await page(node, path)
        if answer.startswith(f"HTTP/1.1 {code} "):
            return answer.partition("\r\n\r\n")[2]
        assert answer.startswith(("HTTP/1.1 200 ", "HTTP/1.1 503 ")), answer
        await asyncio.sleep(0.02)


def health_command(node: LocalNode) -> list[str]:
    """The command by which a container asks a node whether it is alive, at this node's port."""
    lines = (Path(__file__).parents[3] / "deploy" / "Containerfile").read_text(encoding="utf-8").splitlines()
    [command] = [line.partition("CMD ")[2] for line in lines if line.startswith("HEALTHCHECK ")]
    parts: list[str] = json.loads(command)
    assert parts[0] == "python" and "127.0.0.1:7702/livez" in parts[-1]
    return [sys.executable, *parts[1:-1], parts[-1].replace("127.0.0.1:7702", node.metrics_address)]


def is_healthy(command: list[str]) -> bool:
    """What the command says."""
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def test_a_node_without_proc_is_told_why_it_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container or a chroot without it."""
    monkeypatch.setattr(process, "_STAT", tmp_path / "stat")
    config = read_config(None, {}, {"cluster.id": "c", "node.id": "n", "node.data_dir": str(tmp_path / "data")})
    with pytest.raises(process.StartError, match=r"No such file or directory: .*/proc; mount it"):
        process.NodeProcess(config)


async def test_a_node_that_gets_no_thread_says_what_to_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with a traceback, as in a container with few processes."""
    config = read_config(None, {}, {"cluster.id": "c", "node.id": "n", "node.data_dir": str(tmp_path / "data")})
    node = process.NodeProcess(config)
    no_thread = Mock(side_effect=RuntimeError("can't start new thread"))
    with (
        monkeypatch.context() as limited,
        pytest.raises(process.StartError, match=r"raise .*TasksMax") as caught,
    ):
        limited.setattr(threading.Thread, "start", no_thread)
        node._executor("read", 1, asyncio.get_running_loop(), lambda: None)
    assert caught.value.code == process.EXIT_FAILED


LIMITED = """
import asyncio, resource, sys
import uvloop
from pathlib import Path
from tickwheel.node.config import read_config
from tickwheel.node.server import process

async def main(mib):
    config = read_config(None, {}, {"cluster.id": "c", "node.id": "n", "node.data_dir": sys.argv[1]})
    node = process.NodeProcess(config)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bytes_max = pages * resource.getpagesize() + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (bytes_max, bytes_max))
    try:
        await node.run()
    except process.StartError as error:
        print(error.code, error)

uvloop.run(main(int(sys.argv[2])))
"""
"""A node whose address space has room for so many MiB more when it starts; each thread takes two to eight."""


@pytest.mark.parametrize("mib", [4, 16])
def test_a_node_without_room_for_threads_does_not_abort(tmp_path: Path, mib: int) -> None:
    """libuv ended it by SIGABRT, without a word, when the first name was looked up."""
    words = [sys.executable, "-c", LIMITED, str(tmp_path / "data"), str(mib)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(
        f"{process.EXIT_FAILED} can't start new thread: raise the limit of the address space"
    )
    assert not (tmp_path / "data").exists(), "a node that does not start leaves no files"


def test_a_full_disk_at_the_start_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is restarted on a full disk starts by itself once there is room, as a running one goes on by itself.
    It ended with the code for data that cannot be used, after which its service does not start it again."""
    config = read_config(None, {}, {"cluster.id": "c", "node.id": "n", "node.data_dir": str(tmp_path / "data")})
    node = process.NodeProcess(config)

    def refused(call: str, number: int, start: Callable[[], object]) -> process.StartError:
        with monkeypatch.context() as failing, pytest.raises(process.StartError) as caught:
            failing.setattr(os, call, Mock(side_effect=OSError(number, os.strerror(number))))
            start()
        assert str(tmp_path / "data") in str(caught.value)
        return caught.value

    full = refused("open", errno.ENOSPC, node._open_disk)
    disk = node._open_disk()
    for error in (full, refused("pwritev", errno.ENOSPC, lambda: node._disk_uuid(disk))):
        assert error.code == process.EXIT_FAILED and "No space left on device; free space there" in str(error)
    codes: list[int] = []
    monkeypatch.setattr(process, "_exit_now", codes.append)
    node._no_room(DiskFullError("No space left on device"))
    assert codes == [process.EXIT_FAILED], "nor is one when a copied checkpoint is put in place"
    broken = refused("fdatasync", errno.EIO, lambda: node._disk_uuid(disk))
    assert broken.code == process.EXIT_DATA and "Input/output error; the disk is failing" in str(broken)


async def test_a_running_node_serves_every_metric_and_refusals_at_start_say_what_to_do(tmp_path: Path) -> None:
    """A master's page has every entry of the table: what docs/METRICS.md names can be watched. Beside that node, a used
    port, a data directory in use, another cluster's data: an exit code and a sentence, no traceback."""
    async with LocalCluster(tmp_path, 1, config={"metrics": {"topics": ["orders"]}}) as cluster:
        node = cluster.nodes[0]
        # The pending messages of topics are served only while they have a limit.
        await cluster.client().admin.update_settings(topic_pending_max="*=1000")
        served = await page(node)
        names = [spec.exposed_name + ("_info" if spec.kind == "info" else "") for spec in METRICS]
        assert not [name for name in names if f"\n# TYPE {name} " not in served]
        assert '\ntickwheel_topic_dispatched_messages_total{topic="orders"} 0.0\n' in served
        assert int(served.split("\ntickwheel_fdatasync_duration_seconds_count ")[1].split(".")[0]) > 0
        numbers = dict(line.rsplit(" ", 1) for line in served.splitlines() if line.startswith("process_"))
        assert 0 <= time.time() - float(numbers["process_start_time_seconds"]) < 600
        assert 1e7 < float(numbers["process_resident_memory_bytes"]) < float(numbers["process_virtual_memory_bytes"])
        assert await probed(node, "/livez", code=200) == "alive\n"
        assert await probed(node, "/readyz", code=200) == "ready\n"
        assert "\nok    master: this node, in term " in await probed(node, "/healthz", code=200)
        lives = health_command(node)
        assert is_healthy(lives)
        # systemctl reload, although there are no certificates to read again: no reason to end.
        cluster.signal_node(node, signal.SIGHUP)
        while "nothing to read again" not in node.log_file.read_text(encoding="utf-8"):
            assert node.running
            await asyncio.sleep(0.02)
        client, peer = (f"127.0.0.1:{port}" for port in free_ports(2))
        own_data = f"node.data_dir={node.directory / 'data'}"
        here = (f"listen.client_bind={client}", f"listen.peer_bind={peer}", "listen.metrics_bind=")
        metrics = f"listen.metrics_bind={node.metrics_address}"
        taken = (f"listen.client_bind={node.client_address}", *here[1:])
        used = start("cluster.id=c", "node.id=x", f"node.data_dir={tmp_path / 'x'}", *taken)
        assert used.returncode == 2 and node.client_address in used.stderr, used.stderr
        assert "is another process using the port?" in used.stderr
        away = ("listen.client_bind=192.0.2.1:7700", *here[1:], "listen.insecure=true")
        elsewhere = start("cluster.id=c", "node.id=x", f"node.data_dir={tmp_path / 'x'}", *away)
        said = "listen.client_bind: 192.0.2.1:7700: cannot listen there: Cannot assign requested address; it must be"
        assert elsewhere.returncode == 2 and said in elsewhere.stderr, elsewhere.stderr
        watched = start("cluster.id=c", "node.id=x", f"node.data_dir={tmp_path / 'y'}", *here[:2], metrics)
        assert watched.returncode == 2 and "listen.metrics_bind" in watched.stderr, watched.stderr
        beside = (f"listen.peer_bind={node.peer_address}", here[0], here[2])
        met = start("cluster.id=c", "node.id=x", f"node.data_dir={tmp_path / 'z'}", *beside)
        assert met.returncode == 2 and "listen.peer_bind" in met.stderr, met.stderr
        # Files of a node that never ran would have to be removed before another one can use the directory.
        assert not any((tmp_path / name).exists() for name in ("x", "y", "z"))
        locked = start("cluster.id=c", "node.id=x", own_data, *here)
        assert locked.returncode == 3 and "node.data_dir" in locked.stderr, locked.stderr
        a_file = start("cluster.id=c", "node.id=x", f"node.data_dir={node.config_file}", *here)
        assert a_file.returncode == 3 and "node.toml: it is not a directory" in a_file.stderr, a_file.stderr
        await cluster.kill_node(node)
        assert not is_healthy(lives)
        foreign = start("cluster.id=other", f"node.id={node.node_id}", own_data, *here)
        assert foreign.returncode == 3 and "cluster" in foreign.stderr, foreign.stderr
        for refused in (used, elsewhere, watched, met, locked, foreign):
            assert "Traceback" not in refused.stderr


SLOW_START = """
import runpy, sys
from tickwheel.node.server import process

def wait(*_):
    print(flush=True)
    sys.stdin.read()

process.open_identity = wait
runpy.run_module("tickwheel.node.cli.main", run_name="__main__", alter_sys=True)
"""
"""A node that says when it reads its data, and does not get further."""


def test_a_node_that_still_starts_ends_in_order_and_is_not_ended_by_a_reload(tmp_path: Path) -> None:
    """By handlers of its own: the first process of a container gets no other signals."""
    command = [sys.executable, "-c", SLOW_START, "node", "--insecure"]
    for setting in ("cluster.id=c", "node.id=n1", f"node.data_dir={tmp_path / 'data'}", "listen.metrics_bind="):
        command += ["--set", setting]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as node:
        assert node.stdout is not None and node.stdout.read(1) == b"\n"
        node.send_signal(signal.SIGHUP)
        node.terminate()
        assert node.wait(30) == 0
        assert node.communicate()[1] == b""


EARLY = """
import runpy, sys

class Waiting:
    def find_spec(self, name, *_):
        if name == "tickwheel.node.cli.streams":
            print(flush=True)
            sys.stdin.read()

sys.meta_path.insert(0, Waiting())
runpy.run_module("tickwheel.node.cli.main", run_name="__main__", alter_sys=True)
"""
"""The command line as it begins to import, and does not get further."""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["node"], 0),
        (["--context", "x", "node", "--insecure"], 0),
        (["gateway"], 0),
        (["console"], 0),
        (["status", "node"], -signal.SIGTERM),
        (["--context", "node", "status"], -signal.SIGTERM),
    ],
)
def test_a_service_that_only_begins_to_import_ends_in_order(words: list[str], code: int) -> None:
    """In a container nothing else would have ended it: its first process gets no signal that it does not handle."""
    with subprocess.Popen(
        [sys.executable, "-c", EARLY, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None and process.stdout.read(1) == b"\n"
        if not code:
            process.send_signal(signal.SIGHUP)  # a reload
        process.terminate()
        assert process.wait(30) == code


async def test_dropped_links_are_counted_and_a_node_without_majority_is_alive_and_not_ready(tmp_path: Path) -> None:
    """An operator learns that somebody sends a node what is no frame, or cannot be true; the node goes on. Once its
    only peer is dead it says that and why it serves no more, and that nobody need restart it."""

    async with LocalCluster(tmp_path, 2) as cluster, asyncio.timeout(60):
        node, peer = cluster.nodes
        hello = PeerFrame(
            cluster_id=cluster.cluster_id,
            sender_id=peer.node_id,
            receiver_id=node.node_id,
            format_version=FORMAT_VERSION,
            hello=Hello(),
        )
        async with grpc.aio.insecure_channel(node.peer_address) as channel:
            for hostile in (b"\xff" * 100, PeerFrame(term=(1 << 64) - 1).SerializeToString()):
                # Without serializers: bytes as they are.
                call: Any = channel.stream_stream("/tickwheel.v1.Peer/Exchange")()  # type: ignore[call-arg]
                await call.write(hello.SerializeToString())
                assert PeerFrame.FromString(await call.read()).HasField("hello")
                await call.write(hostile)
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        counted = await page(node)
        assert '\ntickwheel_refused_calls_total{kind="undecodable"} 1.0\n' in counted
        assert "\ntickwheel_peer_links_dropped_total 1.0\n" in counted
        assert node.running and "the link of a peer is dropped" in node.log_file.read_text(encoding="utf-8")

        for one in cluster.nodes:
            assert await probed(one, "/readyz", code=200) == "ready\n"
        await cluster.kill_node(peer)
        unready = await probed(node, "/readyz", code=503)
        assert unready.startswith("not ready\n") and "takes part: ALONE: it " in unready, unready
        listed = await probed(node, "/healthz", code=503)
        assert "\nok    loop: it turns\n" in listed and "\nfails takes part: ALONE: it " in listed, listed
        assert await probed(node, "/livez", code=200) == "alive\n"


async def test_a_disk_that_does_not_answer_holds_up_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at files of a remote disk may take minutes: a worker waits for it, and the node ends if they are gone."""
    asked, answers = threading.Event(), threading.Event()

    def hanging(path: Path) -> str:
        asked.set()
        assert answers.wait(30)
        return "No such file or directory"

    monkeypatch.setattr(house, "why_gone", hanging)
    host = Mock(journal_path="journal/1")
    reads = ThreadExecutor("read", 1, asyncio.get_running_loop(), lambda error: pytest.fail(str(error)))
    watching = asyncio.ensure_future(house.watch_files(host, tmp_path, reads))
    assert await asyncio.to_thread(asked.wait, 30), "the loop would not get here"
    assert not watching.done()
    answers.set()
    await watching
    reads.stop()
    assert "files were removed" in host.core.fatal.call_args.args[0]


async def test_a_journal_that_is_removed_under_a_node_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: it went on writing to the removed file, and acknowledged what no start would find again. That a journal has
    gone on to its next file is no reason."""
    monkeypatch.setattr(house, "FILES_S", 0.0)
    (tmp_path / "identity").touch()
    looked: list[str] = []

    class Host:
        """Its journal goes on to its second file while the first is looked for; then that is removed, too."""

        core = Mock()

        @property
        def journal_path(self) -> str:
            looked.append("journal/1" if len(looked) < 1 else "journal/2")
            return looked[-1]

    host: Any = Host()
    reads = ThreadExecutor("read", 1, asyncio.get_running_loop(), lambda error: pytest.fail(str(error)))
    await house.watch_files(host, tmp_path, reads)
    reads.stop()
    assert looked == ["journal/1", *["journal/2"] * 3]
    reason = host.core.fatal.call_args.args[0]
    assert reason.startswith(f"{tmp_path}/journal/2: No such file or directory: this node's files were removed")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DiskError("manifest is damaged"), process.EXIT_DATA),
        (FsyncFailedError("journal"), process.EXIT_DATA),
        (DiskFullError("journal"), process.EXIT_FAILED),
        (RuntimeError("ours"), process.EXIT_FAILED),
        (MemoryError(), process.EXIT_FAILED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_damage_met_while_serving_ends_with_the_code_that_is_not_restarted(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3: a restart would meet the same bytes again, and systemd leaves it."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(process, "_exit_now", leave)
    node = object.__new__(process.NodeProcess)
    with pytest.raises(SystemExit) as left:
        node._failed(error)
    assert left.value.code == code
