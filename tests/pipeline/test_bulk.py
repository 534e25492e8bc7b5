"""Bulk load: rows become bundles on Spark, and a cluster of real nodes takes them over while it serves."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tests.pipeline.running import RunningCluster
from tickwheel.client import AsyncClient
from tickwheel.client.bulk import LoadProgress
from tickwheel.client.messages import is_tag
from tickwheel.pipeline import build as building
from tickwheel.pipeline import load as loading
from tickwheel.pipeline.build import BuildConfig, BuildError, build, build_parquet
from tickwheel.pipeline.bundling import BUNDLES, encoded, steps
from tickwheel.pipeline.hashes import key_hashes, tag_hashes
from tickwheel.pipeline.load import Loader, LoadError, Progress, load
from tickwheel.pipeline.manifest import Manifest, ManifestError, check_content, read_manifest, write_manifest
from tickwheel.pipeline.meta_column import KEYED_META_COLUMNS, meta_column
from tickwheel.pipeline.parquet_pieces import find
from tickwheel.pipeline.runs import DIRECTORY as RUNS
from tickwheel.pipeline.runs import Run, write_run
from tickwheel.pipeline.schedules import ScheduleConfig, schedule, write_schedule
from tickwheel.pipeline.sink_rows import SchemaError
from tickwheel.proto.common_pb2 import MessageMeta
from tickwheel.storage import bundle, tags
from tickwheel.storage.local import LocalDisk

HOUR_MS = 3_600_000


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def frame(spark: SparkSession, count: int, topic: str, hours: int = 40) -> DataFrame:
    """Rows named by their number, of many hours, with keys and tags."""
    return spark.range(0, count, 1, 3).select(
        f.lit(topic).alias("topic"),
        (f.lit(now_ms() + HOUR_MS) + f.col("id") * 7_919_333 % (hours * HOUR_MS)).alias("due_ms"),
        f.concat(f.lit("row-"), f.col("id").cast("string")).alias("payload"),
        f.concat(f.lit("key-"), f.col("id").cast("string")).alias("key"),
        f.when(f.col("id") % 3 == 0, f.array(f.lit("red"))).otherwise(f.array()).alias("tags"),
    )


def contents(folder: Path, manifest: Manifest) -> list[tuple[str, int, bytes]]:
    """(topic, due time, payload without meta) of every unit, read back through the node's own check."""
    (folder / "bulk").symlink_to(folder / "bundles")
    disk = LocalDisk(str(folder))
    found = []
    for built in manifest.bundles:
        layout = bundle.check(disk, built.name)
        segment = bundle.segment_of(disk, built.name, layout)
        for hour, chunk, _ in bundle.chunks_of(segment, layout):
            units = segment.units_of(chunk, 0, chunk.count)
            log = segment.read_log(chunk, 0, chunk.log_bytes)
            for unit in units:
                at, size, meta = int(unit["offset"]), int(unit["size"]), int(unit["meta_size"])
                assert int(unit["due_ms"]) // HOUR_MS == hour
                found.append((built.topics[unit["topic_id"]], int(unit["due_ms"]), log[at + meta : at + size]))
        segment.close()
    return found


# -- hashes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.text(max_size=12)), max_size=30),
    st.lists(st.one_of(st.none(), st.lists(st.text(max_size=6), max_size=4)), max_size=30),
)
def test_hashes_are_those_of_the_nodes(keys: list[str | None], tag_lists: list[list[str] | None]) -> None:
    """Otherwise a loaded message could not be found by its key, and filters would skip it."""
    hashes = key_hashes(pa.array(keys, pa.string()))
    assert hashes.tolist() == [tags.key_hash(key) if key else 0 for key in keys]
    codes, masks, one = tag_hashes(pa.array(tag_lists, pa.list_(pa.string())))
    for row, found in enumerate(tag_lists):
        assert int(masks[row]) == tags.tag_mask(found or ())
        assert bool(one[row]) == (len(found or ()) == 1)
        assert int(codes[row]) == (tags.tag_hash(found[0]) if found and len(found) == 1 else 0)


# -- schedules


