"""How each system is started for one run: three nodes or one server, durable, in a directory of its own.

Owns the processes that it starts, and ends them by their ids. A system says which ids they have, how many elections it
has held, and with which command its load program is started.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tickwheel.bench.peers import tools
from tickwheel.node.local_cluster import LOOPBACK, LocalCluster, free_ports

READY_S = 180.0
LOOK_S = 0.1
ASK_S = 5.0


class StartError(Exception):
    """A system did not start; the text has the end of each of its logs."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a load program is asked to send."""

    case: str
    """`schedule`: due in hours. `deliver`: due in 2 to 3 s, delivered and acknowledged by a consumer."""
    seconds: float
    """How long messages are sent, after a warm-up; the time to deliver the rest comes on top."""
    rate: float
    """Messages a second; 0: as fast as they are accepted."""
    payload_bytes: int

    def arguments(self, address: str, mode: str, window: int) -> list[str]:
        """The arguments, in the order that every load program takes them."""
        return [self.case, f"{self.seconds}", f"{self.rate}", f"{self.payload_bytes}", address, mode, f"{window}"]


class System:
    """One start of a system."""

    name = ""
    acknowledged = ""
    """What an acknowledgement means here."""

    def __init__(self, directory: Path, mode: str) -> None:
        """`mode` is the way of sending that the load program is told."""
        self.directory = directory
        self.mode = mode
        self._processes: list[subprocess.Popen[bytes]] = []

    def prepare(self) -> str:
        """Fetch and build what this needs, and return its version. Raises MissingError."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start, and wait until it serves. Raises StartError."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End all processes at once; their data is not needed any more."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            await asyncio.to_thread(process.wait)

    def pids(self) -> list[int]:
        """Ids of the servers' processes."""
        return [process.pid for process in self._processes]

    async def elections(self) -> int | None:
        """Number of elections held so far; None if the system holds none."""
        return None

    async def command(self, load: Load, window: int) -> list[str]:
        """The command line of the load program."""
        raise NotImplementedError

    def spawn(self, name: str, *command: str | Path, environment: Mapping[str, str] | None = None) -> None:
        """Start a process that writes to NAME.log."""
        with (self.directory / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [str(part) for part in command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,  # Ctrl-C reaches only this process, which ends the others
                )
            )

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until it is ready. Raises StartError if a process ends, or if it takes too long."""
        loop = asyncio.get_running_loop()
        end = loop.time() + READY_S
        while not await asyncio.to_thread(ready):
            if loop.time() > end or any(process.poll() is not None for process in self._processes):
                logs = sorted(self.directory.glob("*.log"))
                raise StartError(
                    f"{self.name} did not start; " + "; ".join(f"{log.name}: {_tail(log)}" for log in logs)
                )
            await asyncio.sleep(LOOK_S)


def _tail(log: Path) -> str:
    return " ".join(log.read_text(encoding="utf-8", errors="replace").split()[-40:])


def listens(port: int) -> bool:
    """Whether something accepts connections on this port."""
    try:
        socket.create_connection((LOOPBACK, port), ASK_S).close()
    except OSError:
        return False
    return True


class Tickwheel(System):
    """Three nodes."""

    name = "tickwheel"
    acknowledged = "fdatasynced by two of three nodes"

    def __init__(self, directory: Path, mode: str) -> None:
        super().__init__(directory, mode)
        self._cluster = LocalCluster(directory, 3)

    def prepare(self) -> str:
        if self.mode.startswith("go-"):
            self._go_load = tools.go_load("twload")
        return version("tickwheel")

    async def start(self) -> None:
        await self._cluster.start()

    async def stop(self) -> None:
        # An orderly stop would spend minutes on a checkpoint, in a directory that is removed right after.
        await asyncio.gather(*(self._cluster.kill_node(node) for node in self._cluster.nodes))
        await self._cluster.stop()

    def pids(self) -> list[int]:
        return [node.pid for node in self._cluster.nodes if node.pid is not None]

    async def elections(self) -> int | None:
        return (await self._cluster.client().admin.master_status()).term

    async def command(self, load: Load, window: int) -> list[str]:
        if self.mode.startswith("go-"):
            # The API without a client library: it goes to the master, and does not follow it.
            address = (await self._cluster.master()).client_address
            return [str(self._go_load), *load.arguments(address, self.mode.removeprefix("go-"), window)]
        program = (sys.executable, "-m", "tickwheel.bench.peers.tickwheel_load")
        return [*program, *load.arguments(",".join(self._cluster.addresses), self.mode, window)]


class Nats(System):
    """Three servers of JetStream that sync every write."""

    name = "nats"
    acknowledged = "synced by two of three servers (R3, sync_interval: always)"

    def prepare(self) -> str:
        self._server, self._go_load = tools.nats_server(), tools.go_load("natsload")
        return tools.run(self._server, "--version").strip().removeprefix("nats-server: ")

    async def start(self) -> None:
        ports = free_ports(9)
        self._clients, routes, self._watches = ports[:3], ports[3:6], ports[6:]
        peers = ", ".join(f"nats://{LOOPBACK}:{port}" for port in routes)
        for number, (client, route, watch) in enumerate(zip(self._clients, routes, self._watches, strict=True)):
            config = self.directory / f"{number}.conf"
            config.write_text(
                f"server_name: n{number}\nlisten: {LOOPBACK}:{client}\nhttp: {LOOPBACK}:{watch}\n"
                f"jetstream {{ store_dir: {json.dumps(str(self.directory / str(number)))}, sync_interval: always }}\n"
                f"cluster {{ name: bench, listen: {LOOPBACK}:{route}, routes: [{peers}] }}\n",
                encoding="utf-8",
            )
            self.spawn(f"{number}", self._server, "-c", config)
        await self.until(lambda: all(self._asked(port, "healthz") is not None for port in self._watches))

    async def elections(self) -> int | None:
        """Terms of all groups in which the servers vote: of themselves, of the stream, of its consumer."""
        answers = [await asyncio.to_thread(self._asked, port, "raftz?acc=$G") for port in self._watches]
        answers += [await asyncio.to_thread(self._asked, port, "raftz?acc=$SYS") for port in self._watches]
        terms: dict[str, int] = {}
        for answer in answers:
            for groups in (answer or {}).values():
                for group, state in groups.items():
                    terms[group] = max(terms.get(group, 0), state["term"])
        # A group begins with term 1, without an election.
        return sum(term - 1 for term in terms.values())

    async def command(self, load: Load, window: int) -> list[str]:
        address = ",".join(f"nats://{LOOPBACK}:{port}" for port in self._clients)
        return [str(self._go_load), *load.arguments(address, self.mode, window)]

    def _asked(self, port: int, path: str) -> dict[str, dict[str, dict[str, int]]] | None:
        """The answer of a server's monitoring; None: it does not answer yet."""
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/{path}", timeout=ASK_S) as answer:
                found: dict[str, dict[str, dict[str, int]]] = json.load(answer)
                return found
        except (OSError, urllib.error.URLError, json.JSONDecodeError):
            return None


