"""Makes the file with Spark's classes that sessions start from (`java_classes` in session.py), once for each version of
Java and Spark: `python -m tickwheel.pipeline.spark_classes`.

The file has some 190 MB, and making it takes as much processor as some five sessions save by it. Sessions do without it
if it cannot be made.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

from tickwheel.pipeline.build import build, build_parquet
from tickwheel.pipeline.forecast import ForecastConfig, forecast
from tickwheel.pipeline.schedules import ScheduleConfig, write_schedule
from tickwheel.pipeline.session import NoJavaError, SessionConfig, build_session, find_java, java_classes

START_MS = 1_800_000_000_000
ROWS = 1_000
TIMEOUT_S = 600.0
ASIDE = "spark-classes-"
"""How the names of the folders begin in which a file is made."""


def make() -> Path | None:
    """The file, made if it was missing. Processes that make it at once each make a whole one. None: it could not be
    made. Raises NoJavaError and OSError."""
    made = java_classes(find_java())
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(made.parent)
    with tempfile.TemporaryDirectory(prefix=ASIDE, dir=made.parent) as folder:
        aside = Path(folder) / made.name
        # A process of its own, since one process has one JVM, which writes the file when it ends.
        command = [sys.executable, "-P", "-m", __spec__.name, str(aside)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        if done.returncode or not aside.exists():
            print(done.stdout, done.stderr, sep="", file=sys.stderr)
            return None
        aside.replace(made)
    for other in made.parent.glob("spark-classes-*.jsa"):
        if other != made:
            other.unlink(missing_ok=True)  # of another version; who has it mapped keeps it
    return made


def _remove_left(folder: Path) -> None:
    """Remove what makers left that were killed: one that lives has begun less than TIMEOUT_S ago."""
    for aside in folder.glob(f"{ASIDE}*/"):
        with suppress(FileNotFoundError):  # its maker has ended meanwhile
            if aside.stat().st_mtime < time.time() - 2 * TIMEOUT_S:
                shutil.rmtree(aside, ignore_errors=True)


def _load_classes(out: Path) -> None:
    """Have a JVM load what commands and tests use, and write it."""
    spark = build_session(SessionConfig(master="local[2]", quick=True, shuffle_partitions=2, classes_out=out))
    try:
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            _work(spark, Path(folder))
        gateway = SparkContext._gateway
    finally:
        spark.stop()
    assert gateway is not None and gateway.proc.stdin is not None
    gateway.shutdown()
    gateway.proc.stdin.close()  # which ends it
    gateway.proc.wait()


def _work(spark: SparkSession, folder: Path) -> None:
    """A little of everything: the commands with code that Spark generates, the rest without."""
    rows, ranked = folder / "rows.parquet", folder / "ranked"
    write_schedule(ScheduleConfig(rows=ROWS, start_ms=START_MS, span_days=7.0), rows)
    build_parquet(spark, str(rows), folder / "built")
    frame = spark.read.parquet(str(rows))
    forecast(frame, ForecastConfig(START_MS))
    for name in ("spark.sql.codegen.wholeStage", "spark.sql.adaptive.enabled"):
        spark.conf.set(name, "false")
    spark.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    frame.createOrReplaceTempView("rows")
    numbered = spark.sql("select *, row_number() over (partition by topic order by due_ms) as rank from rows")
    joined = numbered.join(frame.groupBy("topic").count(), "topic", "left_outer").dropDuplicates(["topic", "rank"])
    joined.repartition(2).write.partitionBy("topic").parquet(str(ranked))
    spark.read.parquet(str(ranked)).orderBy("rank").toPandas()
    build(frame, folder / "built-by-rows")
    spark.createDataFrame([("a", 1), ("b", 2)], "topic string, number bigint").collect()
    query = spark.readStream.schema(frame.schema).parquet(str(ranked)).writeStream.trigger(availableNow=True)
    query.format("noop").option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()


def main() -> None:
    """Make it if it is missing; with a path, write it there."""
    if len(sys.argv) > 1:
        _load_classes(Path(sys.argv[1]))
        return
    try:
        made = make()
    except (NoJavaError, OSError, subprocess.TimeoutExpired) as error:
        made = None
        print(error, file=sys.stderr)
    if made is None:
        print("Spark's classes could not be kept: each session starts without them, and more slowly", file=sys.stderr)


if __name__ == "__main__":
    main()
