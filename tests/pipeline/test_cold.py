"""The cold tier: rows become parts of Parquet with ids, and are promoted into a cluster of real nodes in time."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tests.pipeline.running import RunningCluster
from tickwheel.client import AsyncClient, ColdState
from tickwheel.client.bulk import LoadProgress
from tickwheel.client.messages import META_BYTES_MAX
from tickwheel.pipeline import cold_freeze
from tickwheel.pipeline.build import PAYLOAD_BYTES_MAX
from tickwheel.pipeline.cold_freeze import FreezeConfig, content_job_id, register, write_parts
from tickwheel.pipeline.cold_promote import ColdLoader, Promoter, Promotion, moved_pieces
from tickwheel.pipeline.cold_status import Examined, examine, remove_loaded, text_of
from tickwheel.pipeline.cold_store import ColdError, ColdJobManifest, ColdStore
from tickwheel.storage import bundle

DAY_MS = 86_400_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def frame(spark: SparkSession, count: int, topic: str, first_day: int = 40, days: int = 3) -> DataFrame:
    """Rows named by their number, of some days from `first_day` on, with keys."""
    start = (now_ms() // DAY_MS + first_day) * DAY_MS
    return spark.range(0, count, 1, 2).select(
        f.lit(topic).alias("topic"),
        (f.lit(start) + f.col("id") * 7_919_333 % (days * DAY_MS)).alias("due_ms"),
        f.concat(f.lit("row-"), f.col("id").cast("string")).alias("payload"),
        f.concat(f.lit("key-"), f.col("id").cast("string")).alias("key"),
    )


def frozen(
    cluster: RunningCluster, rows: DataFrame, folder: Path, job_id: str, config: FreezeConfig | None = None
) -> tuple[ColdJobManifest, dict[str, str]]:
    """Freeze with a client of its own; the id of each key."""
    manifest = write_parts(rows, folder, job_id, config or FreezeConfig(tasks=2))

    async def go() -> None:
        async with AsyncClient(cluster.addresses.split(",")) as client:
            await register(client, folder, manifest)

    cluster.wait(go())
    ids = pq.read_table(folder / "_ids" / f"{job_id}.parquet")
    return manifest, dict(zip(ids.column("key").to_pylist(), ids.column("id").to_pylist(), strict=True))


def promoted(spark: SparkSession, cluster: RunningCluster, folder: Path, days: float = 60) -> Promotion:
    """Everything within so many days."""

    async def go() -> Promotion:
        async with AsyncClient(cluster.addresses.split(",")) as client:
            return await Promoter(spark, client, folder).run(horizon_days=days)

    return cluster.wait(go())


def examined(cluster: RunningCluster, folder: Path) -> Examined:
    """What `cold status` shows."""

    async def go() -> Examined:
        async with AsyncClient(cluster.addresses.split(",")) as client:
            return await examine(client, folder)

    return cluster.wait(go())


def test_rows_are_written_once_and_only_far_ones(spark: SparkSession, tmp_path: Path) -> None:
    """Near and illegal rows lie beside with all they need; a repeat, later and of other rows, writes nothing."""
    far, near = frame(spark, 500, "cold"), frame(spark, 30, "cold", first_day=1, days=2)
    wrong = far.limit(4).withColumn("payload", f.lit(None).cast("string"))
    manifest = write_parts(far.union(near).union(wrong), tmp_path, "job", FreezeConfig(tasks=2, part_rows_max=70))
    assert (manifest.rows, manifest.near, manifest.rejected) == (500, 30, 4)
    assert sum(part.rows for part in manifest.parts) == 500 and max(part.rows for part in manifest.parts) <= 70
    table = spark.read.parquet(str(tmp_path))
    assert {row.payload.decode() for row in table.collect()} == {f"row-{n}" for n in range(500)}
    assert all(int(row.due_ms) // DAY_MS == row.day.toordinal() - 719_163 for row in table.limit(50).collect())
    beside = pq.read_table(tmp_path / "_near" / "job")
    assert beside.num_rows == 30 and set(beside.column_names) == {"topic", "due_ms", "payload", "key"}
    assert pq.read_table(tmp_path / "_rejected" / "job").column("reason").to_pylist() == ["payload: null"] * 4
    left = tmp_path / Path(manifest.parts[0].path).parent / "job-0123456789abcdef.parquet"
    left.write_bytes(b"an attempt that lost")
    ColdStore(tmp_path).publish(manifest)
    assert not left.exists()
    assert write_parts(near, tmp_path, "job") == manifest
    with pytest.raises(ColdError, match="job_id"):
        write_parts(near, tmp_path, "../job")
    far.write.parquet(str(tmp_path / "in"))
    assert content_job_id(tmp_path / "in") == content_job_id(tmp_path / "in") != content_job_id(tmp_path / "in", "t")


@given(st.lists(st.integers(1, PAYLOAD_BYTES_MAX), max_size=40), st.integers(1, 60))
@example([1], 2_048)
def test_moved_messages_fit_their_bundles(sizes: list[int], times: int) -> None:
    """Whatever metas they have: one piece that made two bundles would end every promotion."""
    payload_bytes = np.array(sizes * times, np.int64)
    pieces = list(moved_pieces(payload_bytes))
    assert [place for at, end in pieces for place in range(at, end)] == list(range(len(payload_bytes)))
    for at, end in pieces:
        assert end > at
        assert int(payload_bytes[at:end].sum()) + (end - at) * META_BYTES_MAX <= bundle.LOG_BYTES_MAX


def test_other_rows_are_another_job(tmp_path: Path) -> None:
    """All that Spark reads counts: files of any name, and the columns that folders stand for; not what is hidden."""
    ids = []
    for name in ("topic=a/1.parquet", "topic=b/1.parquet"):
        folder = tmp_path / name.replace("/", "-")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"the same rows")
        ids.append(content_job_id(folder))
        for hidden in ("_SUCCESS", ".1.parquet.crc", "_temporary/2.parquet"):
            (folder / hidden).parent.mkdir(exist_ok=True)
            (folder / hidden).write_bytes(b"x")
        ids.append(content_job_id(folder))
        (folder / "part-2.snappy").write_bytes(b"more rows")
        ids.append(content_job_id(folder))
    assert ids[0] == ids[1] and ids[3] == ids[4] and len(set(ids)) == 4


def test_cold_messages_are_cancelled_moved_and_promoted_once(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    """By the ids that freezing gave, before and after; a repeat of either command adds nothing; damage is named."""
    rows = frame(spark, 300, "frozen")
    manifest, ids = frozen(cluster, rows, tmp_path, "first", FreezeConfig(tasks=2, part_rows_max=60))
    again, ids_again = frozen(cluster, rows, tmp_path, "first")
    assert again == manifest and ids_again == ids and len(set(ids.values())) == 300
    client = cluster.client
    assert cluster.wait(client.get(ids["key-7"])).state == "COLD"
    assert cluster.wait(client.cancel(ids["key-7"])) == "CANCELLED"
    target = now_ms() + 35 * DAY_MS
    outcome, receipt = cluster.wait(client.reschedule(ids["key-8"], due_ms=target))
    assert outcome == "RESCHEDULED" and receipt is not None and receipt.id == ids["key-8"]
    assert cluster.messages("frozen") == []
    before = examined(cluster, tmp_path)
    assert before.status.state is ColdState.IN_TIME and not before.bad and before.status.messages == 300
    assert sum(rows for _, rows in before.days.values()) == 300 and len(before.days) == 3
    assert promoted(spark, cluster, tmp_path, days=30).parts == 0
    assert promoted(spark, cluster, tmp_path, days=36).moved == 1
    assert [(m.payload, m.due_ms) for m in cluster.messages("frozen")] == [(b"row-8", target)]
    damaged = tmp_path / manifest.parts[2].path
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-9] + b"x" + content[-8:])
    ColdStore(tmp_path).plan("unfinished", 1)
    part = promoted(spark, cluster, tmp_path)
    assert part.parts == len(manifest.parts) - 1 and len(part.problems) == 1 and str(damaged) in part.problems[0]
    damaged.write_bytes(content)
    rest = promoted(spark, cluster, tmp_path)
    assert (rest.parts, rest.problems) == (1, [])
    assert promoted(spark, cluster, tmp_path).messages == 0
    expected = Counter(f"row-{n}" for n in range(300) if n != 7)
    assert cluster.payloads("frozen") == expected
    assert {m.key for m in cluster.messages("frozen")} == {f"key-{n}" for n in range(300) if n != 7}
    assert cluster.wait(client.cancel(ids["key-9"])) == cluster.wait(client.cancel(ids["key-8"])) == "CANCELLED"
    assert cluster.wait(client.get(ids["key-10"])).state == "PENDING"
    assert cluster.payloads("frozen") == expected - Counter(["row-8", "row-9"])
    status = cluster.wait(client.admin.master_status()).cold
    assert (status.parts, status.cancelled, status.moved) == (0, 0, 0)
    after = examined(cluster, tmp_path)
    assert [text.partition(":")[0] for text in after.problems] == ["job unfinished"] and after.bad
    assert "unfinished" in text_of(after) and after.done_files == len(manifest.parts)

    async def clean() -> tuple[int, int]:
        async with AsyncClient(cluster.addresses.split(",")) as client:
            return await remove_loaded(client, tmp_path)

    left = tmp_path / "_ids" / ".of-a-killed-job.tmp"
    left.touch()
    os.utime(left, (0, 0))
    assert cluster.wait(clean())[0] == len(manifest.parts) + 1 and cluster.wait(clean())[0] == 0
    cluster.check_agreement()


def test_a_file_of_two_parts_stays_while_a_message_of_one_waits(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    """Parts of the same rows are one file. It went with the first of them, and a moved message of the other with it."""
    row = ("same", now_ms() + 40 * DAY_MS, "x")
    rows = spark.createDataFrame([row] * 4, "topic string, due_ms long, payload string").coalesce(1)
    manifest, _ = frozen(cluster, rows, tmp_path, "same", FreezeConfig(tasks=1, part_rows_max=2))
    assert len(manifest.parts) == 2 and len({part.path for part in manifest.parts}) == 1
    ids = pq.read_table(tmp_path / "_ids" / "same.parquet").column("id").to_pylist()
    later_ms = now_ms() + 80 * DAY_MS
    assert cluster.wait(cluster.client.reschedule(ids[-1], due_ms=later_ms))[0] == "RESCHEDULED"
    assert promoted(spark, cluster, tmp_path).messages == 3

    async def clean() -> tuple[int, int]:
        async with AsyncClient(cluster.addresses.split(",")) as client:
            return await remove_loaded(client, tmp_path)

    assert cluster.wait(clean()) == (0, 0)
    assert promoted(spark, cluster, tmp_path, days=90).moved == 1
    assert [message.due_ms for message in cluster.messages("same")] == [row[1]] * 3 + [later_ms]
    assert cluster.wait(clean())[0] == 1


def test_records_of_a_job_that_are_not_its_own_are_named_and_delay_no_other(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    """P2: swapped, they brought the rows of the other job at the times of moved messages."""
    for job in ("one", "two"):
        _, ids = frozen(cluster, frame(spark, 20, job), tmp_path, job, FreezeConfig(tasks=1))
    assert cluster.wait(cluster.client.reschedule(ids["key-8"], due_ms=now_ms() + 35 * DAY_MS))[0] == "RESCHEDULED"
    one, two, aside = (tmp_path / "_jobs" / name for name in ("one", "two", "aside"))
    numbers = [(folder / "registered.json").read_bytes() for folder in (one, two)]
    for folder, number in zip((two, one), numbers, strict=True):
        (folder / "registered.json").write_bytes(number)
    swapped = promoted(spark, cluster, tmp_path, days=36)
    assert swapped.moved == 0 and "differs from what was registered" in swapped.problems[0]
    for folder, number in zip((one, two), numbers, strict=True):
        (folder / "registered.json").write_bytes(number)
    (one / "manifest.json").rename(aside)
    (one / "manifest.json").mkdir()
    assert any("Is a directory" in text for text in examined(cluster, tmp_path).problems)
    part = promoted(spark, cluster, tmp_path)
    assert part.moved == 1 and part.parts and all("Is a directory" in text for text in part.problems)
    assert cluster.payloads("one") == Counter() and len(cluster.payloads("two")) == 20
    (one / "manifest.json").rmdir()
    (one / "manifest.json").write_bytes((two / "manifest.json").read_bytes())
    assert any("the manifest of job two" in text for text in promoted(spark, cluster, tmp_path).problems)
    aside.rename(one / "manifest.json")
    (tmp_path / "_promote").rmdir()
    (tmp_path / "_promote").touch()
    with pytest.raises(ColdError, match=r"_promote.*: Not a directory"):
        promoted(spark, cluster, tmp_path)
    (tmp_path / "_promote").unlink()
    assert promoted(spark, cluster, tmp_path).problems == [] and len(cluster.payloads("one")) == 20


def test_two_promotions_at_once_outlive_their_master(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take the same parts, the master is killed in the middle, clients cancel: nothing lost or twice."""
    rows = frame(spark, 400, "survivors", days=1)
    manifest, ids = frozen(cluster, rows, tmp_path, "second", FreezeConfig(tasks=2, part_rows_max=20))
    assert len(manifest.parts) == 20
    cancelled: set[str] = set()
    plain = ColdLoader._take
    middle = asyncio.Event()
    begun: Counter[ColdLoader] = Counter()

    async def take(self: ColdLoader, place: int) -> LoadProgress:
        begun[self] += 1
        if len(begun) == 2 and min(begun.values()) == 4:
            middle.set()
        return await plain(self, place)

    async def go() -> list[Promotion]:
        inner = cluster._cluster
        addresses = cluster.addresses.split(",")
        async with AsyncClient(addresses) as one, AsyncClient(addresses) as other:

            async def cancel_some() -> None:
                for number in range(0, 400, 9):
                    key = f"key-{number}"
                    assert await one.cancel(ids[key]) == "CANCELLED"
                    cancelled.add(key)

            running = [asyncio.create_task(Promoter(spark, c, tmp_path).run(horizon_days=60)) for c in (one, other)]
            cancelling = asyncio.create_task(cancel_some())
            await middle.wait()
            master = await inner.master()
            await inner.kill_node(master)
            done = await asyncio.gather(*running)
            await cancelling
            inner.start_node(inner.node(master.node_id))
            await inner.wait_ready()
            return done

    monkeypatch.setattr(ColdLoader, "_take", take)
    done = cluster.wait(go())
    assert not done[0].problems + done[1].problems and sum(one.messages for one in done) <= 400
    assert promoted(spark, cluster, tmp_path).parts == 0
    assert {m.key for m in cluster.messages("survivors")} == {f"key-{n}" for n in range(400)} - cancelled
    assert len(cluster.messages("survivors")) == 400 - len(cancelled)
    assert not list((tmp_path / "_promote").iterdir())
    cluster.check_agreement()


def test_of_two_freezes_of_a_job_the_slower_takes_what_the_other_wrote(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faster one removes unfinished files, and so tasks of the slower one fail."""
    rows = frame(spark, 50, "two-freezes")
    write = cold_freeze._written

    def outpaced(*arguments: Any) -> ColdJobManifest:
        monkeypatch.setattr(cold_freeze, "_written", write)
        write_parts(rows, tmp_path, "job")
        raise ColdError("day=2027-01-07/.job@0.tmp: No such file or directory")

    monkeypatch.setattr(cold_freeze, "_written", outpaced)
    assert write_parts(rows, tmp_path, "job") == ColdStore(tmp_path).manifest("job")
