"""Promotion: builds bundles from the parts of a cold tier that are due soon, on Spark, and has the cluster take them.

A bundle has all rows of its part in their order. The cluster leaves out cancelled and moved messages, in the command
that takes the bundle over (node/state/cold.py). Messages that were moved to a nearer time come in separate bundles,
which name them. The cluster records what is loaded. So after any interruption the next promotion does the rest, and two
promotions at once load nothing twice.

A part that cannot be read delays no other part: the promotion loads all others, then fails and names it.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from tickwheel.client import AsyncClient
from tickwheel.client.bulk import LoadProgress
from tickwheel.client.cold import ColdLoad
from tickwheel.client.messages import META_BYTES_MAX
from tickwheel.client.moments import MILLISECOND, moment_of, ms_of
from tickwheel.pipeline.build import DUE_MS_MAX, PAYLOAD_BYTES_MAX
from tickwheel.pipeline.bundling import BUNDLES, RESULT, Bundler, encoded, with_hashes
from tickwheel.pipeline.cold_freeze import HORIZON_DAYS
from tickwheel.pipeline.cold_store import DAY_MS, LEFT_S, ColdError, ColdFile, ColdStore, read_part
from tickwheel.pipeline.load import Loader, Progress
from tickwheel.pipeline.manifest import BuiltBundle, Manifest
from tickwheel.pipeline.sink_rows import RowGatherer, RowLimits
from tickwheel.pipeline.spark_errors import raising
from tickwheel.storage import bundle

Built = list[tuple[int, BuiltBundle]]
"""(number of a part, its bundle)."""

PROMOTE = "_promote"
PARTS_AT_ONCE = 32
"""Parts that are built before they are loaded. Meanwhile they take up to about 3 GiB beside the cold tier."""
MOVED_BYTES_MAX = 32 << 20
"""Bytes of payloads of moved messages in one bundle."""
MOVED_ROWS_MAX = (bundle.LOG_BYTES_MAX - MOVED_BYTES_MAX) // META_BYTES_MAX
"""Moved messages in one bundle. They fit, however large their keys, tags and properties are."""

_PARTS = "number bigint, path string, sha256 string, rows bigint"
_BUILT = pa.schema([("number", pa.int64()), ("problem", pa.string()), *RESULT])


@dataclass(slots=True)
class Promotion:
    """The result of one run."""

    until_ms: int
    parts: int = 0
    """Parts taken over in this run."""
    messages: int = 0
    """Messages of these parts, without cancelled and moved ones."""
    moved: int = 0
    """Moved messages, loaded at their new times."""
    late: int = 0
    """Messages that were already due when the cluster was asked to take them, so they come late. Cancelled ones
    count too."""
    late_ms_max: int = 0
    """How late the earliest of them was."""
    problems: list[str] = field(default_factory=list)
    """Parts that could not be loaded, with the reason."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Late:
    """The number of messages that are overdue, and how late the earliest is."""

    messages: int = 0
    first_ms: int = 0


class ColdLoader(Loader):
    """Loads bundles of the cold tier. Each is a separate load, which the cluster remembers for ever."""

    def __init__(
        self,
        client: AsyncClient,
        folder: Path,
        manifest: Manifest,
        loads: list[ColdLoad],
        late_of: Callable[[int], Late],
    ) -> None:
        super().__init__(client, folder, manifest)
        self._loads = loads
        self._late_of = late_of
        self._units = 0
        self.late = Late()
        """Late messages in the bundles that this loader brought."""

    async def _known(self) -> LoadProgress:
        return LoadProgress(self.job_id, load_sha256="", bundles=0, taken=0, units=0)

    async def _take(self, place: int) -> LoadProgress:
        built, load = self._manifest.bundles[place], self._loads[place]
        name = f"cold-{load.part or 'moved'}"
        late = self._late_of(place)
        cold = replace(load, late=late.messages)
        state = await self._client.bulk.take_over(name, built.name, 1, 1, built.name, built.topics, cold=cold)
        self._units += state.units
        if state.units and late.messages:  # else the cluster had taken it over before
            self.late = Late(self.late.messages + late.messages, max(self.late.first_ms, late.first_ms))
        return replace(state, taken=place + 1, units=self._units)


