"""docs/DEPLOY.md as a user follows it: its certificates, its configuration, three addresses, TLS throughout."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Self

import grpc
import pytest
import pytest_asyncio

from tests import forked_nodes
from tests.process.commands import COMMAND, Commands
from tickwheel.client import AsyncClient, NodeRole, NodeState, NodeStatus, PermissionRefused, TickwheelError
from tickwheel.client.cluster import TRY_TIMEOUT_S, TlsFiles
from tickwheel.node.local_cluster import free_ports
from tickwheel.proto import peer_pb2
from tickwheel.proto.peer_pb2_grpc import PeerStub

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "DEPLOY.md").read_text(encoding="utf-8")
SHOWN = [line.strip() for line in PAGE.splitlines() if re.match(r" +tickwheel [a-z]", line)]
"""The commands that the page shows, without those in its sentences."""
EXPORTS = re.findall(r"\b(TICKWHEEL_\w+)=(\S+)", PAGE)
ELSEWHERE = {
    "tickwheel status -a 127.0.0.1:7700,127.0.0.1:7710,127.0.0.1:7720": "tests/project/test_deployment.py",
    "tickwheel rebuild --config /etc/tickwheel/node.toml": "tests/process/test_damaged_index.py",
    "tickwheel recover --config /etc/tickwheel/node.toml": "tests/process/test_recovery.py",
    "tickwheel recover --config /etc/tickwheel/node.toml --skip-entry 48213": "tests/node/core/test_poison.py",
}
"""Commands of the page that need another cluster, by the test that runs them."""
SOON_S = 90.0
"""In which a node starts on a machine that has other things to do."""
ANY_DISK = "\n[storage]\nhigh_water_percent = 0\n"  # the disk that tests run on may well be nearly full


TYPED: set[str] = set()


def shown(start: str) -> str:
    """The one command of the page that begins so."""
    [line] = [line for line in SHOWN if line.startswith(start) and line not in ELSEWHERE]
    TYPED.add(line)
    return line


CERTS = shown("tickwheel certs --out certs --node n1")
CHECK = shown("tickwheel config check")
NODE = shown("tickwheel node")
STATUS = shown("tickwheel status")
MORE_CERTS = shown("tickwheel certs --out certs --node n4")
REMOVE = shown("tickwheel member remove n3")
ADD = shown("tickwheel member add n4")
BACKUP = shown("tickwheel backup")
RESTORE = shown("tickwheel restore")
CONFIG = "/etc/tickwheel/node.toml"


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

    def start(self, number: str) -> subprocess.Popen[bytes]:
        """The node of a host, by the command of the page; when it is started again, as a fork that need not import."""
        folder = self.root / f"n{number}"
        program, *words = shlex.split(NODE.replace(CONFIG, str(folder / "node.toml")))
        assert program == "tickwheel"
        with (folder / "node.log").open("ab") as log:
            start = forked_nodes.begin if number in self.processes else forked_nodes.as_always
            self.processes[number] = start([*COMMAND, *words], log, os.environ)
        return self.processes[number]

    async def serves(self, number: str) -> None:
        """Until /readyz of a host's node answers 200, as the page says of each step of an upgrade."""
        url = f"http://127.0.0.1:{self.metrics[number]}/readyz"

        def answers() -> bool:
            with suppress(OSError), urllib.request.urlopen(url, timeout=30):  # also of 503
                return True
            return False

        async with asyncio.timeout(SOON_S):
            while not await asyncio.to_thread(answers):
                assert self.processes[number].poll() is None
                await asyncio.sleep(0.05)

    async def ready(self, ops: AsyncClient, count: int) -> NodeStatus:
        """Until so many nodes serve, with a master among them that has its peers without lag. The master."""
        async with asyncio.timeout(SOON_S):
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
        """What the page exports for its commands: addresses, and an administrator's certificate."""
        return {name: self.here(value) for name, value in EXPORTS}

    def address(self, number: str, port: str = "7700") -> str:
        """Where a node is reached."""
        return f"127.0.0.{number}:{self.ports[port]}"

    def tls(self, name: str | None) -> TlsFiles:
        """A caller's certificate."""
        if name is None:
            return TlsFiles(self.certs / "ca.crt")
        return TlsFiles(self.certs / "ca.crt", self.certs / f"{name}.crt", self.certs / f"{name}.key")

    def tls_bytes(self, name: str) -> list[bytes]:
        """Authority, key and certificate of a caller."""
        return [(self.certs / file).read_bytes() for file in ("ca.crt", f"{name}.key", f"{name}.crt")]

    def client(self, name: str | None, timeout_s: float = 20.0) -> AsyncClient:
        """A client with a caller's certificate."""
        return AsyncClient([self.address(number) for number in "123"], tls=self.tls(name), timeout_s=timeout_s)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosts(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> AsyncIterator[Hosts]:
    """The cluster of the document, up and with a master."""
    made = Hosts(tmp_path_factory.mktemp("hosts"), commands)
    done = made.run(CERTS)
    assert done.returncode == 0, done.stderr
    try:
        for number in "123":
            config = made.configure(number)
            checked = made.run(CHECK.replace(CONFIG, str(config)))
            assert checked.returncode == 0, checked.stderr + checked.stdout
            made.start(number)
        async with made.client("ops") as client, asyncio.timeout(SOON_S):
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
            assert process.wait(SOON_S) == 0, f"n{number} did not stop cleanly"
        for log in made.root.glob("n*/node.log"):
            assert b"Traceback" not in log.read_bytes()


async def test_a_client_certificate_schedules_and_consumes_but_changes_nothing(hosts: Hosts) -> None:
    """Peer, client and admin permissions are apart."""
    async with hosts.client("app") as client:
        async with client.consumer("g", "t") as consumer:
            await client.schedule("t", b"hello", delay_ms=10)
            async with asyncio.timeout(SOON_S):
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
    done = hosts.run(STATUS, **hosts.admin)
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
        credentials = grpc.ssl_channel_credentials(*hosts.tls_bytes(name))
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
    done = hosts.run(BACKUP.replace("/backups/", ""), **hosts.admin)
    assert done.returncode == 0, done.stderr
    restore = RESTORE.replace("/backups/", "")
    config = hosts.configure("9", cluster='[cluster]\nid = "orders-2"\n')
    assert 'id = "orders-2"' in PAGE
    done = hosts.run(restore.replace(CONFIG, str(config)))
    assert done.returncode == 0, done.stderr
    assert "cluster orders-2, until now orders (n1, n2, n3)" in done.stdout
    running = config.with_name("running.toml")
    running.write_text(config.read_text(encoding="utf-8").replace("n9/data", "n1/data"), encoding="utf-8")
    refused = hosts.run(restore.replace(CONFIG, str(running)))
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
            ("--context stranger status", 3, "certificate is not accepted (self-signed certificate"),
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


async def until(holds: Callable[[], bool]) -> None:
    """Until it is true."""
    async with asyncio.timeout(SOON_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.02)


class Load:
    """Schedules one message after the other, each due 20 ms later, and consumes them. Left once all have come."""

    def __init__(self, client: AsyncClient, topic: str, lease: timedelta | None = None) -> None:
        self.sent: list[bytes] = []
        self.got: list[bytes] = []
        self.gap_ms_max = 0.0
        """The longest wait of the producer."""
        self._client = client
        self._topic = topic
        self._lease = lease
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(work()) for work in (self._produce, self._consume)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._tasks[0]
        await until(lambda: set(self.got) >= set(self.sent))
        self._tasks[1].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def more(self, count: int) -> None:
        """Until so many more have come."""
        enough = len(self.got) + count
        await until(lambda: len(self.got) >= enough or self._tasks[1].done())
        assert not self._tasks[1].done()

    async def _produce(self) -> None:
        while not self._stop.is_set():
            payload = b"%d" % len(self.sent)
            before = time.monotonic()
            await self._client.schedule(self._topic, payload, delay_ms=20)
            self.gap_ms_max = max(self.gap_ms_max, (time.monotonic() - before) * 1_000)
            self.sent.append(payload)
            await asyncio.sleep(0.01)

    async def _consume(self) -> None:
        async with self._client.consumer(self._topic, self._topic, lease=self._lease) as consumer:
            async for delivery in consumer:
                self.got.append(delivery.payload)
                await delivery.ack()


async def test_one_after_the_other_is_restarted_without_an_error(hosts: Hosts) -> None:
    """A rolling upgrade: SIGTERM ends with 0, slaves first, the master last; nothing is lost, repeated or refused."""
    async with hosts.client("app") as client, hosts.client("ops") as ops:
        master = (await hosts.ready(ops, 3)).node_id[1:]
        async with Load(client, "rolling") as load:
            for number in [*sorted({"1", "2", "3"} - {master}), master]:
                hosts.processes[number].terminate()
                assert await asyncio.to_thread(hosts.processes[number].wait, SOON_S) == 0
                hosts.start(number)
                await hosts.serves(number)
            await load.more(10)
    assert sorted(load.got) == sorted(load.sent), "delivered twice"
    assert load.gap_ms_max < TRY_TIMEOUT_S * 1_000, f"a producer waited {load.gap_ms_max:.0f} ms"
    log = (hosts.root / f"n{master}" / "node.log").read_text(encoding="utf-8")
    assert "was not handed over" not in log and "nobody took" not in log


async def test_a_master_is_killed_and_started_again(hosts: Hosts) -> None:
    """By SIGKILL, under load: the other two go on; the page's command starts it again, and it may lead again. Nothing
    is lost."""
    async with hosts.client("app") as client, hosts.client("ops") as ops:
        master = (await hosts.ready(ops, 3)).node_id[1:]
        kept = hosts.run("tickwheel schedule kept hello --delay 1h", **hosts.admin).stdout.split()[0]
        # What the killed master had sent and did not arrive comes again once its lease is over.
        async with Load(client, "killed", timedelta(seconds=2)) as load:
            await load.more(10)
            hosts.processes[master].kill()
            await asyncio.to_thread(hosts.processes[master].wait)
            await load.more(10)
            told = hosts.run(STATUS, **hosts.admin).stdout
            assert "no answer" in told and "master*" in told, told
            hosts.start(master)
            await hosts.serves(master)
            assert hosts.run(STATUS, **hosts.admin).stdout.count("slave") == 2
            assert "`tickwheel transfer`" in PAGE
            done = hosts.run(f"tickwheel transfer n{master}", **hosts.admin)
            assert f"n{master} is master in term " in done.stdout, done
            await load.more(10)
    assert set(load.got) == set(load.sent)
    assert kept in hosts.run("tickwheel list kept", **hosts.admin).stdout
    used = hosts.run("tickwheel disk", **hosts.admin)
    assert "`tickwheel disk`" in PAGE and "journal" in used.stdout, used


async def test_certificates_are_read_again_when_told(hosts: Hosts) -> None:
    """SIGHUP, as `systemctl reload` sends it."""
    log = hosts.root / "n1" / "node.log"
    hosts.processes["1"].send_signal(signal.SIGHUP)

    def read_again() -> bool:
        return "certificates were read again" in log.read_text(encoding="utf-8")

    await until(read_again)


async def until_disk_is_recorded(hosts: Hosts, ops: AsyncClient, number: str) -> None:
    """The master does so within a second of seeing a member; adding it again changes nothing and tells."""
    member = (f"n{number}", hosts.address(number, "7701"), hosts.address(number))
    async with asyncio.timeout(SOON_S):
        while True:
            if all(known.disk_uuid for known in await ops.admin.add_member(*member)):
                return
            await asyncio.sleep(0.1)


async def test_a_member_is_replaced_as_the_document_says(hosts: Hosts) -> None:
    """Its disk is wiped: refused under the old id, it ends and says what to do. Done so, a new node follows."""
    hosts.processes["3"].terminate()
    assert await asyncio.to_thread(hosts.processes["3"].wait, SOON_S) == 0
    async with hosts.client("ops") as ops:
        await until_disk_is_recorded(hosts, ops, "3")
    shutil.rmtree(hosts.root / "n3" / "data")
    wiped = hosts.start("3")
    assert await asyncio.to_thread(wiped.wait, SOON_S) == 3
    said = (hosts.root / "n3" / "node.log").read_text(encoding="utf-8")
    assert "remove the member and add it anew under a new id" in said
    del hosts.processes["3"]
    assert hosts.run(MORE_CERTS).returncode == 0
    block = next(part for part in PAGE.split("\n\n") if 'join = "existing"' in part and "[cluster]" in part)
    hosts.configure("4", cluster="\n".join(line.strip() for line in block.splitlines()) + "\n")
    hosts.start("4")
    for line in (REMOVE, ADD):
        done = hosts.run(line, **hosts.admin)
        assert done.returncode == 0, done.stderr
    assert "n4" in done.stdout and "n3" not in done.stdout
    async with AsyncClient([hosts.address("1"), hosts.address("4")], tls=hosts.tls("ops")) as ops:
        await hosts.ready(ops, 3)
    listed = hosts.run("tickwheel member list --json", **hosts.admin)
    assert json.loads(listed.stdout)["master_id"] in {"n1", "n2", "n4"}
    again = hosts.run(
        f"tickwheel member add n3 --peer {hosts.address('3', '7701')} --client {hosts.address('3')}", **hosts.admin
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


async def test_every_command_of_the_page_is_typed() -> None:
    """Here, or by another test."""
    assert set(SHOWN) == TYPED | set(ELSEWHERE)
    assert all((ROOT / test).exists() for test in ELSEWHERE.values())
