"""A process of its own: Spark with executors in processes of theirs, and jobs whose tasks fail, are killed, copied or
cancelled, always when rows of theirs are staged already.

Arguments: the addresses, a folder. Prints one JSON object: what each case said, and the tasks of the copied ones. Run
by test_sink_retries.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tests.pipeline.two_workers import two_workers
from tickwheel.client import Client

ROWS, PARTITIONS = 1_000, 2
PAYLOAD_BYTES = 5_000
BATCH_ROWS = 50
STAGED_BYTES = PAYLOAD_BYTES * ROWS // PARTITIONS + (1 << 19)
"""More than all that one of the two tasks stages: of both some is there."""
HELD_S_MAX = 60  # a task that nobody releases fails, so that nothing waits for ever
POLL_S = 0.02
Batches = Iterator[pa.RecordBatch]


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Fails if it takes too long."""
    give_up = time.monotonic() + HELD_S_MAX
    while not true():
        if time.monotonic() > give_up:
            raise RuntimeError(f"waited for too long: {what}")
        time.sleep(POLL_S)


def staged_bytes(client: Client, job_id: str) -> int:
    """Of all jobs together; the others of these nodes have nothing staged that comes or goes meanwhile."""
    return client.staging.job(job_id).staged_bytes


@dataclass(frozen=True)
class Case:
    """What befalls the tasks of one write: made on the driver, called in every task."""

    name: str
    addresses: str
    staged_before: int
    folder: str

    def attempt(self) -> tuple[int, int]:
        """Partition, and number of the attempt at it."""
        context = TaskContext.get()
        assert context is not None
        return context.partitionId(), context.attemptNumber()

    def wait_staged(self) -> None:
        """Until rows of both tasks are in the cluster."""
        with Client(self.addresses) as client:
            wait_until(
                lambda: staged_bytes(client, self.name) > self.staged_before + STAGED_BYTES, f"{self.name}: staged rows"
            )

    def began(self, partition: int, attempt: int) -> Path:
        """A file that is there once the attempt has handed over its first rows."""
        return Path(self.folder) / f"{self.name}-{partition}-{attempt}"

    def __call__(self, batches: Batches) -> Batches:
        partition, attempt = self.attempt()
        *most, last = list(batches)
        for number, batch in enumerate(most):
            yield batch
            if not number:
                self.began(partition, attempt).touch()
        if partition == 1:
            self.before_the_last(attempt)
        yield last
        if partition == 1:
            self.at_the_end(attempt)

    def before_the_last(self, attempt: int) -> None:
        """Of partition 1; of the other one nothing happens."""

    def at_the_end(self, attempt: int) -> None:
        """All rows are handed over."""


class FailAtTheEnd(Case):
    """Once."""

    def at_the_end(self, attempt: int) -> None:
        if attempt == 0:
            self.wait_staged()
            raise RuntimeError("planned")


class KillTheWorker(Case):
    """Once: the Python process of the task."""

    def before_the_last(self, attempt: int) -> None:
        if attempt == 0:
            self.wait_staged()
            os.kill(os.getpid(), signal.SIGKILL)


class KillTheExecutor(Case):
    """Once: the Java process with all that it has."""

    def before_the_last(self, attempt: int) -> None:
        if attempt == 0:
            self.wait_staged()
            daemon = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="ascii")
            os.kill(int(daemon.rpartition(")")[2].split()[1]), signal.SIGKILL)


class FailAlways(Case):
    """Every attempt, half way."""

    def before_the_last(self, attempt: int) -> None:
        if attempt == 0:
            self.wait_staged()
        raise RuntimeError("planned")


class Overtaken(Case):
    """The first attempt stands still at its end, until Spark's copy has succeeded and Spark ends it."""

    def at_the_end(self, attempt: int) -> None:
        if attempt == 0:
            self.wait_staged()
            wait_until(lambda: False, "the end of the overtaken attempt")


class Abreast(Case):
    """The first attempt stands still before its last rows until the copy is there too; then both run to the end."""

    def before_the_last(self, attempt: int) -> None:
        if attempt == 0:
            self.wait_staged()
            wait_until(self.began(1, 1).exists, "a speculative copy")


COPIED: list[type[Case]] = [Overtaken, Abreast]