def test_a_schedule_is_the_same_for_the_same_seed_and_looks_like_life() -> None:
    """Bursts at full hours, few at night, half within the median, none beyond the span."""
    config = ScheduleConfig(rows=60_000, start_ms=1_800_000_000_000, seed=7, keys=True)
    one, two = (pa.Table.from_batches(list(schedule(config))) for _ in range(2))
    assert one.equals(two)
    due = one.column("due_ms").to_numpy()
    ahead = due - config.start_ms
    assert ahead.min() >= 0 and ahead.max() <= config.span_days * 86_400_000
    assert 0.4 < (ahead < config.median_days * 86_400_000).mean() < 0.6
    assert (due % HOUR_MS < 2_000).mean() > 0.9 * config.burst_share
    by_hour = np.bincount(due // HOUR_MS % 24, minlength=24)
    assert by_hour[12] > 4 * by_hour[3]
    assert len(set(one.column("payload").to_pylist())) == config.rows


# -- building


def test_a_build_holds_every_row_once(spark: SparkSession, tmp_path: Path) -> None:
    """Through the check that the nodes make; more than one bundle of an hour, no hour in two tasks."""
    rows = frame(spark, 5_000, "built", hours=6)
    manifest = build(rows, tmp_path / "out", BuildConfig(tasks=3, bundle_messages_max=400))
    assert manifest == read_manifest(tmp_path / "out")
    found = contents(tmp_path / "out", manifest)
    expected = [(row.topic, row.due_ms, row.payload.encode()) for row in rows.collect()]
    assert sorted(found) == sorted((t, d, p) for t, d, p in expected)
    assert manifest.units == 5_000 and max(b.units for b in manifest.bundles) <= 400
    assert {path.name for path in (tmp_path / "out" / "bundles").iterdir()} == {
        f"{b.name}.bundle" for b in manifest.bundles
    }
    again = build(rows, tmp_path / "again", BuildConfig(tasks=3, bundle_messages_max=400))
    assert again.sha256 == manifest.sha256, "the same rows and options are the same load"
    assert not (tmp_path / "out" / "_runs").exists()
    source = str(tmp_path / "in.parquet")
    rows.write.parquet(source)
    from_files = build_parquet(spark, source, tmp_path / "files", BuildConfig(tasks=3, bundle_messages_max=400))
    assert sorted(contents(tmp_path / "files", from_files)) == sorted(found)
    rows.withColumn("day", f.lit(1)).write.partitionBy("day").parquet(str(tmp_path / "days"))
    with pytest.raises(SchemaError, match="column day"):
        build_parquet(spark, str(tmp_path / "days"), tmp_path / "none")


def test_rows_that_cannot_be_messages_are_told_with_reasons(spark: SparkSession, tmp_path: Path) -> None:
    """They go to `_rejected`, or fail the build; a frame with a wrong column names it."""
    due = now_ms() + HOUR_MS
    rows = [
        ("t", due, b"good"),
        ("t", None, b"x"),
        ("t", -5, b"x"),
        ("a b", due, b"x"),
        ("t", due, b""),
        ("t", due, None),
    ]
    bad = spark.createDataFrame(rows, "topic string, due_ms long, payload binary")
    manifest = build(bad, tmp_path / "out", BuildConfig(tasks=2))
    assert (manifest.units, manifest.rejected) == (1, 5)
    reasons = pq.read_table(tmp_path / "out" / "_rejected").column("reason").to_pylist()
    assert sorted(reason.partition(":")[0] for reason in reasons) == ["due", "due", "payload", "payload", "topic"]
    found_by = r"5 rows cannot be messages, one of them: \w+: .* \(topic '(t|a b)'.*\)"
    with pytest.raises(BuildError, match=found_by):
        build(bad, tmp_path / "none", BuildConfig(tasks=2, on_rejected="fail"))
    with pytest.raises(ManifestError, match="not a finished build"):
        read_manifest(tmp_path / "none")
    assert not list((tmp_path / "none").iterdir()), "a repeat, for instance on a full disk, begins with all its room"
    assert build(bad, tmp_path / "none", BuildConfig(tasks=2)).units == 1
    with pytest.raises(SchemaError, match="column due_ms"):
        build(bad.withColumn("due_ms", f.lit("soon")), tmp_path / "wrong")
    with pytest.raises(BuildError, match="not empty"):
        build(bad, tmp_path / "out")


@pytest.mark.parametrize("ended", [False, True], ids=["still at work", "done"])
def test_of_two_builds_into_one_folder_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """Both found it empty. Each then removed the bundles of the other; one that failed removed a finished build."""
    target = tmp_path / "out"
    look, others = Path.iterdir, [0]

    def look_and_be_late(self: Path) -> Iterator[Path]:
        found = list(look(self))
        while others:
            others.pop()
            building._claim(target)
            if ended:
                (target / BUNDLES).mkdir()
                (target / RUNS).rmdir()
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", look_and_be_late)
    with pytest.raises(BuildError, match="not empty"):
        building._claim(target)
    assert [path.name for path in look(target)] == [BUNDLES if ended else RUNS]


def test_a_folder_of_a_killed_build_is_told_from_others(tmp_path: Path) -> None:
    """It holds gigabytes that nobody needs, and "not empty" alone does not say that it may go."""
    target = tmp_path / "out"
    building._claim(target)
    (target / BUNDLES).mkdir()
    for _ in range(2):
        with pytest.raises(BuildError, match="still at work, or was killed"):
            building._claim(target)
        (target / "manifest.json.part").touch()  # killed while it wrote that
    (target / "mine").touch()
    with pytest.raises(BuildError, match="name a new folder"):
        building._claim(target)


@pytest.mark.parametrize("others", [False, True])
def test_a_build_that_was_killed_just_after_its_end_is_finished(tmp_path: Path, *, others: bool) -> None:
    """Its runs, as large as all its bundles, stayed, and the second run said no more than that the folder is not
    empty. A folder in which something else lies is left alone."""
    target = tmp_path / "out"
    building._claim(target)
    (target / BUNDLES).mkdir()
    write_manifest(target, Manifest(1_000, 0, 0, []))
    if others:
        (target / "mine").touch()
    with pytest.raises(BuildError, match="not empty; name a new" if others else "holds a finished build"):
        building._claim(target)
    assert (target / RUNS).exists() == others
    assert read_manifest(target).units == 0


def test_a_damaged_build_is_not_loaded(spark: SparkSession, tmp_path: Path) -> None:
    """A changed manifest, a missing bundle, changed bytes."""
    manifest = build(frame(spark, 50, "damaged"), tmp_path / "out", BuildConfig(tasks=1))
    path = manifest.bundles[0].path(tmp_path / "out")
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(ManifestError, match="changed since"):
        check_content(tmp_path / "out", manifest.bundles[0])
    path.unlink()
    with pytest.raises(ManifestError, match="is missing"):
        read_manifest(tmp_path / "out")
    listed = tmp_path / "out" / "manifest.json"
    listed.write_text(listed.read_text().replace('"units": 50', '"units": 51'))
    with pytest.raises(ManifestError, match="checksum"):
        read_manifest(tmp_path / "out")


# -- loading


def loaded(cluster: RunningCluster, folder: Path, job_id: str = "") -> Progress:
    """Load with a client of its own."""

    async def go() -> Progress:
        async with AsyncClient(cluster.addresses.split(",")) as client:
            return await load(folder, client, job_id=job_id)

    return cluster.wait(go())


def test_a_loaded_message_is_like_any_other(spark: SparkSession, cluster: RunningCluster, tmp_path: Path) -> None:
    """Found by key, listed, cancelled, rescheduled; loading again adds nothing, other rows by the same job neither."""
    rows = frame(spark, 600, "loaded")
    build(rows, tmp_path / "out", BuildConfig(tasks=2, bundle_messages_max=100))
    done = loaded(cluster, tmp_path / "out")
    assert done.taken_units == 600 and done.taken == done.bundles >= 6
    assert loaded(cluster, tmp_path / "out").sent_bytes == {}
    messages = cluster.messages("loaded")
    assert Counter(m.payload for m in messages) == Counter(b"row-%d" % n for n in range(600))
    one, two = messages[0], messages[1]
    assert one.key == (one.payload or b"").decode().replace("row", "key")
    cluster.wait(cluster.client.cancel(one.id))
    cluster.wait(cluster.client.reschedule(two.id, due_ms=two.due_ms + HOUR_MS))
    after = {m.payload: m for m in cluster.messages("loaded")}
    assert one.payload not in after and after[two.payload].due_ms == two.due_ms + HOUR_MS
    cluster.check_agreement()
    build(frame(spark, 10, "loaded"), tmp_path / "other", BuildConfig(tasks=1))
    loaded(cluster, tmp_path / "other", "named")
    build(frame(spark, 11, "loaded"), tmp_path / "third", BuildConfig(tasks=1))
    with pytest.raises(LoadError, match="something else"):
        loaded(cluster, tmp_path / "third", "named")
    build(frame(spark, 5, "loaded"), tmp_path / "fourth", BuildConfig(tasks=1, slot_ms=500))
    with pytest.raises(LoadError, match="ticks of 1000 ms"):
        loaded(cluster, tmp_path / "fourth")


def test_a_load_goes_on_from_where_another_one_is(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody gives the command a second time while the first is at work. The slower one waited for bundles that it
    did not send any more, and failed after two minutes, although all was loaded."""
    monkeypatch.setattr(loading, "GIVE_UP_S", 5.0)
    manifest = build(frame(spark, 600, "loaded-twice"), tmp_path / "out", BuildConfig(tasks=2, bundle_messages_max=100))

    class Overtaken(Loader):
        """Another load does all before this one has its first bundle taken over."""

        async def _take(self, place: int) -> LoadProgress:
            if not place:
                async with AsyncClient(cluster.addresses.split(",")) as client:
                    await load(tmp_path / "out", client)
            return await super()._take(place)

    async def go() -> Progress:
        async with AsyncClient(cluster.addresses.split(",")) as client:
            return await Overtaken(client, tmp_path / "out", manifest).run()

    done = cluster.wait(go())
    assert (done.taken, done.taken_units) == (len(manifest.bundles), 600)
    assert len(manifest.bundles) >= 6 and cluster.payloads("loaded-twice") == Counter(f"row-{n}" for n in range(600))


def test_a_load_outlives_its_master_and_a_node_that_is_down(
    spark: SparkSession, cluster: RunningCluster, tmp_path: Path
) -> None:
    """One node is down from the start, the master is killed in the middle, both come back: each message once."""
    write_schedule(
        ScheduleConfig(rows=4_000, start_ms=now_ms() + HOUR_MS, topics=("survives",)), tmp_path / "in.parquet"
    )
    rows = spark.read.parquet(str(tmp_path / "in.parquet")).drop("key")
    build(rows, tmp_path / "out", BuildConfig(tasks=2, bundle_messages_max=150))
    killed: list[str] = []
    seen: list[int] = []
    middle = asyncio.Event()

    def told(progress: Progress) -> None:
        seen.append(progress.taken)
        if progress.taken >= 5:
            middle.set()

    async def go() -> Progress:
        inner = cluster._cluster
        master = await inner.master()
        slave = next(node for node in inner.nodes if node is not master)
        await inner.kill_node(slave)
        killed.append(slave.node_id)
        async with AsyncClient(cluster.addresses.split(",")) as client:
            loader = Loader(client, tmp_path / "out", read_manifest(tmp_path / "out"))
            running = asyncio.create_task(loader.run(told))
            await middle.wait()
            await inner.kill_node(master)
            killed.append(master.node_id)
            inner.start_node(inner.node(slave.node_id))
            await asyncio.sleep(0.5)
            inner.start_node(inner.node(master.node_id))
            done = await running
            await inner.wait_ready()
            return done

    done = cluster.wait(go())
    assert len(killed) == 2
    assert done.taken_units == 4_000
    assert seen == sorted(seen)
    expected = Counter(pq.read_table(tmp_path / "in.parquet").column("payload").to_pylist())
    assert Counter(m.payload for m in cluster.messages("survives")) == expected
    cluster.check_agreement()


def test_a_load_goes_on_without_a_node_that_hangs(spark: SparkSession, cluster: RunningCluster, tmp_path: Path) -> None:
    """Its connections stay open, and it answers nothing: as far as the load can tell it is down."""
    build(frame(spark, 60, "hangs"), tmp_path / "out", BuildConfig(tasks=1))

    async def go() -> Progress:
        inner = cluster._cluster
        master = await inner.master()
        slave = next(node for node in inner.nodes if node is not master)
        async with AsyncClient(cluster.addresses.split(","), timeout_s=2) as client:
            await client.admin.statuses()  # so there are connections
            inner.signal_node(slave, signal.SIGSTOP)
            try:
                return await load(tmp_path / "out", client)
            finally:
                inner.signal_node(slave, signal.SIGCONT)
                await inner.wait_ready()

    done = cluster.wait(go())
    assert done.taken_units == 60
    assert [reason.endswith("did not answer within 2 s") for reason in done.unreachable.values()] == [True]
    assert len(cluster.messages("hangs")) == 60
    cluster.check_agreement()


# -- the steps of a build


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.text(max_size=3), st.just("k" * 200)),
            st.one_of(st.none(), st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=3)),
            st.one_of(
                st.none(),
                st.dictionaries(st.text(max_size=3), st.one_of(st.none(), st.text(max_size=140)), max_size=3),
            ),
            st.one_of(st.none(), st.text(max_size=3)),
            st.one_of(st.none(), st.text(max_size=3)),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 3),
)
def test_meta_is_what_protobuf_writes(rows: list[tuple[Any, Any, Any, Any, Any]], skip: int) -> None:
    """Columns are joined by hand: each row must read as the same MessageMeta, and rows with a null, or with a tag that
    no message may have, be named."""
    types = (pa.string(), pa.list_(pa.string()), pa.map_(pa.string(), pa.string()), pa.string(), pa.string())
    columns = {
        name: pa.array(
            [None if row[place] is None else list(row[place].items()) if place == 2 else row[place] for row in rows],
            types[place],
        )[skip:]
        for place, name in enumerate(KEYED_META_COLUMNS)
    }
    rows = rows[skip:]
    meta, wrong = meta_column(columns, len(rows))
    texts = [{text.partition(":")[0] for mask, text in wrong if mask[row]} for row in range(len(rows))]
    for place, (key, tag_list, properties, group, unique_key) in enumerate(rows):
        expected = {"tags"} if any(tag is None or not is_tag(tag) for tag in tag_list or ()) else set()
        expected |= {"properties"} if None in (properties or {}).values() else set()
        expected |= {"unique_key"} if unique_key == "" else set()
        assert texts[place] == expected
        if not expected:
            blob = b"" if meta is None else meta[place].as_py()
            assert MessageMeta.FromString(blob) == MessageMeta(
                key=key, tags=tag_list, headers=properties, message_group=group, unique_key=unique_key
            )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_runs_give_every_row_once_in_order(tmp_path: Path, data: st.DataObject) -> None:
    """However rows lie in runs and however few are taken at once, more of one millisecond than that included."""
    times = st.lists(st.integers(0, 6).map(lambda n: n * HOUR_MS // 3), min_size=1, max_size=30)
    runs, expected = [], []
    for number, due in enumerate(data.draw(st.lists(times, min_size=1, max_size=4))):
        payload = [b"%d-%d" % (number, row) for row in range(len(due))]
        topics = ["ab"[row % 2] for row in range(len(due))]
        rows = pa.record_batch({"topic": topics, "due_ms": due, "payload": payload})
        write_run(tmp_path / f"{number}.run", encoded(rows, "").sorted())
        runs.append(Run(tmp_path / f"{number}.run"))
        expected += list(zip(due, topics, payload, strict=True))
    low, high = sorted(data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3))))
    found = []
    for rows_ in steps(runs, low * HOUR_MS, high * HOUR_MS, data.draw(st.integers(1, 12))):
        places = rows_.columns["topic_id"].tolist()
        found += list(
            zip(rows_.due_ms.tolist(), [rows_.topics[n] for n in places], rows_.records.to_pylist(), strict=True)
        )
    assert [row[0] for row in found] == sorted(row[0] for row in found)
    wanted = [row for row in expected if low * HOUR_MS <= row[0] < high * HOUR_MS]
    assert Counter(found) == Counter(wanted)
    assert found == sorted(wanted, key=lambda row: row[0]), "equal times in the order in which they came"


def test_pieces_of_parquet_files_are_every_row_once(tmp_path: Path) -> None:
    """Row groups of several files in pieces, hidden files left out; what Spark alone can read is left to it."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        table = pa.table({"due_ms": pa.array(range(number * 100, number * 100 + 100)), "payload": [b"x" * 50] * 100})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=30)
    (folder / "_SUCCESS").write_bytes(b"")
    (folder / ".hidden").write_bytes(b"no Parquet")
    found = find(str(folder), 1_500)
    assert found is not None and len(found.pieces) > 3
    rows = [value for n in range(len(found.pieces)) for batch in found.read(n) for value in batch["due_ms"].to_pylist()]
    assert sorted(rows) == list(range(300))
    assert all(piece.batch_rows >= 30 for piece in found.pieces)
    pq.write_table(pa.table({"due_ms": ["other"]}), folder / "3.parquet")
    assert find(str(folder), 1_500) is None, "schemas differ"
    (folder / "3.parquet").write_bytes(b"no Parquet")
    assert find(str(folder), 1_500) is None
    assert find("nosuch://bucket/in", 1_500) is None and find(str(tmp_path / "missing"), 1_500) is None
