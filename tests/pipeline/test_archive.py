"""Archive and replay on a real cluster: what is settled and what is dead, once each, and back again."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from tests.pipeline.running import RunningCluster
from tickwheel.client import Delivery
from tickwheel.client.async_client import Message
from tickwheel.client.dead import DeadClient, DeadLetter
from tickwheel.pipeline import settled
from tickwheel.pipeline.archive import archive, read_archive
from tickwheel.pipeline.archive_marks import Mark
from tickwheel.pipeline.archive_place import ArchiveError, ArchivePlace
from tickwheel.pipeline.cli import app
from tickwheel.pipeline.options import CONNECTION, Connection, Options, connection_of
from tickwheel.pipeline.replay import REPLAY_OF, ReplayConfig, ReplayError, replay, selected, shift_ms, summary
from tickwheel.testing import SyncFakeCluster

TOPIC, GROUP = "archived", "archivists"
COUNT = 300


def connection(cluster: RunningCluster) -> Connection:
    """Of the cluster of the tests."""
    return connection_of(Options({"addresses": cluster.addresses}, CONNECTION), 15.0)


def headers(message: Message) -> Mapping[str, str]:
    """Of a message that was read with its content."""
    assert message.headers is not None
    return message.headers


def fate(number: int) -> str:
    """What the consumer does with a message, by its number."""
    if number % 10 == 0:
        return "dies"
    if number % 10 == 1:
        return "comes again"
    return "waits" if number % 10 == 2 else "stays out" if number % 10 == 3 else "done"


class Handled:
    """What became of the messages, by payload: the ids, and which the group is done with."""

    def __init__(self) -> None:
        self.ids: dict[bytes, str] = {}
        self.fates: dict[str, set[bytes]] = {}


@pytest.fixture(scope="module")
def handled(cluster: RunningCluster) -> Handled:
    """Some are acknowledged at once, some at the second attempt, some die, some wait for an attempt in an hour, and
    some are left with the consumer."""
    found = Handled()

    async def go() -> None:
        client = cluster.client
        now_ms = time.time_ns() // 1_000_000 + 3_000  # none is late, which would move its due time
        asked = []
        for number in range(COUNT):
            meta = {"key": f"k{number}", "tags": ["a"], "headers": {"n": str(number)}} if number % 2 else {}
            meta |= {"message_group": f"g{number}", "unique_key": f"u{number}"} if number % 4 < 2 else {}
            asked.append(client.schedule(TOPIC, f"m-{number}", due_ms=now_ms + number, **meta))  # type: ignore[arg-type]
        for number, receipt in enumerate(await asyncio.gather(*asked)):
            found.ids[f"m-{number}".encode()] = receipt.id
            found.fates.setdefault(fate(number), set()).add(f"m-{number}".encode())
        left = COUNT + COUNT // 10
        settled = []
        async with client.consumer(GROUP, TOPIC, lease=timedelta(minutes=10)) as consumer:
            async for batch in consumer.batches():
                for delivery in batch:
                    settled += settle(delivery)
                left -= len(batch)
                if not left:
                    break
            await asyncio.gather(*settled)
            await consumer.drain()

    def settle(delivery: Delivery) -> list[asyncio.Future[object]]:
        what = fate(int(delivery.payload.partition(b"-")[2]))
        if what == "dies":
            return [asyncio.ensure_future(delivery.dead("too bad"))]
        if what == "waits" or (what == "comes again" and delivery.attempt == 1):
            delay = timedelta(hours=1) if what == "waits" else timedelta(milliseconds=1)
            return [asyncio.ensure_future(delivery.nack(delay=delay))]
        return [] if what == "stays out" else [asyncio.ensure_future(delivery.ack())]

    cluster.wait(go())
    return found


@pytest.fixture(scope="module")
def archived(
    spark: SparkSession, cluster: RunningCluster, handled: Handled, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """The archive, in a place that Spark alone reaches. What a repeated run adds, tests of the commands and of a late
    archive see."""
    folder = tmp_path_factory.mktemp("archive")
    configuration = spark._jsc.hadoopConfiguration()
    configuration.set("fs.viewfs.mounttable.lake.link./shared", folder.as_uri())
    path = "viewfs://lake/shared/a"
    done = len(handled.fates["done"]) + len(handled.fates["comes again"])
    dead = len(handled.fates["dies"])
    [first] = archive(spark, path, connection(cluster), [GROUP])
    assert (first.settled, first.dead, first.known) == (done, dead, 0)
    assert not first.missing
    return path


@pytest.fixture(scope="module")
def rows(spark: SparkSession, archived: str) -> DataFrame:
    """It as a frame."""
    return read_archive(spark, archived)


def test_what_is_done_is_archived_once_and_nothing_else(rows: DataFrame, handled: Handled) -> None:
    """Not what waits for a retry or is still out; a message that came again is there once, under its first id, with
    the time when it was due first. Content is complete."""
    found = {bytes(row.payload): row for row in rows.collect()}
    by_kind = {kind: {payload for payload, row in found.items() if row.kind == kind} for kind in ("settled", "dead")}
    assert {(row.kind, row.how) for row in found.values()} == {("settled", "acked"), ("dead", "dead")}
    assert by_kind["settled"] == handled.fates["done"] | handled.fates["comes again"]
    assert by_kind["dead"] == handled.fates["dies"]
    assert len(found) == rows.count()
    for payload, row in found.items():
        assert (row.group, row.topic, row.id) == (GROUP, TOPIC, handled.ids[payload])
        number = int(payload.partition(b"-")[2])
        meta = (f"k{number}", ["a"], {"n": str(number)}) if number % 2 else (None, None, None)
        assert (row.key, row.tags, row.properties) == meta
        assert (row.message_group, row.unique_key) == ((f"g{number}", f"u{number}") if number % 4 < 2 else (None, None))
        assert (row.last_due_ms or row.due_ms) > row.due_ms or fate(number) != "comes again"
    dues = {int(payload.partition(b"-")[2]): row.due_ms for payload, row in found.items()}
    assert len({due_ms - number for number, due_ms in dues.items()}) == 1
    letter = found[b"m-0"]
    assert (letter.cause, letter.error, letter.attempts) == ("declared_dead", "too bad", 1)


@pytest.mark.parametrize("killed_at", ["never", "before", "recorded", "in between", "moved"])
def test_of_two_runs_at_once_one_adds_its_rows(
    spark: SparkSession,
    cluster: RunningCluster,
    handled: Handled,
    rows: DataFrame,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: str,
) -> None:
    """The slower one is refused, whether the other one is done or was killed anywhere. No row is lost or doubled, and
    what a killed one has left is put to use or removed by the next."""
    folder = tmp_path / "lake"
    begun, ended = threading.Event(), threading.Event()
    harden, move = ArchivePlace.harden, ArchivePlace._move

    def waiting(self: ArchivePlace, group: str, run: str) -> None:
        harden(self, group, run)
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert ended.wait(100)

    def archived(refused: list[str]) -> None:
        try:
            archive(spark, folder, connection(cluster), [GROUP])
        except ArchiveError as error:
            refused.append(str(error))

    def moving_one(self: ArchivePlace, *arguments: Any) -> None:
        move(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(ArchivePlace, "harden", waiting)
    refused: list[str] = []
    slow = threading.Thread(target=archived, args=[refused])
    slow.start()
    assert begun.wait(100)
    with monkeypatch.context() as patched:
        if killed_at == "never":
            archive(spark, folder, connection(cluster), [GROUP])
        else:
            steps = {"before": "record", "recorded": "publish", "in between": "_move", "moved": "_delete"}
            patched.setattr(ArchivePlace, steps[killed_at], moving_one if killed_at == "in between" else killing)
            with pytest.raises(KeyboardInterrupt):
                archive(spark, folder, connection(cluster), [GROUP])
    ended.set()
    slow.join()
    if killed_at == "before":
        assert not refused
    else:
        [text] = refused
        assert "another run has archived group archivists meanwhile, so this one has added nothing" in text
    [again] = archive(spark, folder, connection(cluster), [GROUP])
    assert again.known == rows.count() and not (again.settled or again.dead or again.missing)
    found = read_archive(spark, folder)
    assert found.select("kind", "id").exceptAll(rows.select("kind", "id")).count() == 0
    assert found.count() == rows.count()
    for path in folder.glob(f"_staging/{GROUP}/*"):
        os.utime(path, (0, 0))
        for below in path.rglob("*"):
            os.utime(below, (0, 0))
    archive(spark, folder, connection(cluster), [GROUP])
    assert not list(folder.glob(f"_staging/{GROUP}/*"))


def killing(*_: Any) -> None:
    """In place of a step before which the process is killed."""
    raise KeyboardInterrupt


def test_rows_of_a_killed_run_outlive_their_group(spark: SparkSession, tmp_path: Path) -> None:
    """They are recorded as archived, and their group is deleted: no later run of it moves them to their day."""
    run, day = "0" * 32, "day=2026-11-27"
    staged = tmp_path / "_staging" / "gone" / run / day
    staged.mkdir(parents=True)
    (staged / "rows.parquet").write_bytes(b"rows")
    assert ArchivePlace(spark, tmp_path).record("gone", 0, Mark(staged=run).text())
    with SyncFakeCluster() as no_groups:
        assert archive(spark, tmp_path, Connection((no_groups.address,), tls=None, timeout_s=15.0)) == []
    assert (tmp_path / day / "rows.parquet").read_bytes() == b"rows"
    assert not staged.exists()


def test_what_a_killed_run_of_a_deleted_group_has_left_goes(spark: SparkSession, tmp_path: Path) -> None:
    """No later run of the group removes it. One that still stands still has had a day, and is refused its record."""
    left, younger = (tmp_path / "_staging" / "gone" / name for name in ("0" * 32, "1" * 32))
    for folder in (left, younger):
        (folder / "_temporary").mkdir(parents=True)
        (folder / "_temporary" / "rows.parquet").write_bytes(b"rows")
    for path in (left, *left.rglob("*")):
        os.utime(path, (0, 0))
    with SyncFakeCluster() as no_groups:
        for _ in range(2):
            archive(spark, tmp_path, Connection((no_groups.address,), tls=None, timeout_s=15.0))
            assert [path.name for path in (tmp_path / "_staging" / "gone").iterdir()] == [younger.name]
    place = ArchivePlace(spark, tmp_path)
    assert not place.record("gone", 0, Mark(staged=left.name).text())
    assert place.newest("gone")[0] == 1, "one record, not one each run"


def test_only_the_days_that_are_asked_for(
    spark: SparkSession, cluster: RunningCluster, handled: Handled, tmp_path: Path, rows: DataFrame
) -> None:
    """By when messages were due first."""
    middle = sorted(row.due_ms for row in rows.select("due_ms").collect())[100]
    [found] = archive(spark, tmp_path, connection(cluster), [GROUP], from_ms=middle, to_ms=middle + 50)
    wanted = rows.where(f"due_ms >= {middle} AND due_ms < {middle + 50}").count()
    assert found.settled + found.dead == wanted > 0


def test_a_selection_is_scheduled_again_once(
    spark: SparkSession, cluster: RunningCluster, handled: Handled, rows: DataFrame
) -> None:
    """With all that the messages had, and the id they had; although the same job is run twice."""
    config = ReplayConfig(where=f"topic = '{TOPIC}' AND kind = 'dead' AND key IS NULL", shift="1d2h", topic="replayed")
    wanted = {row.id: row for row in rows.where(config.where).collect()}
    assert summary(selected(rows, config)).startswith(f"{len(wanted):,} messages")
    for _ in range(2):
        assert replay(rows, connection(cluster), "replay-the-dead", config) == len(wanted)
    messages = cluster.messages("replayed")
    assert {headers(message)[REPLAY_OF] for message in messages} == set(wanted)
    assert len(messages) == len(wanted) == 30
    for message in messages:
        row = wanted[headers(message)[REPLAY_OF]]
        assert message.payload == bytes(row.payload)
        assert message.due_ms == row.due_ms + 26 * 3_600_000
        assert not message.unique_key


@pytest.mark.parametrize(
    ("conflict", "pending"),
    [
        ("", {"m-5": "", "m-8": "", "m-9": "", "held": "u5"}),
        ("refuse", {"m-8": "u8", "m-9": "u9", "held": "u5"}),
        ("use_existing", {"m-8": "u8", "m-9": "u9", "held": "u5"}),
        ("replace", {"m-5": "u5", "m-8": "u8", "m-9": "u9"}),
    ],
)
def test_unique_keys_go_along_if_so_wanted(
    cluster: RunningCluster, rows: DataFrame, conflict: str, pending: dict[str, str]
) -> None:
    """Then a message whose key is held is refused, and the replay says so, or left out, or replaces the other one."""
    topic = f"keys-again-{conflict or 'none'}"
    cluster.wait(cluster.client.schedule(topic, "held", delay=timedelta(days=1), unique_key="u5"))
    where = "unique_key IN ('u5', 'u8', 'u9')"
    config = ReplayConfig(where, shift="1d", topic=topic, on_key_conflict=conflict)
    if conflict == "refuse":
        with pytest.raises(Exception, match=r"1 of 3 rows were not scheduled.*unique key"):
            replay(rows, connection(cluster), topic, config)
    else:
        assert replay(rows, connection(cluster), topic, config) == 3
    assert {(m.payload or b"").decode(): m.unique_key for m in cluster.messages(topic)} == pending


def test_an_archive_of_a_version_without_unique_keys_is_read_and_goes_on(
    spark: SparkSession, cluster: RunningCluster, rows: DataFrame, tmp_path: Path
) -> None:
    """Its rows have none; a run adds what is missing, with its keys, and nothing twice. All of it can be replayed."""
    folder = str(tmp_path / "before")
    old, new = rows.where("kind = 'dead' OR key IS NULL"), rows.where("kind != 'dead' AND key IS NOT NULL")
    old.drop("unique_key").write.partitionBy("day").parquet(folder)
    assert (
        old.where("unique_key IS NOT NULL").count() > read_archive(spark, folder).where("unique_key > ''").count() == 0
    )
    [added] = archive(spark, folder, connection(cluster), [GROUP])
    assert (added.known, added.settled + added.dead) == (old.count(), new.count())
    both = read_archive(spark, folder)
    assert both.columns == rows.columns and both.count() == rows.count()
    keys = {row.id: row.unique_key for row in new.collect()}
    assert any(keys.values())
    assert {row.id: row.unique_key for row in both.collect()} == keys | {row.id: None for row in old.collect()}
    config = ReplayConfig("kind = 'dead' OR unique_key = 'u5'", shift="1d", on_key_conflict="refuse")
    again = {row.unique_key for row in selected(both, config).collect()}
    assert again == {None, "u5"}


def test_due_times_may_be_computed(spark: SparkSession, cluster: RunningCluster, rows: DataFrame) -> None:
    """From any columns, as milliseconds or as a timestamp; key, tags and properties go along."""
    config = ReplayConfig(where="key IN ('k5', 'k7')", due="timestamp_millis(due_ms) + INTERVAL 3 DAYS")
    replay(rows, connection(cluster), "replay-computed", config)
    found = [m for m in cluster.messages(TOPIC) if REPLAY_OF in headers(m)]
    before = {row.key: row for row in rows.where(config.where).collect()}
    assert Counter(m.key for m in found) == Counter(list(before))
    for message in found:
        row = before[message.key]
        assert message.due_ms == row.due_ms + 3 * 86_400_000
        assert (list(message.tags), message.headers) == (row.tags, {**row.properties, REPLAY_OF: row.id})
        assert message.message_group == (row.message_group or "")
    assert {message.message_group for message in found} == {"g5", ""}


def test_what_cannot_be_is_said(spark: SparkSession, rows: DataFrame, tmp_path: Path) -> None:
    """A wrong column by its name, and what there is; a condition that is none; no due time, or of a wrong kind."""
    wrong = {
        "no column topik; the columns are kind, how, group, id, topic": ReplayConfig(where="topik = 'x'", shift="1d"),
        "no column duty": ReplayConfig(due="duty + 1"),
        "where: ": ReplayConfig(where="topic =", shift="1d"),
        "exactly one of them": ReplayConfig(),
        "must be bigint": ReplayConfig(due="topic"),
        "shift: '1 day'": ReplayConfig(shift="1 day"),
        "on_key_conflict: 'drop': one of refuse, use_existing, replace": ReplayConfig(
            shift="1d", on_key_conflict="drop"
        ),
    }
    for text, config in wrong.items():
        with pytest.raises(ReplayError, match=text):
            selected(rows, config)
    assert (shift_ms("1d12h"), shift_ms("90s"), shift_ms("1.5m")) == (129_600_000, 90_000, 90_000)
    with pytest.raises(ArchiveError, match="no archive"):
        read_archive(spark, tmp_path)
    with pytest.raises(ArchiveError, match=r"nowhere://x/a/.*: Spark says: .*nowhere.*a URI of a file system"):
        read_archive(spark, "nowhere://x/a")


def test_the_commands_say_what_they_did(
    spark: SparkSession, cluster: RunningCluster, archived: str, rows: DataFrame
) -> None:
    """As an operator uses them: all groups into an archive that has them, a look, a replay, and a wrong condition."""

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, [words[0], archived, "--addresses", cluster.addresses, *words[1:]])
        return f"{done.output}{done.exception or ''}"

    before = rows.count()
    said = run("archive", "--group", GROUP, "--from", "2026-01-01", "--to", "2100-01-01T00:00Z")
    assert f"{GROUP}: 0 settled messages (none) and 0 dead letters added, {before:,} were there" in said
    said = run("replay", "--job-id", "by-hand", "--where", "kind = 'dead'", "--shift", "1w", "--dry-run")
    assert said.startswith("30 messages would be scheduled")
    said = run("replay", "--job-id", "by-hand", "--where", "key = 'k15'", "--shift", "1w", "--topic", "by-hand")
    assert said.startswith("1 messages scheduled as job by-hand")
    assert cluster.payloads("by-hand") == Counter(["m-15"])
    held = ("--where", "unique_key = 'u17'", "--shift", "1w", "--topic", "by-hand", "--on-key-conflict")
    said = run("replay", "--job-id", "by-hand-17", *held, "use-existing")
    assert said.startswith("1 messages scheduled as job by-hand-17, except those whose unique key was held")
    assert "another message holds their unique key" in run("replay", "--job-id", "by-hand-18", *held, "refuse")
    assert "no column nokey" in run("replay", "--job-id", "x", "--where", "nokey = 'k15'", "--shift", "1w")
    assert "--from: 'soon'" in run("archive", "--from", "soon")
    for moment in ("20261121", "1795000000"):  # as milliseconds both are in January 1970
        assert f"--to: {moment}: A time like" in run("archive", "--to", moment)


def test_how_a_message_ended_is_told_as_far_as_it_is_known(
    spark: SparkSession, cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acknowledged, skipped by the filter, passed before the group began; not once the filter was changed or letters
    were purged. A dead letter that is replayed while the archive looks is on its way again: not settled, not dead."""
    client, topic = cluster.client, "ends"

    async def begin() -> None:
        await client.admin.create_topic(topic)
        await client.admin.create_group("choosy", [topic], filter="a")
        due_ms = time.time_ns() // 1_000_000 + 300
        for payload, tags in (("a", ["a"]), ("b", ["b"]), ("ab", ["a", "b"]), ("dies", ["a"]), ("none", [])):
            await client.schedule(topic, payload, due_ms=due_ms, tags=tags)
        async with client.consumer("choosy") as consumer:
            taken = 0
            async for delivery in consumer:
                await (delivery.dead("x") if delivery.payload == b"dies" else delivery.ack())
                taken += 1
                if taken == 3:
                    break
            await consumer.drain()
        await client.admin.create_group("newcomer", [topic], start_from="latest")

    def ends(group: str) -> dict[str, str | None]:
        done = settled.done_with(spark, connection(cluster), group)
        rows = done.frame.select("payload", "how").collect()
        assert len({bytes(row.payload) for row in rows}) == len(rows)
        return {bytes(row.payload).decode(): row.how for row in rows}

    cluster.wait(begin())
    assert ends("newcomer") == dict.fromkeys(("a", "b", "ab", "dies", "none"), "passed")
    plain, replayed = DeadClient.list, False

    async def list_after_a_replay(self: DeadClient, group: str) -> AsyncIterator[DeadLetter]:
        nonlocal replayed
        if not replayed:
            replayed = True
            assert (await self.replay(group)).changed == 1
        async for letter in plain(self, group):
            yield letter

    known = {"a": "acked", "ab": "acked", "b": "skipped", "none": "skipped"}
    assert ends("choosy") == known | {"dies": "dead"}
    monkeypatch.setattr(DeadClient, "list", list_after_a_replay)
    assert ends("choosy") == known

    async def bury_again() -> None:
        async with client.consumer("choosy") as consumer:
            async for delivery in consumer:
                await delivery.dead("again")
                break
            await consumer.drain()

    cluster.wait(bury_again())
    assert ends("choosy") == known | {"dies": "dead"}
    cluster.wait(client.dead.purge("choosy"))
    assert ends("choosy") == dict.fromkeys((*known, "dies"))
