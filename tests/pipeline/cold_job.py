"""A process of its own that is killed: it freezes, or promotes, and stands still in the middle. For test_cold_kills.py.

Arguments: freeze IN.parquet COLD JOB, or promote COLD ENDPOINTS. Prints a line once Spark runs; begins when it is sent
one; prints another when it is in the middle, and goes no further than a little beyond that.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark.sql import SparkSession

from tests.pipeline.running import FEW_ROWS
from tickwheel.client import AsyncClient
from tickwheel.client.bulk import LoadProgress
from tickwheel.pipeline import cold_freeze
from tickwheel.pipeline.cold_freeze import FreezeConfig, write_parts
from tickwheel.pipeline.cold_promote import ColdLoader, Promoter
from tickwheel.pipeline.session import SessionConfig, build_session

PART_ROWS = 25
PARTS_WRITTEN = 3
"""Of each task, before it stands still."""
MIDDLE, STOP = 4, 11
"""Bundles of a promotion: the parent hears of the first, and at the second it stands still."""
HELD_S_MAX = 120  # whoever is not killed fails, so that nothing waits for ever

Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def say(word: str) -> None:
    """To the parent."""
    print(word, flush=True)


def held(plain: Work) -> Work:
    """A task of `freeze` that writes some parts and no more."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, row in enumerate(plain(batches), 1):
            yield row
            if number == PARTS_WRITTEN:
                time.sleep(HELD_S_MAX)
                raise RuntimeError("nobody killed the job")

    return run


def freeze(spark: SparkSession, source: str, folder: str, job_id: str) -> None:
    """Stands still when each task has written some parts."""
    plain = cold_freeze._task
    cold_freeze._task = lambda *facts: held(plain(*facts))
    say("middle")  # as soon as the parts are there
    write_parts(
        spark.read.parquet(source), folder, job_id, FreezeConfig(horizon_days=0, tasks=2, part_rows_max=PART_ROWS)
    )


def promote(spark: SparkSession, folder: str, addresses: str) -> None:
    """Tells when some bundles are taken over, goes on, and stands still before the last ones."""
    plain = ColdLoader._take
    taken = 0

    async def take(self: ColdLoader, place: int) -> LoadProgress:
        nonlocal taken
        taken += 1
        if taken == STOP:
            await asyncio.sleep(HELD_S_MAX)
            raise RuntimeError("nobody killed the job")
        state = await plain(self, place)
        if taken == MIDDLE:
            say("middle")
        return state

    ColdLoader._take = take  # type: ignore[method-assign]

    async def go() -> None:
        async with AsyncClient(addresses.split(",")) as client:
            await Promoter(spark, client, folder).run(horizon_days=30)

    asyncio.run(go())


def main(what: str, *words: str) -> None:
    spark = build_session(SessionConfig(master="local[2]", quick=True, shuffle_partitions=2, settings=FEW_ROWS))
    say("ready")
    sys.stdin.readline()
    if what == "freeze":
        freeze(spark, *words)
    else:
        promote(spark, *words)


if __name__ == "__main__":
    main(*sys.argv[1:])
