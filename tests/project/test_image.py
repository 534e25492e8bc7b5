"""deploy/Containerfile builds, and what it builds runs: three nodes in it, without root.

`make image` runs this: it needs root, Debian's buildah and mmdebstrap, and some minutes. The base image comes from no
registry: it is made of Debian's packages, with the same name and version of Python as the one that the Containerfile
names. Otherwise the file is built as it stands.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.project.imports import ROOT

BASE = "docker.io/library/python:3.11-slim"
PACKAGES = "python3,python3-pip,python-is-python3,ca-certificates"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
"""Where the way to the package index ends in an authority of this machine's, the image must know it, too."""
USER = "10001"
SOON_S = 120

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1_800),
    pytest.mark.skipif("TICKWHEEL_IMAGE" not in os.environ, reason="takes some minutes and needs root: make image"),
]

Buildah = Callable[..., str]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Buildah with a store of its own that holds the base image; everything goes at the end."""
    for program in ("buildah", "mmdebstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install buildah mmdebstrap")
    place = tmp_path_factory.mktemp("images")
    command = ["buildah", "--root", str(place / "store"), "--runroot", str(place / "run"), "--storage-driver", "vfs"]

    def run(*words: str | Path) -> str:
        done = subprocess.run(
            [*command, *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2_000:]}\n{done.stderr[-4_000:]}"
        return done.stdout.strip()

    packed = place / "base.tar"
    words = ("--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(packed))
    subprocess.run(["mmdebstrap", *words], check=True)
    made = run("from", "scratch")
    run("add", made, packed, "/")
    packed.unlink()
    if CERTIFICATES.exists():
        run("copy", made, CERTIFICATES, CERTIFICATES)
    # Debian's pip keeps to virtual environments and to certificates of its own.
    run("config", "--env", "PIP_BREAK_SYSTEM_PACKAGES=1", "--env", f"PIP_CERT={CERTIFICATES}", made)
    run("commit", "--rm", made, BASE)
    yield run
    run("rm", "--all")
    run("rmi", "--all", "--force")


def test_the_image_runs_a_cluster_without_root(buildah: Buildah, tmp_path: Path) -> None:
    """Built from a clean copy with every package by hash; user and entry point as deploy/ relies on them;
    a message passes through three nodes in a container, scheduled and consumed by the image's own command line."""
    source = tmp_path / "source"
    source.mkdir()
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=True).stdout
    kept = [name.decode() for name in listed.split(b"\0") if name]
    subprocess.run(["cp", "-d", "--parents", "--target-directory", source, "--", *kept], cwd=ROOT, check=True)
    buildah("build", "--pull-never", "-f", source / "deploy" / "Containerfile", "-t", "tickwheel", source)
    config = json.loads(buildah("inspect", "--type", "image", "tickwheel"))["Docker"]["config"]
    assert config["User"] == USER and config["Entrypoint"] == ["tickwheel"] and config["StopSignal"] == "SIGTERM"
    assert config["Cmd"] == ["node", "--config", "/etc/tickwheel/node.toml"]

    made = buildah("from", "--pull-never", "tickwheel")
    assert buildah("run", made, "--", "id", "-u") == USER
    started = ("up", "--port", "0", "--data", "/var/lib/tickwheel/trial", "--json")
    run = ["buildah", *_store_of(buildah), "run", "--isolation", "chroot", made, "--", "tickwheel"]
    with subprocess.Popen([*run, *started], stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        try:
            addresses = ",".join(json.loads(up.stdout.readline())["addresses"])
            buildah("run", made, "--", "tickwheel", "schedule", "trial", "hello", "--delay", "10ms", "-a", addresses)
            said = buildah("run", made, "--", "tickwheel", "consume", "trial", "-n", "1", "-a", addresses)
            assert said.endswith("hello")
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(SOON_S)


def _store_of(buildah: Buildah) -> list[str]:
    """The options that name its store."""
    found = json.loads(buildah("info"))["store"]
    return ["--root", found["GraphRoot"], "--runroot", found["RunRoot"], "--storage-driver", found["GraphDriverName"]]
