"""What a cold tier's folder promises when the power goes."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.system_calls import PowerLoss
from tickwheel.pipeline.cold_promote import remove_left
from tickwheel.pipeline.cold_store import NEAR, ColdJobManifest, ColdStore, write_file, write_ids
from tickwheel.pipeline.sink_rejected import TEMPORARY, RejectedFile

REAL_SYNC = os.fsync


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[str]]:
    """By inode of a folder, the names in it that its latest sync found; syncs are real ones."""
    seen: dict[int, set[str]] = {}

    def fsync(handle: int) -> None:
        REAL_SYNC(handle)
        state = os.fstat(handle)
        if stat.S_ISDIR(state.st_mode):
            seen[state.st_ino] = set(os.listdir(handle))

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


@pytest.mark.parametrize("made", [False, True], ids=["new", "of one who was killed"])
def test_a_new_day_is_on_stable_storage_with_its_first_part(
    synced: dict[int, set[str]], tmp_path: Path, made: bool
) -> None:
    """P1: the manifest would name a part whose folder is gone, and whoever loaded the rows has forgotten them."""
    part = tmp_path / "day=2027-01-31" / "job-0.parquet"
    if made:
        part.parent.mkdir()
    write_file(part, b"rows", aside="job@0-1")
    assert "job-0.parquet" in synced[part.parent.stat().st_ino]
    assert "day=2027-01-31" in synced[tmp_path.stat().st_ino]


def test_a_jobs_folder_is_on_stable_storage_with_its_plan(synced: dict[int, set[str]], tmp_path: Path) -> None:
    """P1: the manifest is written there later; with the folder it would be gone."""
    ColdStore(tmp_path).plan("job", 1)
    assert "plan.json" in synced[(tmp_path / "_jobs" / "job").stat().st_ino]
    assert "job" in synced[(tmp_path / "_jobs").stat().st_ino]
    assert "_jobs" in synced[tmp_path.stat().st_ino]


def test_a_freeze_that_is_killed_at_any_step_can_be_repeated(tmp_path: Path) -> None:
    """P1: the repeat ends with the same files. `cold clean` takes away what the killed process has left unfinished, but
    not what a process may still be writing."""
    command = [sys.executable, "-m", "tests.pipeline.cold_steps", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert len(lines) > 40
    unfinished = 0
    for step, found in lines:
        folder = tmp_path / step
        more, fewer = (set(re.findall(r"'([^']+)'", part)) for part in found.split("] ["))
        assert not fewer, f"killed at step {step}"
        unfinished += len(more)
        store = ColdStore(folder)
        assert not list(store.left())
        for name in more:
            os.utime(folder / name, (0, 0))
        assert {str(path.relative_to(folder)) for path in store.left()} == more, f"killed at step {step}"
    assert unfinished > 5


def test_what_promotions_leave_goes_while_others_end(tmp_path: Path) -> None:
    """Files that another promotion removes between a look at the folder and at the file are no error."""
    work = tmp_path / "_promote"
    (work / "old").mkdir(parents=True)
    os.utime(work / "old", (0, 0))
    (work / "gone").symlink_to("nowhere")
    remove_left(work)
    assert [path.name for path in work.iterdir()] == ["gone"]


ROWS = pa.RecordBatch.from_pylist([{"due_ms": 1}])


def manifest_of(near_files: list[str]) -> ColdJobManifest:
    """Of a job whose rows were all near."""
    return ColdJobManifest("job", 0, 0, len(near_files), 0, near_files, [], [])


def near_file(folder: Path, name: str) -> str:
    """The rows of an attempt, as a worker leaves them for the driver."""
    with RejectedFile(str(folder / NEAR / "job"), name) as file:
        file.write([ROWS])
    return file.file


@pytest.mark.parametrize("names_at_once", [False, True], ids=["names lost", "names kept"])
def test_rows_that_did_not_become_cold_outlive_a_power_loss(
    names_at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a worker has told of them, and once they are published: a repeat does not write them again."""
    folder = tmp_path / "cold"
    folder.mkdir()
    with contextlib.closing(PowerLoss(monkeypatch, folder)) as power:
        power.arm(-1)
        near_file(folder, "near.parquet")
        power.survivors(tmp_path / "told", names_at_once=names_at_once)
        ColdStore(folder).finish(manifest_of(["near.parquet"]))
        power.survivors(tmp_path / "published", names_at_once=names_at_once)
    store = ColdStore(tmp_path / "told")
    store.finish(manifest_of(["near.parquet"]))
    for place in (tmp_path / "told", tmp_path / "published"):
        assert pq.read_table(place / NEAR / "job" / "near.parquet").num_rows == 1


def test_clean_removes_the_rows_of_a_killed_freeze_and_never_those_that_count(tmp_path: Path) -> None:
    """A killed one left them for ever. Those of a manifest may not be published yet."""
    store = ColdStore(tmp_path)
    temporary = tmp_path / NEAR / "job" / TEMPORARY
    for name in ("counts.parquet", "attempt.parquet"):
        near_file(tmp_path, name)
    assert not list(store.left()), "a job may be running"
    os.utime(temporary / "attempt.parquet", (0, 0))
    assert not list(store.left()), "a task of it has ended just now"
    os.utime(temporary / "counts.parquet", (0, 0))
    assert len(list(store.left())) == 2
    store.publish(manifest_of(["counts.parquet"]))
    for path in list(store.left()):
        store.remove(path)
    assert [path.name for path in temporary.iterdir()] == ["counts.parquet"]
    store.publish_beside(manifest_of(["counts.parquet"]))
    assert [path.name for path in temporary.parent.iterdir()] == ["counts.parquet"]

    other = tmp_path / NEAR / "other" / TEMPORARY
    other.mkdir(parents=True)
    (other / "x.parquet").touch()
    os.utime(other / "x.parquet", (0, 0))
    for path in list(store.left()):
        store.remove(path)
    assert not other.parent.exists()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A job that is repeated on a full disk must not fill it further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match=r"too large: .*day=2027-01-31"):
            write_file(tmp_path / "day=2027-01-31" / "job-0.parquet", bytes(100_000), aside="job@0-1")
        with pytest.raises(OSError, match=r"too large: .*plan\.json"):
            ColdStore(tmp_path).plan("job", 1)
        with pytest.raises(OSError, match=r"too large: .*_ids"):
            write_ids(ColdStore(tmp_path), manifest_of([]), 1, str)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
