"""The data source `tickwheel`: the face that Spark sees, for batches and streams, in and out.

Spark finds it by itself (package `pyspark_tickwheel`); `spark.dataSource.register(TickwheelSource)` does the same.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource


class TickwheelSource(DataSource):
    """`spark.read.format("tickwheel")`, `df.write.format("tickwheel").mode("append")` and their streaming kin."""

    @classmethod
    def name(cls) -> str:
        """What `format(...)` takes."""
        return "tickwheel"
