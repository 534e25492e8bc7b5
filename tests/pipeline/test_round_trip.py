"""What a message has comes back through every way in: sink, build and load, freeze and promote; and the sources out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tests.pipeline.running import RunningCluster
from tests.pipeline.test_bulk import loaded
from tests.pipeline.test_cold import frozen, promoted
from tickwheel.pipeline.build import BuildConfig, build
from tickwheel.pipeline.meta_column import KEYED_META_COLUMNS
from tickwheel.pipeline.source_columns import CONTENT_FIELDS, ddl_of

DAY_MS = 86_400_000
DUE_MS = time.time_ns() // 1_000_000 + 40 * DAY_MS
ROWS = [
    (b"whole", "k", ["a", "b"], {"n": "1"}, "lane", "u"),
    (b"grouped", None, None, None, "lane", None),
    (b"bare", None, None, None, None, None),
]
COLUMNS = ("payload", *KEYED_META_COLUMNS)


@pytest.mark.parametrize("way", ["sink", "build", "freeze"])
def test_all_fields_of_a_message_come_back(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path, way: str
) -> None:
    """Read as what is pending, beside a row without any of them. Only the sink takes unique keys."""
    topic = f"round-{way}"
    rows = spark.createDataFrame(ROWS, ddl_of(CONTENT_FIELDS)).coalesce(1).withColumn("due_ms", f.lit(DUE_MS))
    rows, expected = rows.withColumn("topic", f.lit(topic)), ROWS
    if way != "sink":
        rows, expected = rows.drop("unique_key"), [(*row[:-1], None) for row in ROWS]
    _written(rows, spark, cluster, tmp_path, way)
    reader = spark.read.format("tickwheel").options(addresses=cluster.addresses, topic=topic)
    found = reader.option("due_ms_min", str(DUE_MS)).option("due_ms_max", str(DUE_MS + 1)).load()
    assert sorted((tuple(row) for row in found.select(*COLUMNS).collect()), key=repr) == sorted(expected, key=repr)


def _written(rows: DataFrame, spark: SparkSession, cluster: RunningCluster, folder: Path, way: str) -> None:
    if way == "sink":
        rows.write.format("tickwheel").option("addresses", cluster.addresses).mode("append").save()
    elif way == "build":
        build(rows, folder / "out", BuildConfig(tasks=1))
        loaded(cluster, folder / "out")
    else:
        frozen(cluster, rows, folder, "round")
        promoted(spark, cluster, folder)
