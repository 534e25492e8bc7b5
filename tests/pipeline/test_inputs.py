"""Which files of a folder are read: all that count, each once, by whichever command."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from tickwheel.pipeline.build import BuildError, build_parquet
from tickwheel.pipeline.cold_freeze import content_job_id, write_parts
from tickwheel.pipeline.cold_store import ColdError
from tickwheel.pipeline.inputs import InputError, files_below, read_parquet
from tickwheel.pipeline.parquet_pieces import find
from tickwheel.pipeline.sink_rows import SchemaError

DAY_MS = 86_400_000


def rows(count: int) -> pa.Table:
    """Rows that are due in forty days."""
    due_ms = time.time_ns() // 1_000_000 + 40 * DAY_MS
    return pa.table({"topic": ["t"] * count, "due_ms": [due_ms] * count, "payload": [f"{n}" for n in range(count)]})


def put(path: Path, count: int) -> None:
    """A file with so many rows, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows(count), path)


def test_files_in_plain_folders_are_read_by_every_command(spark: SparkSession, tmp_path: Path) -> None:
    """Spark left them out and said nothing: of a frozen folder, and of a built one as soon as Spark had to read it."""
    put(tmp_path / "in" / "a.parquet", 3)
    put(tmp_path / "in" / "sub" / "deeper" / "b.parquet", 5)
    put(tmp_path / "in" / "_hidden" / "c.parquet", 7)
    put(tmp_path / "in" / "sub" / ".d.parquet", 7)
    assert read_parquet(spark, str(tmp_path / "in")).count() == 8
    assert write_parts(read_parquet(spark, str(tmp_path / "in")), tmp_path / "cold", "job").rows == 8
    assert build_parquet(spark, str(tmp_path / "in"), tmp_path / "by-arrow").units == 8
    (tmp_path / "in" / "notes").touch()
    assert find(str(tmp_path / "in"), 1) is None
    assert build_parquet(spark, str(tmp_path / "in"), tmp_path / "by-spark").units == 8
    (tmp_path / "in" / "a.parquet").unlink()
    assert read_parquet(spark, f"file://{tmp_path}/in").count() == 5, "no file in the folder itself"


def test_times_in_nanoseconds_are_told(spark: SparkSession, tmp_path: Path) -> None:
    """As pandas writes them. Spark says only which type is illegal; `build` reads them by Arrow."""
    due_at = pa.array([time.time_ns()], pa.timestamp("ns", "UTC"))
    pq.write_table(pa.table({"topic": ["t"], "due_at": due_at, "payload": ["x"]}), tmp_path / "in.parquet")
    with pytest.raises(InputError, match="write them in microseconds"):
        read_parquet(spark, str(tmp_path / "in.parquet"))
    assert build_parquet(spark, str(tmp_path / "in.parquet"), tmp_path / "out").units == 1
    with pytest.raises(AnalysisException, match="PATH_NOT_FOUND"):
        read_parquet(spark, str(tmp_path / "missing"))


def test_folders_that_stand_for_columns_stay_columns(spark: SparkSession, tmp_path: Path) -> None:
    """An archive, or a cold tier, is such a folder."""
    put(tmp_path / "in" / "topic=x" / "a.parquet", 3)
    put(tmp_path / "in" / "topic=y" / "b.parquet", 5)
    found = read_parquet(spark, str(tmp_path / "in")).groupBy("topic").count().collect()
    assert {row["topic"]: row["count"] for row in found} == {"x": 3, "y": 5}


def test_a_link_is_followed_and_a_loop_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """A link that leads back gave each message forty times, until the system refused to follow it."""
    put(tmp_path / "in" / "a.parquet", 3)
    put(tmp_path / "elsewhere" / "b.parquet", 5)
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "again").symlink_to(tmp_path / "elsewhere")
    assert [path.name for path in files_below(tmp_path / "in")] == ["a.parquet", "b.parquet", "b.parquet"]
    assert read_parquet(spark, str(tmp_path / "in")).count() == 13, "two links are meant"
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "in")
    for read in (
        lambda: find(str(tmp_path / "in"), 1),
        lambda: read_parquet(spark, str(tmp_path / "in")),
        lambda: content_job_id(tmp_path / "in"),
    ):
        with pytest.raises(InputError, match=r"back: it leads back to a folder above it"):
            read()


def test_a_job_is_named_by_what_links_lead_to(tmp_path: Path) -> None:
    """Other rows behind a link had the same job id: `freeze` called them known, and they never became messages."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    put(tmp_path / "elsewhere" / "b.parquet", 3)
    before = content_job_id(tmp_path / "in")
    put(tmp_path / "elsewhere" / "b.parquet", 4)
    assert content_job_id(tmp_path / "in") != before
    with pytest.raises(ColdError, match="there is no Parquet file"):
        content_job_id(tmp_path / "nothing")


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files were left out of the job id."""
    put(tmp_path / "in" / "closed" / "a.parquet", 3)
    plain = Path.iterdir

    def refused(path: Path) -> object:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(InputError, match=r"in/closed: Permission denied"):
        content_job_id(tmp_path / "in")


def test_a_file_that_is_cut_is_named_by_the_projects_own_error(spark: SparkSession, tmp_path: Path) -> None:
    """Of a program that builds or freezes; the error of Spark is its cause."""
    put(tmp_path / "in" / "a.parquet", 3)
    put(tmp_path / "in" / "b.parquet", 3)
    cut = tmp_path / "in" / "b.parquet"
    cut.write_bytes(cut.read_bytes()[:-9])
    with pytest.raises(BuildError, match=r"b\.parquet is not a Parquet file") as caught:
        build_parquet(spark, str(tmp_path / "in"), tmp_path / "out")
    assert caught.value.__cause__ is not None
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(ColdError, match=r"b\.parquet is not a Parquet file"):
        write_parts(read_parquet(spark, str(tmp_path / "in")), tmp_path / "cold", "job")
    pq.write_table(rows(1).drop_columns(["payload"]), tmp_path / "c.parquet")
    with pytest.raises(SchemaError, match="column payload"):
        build_parquet(spark, str(tmp_path / "c.parquet"), tmp_path / "none")
