"""The session that everything on Spark runs on, and how Spark finds the data source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from tickwheel.pipeline import options, sink, source_pending, source_stream
from tickwheel.pipeline.session import NoJavaError, find_java
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


def test_without_java_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's own words for it would be a traceback of its launcher."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(NoJavaError, match="openjdk-17"):
        find_java()


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
