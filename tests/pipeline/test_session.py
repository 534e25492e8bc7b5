"""The session that everything on Spark runs on, and how Spark finds the data source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from tickwheel.pipeline.session import NoJavaError, find_java


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


def test_without_java_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's own words for it would be a traceback of its launcher."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(NoJavaError, match="openjdk-17"):
        find_java()


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
