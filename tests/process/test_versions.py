"""Nodes and clients one version apart: a rolling upgrade under load, through a SIGKILL of the master.

The version before is built as a wheel from this clone's own history: the newest commit whose log has the level before
today's (node/state/schema.py). A clone without that history, or without git, is skipped. An elder client schedules and
consumes at newer nodes, and the other way round.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.process.commands import Commands
from tests.process.test_recovery import until_equal
from tests.project.imports import ROOT
from tickwheel.client import AsyncClient, Selection
from tickwheel.node.local_cluster import LocalCluster, LocalNode
from tickwheel.node.state.schema import LOG_LEVEL

SCHEMA = "node/state/schema.py"
MAIN = "tickwheel.node.cli.main"
HOUR_MS = 3_600_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def git(*words: str) -> str:
    """Output of git in this clone; skips the test without git or a repository."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("git is not installed: the version before cannot be built")
    if done.returncode:
        pytest.skip(f"the version before is not in this copy's history: {done.stderr.strip()[:200]}")
    return done.stdout


def level_of(commit: str) -> int:
    """The level of the log that a commit's nodes write."""
    text = git("show", f"{commit}:{SCHEMA}")
    names = dict(re.findall(r"^(\w*LEVEL) = (\w+)$", text, re.MULTILINE))
    value = names.get("LOG_LEVEL", "")
    while not value.isdigit():
        value = names[value]
    return int(value)


def commit_before() -> str:
    """The newest commit of the level before."""
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("this clone is shallow: git fetch --unshallow brings the version before")
    for commit in git("log", "--first-parent", "--format=%H", "-GLEVEL = ", "--", SCHEMA).split():
        if level_of(commit) == LOG_LEVEL and level_of(f"{commit}^") == LOG_LEVEL - 1:
            return git("rev-parse", f"{commit}^").strip()
    pytest.skip(f"no commit of level {LOG_LEVEL - 1} is in this clone's history")


@dataclass(frozen=True, slots=True)
class Elder:
    """An environment with the version before."""

    python: Path
    commands: Commands

    def command(self, *words: str) -> list[str]:
        """Its command line."""
        return [str(self.python), "-m", MAIN, *words]

    async def run(self, *words: str, status: int = 0) -> str:
        """Run one of its commands; its output."""
        done = await asyncio.to_thread(self.commands.run, words, folder=Path.cwd(), environment=os.environ)
        assert done.returncode == status, done
        return done.stdout


@pytest.fixture(scope="module")
def elder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elder]:
    """The wheel of the version before, in an environment of its own; its packages are those of the tests."""
    commit, place = commit_before(), tmp_path_factory.mktemp("elder")
    source = place / "source"
    source.mkdir()
    with subprocess.Popen(["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE) as packed:
        subprocess.run(["tar", "-x", "-C", str(source)], stdin=packed.stdout, check=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place), str(source)], check=True
    )
    [wheel] = place.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")], check=True)
    python = place / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "-q", "--no-deps", str(wheel)], check=True)
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    # Behind its own: the packages come from the tests' environment, tickwheel from the wheel.
    Path(found.stdout.strip(), "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    asked = "from tickwheel.node.state import schema; print(schema.__file__, schema.LOG_LEVEL)"
    said = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True, cwd=place).stdout
    assert said.startswith(str(place / "venv")) and said.split()[1] == str(LOG_LEVEL - 1)
    with Commands(python) as commands:
        yield Elder(python, commands)


class Upgrading(LocalCluster):
    """Three nodes; those in `elders` run the version before."""

    def __init__(self, directory: Path, elder: Elder) -> None:
        super().__init__(directory, 3)
        self.elder = elder
        self.elders = {node.node_id for node in self.nodes}

    def command(self, node: LocalNode) -> list[str]:
        """Of LocalCluster."""
        if node.node_id in self.elders:
            return self.elder.command("node", "--config", str(node.config_file))
        return super().command(node)

    async def upgrade(self, node: LocalNode) -> None:
        """Start a node that is down in today's version, on its data."""
        self.elders.discard(node.node_id)
        self.start_node(node)
        await self.wait_ready()


