"""Rows that cannot be messages, on disks that fail: none is lost after a commit, and nothing is left by what failed."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from tests.pipeline.full_disk import full_disk
from tests.pipeline.running import RunningCluster
from tickwheel.client.staging import StagedState
from tickwheel.pipeline import sink_rejected
from tickwheel.pipeline.options import Options
from tickwheel.pipeline.sink import OPTIONS, RejectedRowsError, Run, StagedMessage, sink_config
from tickwheel.pipeline.sink_rejected import TEMPORARY, RejectedFile, publish

ROWS = pa.RecordBatch.from_pylist([{"due_ms": 1, "reason": "x"}])


DUE_MS = time.time_ns() // 1_000_000 + 3_600_000


def staged(cluster: RunningCluster, folder: Path, job_id: str, run_id: str = "run-1") -> tuple[Run, StagedMessage]:
    """A run with two good rows and a bad one, up to its commit."""
    due = DUE_MS
    options = {"addresses": cluster.addresses, "topic": "sink-torn", "job_id": job_id}
    run = Run(sink_config(Options(options, OPTIONS), stream=False), job_id, 0, run_id, str(folder))
    rows = [{"due_ms": due, "payload": "a"}, {"due_ms": due, "payload": "b"}, {"due_ms": None, "payload": "c"}]
    schema = pa.schema([("due_ms", pa.int64()), ("payload", pa.string())])
    return run, run.write(iter([pa.RecordBatch.from_pylist(rows, schema)]))


def test_bad_rows_that_cannot_be_moved_outlive_the_abort(cluster: RunningCluster, tmp_path: Path) -> None:
    """Spark aborts a write whose commit raised. The rows are scheduled by then, so the text says not to repeat it."""
    run, message = staged(cluster, tmp_path / "bad", "torn-1")
    in_the_way = tmp_path / "bad" / message.rejected_file
    (in_the_way / "x").mkdir(parents=True)
    with pytest.raises(RejectedRowsError, match=r"torn-1 is done: .* do not write them again"):
        run.commit([message])
    assert cluster.payloads("sink-torn").total() == 2
    with pytest.raises(OSError, match=message.rejected_file):
        run.abort([message])
    assert pq.read_table(tmp_path / "bad" / TEMPORARY / message.rejected_file).num_rows == 1
    (in_the_way / "x").rmdir()
    in_the_way.rmdir()
    run.abort([message])
    assert pq.read_table(in_the_way).num_rows == 1
    assert not (tmp_path / "bad" / TEMPORARY).exists()


def test_bad_rows_outlive_an_abort_after_a_commit_of_which_nobody_heard(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    """The answer to a commit may be lost. An abort that comes before any commit still drops them."""
    run, message = staged(cluster, tmp_path / "bad", "torn-2")
    run.abort([message])
    assert not list((tmp_path / "bad").rglob("*.parquet"))

    run, message = staged(cluster, tmp_path / "bad", "torn-3")
    run.commit([message])
    path = tmp_path / "bad" / message.rejected_file
    (tmp_path / "bad" / TEMPORARY).mkdir()
    path.rename(tmp_path / "bad" / TEMPORARY / message.rejected_file)  # as it was before the commit
    run.abort([message])
    assert pq.read_table(path).num_rows == 1
    job = cluster.wait(cluster.client.staging.job("torn-3"))
    assert job.state is StagedState.PUBLISHED


def test_of_two_runs_at_once_one_leaves_its_bad_rows(cluster: RunningCluster, tmp_path: Path) -> None:
    """Both had staged all when the first was committed. Who corrects and writes them would otherwise schedule them
    twice."""
    pair = [staged(cluster, tmp_path / "bad", "torn-two", run_id) for run_id in ("run-1", "run-2")]
    for run, message in pair:
        run.commit([message])
    [found] = (tmp_path / "bad").rglob("*.parquet")
    assert found.parent == tmp_path / "bad" and pq.read_table(found).num_rows == 1
    assert not (tmp_path / "bad" / TEMPORARY).exists()


def test_runs_that_replace_bad_rows_at_once_lose_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took the other's for those of an earlier run: both had moved theirs, then both looked, and both removed."""
    names = [sink_rejected.file_name(0, attempt) for attempt in (1, 2)]
    for name in names:
        with RejectedFile(str(tmp_path), name) as file:
            file.write([ROWS])
    (tmp_path / TEMPORARY / names[1]).rename(tmp_path / names[1])
    opened = sink_rejected._opened

    def in_between(path: str) -> tuple[fs.FileSystem, str]:
        system, base = opened(path)

        class Late(type(system)):  # type: ignore[misc]
            """The other run goes on once this one has looked."""

            def get_file_info(self, what: object) -> object:
                found = system.get_file_info(what)
                if isinstance(what, fs.FileSelector):
                    monkeypatch.setattr(sink_rejected, "_opened", opened)
                    publish(str(tmp_path), names[1:], replace=True)
                return found

        return Late(), base

    monkeypatch.setattr(sink_rejected, "_opened", in_between)
    publish(str(tmp_path), names[:1], replace=True)
    assert list(tmp_path.glob("*.parquet"))


@pytest.mark.parametrize("bytes_max", [0, 100], ids=["at its beginning", "at its end"])
def test_an_attempt_that_fails_leaves_no_file(tmp_path: Path, bytes_max: int) -> None:
    """Repeats would fill a full disk further. The error names the file."""
    with (
        full_disk(bytes_max),
        pytest.raises(OSError, match=r"bad/_temporary/one\.parquet"),
        RejectedFile(str(tmp_path / "bad"), "one.parquet") as file,
    ):
        file.write([ROWS])
    with pytest.raises(ZeroDivisionError), RejectedFile(str(tmp_path / "bad"), "two.parquet") as file:
        file.write([ROWS])
        raise ZeroDivisionError
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["My Documents", "50%", "a#b", "a?b", "a%20b", "größe", "[x]"])
def test_any_name_of_a_folder_will_do(tmp_path: Path, name: str) -> None:
    """A path was read as a URI: some names failed, others meant another folder."""
    folder = tmp_path / name / "bad"
    with RejectedFile(str(folder), "one.parquet") as file:
        file.write([ROWS])
    publish(str(folder), [file.file])
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with (folder / "one.parquet").open("rb") as written:
        assert pq.ParquetFile(written).metadata.num_rows == 1


def test_a_run_that_ends_leaves_what_another_has_begun_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same job, between its look at the folder and the folder's removal: those rows were lost without a word."""
    (tmp_path / TEMPORARY).mkdir()
    opened = sink_rejected._opened

    def late(path: str) -> tuple[fs.FileSystem, str]:
        system, base = opened(path)

        class Writing(type(system)):  # type: ignore[misc]
            """Another run writes as soon as this one has looked."""

            def get_file_info(self, what: object) -> object:
                found = system.get_file_info(what)
                if isinstance(what, fs.FileSelector):
                    (tmp_path / TEMPORARY / "other.parquet").touch()
                return found

        return Writing(), base

    monkeypatch.setattr(sink_rejected, "_opened", late)
    sink_rejected.discard(str(tmp_path), ())
    assert (tmp_path / TEMPORARY / "other.parquet").exists()
