"""What a cold tier's folder promises when the power goes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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

from tests.pipeline.cold_steps import PART
from tests.system_calls import PowerLoss
from tickwheel.client import AsyncClient
from tickwheel.pipeline.cold_freeze import PartWriter, register
from tickwheel.pipeline.cold_promote import remove_left
from tickwheel.pipeline.cold_status import examine, give_up, remove_loaded
from tickwheel.pipeline.cold_store import (
    DAY_MS,
    JOBS,
    NEAR,
    ColdError,
    ColdFile,
    ColdJobManifest,
    ColdStore,
    write_file,
    write_ids,
)
from tickwheel.pipeline.sink_rejected import TEMPORARY, RejectedFile
from tickwheel.testing import SyncFakeCluster

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


def near_file(folder: Path, name: str, job_id: str = "job") -> str:
    """The rows of an attempt, as a worker leaves them for the driver."""
    with RejectedFile(str(folder / NEAR / job_id), name) as file:
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


def written(folder: Path, job_id: str, when_ms: int) -> ColdJobManifest:
    """A job of one row, with all that its tasks and the driver leave before it is registered."""
    store = ColdStore(folder)
    near_file(folder, "near.parquet", job_id)
    writer = PartWriter(folder, job_id, "attempt", "topic", 8)
    batch = pa.RecordBatch.from_pydict({"due_ms": pa.array([when_ms]), "payload": [job_id]})
    parts = [ColdFile(**{name: row[name] for name in PART}) for row in (*writer.take(batch), *writer.rest())]
    boundary_ms = store.plan(job_id, when_ms)
    return store.finish(ColdJobManifest(job_id, boundary_ms, 1, 1, 0, ["near.parquet"], [], parts))


def test_a_job_that_is_not_registered_can_be_given_up(tmp_path: Path) -> None:
    """`cold status` named it for ever. Its files go a day later; until then freezing it again takes it back. A
    registered one stays, and so does one whose files are being removed."""

    async def go(address: str) -> None:
        async with AsyncClient(address) as client:
            store = ColdStore(tmp_path)
            kept, gone = (written(tmp_path, name, 40 * DAY_MS) for name in ("kept", "gone"))
            store.plan("broken-off", 1)
            assert len((await examine(client, tmp_path)).problems) == 3
            for name, rows in (("kept", 1), ("gone", 1), ("broken-off", 0)):
                assert await give_up(client, tmp_path, name) == rows
            assert not (await examine(client, tmp_path)).bad
            assert await remove_loaded(client, tmp_path) == (0, 0), "it may be taken back"
            assert await register(client, tmp_path, kept) is not None
            with pytest.raises(ColdError, match="kept: it is registered"):
                await give_up(client, tmp_path, "kept")
            (tmp_path / JOBS / "kept" / "registered.json").unlink()
            with pytest.raises(ColdError, match="kept: it is registered"):
                await give_up(client, tmp_path, "kept")
            with pytest.raises(ColdError, match="knows no such job"):
                await give_up(client, tmp_path, "unknown")
            for name in ("gone", "broken-off"):
                os.utime(tmp_path / JOBS / name / "given_up.json", (0, 0))
            assert (await remove_loaded(client, tmp_path))[0] == 3  # manifest, part, near rows
            assert store.jobs() == ["kept"]
            with pytest.raises(ColdError, match="gone: its files have been removed"):
                await register(client, tmp_path, gone)

    with SyncFakeCluster() as cluster:
        asyncio.run(go(cluster.address))
    assert {path.name.partition("-")[0] for path in tmp_path.glob("day=*/*")} == {"kept"}
    assert not (tmp_path / NEAR / "gone").exists()


def test_a_removal_that_was_killed_goes_on(tmp_path: Path) -> None:
    """At each file; no freeze of the job begins meanwhile."""
    store = ColdStore(tmp_path)
    for files in range(4):
        manifest = written(tmp_path, "job", 40 * DAY_MS)
        store.give_up("job")
        os.utime(tmp_path / JOBS / "job" / "given_up.json", (0, 0))
        for _ in itertools.islice(store.remove_given_up("job"), files):
            pass
        if files:
            assert store.is_given_up("job")
            with pytest.raises(ColdError, match="files are being removed"):
                store.take_back("job")
        assert len(list(store.remove_given_up("job"))) == 3 - max(0, files - 1)
        assert not store.jobs() and not (tmp_path / manifest.parts[0].path).exists()


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