async def work(client: AsyncClient, elder: Elder, addresses: str, name: str) -> set[str]:
    """What both versions ask of the cluster; the payloads that must be delivered."""
    for number in range(20):
        await client.schedule("mixed", f"{name}-{number}", delay_ms=number * 50, key=f"{name}/{number}", tags=["new"])
    said = await elder.run("schedule", "mixed", f"{name}-elder", "--delay", "1s", "--tag", "old", "-a", addresses)
    assert re.match(r"0-\d+-\d+ ", said), said
    kept = await client.schedule("mixed", "never", delay_ms=HOUR_MS, unique_key=f"{name}/kept")
    await elder.run("cancel", kept.id, "-a", addresses)
    words = ("schedule", "mixed", "never", "--delay", "1h", "--key", f"{name}/swept", "--json")
    later = json.loads(await elder.run(*words, "-a", addresses))
    sweep = await client.sweeps.cancel(Selection("mixed", key=f"{name}/swept"))
    assert (await client.sweeps.wait(sweep.job_id)).done == 1
    assert (await client.get(later["id"])).state == "CANCELLED"
    await bury_and_replay(client, f"{name}-letter")
    await client.schedules.put(f"plan/{name}", "plans", "go", cron="0 9 * * *", zone="Europe/Berlin")
    assert f"plan/{name}" in await elder.run("schedules", "list", "-a", addresses)
    return {f"{name}-{number}" for number in range(20)} | {f"{name}-elder"}


async def bury_and_replay(client: AsyncClient, payload: str) -> None:
    """One message becomes a dead letter, a replay of all letters brings it back, and a purge of all ends it."""
    await client.schedule("letters", payload, delay_ms=0)
    async with asyncio.timeout(20):
        for all_letters in (client.dead.replay, client.dead.purge):
            async with client.consumer("buriers", ["letters"]) as consumer:
                delivery = await anext(aiter(consumer))
                assert delivery.payload.decode() == payload
                await delivery.dead("no use")
            assert (await all_letters("buriers")).changed == 1


async def consumed(client: AsyncClient, wanted: set[str]) -> None:
    """Take exactly these messages."""
    found: list[str] = []
    async with asyncio.timeout(60), client.consumer("readers", ["mixed"]) as consumer:
        async for delivery in consumer:
            found.append(delivery.payload.decode())
            await delivery.ack()
            if set(found) >= wanted:
                break
    assert set(found) == wanted


async def test_a_rolling_upgrade_under_both_clients(tmp_path: Path, elder: Elder) -> None:
    """All elder, one newer, its master killed, all newer: each step serves both clients, nothing is lost, and the
    nodes' states are equal."""
    cluster = Upgrading(tmp_path, elder)
    addresses = ",".join(cluster.addresses)
    async with cluster:
        client: Any = cluster.client()
        await client.admin.create_topic("mixed")
        await client.admin.create_group("readers", ["mixed"])
        await client.admin.create_topic("letters")
        await client.admin.create_group("buriers", ["letters"])
        await consumed(client, await work(client, elder, addresses, "elder"))

        master = await cluster.master()
        slave, other = (node for node in cluster.nodes if node is not master)
        await cluster.stop_node(slave)
        await cluster.upgrade(slave)
        await until_equal(cluster.nodes)
        await consumed(client, await work(client, elder, addresses, "one newer"))

        await client.admin.transfer(slave.node_id)
        wanted = await work(client, elder, addresses, "newer master")
        await cluster.kill_node(slave)  # an elder one leads what the newer one has written
        wanted |= await work(client, elder, addresses, "newer killed")
        await consumed(client, wanted)
        await cluster.upgrade(slave)
        await until_equal(cluster.nodes)

        for node in (other, master):
            await cluster.kill_node(node)
            await cluster.upgrade(node)
        assert not cluster.elders
        wanted = await work(client, elder, addresses, "all newer")
        await consumed(client, wanted)
        said = await elder.run("consume", "mixed", "--group", "elders", "-n", "105", "-a", addresses)
        found = [line.split("  ")[-1] for line in said.splitlines()]
        assert len(found) == len(set(found)) == 5 * len(wanted) and wanted <= set(found)
        await until_equal(cluster.nodes)
