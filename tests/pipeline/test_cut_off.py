"""A test that is cut off while it waits for Spark, as by its time-out, spoils none of those after it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tests.pipeline.running import forget_calls


class CutOff(BaseException):
    """As pytest's own failures, no Exception."""


def test_the_call_after_one_that_was_cut_off_gets_its_own_answer(spark: SparkSession) -> None:
    """Without a new connection it gets the answer to the one before."""

    def cut_off(number: int, frame: FrameType | None) -> None:
        raise CutOff

    class NothingWriter(DataSourceWriter):
        """Writes nothing."""

        def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
            """See DataSourceWriter."""
            return WriterCommitMessage()

    class Nothing(DataSource):
        """Known to this session alone."""

        @classmethod
        def name(cls) -> str:
            """See DataSource."""
            return "nothing"

        def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
            """See DataSource."""
            return NothingWriter()

    spark.dataSource.register(Nothing)
    before = signal.signal(signal.SIGUSR1, cut_off)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    assert spark._jvm is not None
    math, thread = spark._jvm.java.lang.Math, spark._jvm.java.lang.Thread
    try:
        timer.start()
        with pytest.raises(CutOff) as caught:  # keeps the frames of the call alive, like pytest's report
            thread.sleep(3_000)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    forget_calls()
    assert [math.addExact(number, 1) for number in range(3)] == [1, 2, 3]
    assert spark.range(7).count() == 7
    # The session still has its data sources.
    spark.range(7).write.format("nothing").mode("append").save()
    assert caught.value is not None
