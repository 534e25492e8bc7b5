"""Every example runs, against a real node."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tickwheel.bench.peers.tools import PROTOC_GEN_GO, PROTOC_GEN_GO_GRPC
from tickwheel.node.local_cluster import LocalCluster

EXAMPLES = Path(__file__).parents[2] / "examples"
EXPECTED = {
    "quickstart": "received",
    "reminders": "reminded 200",
    "retries": "dead after 3 attempts: RuntimeError: a bug",
    "payment_timeout": "order 1 paid: CANCELLED\nonce more: CANCELLED\ngiven up: order 2",
    "idempotent_consumer": "balance 35",
    "sync_client": "received dear reader ['paper']",
    "debounce": "digest of notes.md\npending: 0",
    "throttle": "orders: FREE, USED_EXISTING, USED_EXISTING\nsummary for customer-17\nthe next order: FREE",
    "session_timeout": "used: True\ntimed out: session-1\nused: False\nbegun: True\nlogged out: True False",
}
RECIPES = {"django_app", "fastapi_app", "idempotent_postgres", "outbox"}
"""Need more than a cluster: test_recipes.py."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One real node, where what failed comes again after a second rather than ten."""
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster"), 1)

    async def start() -> None:
        await cluster.start()
        await cluster.client().admin.update_settings(delay_levels="1s 1s 1s")

    with asyncio.Runner() as runner:
        try:
            runner.run(start())
            yield cluster.addresses[0]
        finally:
            runner.run(cluster.stop())


def test_all_examples_are_listed() -> None:
    """A new example is run too."""
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted({*EXPECTED, *RECIPES})


@pytest.mark.parametrize("name", EXPECTED)
def test_python_example(name: str, address: str) -> None:
    """It ends well and says what it should."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", address], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout


def test_the_worker_of_the_tutorial(address: str, tmp_path: Path) -> None:
    """As docs/TUTORIAL.md has it, with fewer messages and one node."""
    text = (EXAMPLES.parent / "docs" / "TUTORIAL.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^```python\n(# worker\.py\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    changed = code.replace("127.0.0.1:7700,127.0.0.1:7701,127.0.0.1:7702", address).replace("1_200", "40")
    assert address in changed and "COUNT = 40\n" in changed
    (tmp_path / "worker.py").write_text(changed, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, tmp_path / "worker.py"], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("40 of 40 came, 0 are missing, ")


def test_node_example(address: str, tmp_path: Path) -> None:
    """From the .proto files alone, in another language."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm")
    shutil.copytree(EXAMPLES / "node", tmp_path / "examples" / "node", ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(EXAMPLES.parent / "proto", tmp_path / "proto", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "examples" / "node"
    installed = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--prefer-offline"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if installed.returncode != 0:
        pytest.skip(f"npm install failed: {installed.stderr.strip().splitlines()[-1:]}")
    done = subprocess.run(
        [node, "main.js", address], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "received hello from Node" in done.stdout
    assert "settled 1" in done.stdout


def test_go_example(address: str, tmp_path: Path) -> None:
    """As docs/OTHER_LANGUAGES.md says, with the modules that this machine has; nothing is fetched."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("needs go")
    shutil.copytree(EXAMPLES.parent / "proto", tmp_path / "proto", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "examples" / "go"
    shutil.copytree(EXAMPLES / "go", folder, ignore=shutil.ignore_patterns("tickwheel", "go.sum"))
    modules = subprocess.run([go, "env", "GOMODCACHE"], capture_output=True, text=True, check=True).stdout.strip()
    environment = os.environ | {"GOBIN": str(tmp_path / "bin"), "GOPROXY": f"file://{modules}/cache/download"}
    environment |= {"GOSUMDB": "off", "GOFLAGS": "-mod=mod", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment["PROTOC"] = f"{sys.executable} -m grpc_tools.protoc"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    for plugin in (PROTOC_GEN_GO, PROTOC_GEN_GO_GRPC):
        if (installed := run(go, "install", plugin)).returncode != 0:
            pytest.skip(f"go install failed: {installed.stderr.strip().splitlines()[-1:]}")
    made = run("./stubs.sh")
    assert made.returncode == 0, made.stderr
    if (tidied := run(go, "mod", "tidy")).returncode != 0:
        pytest.skip(f"go mod tidy failed: {tidied.stderr.strip().splitlines()[-1:]}")
    done = run(go, "run", ".", address)
    assert done.returncode == 0, done.stderr
    assert "received hello from Go\nsettled 1\n" in done.stdout


def test_java_example(address: str, tmp_path: Path) -> None:
    """As docs/OTHER_LANGUAGES.md says."""
    mvn = shutil.which("mvn")
    if mvn is None or shutil.which("javac") is None:
        pytest.skip("needs a JDK and Maven")
    shutil.copytree(EXAMPLES.parent / "proto", tmp_path / "proto", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "examples" / "java"
    shutil.copytree(EXAMPLES / "java", folder, ignore=shutil.ignore_patterns("target"))
    done = subprocess.run(
        [mvn, "--quiet", "--batch-mode", "compile", "exec:java", f"-Dexec.args={address}"],
        cwd=folder,
        # Quick to start, which is most of the work.
        env=os.environ | {"MAVEN_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"},
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    if "Could not resolve" in done.stdout or "Could not transfer" in done.stdout:
        pytest.skip(f"Maven cannot fetch what it needs: {done.stdout.splitlines()[0]}")
    assert done.returncode == 0, done.stdout
    assert "received hello from Java\nsettled 1\n" in done.stdout