class Promoter:
    """One run of a promotion."""

    def __init__(self, spark: SparkSession, client: AsyncClient, folder: str | Path) -> None:
        self._spark = spark
        self._client = client
        self._store = ColdStore(folder)
        self._work = self._store.folder / PROMOTE / uuid.uuid4().hex
        self._slot_ms = 1_000
        self._clock_ahead_ms = 0.0
        """The cluster's clock minus this process's monotonic clock."""

    async def run(
        self, until_ms: int = 0, horizon_days: float = HORIZON_DAYS, told: Callable[[Progress], None] = lambda _: None
    ) -> Promotion:
        """Load all messages due before `until_ms`; by default those within the horizon now.

        Raises ColdError, LoadError, TickwheelError kinds.
        """
        started = time.monotonic()
        status = await self._client.admin.master_status()
        self._store.belong_to(status.cluster_id)
        clock_ms = ms_of("clock", status.clock) if status.clock is not None else 0
        self._slot_ms = status.slot // MILLISECOND
        self._clock_ahead_ms = clock_ms - time.monotonic() * 1_000
        done = Promotion(until_ms or int(clock_ms + horizon_days * DAY_MS))
        remove_left(self._store.folder / PROMOTE)
        try:
            await self._load_moved(done, told)
            await self._load_parts(done, told)
        except OSError as error:  # in the folder of this promotion: what is loaded stays so
            raise ColdError(f"{error.filename or self._work}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(self._work, ignore_errors=True)
        done.seconds = time.monotonic() - started
        return done

    def _now_ms(self) -> int:
        return int(time.monotonic() * 1_000 + self._clock_ahead_ms)

    # -- parts

    def _late_of_part(self, part: ColdFile) -> Late:
        now_ms = self._now_ms()
        if now_ms <= part.due_min_ms:
            return Late()
        if now_ms > part.due_max_ms:
            return Late(part.rows, now_ms - part.due_min_ms)
        try:
            due = read_part(self._store.folder, part.path, part.sha256).column("due_ms").to_numpy()
        except ColdError:
            return Late()  # the bundle exists already, so it can still be loaded; the cluster counts late hours itself
        return self._late_of(due)

    def _late_of(self, due_ms: np.ndarray) -> Late:
        now_ms = self._now_ms()
        count = int(np.searchsorted(due_ms, now_ms))
        return Late(count, now_ms - int(due_ms[0])) if count else Late()

    async def _load_parts(self, done: Promotion, told: Callable[[Progress], None]) -> None:
        parts, _ = await self._client.cold.parts(waiting_only=True)
        until = moment_of(done.until_ms)
        waiting = [part for part in parts if part.due_first < until]
        waiting.sort(key=lambda part: (part.due_first, part.number))
        wanted: list[tuple[int, ColdFile]] = []
        for part in waiting:
            try:
                manifest = self._store.manifest(part.job_id)
            except ColdError as error:
                done.problems.append(f"part {part.number}: {error}")
                continue
            if manifest is None or part.place >= len(manifest.parts):
                done.problems.append(f"part {part.number}: {self._store.folder} has no manifest of job {part.job_id}")
                continue
            file = manifest.parts[part.place]
            problem = self._store.problem_of(file)
            if not problem and bytes.fromhex(file.sha256) != part.sha256:
                problem = f"{file.path}: it differs from what was registered"
            if problem:
                done.problems.append(f"part {part.number}: {problem}")
            else:
                wanted.append((part.number, file))
        for at in range(0, len(wanted), PARTS_AT_ONCE):
            built = self._build(wanted[at : at + PARTS_AT_ONCE], done)
            files = dict(wanted[at : at + PARTS_AT_ONCE])

            def late_of(place: int, built: Built = built, files: dict[int, ColdFile] = files) -> Late:
                return self._late_of_part(files[built[place][0]])

            await self._load(built, [ColdLoad(part=number) for number, _ in built], late_of, done, told)
            done.parts += len(built)

    def _build(self, parts: list[tuple[int, ColdFile]], done: Promotion) -> Built:
        """Bundles of parts, in their order, without those that cannot be built."""
        (self._work / BUNDLES).mkdir(parents=True, exist_ok=True)
        rows = [(number, part.path, part.sha256, part.rows) for number, part in parts]
        frame = self._spark.createDataFrame(rows, _PARTS).repartition(len(rows), "number")
        task = _task(str(self._store.folder), str(self._work), self._slot_ms)
        with raising(ColdError, str(self._work)):
            found = {row["number"]: row for row in frame.mapInArrow(task, from_arrow_schema(_BUILT)).collect()}
        good = []
        for number, _ in parts:
            row = found[number]
            if row["problem"]:
                done.problems.append(f"part {number}: {row['problem']}")
            else:
                good.append((number, _built(row)))
        return good

    async def _load(
        self,
        built: Built,
        loads: list[ColdLoad],
        late_of: Callable[[int], Late],
        done: Promotion,
        told: Callable[[Progress], None],
    ) -> None:
        if not built:
            return
        bundles = [one for _, one in built]
        manifest = Manifest(self._slot_ms, sum(one.units for one in bundles), 0, bundles)
        loader = ColdLoader(self._client, self._work, manifest, loads, late_of)
        progress = await loader.run(told)
        done.messages += progress.taken_units
        done.late += loader.late.messages
        done.late_ms_max = max(done.late_ms_max, loader.late.first_ms)
        shutil.rmtree(self._work / BUNDLES)

    # -- moved messages

    async def _load_moved(self, done: Promotion, told: Callable[[Progress], None]) -> None:
        registered = {part.number: part.sha256.hex() for part in (await self._client.cold.parts())[0]}
        files = self._store.numbered(done.problems)
        async for ids, due_ms in self._moved(done.until_ms):
            tables, kept_ids, kept_due = [], [], []
            parts = ids >> 32 & 0x7FFF_FFFF
            for number in np.unique(parts).tolist():
                chosen = parts == number
                file = files.get(number)
                try:
                    if file is None:
                        raise ColdError(f"{self._store.folder} knows no such part; freeze its job again")
                    if registered.get(number, file.sha256) != file.sha256:
                        raise ColdError(f"{file.path}: it differs from what was registered")
                    table = read_part(self._store.folder, file.path, file.sha256)
                    places = ids[chosen] & 0xFFFF_FFFF
                    if int(places.max()) >= table.num_rows:
                        raise ColdError(f"{file.path}: it has only {table.num_rows} rows")
                except ColdError as error:
                    done.problems.append(f"{int(chosen.sum())} moved messages of part {number}: {error}")
                    continue
                tables.append(table.take(pa.array(places)))
                kept_ids.append(ids[chosen])
                kept_due.append(due_ms[chosen])
            if tables:
                await self._load_rows(tables, np.concatenate(kept_ids), np.concatenate(kept_due), done, told)

    async def _moved(self, until_ms: int) -> AsyncIterator[tuple[np.ndarray, np.ndarray]]:
        after, more = 0, True
        while more:
            page = await self._client.cold.moved(moment_of(until_ms), after)
            more = page.more
            if page.ids:
                after = page.ids[-1]
                yield np.array(page.ids, np.uint64), np.array(page.due_ms, np.int64)

    async def _load_rows(
        self,
        tables: list[pa.Table],
        ids: np.ndarray,
        due_ms: np.ndarray,
        done: Promotion,
        told: Callable[[Progress], None],
    ) -> None:
        """Build and load moved messages at their new times, in bundles that name them."""
        table = pa.concat_tables(tables, promote_options="default")
        order = np.argsort(due_ms, kind="stable")
        ids, due_ms = ids[order], due_ms[order]
        table = table.take(pa.array(order))
        table = table.set_column(table.column_names.index("due_ms"), "due_ms", pa.array(due_ms))
        for at, end in moved_pieces(pc.binary_length(table.column("payload")).to_numpy()):
            (self._work / BUNDLES).mkdir(parents=True, exist_ok=True)
            row = _bundle(table.slice(at, end - at), self._work, uuid.uuid4().hex, self._slot_ms)
            load = ColdLoad(ids=ids[at:end].tolist(), due_ms=due_ms[at:end].tolist())
            before_units = done.messages

            def late_of(_: int, due: np.ndarray = due_ms[at:end]) -> Late:
                return self._late_of(due)

            await self._load([(0, _built(row))], [load], late_of, done, told)
            done.moved += done.messages - before_units


def remove_left(folder: Path) -> None:
    """Remove the files of promotions that were killed more than LEFT_S ago."""
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # another promotion has ended meanwhile
            if path.stat().st_mtime < time.time() - LEFT_S:
                shutil.rmtree(path, ignore_errors=True)


def moved_pieces(payload_bytes: np.ndarray) -> Iterator[tuple[int, int]]:
    """(first, end) of the moved messages that make each bundle."""
    ends = np.cumsum(payload_bytes, dtype=np.int64)
    at = 0
    while at < len(ends):
        before = int(ends[at - 1]) if at else 0
        end = min(int(np.searchsorted(ends, before + MOVED_BYTES_MAX, side="right")), at + MOVED_ROWS_MAX)
        yield at, end
        at = end


def _built(row: Any) -> BuiltBundle:
    names = ("name", "bytes", "units", "hour_min", "hour_max", "crc32c", "topics")
    return BuiltBundle(**{name: row[name] for name in names})


def _bundle(table: pa.Table, folder: Path, attempt: str, slot_ms: int) -> dict[str, Any]:
    """One bundle of a table, row by row. Raises ColdError if it would be another number of rows or of bundles."""
    good = RowGatherer("", RowLimits(1, PAYLOAD_BYTES_MAX, DUE_MS_MAX), texts_checked=False)
    bundler = Bundler(folder, attempt, slot_ms=slot_ms, units_max=bundle.UNITS_MAX)
    made: list[pa.RecordBatch] = []
    try:
        for batch in table.combine_chunks().to_batches():
            made += bundler.take(encoded(good.good_rows(with_hashes(batch)), ""))
        made += bundler.rest()
    except (bundle.BadBundleError, pa.ArrowException, LookupError, TypeError, ValueError) as error:
        raise ColdError(f"its rows cannot be messages: {error}") from error
    if len(made) != 1 or good.rejected:
        raise ColdError(f"{table.num_rows} rows gave {len(made)} bundles, and some of them may have been rejected")
    row: dict[str, Any] = made[0].to_pylist()[0]
    if row["units"] != table.num_rows:
        raise ColdError(f"{table.num_rows} rows gave a bundle of {row['units']}")
    return row


def _task(folder: str, work: str, slot_ms: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The work in the workers, which turns a part into a bundle."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in batch.to_pylist():
                row = dict.fromkeys(_BUILT.names) | {"number": part["number"], "problem": ""}
                try:
                    table = read_part(folder, part["path"], part["sha256"])
                    if table.num_rows != part["rows"]:
                        raise ColdError(f"{part['path']}: it has {table.num_rows} rows, {part['rows']} were written")
                    row |= _bundle(table, Path(work), uuid.uuid4().hex, slot_ms)
                except ColdError as error:
                    row["problem"] = str(error)
                except OSError as error:
                    row["problem"] = f"{work}: {error.strerror}"
                yield pa.RecordBatch.from_pylist([row], _BUILT)

    return run
