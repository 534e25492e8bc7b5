"""docs/DEPLOY.md as a user follows it: its certificates, its configuration, three addresses, TLS throughout."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from tests.process.commands import Commands
from tickwheel.client import AsyncClient, NodeRole, NodeState, NodeStatus, PermissionRefused, TickwheelError
from tickwheel.client.cluster import TlsFiles
from tickwheel.node.local_cluster import free_ports
from tickwheel.proto import peer_pb2
from tickwheel.proto.peer_pb2_grpc import PeerStub

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "tickwheel.node.cli.main"]
ANY_DISK = "\n[storage]\nhigh_water_percent = 0\n"  # the disk that tests run on may well be nearly full


class Hosts:
    """Three hosts, which are three addresses of this machine."""

    def __init__(self, root: Path, commands: Commands) -> None:
        self.root = root
        self._commands = commands
        self.certs = root / "certs"
        self.ports = dict(zip(("7700", "7701"), free_ports(2), strict=True))
        self.metrics = dict(zip("12349", free_ports(5), strict=True))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def here(self, text: str) -> str:
        """The document's addresses and ports, on this machine."""
        text = re.sub(r"10\.0\.0\.(\d)", r"127.0.0.\1", text)
        return re.sub(r"\b770[01]\b", lambda found: str(self.ports[found[0]]), text)

    def run(self, line: str, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """A command line of the document."""
        words = shlex.split(self.here(line))
        assert words.pop(0) == "tickwheel"
        environment = {**os.environ, "COLUMNS": "200", **environment}
        return self._commands.run(words, folder=self.root, environment=environment, typed=typed)

    def configure(self, number: str, cluster: str = "") -> Path:
        """deploy/node.toml, adapted as the document says; `cluster`: in place of its section of that name."""
        directory = self.root / f"n{number}"
        directory.mkdir()
        text = (ROOT / "deploy" / "node.toml").read_text(encoding="utf-8")
        head, listen, rest = text.partition("[listen]")
        rest = rest.replace("10.0.0.1", f"10.0.0.{number}").replace("n1.", f"n{number}.")
        head = head.replace('[node]\nid = "n1"', f'[node]\nid = "n{number}"')
        if cluster:
            head = cluster + head[head.index("[node]") :]
        text = self.here(head + listen + rest).replace("127.0.0.1:7702", f"127.0.0.1:{self.metrics[number]}")
        text = text.replace("/etc/tickwheel", str(self.certs)).replace("/var/lib/tickwheel", str(directory / "data"))
        path = directory / "node.toml"
        path.write_text(text + ANY_DISK, encoding="utf-8")
        return path

    def start(self, number: str, config: Path) -> subprocess.Popen[bytes]:
        """`tickwheel node --config`."""
        with (config.parent / "node.log").open("ab") as log:
            command = [*COMMAND, "node", "--config", str(config)]
            self.processes[number] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        return self.processes[number]

    async def ready(self, ops: AsyncClient, count: int) -> NodeStatus:
        """Until so many nodes serve, with a master among them that has its peers without lag. The master."""
        async with asyncio.timeout(30):
            while True:
                statuses = [s for s in (await ops.admin.statuses()).values() if isinstance(s, NodeStatus)]
                for status in statuses:
                    for peer in status.peers:
                        if peer.client_address:
                            ops.cluster.add(peer.client_address)
                serving = [s for s in statuses if s.state is NodeState.SERVING]
                master = next((s for s in serving if s.role is NodeRole.MASTER and s.lease_held), None)
                if master is not None and sum(s.master_id == master.node_id for s in serving) == count:
                    return master
                await asyncio.sleep(0.05)

    @property
    def admin(self) -> dict[str, str]:
        """The environment of a command with an administrator's certificate."""
        parts = (("CA", "ca.crt"), ("CERT", "ops.crt"), ("KEY", "ops.key"))
        return {f"TICKWHEEL_TLS_{part}": f"certs/{name}" for part, name in parts}

    def address(self, number: str, port: str = "7700") -> str:
        """Where a node is reached."""
        return f"127.0.0.{number}:{self.ports[port]}"

    def tls(self, name: str | None) -> TlsFiles:
        """A caller's certificate."""
        if name is None:
            return TlsFiles(self.certs / "ca.crt")
        return TlsFiles(self.certs / "ca.crt", self.certs / f"{name}.crt", self.certs / f"{name}.key")

    def client(self, name: str | None, timeout_s: float = 20.0) -> AsyncClient:
        """A client with a caller's certificate."""
        return AsyncClient([self.address(number) for number in "123"], tls=self.tls(name), timeout_s=timeout_s)


def command_in_docs(start: str) -> str:
    """The line of the document that begins so."""
    text = (ROOT / "docs" / "DEPLOY.md").read_text(encoding="utf-8")
    return next(line.strip() for line in text.splitlines() if line.strip().startswith(start))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosts(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> AsyncIterator[Hosts]:
    """The cluster of the document, up and with a master."""
    made = Hosts(tmp_path_factory.mktemp("hosts"), commands)
    done = made.run(command_in_docs("tickwheel certs"))
    assert done.returncode == 0, done.stderr
    try:
        for number in "123":
            config = made.configure(number)
            checked = made.run(f"tickwheel config check {config}")
            assert checked.returncode == 0, checked.stderr + checked.stdout
            made.start(number, config)
        async with made.client("ops") as client, asyncio.timeout(30):
            while True:
                with suppress(TickwheelError):
                    if (await client.admin.master_status(2.0)).lease_held:
                        break
                await asyncio.sleep(0.1)
        yield made
    finally:
        for process in made.processes.values():
            process.terminate()
        for number, process in made.processes.items():
            assert process.wait(30) == 0, f"n{number} did not stop cleanly"
        for log in made.root.glob("n*/node.log"):
            assert b"Traceback" not in log.read_bytes()


async def test_a_client_certificate_schedules_and_consumes_but_changes_nothing(hosts: Hosts) -> None:
    """Peer, client and admin permissions are apart."""
    async with hosts.client("app") as client:
        async with client.consumer("g", "t") as consumer:
            await client.schedule("t", b"hello", delay_ms=10)
            async with asyncio.timeout(20):
                async for delivery in consumer:
                    assert delivery.payload == b"hello"
                    await delivery.ack()
                    break
        with pytest.raises(PermissionRefused):
            await client.admin.create_topic("mine")
        with pytest.raises(PermissionRefused):
            await client.admin.transfer()
    async with hosts.client("ops") as client:
        assert (await client.admin.create_topic("ours")).name == "ours"


async def test_status_as_the_document_says(hosts: Hosts) -> None:
    """Its environment variables and its command show three nodes of which one is master."""
    environment = dict(
        word.split("=", 1) for word in command_in_docs("export TICKWHEEL_TLS_CA").split()[1:] if "=" in word
    )
    done = hosts.run(command_in_docs("tickwheel status --addresses"), **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("slave") == 2 and "master" in done.stdout, done.stdout


@pytest.mark.parametrize("who", ["nobody", "without"])
async def test_callers_without_a_certificate_get_nowhere(hosts: Hosts, who: str) -> None:
    """Neither in clear text nor with TLS and no certificate of their own."""
    tls = None if who == "nobody" else hosts.tls(None)
    addresses = [hosts.address(number) for number in "123"]
    async with AsyncClient(addresses, tls=tls, timeout_s=1.5) as client:
        with pytest.raises(TickwheelError):
            await client.schedule("t", b"x", delay_ms=10)


async def test_a_peer_must_be_the_member_of_its_certificate(hosts: Hosts) -> None:
    """n2's certificate does not make a caller n3, and a client's certificate makes nobody a member."""
    for name, words in (("n2", "the certificate is not that of node n3"), ("app", "certificate")):
        credentials = hosts.tls(name).credentials()
        async with grpc.aio.secure_channel(hosts.address("1", "7701"), credentials) as channel:
            call = PeerStub(channel).Exchange()  # type: ignore[call-arg]  # written to, not iterated over
            hello = peer_pb2.PeerFrame(
                cluster_id="orders", sender_id="n3", receiver_id="n1", format_version=1, hello=peer_pb2.Hello()
            )
            await call.write(hello)
            answer = await call.read()
            assert isinstance(answer, peer_pb2.PeerFrame) and words in answer.refused.reason, answer
            call.cancel()


async def test_a_backup_over_tls_restores(hosts: Hosts) -> None:
    """The document's backup and restore; refused with advice where a node runs."""
    backup = command_in_docs("tickwheel backup").replace("/backups/", "")
    done = hosts.run(backup, **hosts.admin)
    assert done.returncode == 0, done.stderr
    restore = command_in_docs("tickwheel restore").replace("/backups/", "")
    config = hosts.configure("9", cluster='[cluster]\nid = "orders-2"\n')
    assert 'id = "orders-2"' in (ROOT / "docs" / "DEPLOY.md").read_text(encoding="utf-8")
    done = hosts.run(restore.replace("/etc/tickwheel/node.toml", str(config)))
    assert done.returncode == 0, done.stderr
    assert "cluster orders-2, until now orders (n1, n2, n3)" in done.stdout
    running = config.with_name("running.toml")
    running.write_text(config.read_text(encoding="utf-8").replace("n9/data", "n1/data"), encoding="utf-8")
    refused = hosts.run(restore.replace("/etc/tickwheel/node.toml", str(running)))
    assert refused.returncode == 1 and "a node is running" in refused.stderr, refused.stderr


async def test_contexts_carry_certificates_and_tokens(hosts: Hosts, tmp_path: Path) -> None:
    """Named once, then `--context`: by certificate, by token, and what is told if either is wrong."""
    nodes = ",".join(hosts.address(number) for number in "123")
    home = {"XDG_CONFIG_HOME": str(tmp_path)}

    def run(line: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        return hosts.run(f"tickwheel {line}", typed=typed, **home)

    def add(name: str, options: str, token: str = "") -> None:
        more = " --token -" if token else ""
        done = run(f"context add {name} -a {nodes} {options}{more}", token + "\n")
        assert done.returncode == 0, done.stderr

    own, other = "--tls-ca certs/ca.crt --tls-cert certs/{0}.crt --tls-key certs/{0}.key", "--tls-ca other/ca.crt"
    assert run("certs --out other --node n1=127.0.0.1 --client app").returncode == 0
    add("ops", own.format("ops"))
    for line in (
        "user set root --role administrator",
        "role set pays --allow schedule,read:pay-*",
        "user set shop --role pays",
    ):
        assert run(line).returncode == 0, line
    shop = json.loads(run("user token shop --json").stdout)["secret"]
    add("shop", own.format("app"), shop)
    add("app", own.format("app"))
    add("wrong", own.format("app"), "tw_wrong")
    add("stranger", other)
    add("clear", "")
    try:
        assert run("settings set rights=true").returncode == 0
        told = json.loads(run("--context shop whoami --json").stdout)
        assert (told["name"], told["rights"]) == ("shop", True), told
        assert run("--context shop schedule pay-late hello --delay 1h").returncode == 0
        for line, code, said in (
            ("--context shop schedule mail hello --delay 1h", 5, "allows it to schedule topic mail"),
            ("--context app whoami", 5, "no user is named app"),
            ("--context wrong list pay-late", 5, "the token is not known"),
            ("--context wrong status", 5, "the token is not known"),
            ("--context wrong top --once", 5, "the token is not known"),
            ("--context stranger status", 3, "certificate is not accepted (self signed certificate"),
            ("--context clear status", 3, "it uses TLS, but this client does not"),
            ("--context nowhere status", 2, "context nowhere: unknown"),
        ):
            done = run(line)
            assert done.returncode == code and said in done.stderr, (line, done)
            assert done.stderr.splitlines()[-1].startswith("Hint: ") and "Handshake failed" not in done.stderr, line
            assert shop not in done.stdout + done.stderr
        held = tmp_path / "tickwheel" / "contexts.json"
        held.chmod(0o644)
        done = run("--context shop whoami")
        assert done.returncode == 0 and f"chmod 600 {held}" in done.stderr
        assert "chmod" not in run("--context ops whoami").stderr  # it has no token
    finally:
        assert run("settings set rights=false").returncode == 0


async def test_one_after_the_other_is_restarted_without_an_error(hosts: Hosts) -> None:
    """A rolling upgrade: SIGTERM ends with 0, slaves first, the master last; nothing is lost, repeated or refused."""
    got: list[bytes] = []
    sent: list[bytes] = []
    stop = asyncio.Event()
    gaps_ms = [0.0]

    async def produce(client: AsyncClient) -> None:
        while not stop.is_set():
            payload = b"%d" % len(sent)
            before = time.monotonic()
            await client.schedule("rolling", payload, delay_ms=20)
            gaps_ms.append((time.monotonic() - before) * 1_000)
            sent.append(payload)
            await asyncio.sleep(0.01)

    async def consume(client: AsyncClient) -> None:
        async with client.consumer("rolling", "rolling") as consumer:
            async for delivery in consumer:
                got.append(delivery.payload)
                await delivery.ack()

    async with hosts.client("app") as client, hosts.client("ops") as ops:
        tasks = [asyncio.create_task(work(client)) for work in (produce, consume)]
        master = (await hosts.ready(ops, 3)).node_id[1:]
        for number in [*sorted({"1", "2", "3"} - {master}), master]:
            hosts.processes[number].terminate()
            assert await asyncio.to_thread(hosts.processes[number].wait, 20) == 0
            hosts.start(number, hosts.root / f"n{number}" / "node.toml")
            await hosts.ready(ops, 3)
        async with asyncio.timeout(20):
            enough = len(sent) + 10
            while not stop.is_set() or len(set(got)) < len(sent):
                await asyncio.sleep(0.05)
                assert not tasks[1].done()
                if len(sent) >= enough and not stop.is_set():
                    stop.set()
                    await tasks[0]
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(got) == sorted(sent), "delivered twice"
    assert max(gaps_ms) < 2_000, f"a producer waited {max(gaps_ms):.0f} ms"
    log = (hosts.root / f"n{master}" / "node.log").read_text(encoding="utf-8")
    assert "was not handed over" not in log and "nobody took" not in log


async def until_disk_is_recorded(hosts: Hosts, ops: AsyncClient, number: str) -> None:
    """The master does so within a second of seeing a member; adding it again changes nothing and tells."""
    member = (f"n{number}", hosts.address(number, "7701"), hosts.address(number))
    async with asyncio.timeout(10):
        while True:
            if all(known.disk_uuid for known in await ops.admin.add_member(*member)):
                return
            await asyncio.sleep(0.1)


async def test_a_member_is_replaced_as_the_document_says(hosts: Hosts) -> None:
    """Its disk is wiped: refused under the old id, it ends and says what to do. Done so, a new node follows."""
    hosts.processes["3"].terminate()
    assert await asyncio.to_thread(hosts.processes["3"].wait, 20) == 0
    async with hosts.client("ops") as ops:
        await until_disk_is_recorded(hosts, ops, "3")
    shutil.rmtree(hosts.root / "n3" / "data")
    wiped = hosts.start("3", hosts.root / "n3" / "node.toml")
    assert await asyncio.to_thread(wiped.wait, 20) == 3
    said = (hosts.root / "n3" / "node.log").read_text(encoding="utf-8")
    assert "remove the member and add it anew under a new id" in said
    del hosts.processes["3"]
    assert hosts.run(command_in_docs("tickwheel certs --out certs --node n4")).returncode == 0
    environment = {**hosts.admin, "TICKWHEEL_ADDRESSES": hosts.address("1")}
    text = (ROOT / "docs" / "DEPLOY.md").read_text(encoding="utf-8")
    block = next(part for part in text.split("\n\n") if 'join = "existing"' in part and "[cluster]" in part)
    config = hosts.configure("4", cluster="\n".join(line.strip() for line in block.splitlines()) + "\n")
    hosts.start("4", config)
    for line in ("tickwheel member remove n3", "tickwheel member add n4"):
        done = hosts.run(command_in_docs(line), **environment)
        assert done.returncode == 0, done.stderr
    assert "n4" in done.stdout and "n3" not in done.stdout
    async with AsyncClient([hosts.address("1"), hosts.address("4")], tls=hosts.tls("ops")) as ops:
        await hosts.ready(ops, 3)
    listed = hosts.run("tickwheel member list --json", **environment)
    assert json.loads(listed.stdout)["master_id"] in {"n1", "n2", "n4"}
    again = hosts.run(
        f"tickwheel member add n3 --peer {hosts.address('3', '7701')} --client {hosts.address('3')}", **environment
    )
    assert again.returncode == 1 and "was removed" in again.stderr


async def test_without_tls_only_loopback_unless_told(hosts: Hosts, tmp_path: Path) -> None:
    """A node that would listen in clear text on another address refuses to start and says what to do."""
    (port,) = free_ports(1)
    settings = (
        "cluster.id=c", "node.id=n1", f"node.data_dir={tmp_path}/d", "listen.metrics_bind=",
        f"listen.client_bind=0.0.0.0:{port}", f"listen.peer_bind=127.0.0.1:{port + 1}",
    )  # fmt: skip
    done = hosts.run("tickwheel node " + " ".join(f"--set {setting}" for setting in settings))
    assert done.returncode == 2
    assert "--insecure" in done.stderr and "Traceback" not in done.stderr, done.stderr
