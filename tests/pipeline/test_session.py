"""The session that everything on Spark runs on, and how Spark finds the data source."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession, functions

from tickwheel.pipeline import options, sink, source_pending, source_stream, spark_classes
from tickwheel.pipeline.archive_place import ArchiveError
from tickwheel.pipeline.session import NoJavaError, class_options, find_java, java_classes, java_has_ended
from tickwheel.pipeline.source import TickwheelSource
from tickwheel.pipeline.spark_errors import reason_of


def test_a_session_keeps_utc_and_runs_python(spark: SparkSession) -> None:
    """Times mean the same on every machine, and Python workers of this environment start."""
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    frame = spark.range(10).mapInArrow(lambda batches: batches, "id long")
    assert frame.count() == 10


def test_an_error_is_raised_and_not_also_written(spark: SparkSession, capfd: pytest.CaptureFixture[str]) -> None:
    """Spark would write each query that it cannot analyse to the terminal, with a page of Java's stack."""
    with pytest.raises(AnalysisException, match="nothing_like_it"):
        spark.range(1).where("nothing_like_it = 1")
    assert capfd.readouterr() == ("", "")


def test_an_error_of_a_worker_says_what_happened_there(spark: SparkSession) -> None:
    """A command that fails on a full disk names that, and not only that there was a traceback."""

    def divides(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        raise ZeroDivisionError("by nothing")

    with pytest.raises(PySparkException) as caught:
        spark.range(1).mapInArrow(divides, "id long").collect()
    assert reason_of(caught.value, "in.parquet") == "in.parquet: ZeroDivisionError: by nothing"

    def fails(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        Path("/proc/self/no-such-file").write_bytes(b"")
        yield from batches

    with pytest.raises(PySparkException) as caught:
        spark.range(1).mapInArrow(fails, "id long").collect()
    told = reason_of(caught.value, "in.parquet")
    assert told == "/proc/self/no-such-file: No such file or directory", "the input is not at fault"


def test_a_worker_that_ends_is_told(spark: SparkSession) -> None:
    """In the commit of a write Java says no more than that a file is at its end."""
    assert spark._jvm is not None
    ended = Py4JJavaError("o1.save", spark._jvm.java.io.EOFException())
    assert "Python process of Spark has ended" in reason_of(ended, "in.parquet")


def test_an_error_of_a_full_disk_names_what_was_written(spark: SparkSession, tmp_path: Path) -> None:
    """Java does not say where. The input was named, or the cluster, if Spark's local folder was full."""
    rows = spark.range(0, 20_000, 1, 2).select(functions.expr("uuid()").alias("x"))
    rows.write.parquet(str(tmp_path / "before"))  # loads libraries, which Java copies to a file first
    gateway = SparkContext._gateway
    assert gateway is not None
    java = gateway.proc.pid
    limits = resource.prlimit(java, resource.RLIMIT_FSIZE)
    resource.prlimit(java, resource.RLIMIT_FSIZE, (10_000, limits[1]))  # fails where a full disk does
    try:
        with pytest.raises(Py4JJavaError) as local:
            rows.groupBy("x").count().collect()
        with pytest.raises(Py4JJavaError) as written:
            rows.write.parquet(str(tmp_path / "out"))
    finally:
        resource.prlimit(java, resource.RLIMIT_FSIZE, limits)
    told = reason_of(local.value, "in.parquet")
    assert told == "Spark's local folder (SPARK_LOCAL_DIRS or /tmp): File too large"
    assert reason_of(written.value, "in.parquet") == f"{tmp_path / 'out'}: File too large"


KILLED = """
import os, signal, time
from pyspark import SparkContext
from tickwheel.client.errors import RequestRefused
from tickwheel.pipeline.cli_app import SparkOptions

try:
    with SparkOptions("local[1]").session(quick=True) as spark:
        driver = os.getpid()

        def task(_):
            os.kill(driver, signal.SIGTERM)
            time.sleep(1_000)

        try:
            spark.range(1).foreach(task)
        except KeyboardInterrupt:
            print("terminated.", end=" ")
        SparkContext._gateway.proc.kill()
        spark.range(1).count()
except RequestRefused as error:
    print(error)
"""


def test_a_command_whose_java_was_killed_says_so() -> None:
    """It ended with `Connection refused`: so ended the attempt to stop Spark. A SIGTERM interrupts its work, so that it
    removes what is half done: a `build` left a folder that the next one refused. It shows no stack of it."""
    ended = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.startswith("terminated. Spark's Java process has ended before the work was done"), ended
    assert "KeyboardInterrupt" not in ended.stderr


KILLED_EARLY = """
from pyspark.core import context
from tickwheel.client.errors import RequestRefused
from tickwheel.pipeline.cli_app import SparkOptions

def launched(*arguments, launch=context.launch_gateway):
    gateway = launch(*arguments)
    gateway.proc.kill()
    return gateway

context.launch_gateway = launched
try:
    with SparkOptions("local[1]").session(quick=True):
        pass
except RequestRefused as error:
    print(error)
"""


def test_a_command_whose_java_was_killed_as_spark_began_says_so() -> None:
    """It ended with a traceback, or with `Connection refused` and the hint to look at path, owner and free space."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED_EARLY], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout.startswith("Spark's Java process has ended before the work was done"), ended


def naming_the_place() -> ArchiveError:
    """As the archive raises it."""
    error = ArchiveError("/lake: Connection refused")
    error.__cause__ = ConnectionRefusedError()
    return error


@pytest.mark.parametrize(
    "error",
    [Py4JError("An error occurred while calling o1.count"), ConnectionRefusedError(), naming_the_place()],
)
def test_a_java_that_is_about_to_end_has_ended(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Its connections are gone before it is. py4j tells a broken connection as an error of the call."""
    with subprocess.Popen(["sleep", "0.2"]) as process:
        monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
        assert not java_has_ended(ValueError()) and not java_has_ended()
        assert java_has_ended(error)


def test_without_java_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's own words for it would be a traceback of its launcher."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(NoJavaError, match="openjdk-17"):
        find_java()


def makes_classes(path: Path, script: str) -> None:
    """A stand-in for the Python that would make the file, which takes a minute."""
    path.write_text(f"#!/bin/sh\nfor out; do :; done\n{script}")
    path.chmod(0o755)


def test_spark_classes_are_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that find none make one each, aside; what is left is a whole one, and none of another version."""
    python, tries = tmp_path / "python", tmp_path / "tries"
    makes_classes(python, f'echo >> {tries}; sleep 0.2; echo classes > "$out"')
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(python))
    java = find_java()
    assert class_options(java) == []
    path = java_classes(java)
    path.parent.mkdir(parents=True)
    path.with_stem("spark-classes-of-earlier").touch()
    killed = path.parent / "spark-classes-killed"
    killed.mkdir()
    os.utime(killed, (0, 0))
    with ThreadPoolExecutor(2) as pool:
        assert {*pool.map(lambda _: spark_classes.make(), range(2))} == {path}
    assert spark_classes.make() == path
    assert tries.read_text().count("\n") <= 2
    assert [*path.parent.iterdir()] == [path] and path.read_text() == "classes\n"
    assert any(str(path) in option for option in class_options(java))


@pytest.mark.parametrize("script", ["echo no room >&2; exit 1", ":"])
def test_sessions_go_on_without_spark_classes(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If they cannot be made nothing is left over; and Java starts, without a word, with a file that is none."""
    makes_classes(tmp_path / "python", script)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert spark_classes.make() is None
    java = find_java()
    assert ("no room" in capfd.readouterr().err) == ("no room" in script)
    path = java_classes(java)
    assert not [*path.parent.iterdir()] and class_options(java) == []
    path.write_text("no classes")
    options = [option.strip('"') for option in class_options(java)]
    said = subprocess.run([java.command, *options, "-version"], capture_output=True, text=True, check=True)
    assert options and (said.stdout, said.stderr.splitlines()[0]) == ("", java.build.splitlines()[0])


def test_every_option_is_explained_with_its_default() -> None:
    """Where `help` shows it; and none that does not exist."""
    text = TickwheelSource.__doc__ or ""
    # Spark hands options on in lower case; `pushdown` is known only to be refused with a reason.
    known = (options.CONNECTION | sink.OPTIONS | source_pending.OPTIONS | source_stream.OPTIONS) - {"pushdown"}
    explained = re.findall(r"^    - ((?:`\w+`(?:, )?)+): (.*?)(?=^    - |\n\n)", text, re.MULTILINE | re.DOTALL)
    names = {name for names, _ in explained for name in re.findall(r"`(\w+)`", names)}
    assert {name.lower() for name in names} == known
    for names, words in explained:
        assert re.search("default|required", words, re.IGNORECASE), names


TOOLS = ("sh", "sed", "head", "grep", "id", "cat", "chmod")
FAKE_APT = """#!/bin/sh
[ "$1" = install ] || [ "$5" = install ] || exit 0
printf '#!/bin/sh\necho openjdk version \\"17.0.1\\" >&2\n' > "$(dirname "$0")/java"; chmod +x "$(dirname "$0")/java"
"""


@pytest.mark.skipif(os.getuid() != 0, reason="others may be asked for a password")
def test_java_is_brought_where_it_may_be_and_named_where_not(tmp_path: Path) -> None:
    """The script of the Makefile, on a path without Java: without apt it says what to install, with it it installs."""
    script = Path(__file__).parents[2] / "scripts" / "ensure_java.sh"
    for tool in (*TOOLS, "dirname", "env"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(tmp_path), **more}
        return subprocess.run([tmp_path / "sh", script], env=env, capture_output=True, text=True, check=False)

    said = run()
    assert said.returncode == 1
    for line in ("needs Java 17 or newer, and there is none", "apt-get install openjdk-17-jre-headless", "dnf install"):
        assert line in said.stderr
    said = run(JAVA_HOME=str(tmp_path / "nothing"))
    assert said.returncode == 1 and "Correct or unset JAVA_HOME" in said.stderr
    for tool in ("apt-get", "apt-cache"):
        (tmp_path / tool).write_text(FAKE_APT)
        (tmp_path / tool).chmod(0o755)
    said = run()
    assert said.returncode == 0, said.stderr
    assert "installing openjdk-17-jre-headless" in said.stderr
    assert run().stderr == ""


def test_the_package_that_spark_imports_imports_nothing() -> None:
    """It is imported by every Spark program on the machine, whether or not tickwheel is used."""
    code = "import sys, pyspark_tickwheel; assert not {'tickwheel', 'grpc', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_does_no_harm_without_the_extra() -> None:
    """Discovery asks with hasattr: an ImportError there would hide everybody's data sources."""
    code = (
        "import sys; sys.modules['pyspark'] = None; import pyspark_tickwheel; "
        "assert not hasattr(pyspark_tickwheel, 'DefaultSource')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