class Redis(System):
    """One server that syncs its log of every write."""

    name = "redis"
    acknowledged = "fsynced by one server (appendfsync always)"

    def prepare(self) -> str:
        self._server, self._python = tools.redis_server(), tools.redis_python()
        words = tools.run(self._server, "--version").split()
        return next(word.removeprefix("v=") for word in words if word.startswith("v="))

    async def start(self) -> None:
        [self._port] = free_ports(1)
        options: dict[str, str | Path] = {
            "port": f"{self._port}",
            "bind": LOOPBACK,
            "dir": self.directory,
            "appendonly": "yes",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self.spawn("redis", self._server, *words, "--appendfsync", "always", "--save", "")
        await self.until(lambda: listens(self._port))

    async def command(self, load: Load, window: int) -> list[str]:
        program = [str(self._python), str(tools.SOURCES / "redis_load.py")]
        return [*program, *load.arguments(f"{self._port}", self.mode, window)]


class Rocketmq(System):
    """One broker that syncs every message, and the name server it needs."""

    name = "rocketmq"
    acknowledged = "synced by one broker (SYNC_FLUSH)"

    def prepare(self) -> str:
        self._classpath = tools.rocketmq_classpath()
        return tools.rocketmq_version()

    async def start(self) -> None:
        names, broker, replica = free_ports(3)
        self._names = f"{LOOPBACK}:{names}"
        home = self.directory / "home"
        (home / "conf").mkdir(parents=True)
        files: dict[str, dict[str, object]] = {
            "names": {"listenPort": names, "bindAddress": LOOPBACK},
            "broker": {
                "brokerClusterName": "bench",
                "brokerName": "broker",
                "brokerId": 0,
                "brokerIP1": LOOPBACK,
                "bindAddress": LOOPBACK,
                "listenPort": broker,
                "haListenPort": replica,
                "namesrvAddr": self._names,
                "storePathRootDir": self.directory / "store",
                "storePathCommitLog": self.directory / "store" / "commitlog",
                "brokerRole": "ASYNC_MASTER",
                "flushDiskType": "SYNC_FLUSH",
                "timerWheelEnable": "true",
                # The smallest value allowed; by default messages come up to a second late.
                "timerPrecisionMs": 100,
                # By default it refuses a message that has waited for 200 ms, as the last of 2,000 under way do.
                "waitTimeMillsInSendQueue": 10_000,
            },
        }
        for name, values in files.items():
            lines = [f"{key}={value}\n" for key, value in values.items()]
            (self.directory / f"{name}.conf").write_text("".join(lines), encoding="utf-8")
        environment = {"ROCKETMQ_HOME": str(home)}
        for name, heap, program, port in (
            ("names", "256m", "namesrv.NamesrvStartup", names),
            ("broker", "2g", "broker.BrokerStartup", broker),
        ):
            java = self._java(heap, f"org.apache.rocketmq.{program}", "-c", str(self.directory / f"{name}.conf"))
            self.spawn(name, *java, environment=environment)
            await self.until(partial(listens, port))

    async def command(self, load: Load, window: int) -> list[str]:
        return [*self._java("768m", "Load"), *load.arguments(self._names, self.mode, window)]

    def _java(self, heap: str, program: str, *arguments: str) -> list[str]:
        """A Java command. Files that the program would write below the user's home go into the run's directory."""
        options = [f"-Xms{heap}", f"-Xmx{heap}", "-XX:+UseG1GC", f"-Duser.home={self.directory}"]
        return ["java", *options, "-cp", self._classpath, program, *arguments]