class Held(Case):
    """Stands still until it is released; if Spark has not ended it by then, it goes on."""

    def before_the_last(self, attempt: int) -> None:
        self.wait_staged()
        wait_until((Path(self.folder) / "released").exists, "the release")


def rows(spark: SparkSession, case: Callable[[Batches], Batches]) -> DataFrame:
    """Numbered rows an hour ahead."""
    due_ms = time.time_ns() // 1_000_000 + 3_600_000
    numbers = spark.range(0, ROWS, 1, PARTITIONS).select(
        (f.lit(due_ms) + f.col("id")).alias("due_ms"),
        f.rpad(f.concat(f.lit("row-"), f.col("id").cast("string")), PAYLOAD_BYTES, ".").alias("payload"),
    )
    return numbers.mapInArrow(lambda batches: case(batches), numbers.schema)


def tasks_of(spark: SparkSession, group: str) -> list[dict[str, object]]:
    """What Spark tells of the tasks of a job group, once all of them have ended."""
    found: list[dict[str, object]] = []

    def ended() -> bool:
        found[:] = shown(spark, group)
        return all(task["status"] != "RUNNING" for task in found)

    wait_until(ended, f"the end of all tasks of {group}")
    return found


def shown(spark: SparkSession, group: str) -> list[dict[str, object]]:
    """What Spark shows of them now."""
    context = spark.sparkContext
    tracker, store = context.statusTracker(), context._jsc.sc().statusStore()
    found = []
    for job in tracker.getJobIdsForGroup(group):
        info = tracker.getJobInfo(job)
        for stage in info.stageIds if info is not None else ():
            tasks = store.taskList(stage, 0, 100)
            for number in range(tasks.size()):
                task = tasks.apply(number)
                found.append(
                    {
                        "partition": task.partitionId(),
                        "attempt": task.attempt(),
                        "speculative": task.speculative(),
                        "host": task.host(),
                        "status": task.status(),
                    }
                )
    return found


def main(addresses: str, folder: str) -> None:
    """All cases, one after the other."""
    spark = two_workers(Path(folder) / "workers", {"spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH_ROWS)})
    said: dict[str, str] = {}

    def write(name: str, case: Callable[[Batches], Batches]) -> None:
        writer = rows(spark, case).write.format("tickwheel").option("addresses", addresses)
        options = {"topic": name, "job_id": name, "bad_rows": "fail"}
        try:
            writer.options(**options).mode("append").save()
            said[name] = said.get(name, "") + "done "
        except Exception as error:
            said[name] = said.get(name, "") + ("planned " if "planned" in str(error) else "cancelled ")
            if not ("planned" in str(error) or "cancelled" in str(error).lower()):
                said[name] += str(error)

    def made(kind: type[Case]) -> Case:
        name = kind.__name__
        return kind(name, addresses, staged_bytes(client, name), folder)

    def cancelled(case: Held) -> None:
        spark.createDataFrame([(1,)], "a int")  # a thread must have used the session before it writes
        spark.sparkContext.setJobGroup("doomed", "to be cancelled", interruptOnCancel=True)
        write("Held", case)

    with Client(addresses) as client:
        failing: list[type[Case]] = [FailAtTheEnd, KillTheWorker, FailAlways]
        for kind in failing:
            write(kind.__name__, made(kind))
        write("FailAlways", iter)
        for kind in COPIED:
            spark.sparkContext.setJobGroup(kind.__name__, "to be copied")
            write(kind.__name__, made(kind))
        spark.sparkContext.setJobGroup("others", "")
        held = Held("Held", addresses, staged_bytes(client, "Held"), folder)
        writing = threading.Thread(target=cancelled, args=(held,))
        writing.start()
        wait_until(
            lambda: staged_bytes(client, "Held") > held.staged_before + STAGED_BYTES or not writing.is_alive(),
            "rows of the job that is to be cancelled",
        )
        spark.sparkContext.cancelJobGroup("doomed")
        writing.join()
        (Path(folder) / "released").touch()  # a task that Spark has not ended yet goes on now, and must be refused
        write("Held", iter)
        write("KillTheExecutor", made(KillTheExecutor))
    copied = {kind.__name__: tasks_of(spark, kind.__name__) for kind in COPIED}
    print(json.dumps({"said": said, "copied": copied}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
