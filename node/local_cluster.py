"""A cluster of real node processes on this machine: for `tickwheel up`, the demo, tests and benchmarks.

Owns the processes that it started, and their configuration files, logs and ports, in one directory. Ports are chosen
once and kept in the configuration, so a stopped cluster can start again on its data. At the start of a node its log is
cut to LOG_BYTES_MAX. Stop is idempotent and waits. Nodes end with the process that started them, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from tickwheel.client import AsyncClient, NodeRole, NodeState, NodeStatus
from tickwheel.client.errors import Fault
from tickwheel.node.made_files import CONFIG_NAME, DATA_NAME, LOG_NAME, LocalClusterError, MadeFiles
from tickwheel.storage.plain_file import replace_file

T = TypeVar("T")

LOG_BYTES_MAX = 4 << 20
STOP_S = 20.0
KILL_S = 5.0
READY_S = 30.0
POLL_S = 0.05
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that the system gives to outgoing connections."""
OUTGOING_FIRST = 32_768
PORT_MIN = 10_000
LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class LocalNode:
    """One node: where it listens, where its files are, and its process if it runs."""

    node_id: str
    directory: Path
    client_address: str
    peer_address: str
    metrics_address: str
    process: subprocess.Popen[bytes] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    peer_advertised: str = ""
    """The address that its peers dial, if it differs from where the node listens, because of a proxy in between."""
    client_advertised: str = ""
    """The same for clients."""

    @property
    def peer_dialled(self) -> str:
        return self.peer_advertised or self.peer_address

    @property
    def client_dialled(self) -> str:
        return self.client_advertised or self.client_address

    @property
    def config_file(self) -> Path:
        return self.directory / CONFIG_NAME

    @property
    def log_file(self) -> Path:
        return self.directory / LOG_NAME

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.running else None

    def log_tail(self, lines: int = 5) -> str:
        """The end of its log."""
        try:
            text = self.log_file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def free_ports(count: int) -> list[int]:
    """Different ports on which no process listens now, outside the system's range for outgoing connections.

    Of those one could be taken by any connection before its node listens, or while it is being restarted.
    """
    sockets: list[socket.socket] = []
    first_outgoing = int(PORT_RANGE.read_text(encoding="ascii").split()[0]) if PORT_RANGE.exists() else OUTGOING_FIRST
    ports = random.SystemRandom().sample(range(PORT_MIN, max(first_outgoing, PORT_MIN + 10_000)), 4_000)
    try:
        for port in ports:
            if len(sockets) == count:
                break
            item = socket.socket()
            try:
                item.bind(("127.0.0.1", port))
            except OSError:
                item.close()
            else:
                sockets.append(item)
        if len(sockets) < count:
            raise LocalClusterError(f"no {count} free ports from {PORT_MIN} to {first_outgoing}")
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


def _processes_with(files: Collection[Path]) -> list[int]:
    """Ids of processes that were started with one of these files as an argument. Of other users' only what the system
    shows."""
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            folder = (place / "cwd").readlink()
            words = (place / "cmdline").read_bytes().split(b"\0")
            named = (folder / os.fsdecode(word) for word in words if word.endswith(CONFIG_NAME.encode()))
            if any(path.resolve() in files for path in named):
                found.append(int(place.name))
    return sorted(found)


def begin(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of a node. It has a session of its own: Ctrl-C reaches only this process, which stops the nodes
    in order. The project's tests put a faster way in its place (tests/forked_nodes.py)."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
    )


