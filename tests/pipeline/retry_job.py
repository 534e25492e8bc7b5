"""A process of its own: Spark with retries, and jobs whose tasks fail, are killed or are cancelled.

Arguments: the endpoints. Prints one JSON object: what each case said. Run by test_sink_retries.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tickwheel.client import Client
from tickwheel.pipeline.session import SessionConfig, build_session

ROWS = 4_000
HELD_S_MAX = 120  # a task that nobody releases fails, so that nothing waits for ever
Batches = Iterator[pa.RecordBatch]


def first_try(number: int) -> bool:
    """Whether this is the first attempt at a partition."""
    context = TaskContext.get()
    return context is not None and context.partitionId() == number and context.attemptNumber() == 0


def fail_half_way(batches: Batches) -> Batches:
    """Partition 0 fails once, after some rows."""
    for number, batch in enumerate(batches):
        if number == 3 and first_try(0):
            raise RuntimeError("planned")
        yield batch


def fail_at_the_end(batches: Batches) -> Batches:
    """Partition 1 fails once, all its rows handed over."""
    yield from batches
    if first_try(1):
        raise RuntimeError("planned")


def kill_the_worker(batches: Batches) -> Batches:
    """The process of partition 0's task dies once, after some rows."""
    for number, batch in enumerate(batches):
        if number == 3 and first_try(0):
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def fail_always(batches: Batches) -> Batches:
    """Partition 1 never succeeds."""
    for number, batch in enumerate(batches):
        context = TaskContext.get()
        if number == 2 and context is not None and context.partitionId() == 1:
            raise RuntimeError("planned")
        yield batch


def harmless(batches: Batches) -> Batches:
    """Nothing happens."""
    return batches


def held_until(released: Path) -> Callable[[Batches], Batches]:
    """Partition 0 comes through; partition 1 stands after its first rows until the file is there."""

    def held(batches: Batches) -> Batches:
        for batch in batches:
            yield batch
            context = TaskContext.get()
            if context is not None and context.partitionId() == 1:
                give_up = time.monotonic() + HELD_S_MAX
                while not released.exists():
                    if time.monotonic() > give_up:
                        raise RuntimeError("nobody released the task")
                    time.sleep(0.02)

    return held


def rows(spark: SparkSession, through: Callable[[Batches], Batches]) -> DataFrame:
    """Numbered rows an hour ahead."""
    due_ms = time.time_ns() // 1_000_000 + 3_600_000
    numbers = spark.range(0, ROWS, 1, 2).select(
        (f.lit(due_ms) + f.col("id")).alias("due_ms"),
        f.concat(f.lit("row-"), f.col("id").cast("string")).alias("payload"),
    )
    return numbers.mapInArrow(through, numbers.schema)


def main(endpoints: str) -> None:
    """All cases, one after the other."""
    spark = build_session(
        SessionConfig(master="local[2,4]", quick=True, settings={"spark.sql.execution.arrow.maxRecordsPerBatch": "200"})
    )
    found: dict[str, str] = {}

    def write(case: str, through: Callable[[Batches], Batches]) -> None:
        writer = rows(spark, through).write.format("tickwheel").option("endpoints", endpoints)
        options = {"topic": case, "job_id": case, "bad_rows": "fail"}
        try:
            writer.options(**options).mode("append").save()
            found[case] = found.get(case, "") + "done "
        except Exception as error:
            found[case] = found.get(case, "") + ("planned " if "planned" in str(error) else "cancelled ")
            if not ("planned" in str(error) or "cancelled" in str(error).lower()):
                found[case] += str(error)

    for case in (fail_half_way, fail_at_the_end, kill_the_worker, fail_always):
        write(case.__name__, case)
    write("fail_always", harmless)

    released = Path(tempfile.mkdtemp()) / "released"

    def cancelled() -> None:
        spark.createDataFrame([(1,)], "a int")  # a thread must have used the session before it writes
        spark.sparkContext.setJobGroup("doomed", "to be cancelled", interruptOnCancel=True)
        write("slow", held_until(released))

    writing = threading.Thread(target=cancelled)
    writing.start()
    with Client(endpoints) as client:
        staging = client.asynchronous.staging
        while client.wait(staging.job("slow")).staged_bytes == 0 and writing.is_alive():
            time.sleep(0.02)  # the rows of partition 0 are staged, and without partition 1 the job cannot end
    spark.sparkContext.cancelJobGroup("doomed")
    writing.join()
    released.touch()  # if Spark has not ended it yet, the task of the cancelled job goes on now, and must be refused
    write("slow", harmless)
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
