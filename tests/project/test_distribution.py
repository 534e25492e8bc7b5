"""What is built runs far from the clone: sdist, the wheel built from it, a fresh environment."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.project.imports import FOLDERS, ROOT, modules

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
LEFT_BEHIND = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist", "node_modules", ".*_cache", ".hypothesis"
)


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command; its failure shows both streams."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_wheel_and_sdist_install_and_run_outside_the_clone(tmp_path: Path) -> None:
    """Builds both as a release would, installs the wheel with its dependencies, runs it, imports everything."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=LEFT_BEHIND)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", source, cwd=tmp_path)
    [sdist] = (tmp_path / "dist").glob("*.tar.gz")
    [wheel] = (tmp_path / "dist").glob("*.whl")

    names = [(name, path) for folder in FOLDERS for name, path in modules(folder)]
    expected = {
        f"tickwheel/{'/'.join(name.split('.')[1:])}{'/__init__' if path.name == '__init__.py' else ''}.py"
        for name, path in names
    } | {"pyspark_tickwheel/__init__.py"}
    expected |= {f"tickwheel/proto/{path.name}" for path in (ROOT / "proto").iterdir() if path.is_file()}
    expected |= {f"tickwheel/chaos/live/{path.name}" for path in (ROOT / "chaos" / "live").glob("page.*")}
    shared = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for folder in ("deploy", "docs"):
        shared += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".png"]
    prefix = f"{wheel.name.rsplit('-', 3)[0]}.data/data/share/tickwheel"
    with zipfile.ZipFile(wheel) as archive:
        assert not expected - set(archive.namelist())
        assert not {f"{prefix}/{path.relative_to(ROOT)}" for path in shared} - set(archive.namelist())
        metadata = archive.read(f"{wheel.name.rsplit('-', 3)[0]}.dist-info/METADATA").decode()
    assert metadata.count("\nProject-URL: ") >= 3
    with tarfile.open(sdist) as unpacked:
        held = {name.split("/", 1)[-1] for name in unpacked.getnames()}
    assert not {f"src/{name}" for name in expected} - held
    assert {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt"} <= held

    python = fresh_environment(tmp_path / "venv", message_from_string(metadata).get_all("Requires-Dist") or [])
    run(*PIP, "--python", python, "install", "-q", "--no-deps", "--no-compile", wheel, cwd=tmp_path)
    # bench, traces, what runs on Spark and what writes for it draw on extras, the fixtures on pytest; the rest must
    # come up without them.
    extras = (
        *("tickwheel.bench", "tickwheel.pipeline.", "tickwheel.chaos.live.audit_export", "tickwheel.client.tracing"),
        *("tickwheel.console.", "tickwheel.gateway.", "tickwheel.testing.fixtures"),
    )
    importable = [name for name, _ in names if not name.startswith(extras)]
    importable += ["tickwheel.pipeline", "pyspark_tickwheel"]
    # The commands below need not compile what this has compiled.
    importing = ["import sys", "sys.dont_write_bytecode = False"]
    importing += [f"import {name}" for name in importable if not name.endswith("__main__")]
    run(python, "-c", "\n".join(importing), cwd=tmp_path)

    tickwheel = python.with_name("tickwheel")
    assert run(tickwheel, "--version", cwd=tmp_path).strip().endswith(version_of(wheel))
    with subprocess.Popen(
        [tickwheel, "up", "--nodes", "1", "--port", "0", "--json"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as up:  # as `pipx run tickwheel up` does
        assert up.stdout is not None
        try:
            address = json.loads(up.stdout.readline())["addresses"][0]
            run(tickwheel, "schedule", "topic", "hello", "--delay", "10ms", "-a", address, cwd=tmp_path)
            assert "hello" in run(tickwheel, "consume", "topic", "-n", "1", "-a", address, cwd=tmp_path)
        finally:
            up.send_signal(signal.SIGINT)
    assert up.returncode == 0


def fresh_environment(path: Path, requirements: list[str]) -> Path:
    """An environment with what is required, and what that requires in turn, and nothing else; its Python.

    The files are those of this environment, where pip has put them.
    """
    run(sys.executable, "-m", "venv", "--without-pip", path, cwd=path.parent)
    [packages] = path.glob("lib/python*/site-packages")
    wanted, seen = list(requirements), set[str]()
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        found = distribution(name)
        wanted += found.requires or []
        for file in found.files or []:
            if ".." not in file.parts:
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                (packages / file).symlink_to(file.locate())
    return path / "bin" / "python"


def version_of(wheel: Path) -> str:
    """0.1.0 of tickwheel-0.1.0-py3-none-any.whl."""
    return wheel.name.split("-")[1]