def _toml(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def write_toml(path: Path, sections: Mapping[str, Mapping[str, object]]) -> None:
    """Replace a configuration; durable on return. Raises OSError."""
    blocks = []
    for name, values in sections.items():
        lines = [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
        blocks.append("\n".join(lines))
    replace_file(path, ("\n\n".join(blocks) + "\n").encode())


class LocalCluster:
    """`nodes` processes in `directory`. As an async context manager: started and ready inside, stopped at the end.

    `config` is laid over every node's configuration: {"section": {"key": value}}.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int = 3,
        *,
        config: Mapping[str, Mapping[str, object]] | None = None,
        cluster_id: str = "local",
        ready_s: float = READY_S,
        client_port: int = 0,
        peers_apart: bool = False,
        clients_apart: bool = False,
    ) -> None:
        """`peers_apart`: peers dial each node at `peer_advertised`, where the caller must listen.

        `clients_apart`: the same for clients and `client_advertised`.
        """
        self.directory = directory
        self.made = MadeFiles(directory)
        self.cluster_id = cluster_id
        self._config = config or {}
        self._ready_s = ready_s
        self._peers_apart = peers_apart
        self._clients_apart = clients_apart
        self.nodes = self._known_nodes() or self._new_nodes(nodes, client_port)
        self._client: AsyncClient | None = None

    # -- layout

    def _known_nodes(self) -> list[LocalNode]:
        """The nodes made here before. Older versions kept no note; their nodes are found by their data."""
        names = self.made.names()
        found = []
        for name in names or sorted(file.parent.name for file in self.directory.glob(f"*/{CONFIG_NAME}")):
            folder = self.directory / name
            file = folder / CONFIG_NAME
            try:
                tree = tomllib.loads(file.read_text(encoding="utf-8"))
                if not names and tree["node"].get("data_dir") != str(folder.resolve() / DATA_NAME):
                    continue  # not made by this command
                listen = tree["listen"]
                found.append(
                    LocalNode(
                        tree["node"]["id"],
                        folder,
                        listen["client_bind"],
                        listen["peer_bind"],
                        listen["metrics_bind"],
                        peer_advertised=listen.get("peer_advertised", ""),
                        client_advertised=listen.get("client_advertised", ""),
                    )
                )
            except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
                if names:
                    why = error.strerror if isinstance(error, OSError) else error
                    raise LocalClusterError(f"{file} is no configuration of a local node: {why}") from error
        return found

    def _new_nodes(self, count: int, client_port: int) -> list[LocalNode]:
        place = str(self.directory.resolve())
        if place != place.encode(errors="ignore").decode():
            raise LocalClusterError(
                f"{place!r}: the name is no UTF-8, so no configuration of a node could hold it: name another directory"
            )
        ports = free_ports(5 * count)
        made = []
        for number in range(count):
            client, peer, metrics, peers, clients = ports[5 * number : 5 * number + 5]
            if client_port:
                client = client_port + number
            node_id = f"n{number + 1}"
            host = self.host(node_id)
            made.append(
                LocalNode(
                    node_id,
                    self.directory / node_id,
                    f"{host}:{client}",
                    f"{host}:{peer}",
                    f"{host}:{metrics}",
                    peer_advertised=f"127.0.0.1:{peers}" if self._peers_apart else "",
                    client_advertised=f"127.0.0.1:{clients}" if self._clients_apart else "",
                )
            )
        members: list[object] = [
            {"id": n.node_id, "peer_address": n.peer_dialled, "client_address": n.client_dialled} for n in made
        ]
        self.made.make([node.node_id for node in made])
        for node in made:
            self._write_config(node, {"id": self.cluster_id, "join": "new", "members": members})
        return made

    def host(self, node_id: str) -> str:
        """The host on which a new node listens."""
        return LOOPBACK

    def _write_config(self, node: LocalNode, cluster: Mapping[str, object]) -> None:
        sections: dict[str, dict[str, object]] = {
            "cluster": dict(cluster),
            "node": {"id": node.node_id, "data_dir": str(node.directory.resolve() / DATA_NAME)},
            "listen": {
                "client_bind": node.client_address,
                "peer_bind": node.peer_address,
                "metrics_bind": node.metrics_address,
            },
            "log": {"level": "info", "format": "json"},
            # A developer's disk may be nearly full.
            "storage": {"high_water_percent": 0},
        }
        for name in ("peer_advertised", "client_advertised"):
            if getattr(node, name):
                sections["listen"][name] = getattr(node, name)
        for name, values in self._config.items():
            sections.setdefault(name, {}).update(values)
        write_toml(node.config_file, sections)

    @property
    def addresses(self) -> list[str]:
        """The nodes' addresses for clients."""
        return [node.client_dialled for node in self.nodes]

    def node(self, node_id: str) -> LocalNode:
        """One node by its id."""
        return next(node for node in self.nodes if node.node_id == node_id)

    def check_ports(self, only: str = "") -> None:
        """Raise LocalClusterError if another process listens on a node's port: it would answer in the node's place.
        `only`: look at this node's alone."""
        for node in self.nodes:
            if only and node.node_id != only:
                continue
            purposes = {"clients": node.client_address, "peers": node.peer_address, "metrics": node.metrics_address}
            for purpose, address in purposes.items():
                host, _, port = address.rpartition(":")
                with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as item:
                    item.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        item.bind((host.strip("[]"), int(port)))
                        item.listen()
                    except (OSError, ValueError, OverflowError) as error:
                        why = error.strerror if isinstance(error, OSError) else error
                        advice = "is another cluster running? Stop it, or take other ports (--port, with a new --data)"
                        left = [] if only else _processes_with({item.config_file.resolve() for item in self.nodes})
                        if left:
                            advice = "nodes of this directory still run, since the command that started them was "
                            advice += f"killed. Stop them: kill {' '.join(map(str, left))}"
                        raise LocalClusterError(
                            f"port {port} cannot be used for {purpose} of {node.node_id} ({address}: {why}): {advice}"
                        ) from None

    # -- processes

    def command(self, node: LocalNode) -> list[str]:
        """The command line that starts a node."""
        arguments = ["--parent", str(os.getpid()), "node", "--config", str(node.config_file)]
        return [sys.executable, "-P", "-m", "tickwheel.node.bound_node", *arguments]

    def start_node(self, node: LocalNode) -> None:
        """Start its process; does not wait."""
        if node.running:
            return
        _cut_log(node.log_file)
        with node.log_file.open("ab") as log:
            node.process = begin(self.command(node), log, {**os.environ, **node.environment})

    def signal_node(self, node: LocalNode, number: signal.Signals) -> None:
        """Send a signal to its process, if it runs."""
        if node.process is not None and node.running:
            node.process.send_signal(number)

    async def kill_node(self, node: LocalNode) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.signal_node(node, signal.SIGKILL)
        await self._gone(node, KILL_S)

    async def stop_node(self, node: LocalNode) -> int:
        """SIGTERM, and wait; SIGKILL after STOP_S. Returns the exit code."""
        await self._stops(node)
        return 0 if node.process is None else node.process.returncode

    async def _stops(self, node: LocalNode) -> bool:
        """Stop it. False: it had to be killed."""
        self.signal_node(node, signal.SIGTERM)
        if await self._gone(node, STOP_S):
            return True
        await self.kill_node(node)
        return False

    async def _gone(self, node: LocalNode, timeout_s: float) -> bool:
        process = node.process
        if process is None:
            return True
        try:
            await asyncio.to_thread(process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    async def start(self) -> None:
        """Start all and wait until they are ready."""
        await self.bring_up(lambda text: None)

    async def bring_up(self, told: Callable[[str], None], only: str = "") -> None:
        """Start all, or `only` this one, and wait until they are ready. `told` gets a sentence about each step."""
        for node in self.nodes:
            if not only or node.node_id == only:
                self.start_node(node)
                told(f"{node.node_id} started as process {node.pid}; its log is {node.log_file}")
        await self.wait_ready(told=told)

    async def stop(self) -> list[LocalNode]:
        """Stop all and wait. Returns those that had to be killed after STOP_S. If it is cancelled, it kills all."""
        running = [node for node in self.nodes if node.running]
        try:
            in_time = await asyncio.gather(*map(self._stops, running))
        except asyncio.CancelledError:
            for node in running:
                self.signal_node(node, signal.SIGKILL)
            for node in running:
                assert node.process is not None
                node.process.wait(KILL_S)
            raise
        finally:
            if self._client is not None:
                client, self._client = self._client, None
                await client.close()
        return [node for node, good in zip(running, in_time, strict=True) if not good]

    def discard(self) -> None:
        """Remove the files that this cluster made, unless they are in use. Stop it first."""
        with contextlib.suppress(LocalClusterError), self.made.lock():
            self.made.remove()

    async def __aenter__(self) -> LocalCluster:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # -- asking

    def client(self) -> AsyncClient:
        """A client of this cluster, closed with it."""
        if self._client is None:
            self._client = AsyncClient(self.addresses)
        return self._client

    async def statuses(self, timeout_s: float = 1.0) -> dict[str, NodeStatus | Fault]:
        """The status of each node, by node id; a Fault for a node without an answer."""
        answers = await self.client().admin.statuses(timeout_s)
        return {node.node_id: answers[node.client_dialled] for node in self.nodes if node.client_dialled in answers}

    async def wait_ready(self, *, all_serve: bool = True, told: Callable[[str], None] = lambda text: None) -> LocalNode:
        """Wait until a master serves and every running node follows it. Returns the master. `told` gets a sentence
        whenever what a node does has changed."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._ready_s
        does: dict[str, str] = {}
        while True:
            for node in self.nodes:
                if node.process is not None and node.process.poll() is not None and all_serve:
                    raise LocalClusterError(
                        f"node {node.node_id} ended with code {node.process.returncode}; {node.log_file} ends with:\n"
                        f"{node.log_tail()}"
                    )
            answers = await self.statuses()
            running = [answers.get(node.node_id) for node in self.nodes if node.running]
            serving = [status for status in running if isinstance(status, NodeStatus)]
            for status in serving:
                if does.get(status.node_id) != _doing(status):
                    does[status.node_id] = _doing(status)
                    told(f"{status.node_id} {does[status.node_id]}")
            # One that another command runs may lead, too.
            masters = [
                status
                for status in answers.values()
                if isinstance(status, NodeStatus)
                and status.role is NodeRole.MASTER
                and status.lease_held
                and status.state is NodeState.SERVING
            ]
            follow = [status for status in serving if masters and status.master_id == masters[-1].node_id]
            if masters and (not all_serve or len(follow) == len(running)):
                return self.node(masters[-1].node_id)
            if loop.time() > end:
                logs = ", ".join(str(node.log_file) for node in self.nodes)
                raise LocalClusterError(f"the cluster was not ready within {self._ready_s:g} s; see {logs}")
            await asyncio.sleep(POLL_S)

    async def master(self, timeout_s: float = READY_S) -> LocalNode:
        """The current master; waits for one up to `timeout_s`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while True:
            answers = await self.statuses()
            masters = [
                status
                for status in answers.values()
                if isinstance(status, NodeStatus) and status.role is NodeRole.MASTER and status.lease_held
            ]
            if masters:
                return self.node(max(masters, key=lambda status: status.term).node_id)
            if loop.time() > end:
                raise LocalClusterError(f"no master within {timeout_s:g} s")
            await asyncio.sleep(POLL_S)


def on_end(act: Callable[[], None]) -> None:
    """Call `act` on the running loop when this process gets a SIGTERM, or a SIGHUP because its terminal is gone; not
    under nohup, which ignores that."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, act)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, act)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """What is tidied up in this context is tidied up to its end, whatever signal comes. Main thread only."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, but SIGTERM and SIGHUP cancel `main` as Ctrl-C does, so that it can stop its nodes. A second
    signal cancels that, too.

    Raises KeyboardInterrupt after any of them.
    """
    told = False

    async def go() -> T:
        task = asyncio.current_task()
        assert task is not None

        def terminated() -> None:
            nonlocal told
            told = True
            task.cancel()

        on_end(terminated)
        return await main

    try:
        return asyncio.run(go())
    except asyncio.CancelledError:
        if told:
            raise KeyboardInterrupt from None
        raise


def _doing(status: NodeStatus) -> str:
    """What a node that starts is at, without numbers that change all the time."""
    if status.state is NodeState.ALONE:
        return "hears no master yet"
    if status.state is not NodeState.SERVING:
        return f"is {status.state.replace('_', ' ')}"
    return "is the master" if status.role is NodeRole.MASTER else f"follows {status.master_id}"


def _cut_log(path: Path) -> None:
    """Cut a log that is too long to its second half."""
    try:
        size = path.stat().st_size
    except OSError:
        return
    if size > LOG_BYTES_MAX:
        with path.open("rb") as log:
            log.seek(size - LOG_BYTES_MAX // 2)
            log.readline()
            rest = log.read()
        path.write_bytes(rest)
