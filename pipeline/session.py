"""Creates the Spark sessions of the commands, the examples and the tests.

The default is `local[*]`; `master` sets any Spark master. Sessions use UTC and log little. On a cluster the workers
need `tickwheel[spark]` too.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyspark
from pyspark import SparkContext
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

JAVA_VERSION_MIN = 17
JAVA_END_S = 2.0
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options with which the JVM starts in half the time but runs long jobs more slowly: for tests and short commands."""

_LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""
"""Spark takes its "default log level" from the last logger. It equals the root's, so Spark announces no change."""
_JVM_NOISE = b"WARNING: Using incubator modules: "
"""Java's own warning about a module that Spark needs. Java prints it before any log setting takes effect."""
_ECHOES = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers that write a page with Java's stack for an error that is raised anyway."""

SAFE_PATH = {"spark.executorEnv.PYTHONSAFEPATH": "1"}
"""Spark's Python workers import no file of the working directory, whose `inspect.py` would end them. For commands: the
workers of a user's own job may need modules that lie there."""


class NoJavaError(Exception):
    """Spark has no Java to run on; the text says what to install."""


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """The settings of a session."""

    master: str = "local[*]"
    """A Spark master: `local[2]`, `local[2,4]` (four tries a task), `spark://host:7077`, ..."""

    app_name: str = "tickwheel"

    driver_memory: str = "1g"
    """Heap of the driver; in local mode it holds everything."""

    shuffle_partitions: int | None = None
    """Tasks after a shuffle; None: twice the cores of a local master, else Spark's own default."""

    quick: bool = False
    """Start sooner, compile less: for tests and short commands."""

    quiet: bool = True
    """Only errors in the log, no progress bar, no web page."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Spark settings that override all others."""

    classes_out: Path | None = None
    """File to which the JVM writes the classes that it has loaded when it ends; see `java_classes`."""


@dataclass(frozen=True, slots=True)
class Java:
    """The Java that Spark will use."""

    command: str
    build: str
    """What it says of its version and build."""


def find_java() -> Java:
    """Raises NoJavaError if there is none or it is too old."""
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    advice = "install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless) or set JAVA_HOME"
    where = f"in JAVA_HOME ({home})" if home else "on the path"
    if command is None or not Path(command).exists():
        raise NoJavaError(f"Spark needs Java {JAVA_VERSION_MIN} or newer, and there is none {where}: {advice}")
    text = subprocess.run([command, "-version"], capture_output=True, text=True, check=False).stderr
    version = text.partition('version "')[2].partition('"')[0]
    major = version.partition(".")[0]
    if not major.isdigit() or int(major) < JAVA_VERSION_MIN:
        raise NoJavaError(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer; {command} is {version or 'of no known version'}: {advice}"
        )
    return Java(command, text)


def java_classes(java: Java) -> Path:
    """The file with Spark's classes as this Java keeps them in memory, if `spark_classes` has made it: an archive of
    class data sharing. A JVM that maps it need not parse and verify the classes, two fifths of the cost of a start.
    Java ignores an archive that was made for another build of it or for other jars."""
    of = hashlib.sha256(f"{java.build}\n{pyspark.__version__}\n{pyspark.__file__}".encode()).hexdigest()[:16]
    return Path(sys.prefix) / "share" / "tickwheel" / f"spark-classes-{of}.jsa"


def class_options(java: Java, out: Path | None = None) -> list[str]:
    """Options of a JVM that uses Spark's classes if they were made, or writes them to `out` when it ends."""
    made = java_classes(java)
    if out is None and not made.exists():
        return []
    wanted = f"-XX:SharedArchiveFile={made}" if out is None else f"-XX:ArchiveClassesAtExit={out}"
    return [f'"{wanted}"', "-Xlog:cds*=error"]  # it would tell of each class that no archive can hold


def _local_cores(master: str) -> int | None:
    if not master.startswith("local"):
        return None
    inside = master.partition("[")[2].partition("]")[0].partition(",")[0]
    return int(inside) if inside.isdigit() else (os.cpu_count() or 1) if inside == "*" else 1


def build_session(config: SessionConfig | None = None) -> SparkSession:
    """A session with these settings, or the existing session of this process. Raises NoJavaError."""
    config = config or SessionConfig()
    java = find_java()
    # Workers of a local master run this Python; other masters name their own.
    cores = _local_cores(config.master)
    if cores is not None:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    options = class_options(java, config.classes_out)
    if config.quick:
        options.append(QUICK_JVM)
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.driver.memory": config.driver_memory,
    }
    if cores is not None:
        settings["spark.driver.host"] = settings["spark.driver.bindAddress"] = "127.0.0.1"
        settings["spark.sql.shuffle.partitions"] = str(2 * cores)
    if config.shuffle_partitions is not None:
        settings["spark.sql.shuffle.partitions"] = str(config.shuffle_partitions)
    if config.quiet:
        settings["spark.ui.enabled"] = settings["spark.ui.showConsoleProgress"] = "false"
        options.append(f"-Dlog4j2.configurationFile={_log4j_file()}")
        for name in _ECHOES:
            PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    if options:
        settings["spark.driver.extraJavaOptions"] = " ".join(options)
    builder = SparkSession.builder.master(config.master).appName(config.app_name)
    for name, value in {**settings, **config.settings}.items():
        builder = builder.config(name, value)
    with _without_noise() if config.quiet and SparkContext._gateway is None else nullcontext():
        return builder.getOrCreate()


def java_has_ended(error: Exception | None = None) -> bool:
    """Whether Java, which this process has started, has ended, as far as that can be the cause of `error`."""
    from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]

    process = getattr(SparkContext._gateway, "proc", None)
    if process is None or isinstance(error, Py4JJavaError):  # that is an answer of Java
        return False
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (Py4JError, ConnectionError, EOFError)):
        cause = cause.__cause__  # an error of ours may name the place
    if cause is not None and not isinstance(cause, Py4JJavaError):
        with suppress(subprocess.TimeoutExpired):
            process.wait(JAVA_END_S)  # it may have closed its connections and not be gone
    return process.poll() is not None


@contextmanager
def _without_noise() -> Iterator[None]:
    """Processes that are started in this context have a standard error without _JVM_NOISE, as long as they live.

    Their lines pass through a pipe and a thread of this process. What Java writes after this process has ended is lost.
    """
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    read_end, write_end = os.pipe()
    os.dup2(write_end, 2)
    os.close(write_end)
    threading.Thread(target=_pass_lines, args=(read_end, os.dup(kept)), name="spark-stderr", daemon=True).start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _pass_lines(source: int, target: int) -> None:
    """Pass lines on, without _JVM_NOISE, until all writers of the source have ended."""
    with os.fdopen(source, "rb") as lines, os.fdopen(target, "wb", buffering=0) as out:
        for line in lines:
            if not line.startswith(_JVM_NOISE):
                with suppress(BrokenPipeError):  # the reader has gone, which must not block Java
                    out.write(line)


def _log4j_file() -> Path:
    """The path of the log settings, which the JVM reads at its start. The small file is shared and never removed."""
    path = Path(tempfile.gettempdir()) / f"tickwheel-log4j2-{os.getuid()}.properties"
    if not path.exists() or path.read_text(encoding="utf-8") != _LOG4J:
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(_LOG4J, encoding="utf-8")
        aside.replace(path)
    return path
