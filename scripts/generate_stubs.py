"""Writes the Python stubs of proto/*.proto, or checks that the committed ones are fresh.

`python scripts/generate_stubs.py` writes through the link src/tickwheel/proto; with `--check` it
generates aside, compares and names every file that differs, is missing or has lost its .proto.
The versions of the generators are pinned in pyproject.toml, since they show in the stubs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
ENDINGS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(target: Path) -> None:
    """Write all stubs below `target`/tickwheel/proto."""
    names = sorted(path.name for path in PROTO.glob("*.proto"))
    outputs = [f"--{kind}={target}" for kind in ("python_out", "grpc_python_out")]
    outputs += [f"--{kind}=quiet:{target}" for kind in ("mypy_out", "mypy_grpc_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-Itickwheel/proto={PROTO}", *outputs]
    # protoc looks its mypy plugin up on the path; it lies beside this interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run(
        [*command, *(f"tickwheel/proto/{name}" for name in names)], check=True, env={**os.environ, "PATH": path}
    )


def stubs_in(folder: Path) -> dict[str, bytes]:
    """Name and content of every stub in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.endswith(ENDINGS)}


def stale_stubs() -> list[str]:
    """Names of committed stubs that are not what the .proto files give; empty if all are fresh."""
    with tempfile.TemporaryDirectory() as aside:
        generate(Path(aside))
        fresh = stubs_in(Path(aside) / "tickwheel" / "proto")
    held = stubs_in(PROTO)
    return sorted(name for name in fresh.keys() | held.keys() if fresh.get(name) != held.get(name))


def main(arguments: list[str]) -> int:
    """Exit code 0: written, or fresh."""
    if arguments not in ([], ["--check"]):
        print("usage: generate_stubs.py [--check]", file=sys.stderr)
        return 2
    if not arguments:
        generate(ROOT / "src")
        return 0
    stale = stale_stubs()
    for name in stale:
        print(f"proto/{name}: not what its .proto gives; run `make stubs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
