"""The folder of a cold tier: Parquet files by due day, and the manifests that list the files that count.

    COLD/_cold.json                       the cluster that it belongs to
    COLD/day=2027-01-31/<job>-<hash>.parquet   one part: rows of one day, sorted by due time
    COLD/_jobs/<job>/plan.json            fixed when the job began: from when on rows are cold
    COLD/_jobs/<job>/manifest.json        its parts in their order; written once, last
    COLD/_jobs/<job>/registered.json      the number of its first part in the cluster
    COLD/_jobs/<job>/given_up.json        its rows are not wanted any more; they are no messages
    COLD/_ids/<job>.parquet               the id of every message
    COLD/_near/<job>/, COLD/_rejected/<job>/   rows that did not become cold ones

Files never change. A part that no manifest names does not count. Spark reads the days as one partitioned table. Every
file is written aside, fsynced and renamed; for a job's decisions the first writer wins (`write_once`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tickwheel.pipeline import fields
from tickwheel.pipeline.places import PlaceError, local_folder
from tickwheel.pipeline.sink_rejected import TEMPORARY, fsync_folder, publish
from tickwheel.storage.plain_file import naming, unfinished

DAY_MS = 86_400_000
JOBS, IDS, NEAR, REJECTED = "_jobs", "_ids", "_near", "_rejected"
LEFT_S = 86_400
"""Age at which an unfinished file was left by a job that was killed."""
OWNER = "_cold.json"
_GIVEN_UP, _REMOVING = "given_up.json", "removing.json"
"""The mark of a job that was given up, and its name from when its files are being removed."""
VERSION = 1
_JOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_PART = re.compile(r"day=\d{4}-\d\d-\d\d/[A-Za-z0-9_][A-Za-z0-9_.-]*\.parquet", re.ASCII)
_BESIDE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.parquet")
_MS_MAX = 253_402_300_799_999
"""The end of the year 9999, the last that a datetime can have."""
_SHA256 = re.compile("[0-9a-f]{64}")


class ColdError(Exception):
    """The cold tier cannot be used as asked; the text says why."""


@dataclass(frozen=True, slots=True)
class ColdFile:
    """One part."""

    path: str
    """Path relative to the folder."""
    day: int
    """Days since 1970."""
    rows: int
    due_min_ms: int
    due_max_ms: int
    bytes: int
    sha256: str
    topics: list[str]


@dataclass(frozen=True, slots=True)
class ColdJobManifest:
    """The parts that a job wrote, and its decisions."""

    job_id: str
    boundary_ms: int
    """Rows due before this were near."""
    rows: int
    near: int
    rejected: int
    near_files: list[str]
    rejected_files: list[str]
    parts: list[ColdFile]

    @property
    def sha256(self) -> str:
        """Hash that names the content."""
        facts = [[p.sha256, p.rows, p.due_min_ms, p.due_max_ms, p.topics] for p in self.parts]
        return hashlib.sha256(json.dumps([self.boundary_ms, facts]).encode()).hexdigest()


def day_folder(day: int) -> str:
    """The folder name of a day since 1970."""
    return "day=" + datetime.fromtimestamp(day * DAY_MS / 1_000, UTC).strftime("%Y-%m-%d")


def write_file(path: Path, data: bytes, *, aside: str) -> None:
    """Write a file whole or not at all; durable on return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{aside}.tmp"
    _write_synced(temporary, data)
    temporary.replace(path)
    fsync_folder(path.parent, above=1)  # the process that made the day's folder may have been killed before its sync


def _write_synced(path: Path, data: bytes) -> None:
    with unfinished(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_once(path: Path, body: dict[str, Any], above: int = 0) -> dict[str, Any]:
    """Write the file unless it exists. Returns its content, which is that of the first writer.

    `above`: as in `fsync_folder`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}-{uuid.uuid4().hex}.tmp"
    text = json.dumps(body, sort_keys=True)
    content = json.dumps({"crc32c": google_crc32c.value(text.encode()), "body": body}, sort_keys=True, indent=1)
    _write_synced(temporary, content.encode())
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    fsync_folder(path.parent, above)
    found = read_json(path)
    if found is None:
        raise ColdError(f"{path}: it was removed just after it was written")
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """The content of a file; None if it does not exist. Raises ColdError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        body: dict[str, Any] = content["body"]
        if not isinstance(body, dict):
            raise ColdError(f"{path}: it is damaged: there is no record in it")
        if google_crc32c.value(json.dumps(body, sort_keys=True).encode()) == content["crc32c"]:
            return body
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ColdError(f"{path}: it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ColdError(f"{path}: it cannot be read: {error}") from error
    raise ColdError(f"{path}: it does not match its checksum")


class ColdStore:
    """One folder."""

    def __init__(self, folder: str | Path) -> None:
        """A path or a file: URI. Raises ColdError for any other."""
        try:
            self.folder = local_folder(folder, "cold tier")
        except PlaceError as error:
            raise ColdError(str(error)) from None

    def job_folder(self, job_id: str) -> Path:
        """The folder of a job. Raises ColdError for an invalid job id."""
        if not _JOB.fullmatch(job_id):
            raise ColdError(f"job_id: {job_id}: 1 to 100 characters of [A-Za-z0-9_.-], not starting with a dot or dash")
        return self.folder / JOBS / job_id

    def belong_to(self, cluster_id: str) -> None:
        """Bind the folder to this cluster. Raises ColdError if it belongs to another."""
        with suppress(FileNotFoundError):  # its former name, which Spark read as a file of the table
            (self.folder / "cold.json").rename(self.folder / OWNER)
        found = write_once(self.folder / OWNER, {"version": VERSION, "cluster_id": cluster_id})
        with _of(self.folder / OWNER):
            version, owner = fields.whole(found, "version"), fields.text(found, "cluster_id")
        if version != VERSION:
            raise ColdError(f"{self.folder}: it has version {version}, but this program knows {VERSION}")
        if owner != cluster_id:
            raise ColdError(f"{self.folder}: it belongs to cluster {owner}, this is {cluster_id}")

    def plan(self, job_id: str, boundary_ms: int) -> int:
        """The boundary from which rows of a job are cold: the one decided when the job began."""
        path = self.job_folder(job_id) / "plan.json"
        plan = write_once(path, {"boundary_ms": boundary_ms}, above=2)
        with _of(path):
            return fields.whole(plan, "boundary_ms")

    def jobs(self) -> list[str]:
        """Ids of all jobs that ever began."""
        folder = self.folder / JOBS
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted(path.name for path in found if _JOB.fullmatch(path.name) and path.is_dir())

    def manifest(self, job_id: str) -> ColdJobManifest | None:
        """The manifest of a job; None while the job has not written all parts. Raises ColdError."""
        path = self.job_folder(job_id) / "manifest.json"
        body = read_json(path)
        return None if body is None else _manifest(path, body, job_id)

    def finish(self, manifest: ColdJobManifest) -> ColdJobManifest:
        """Finish a job that has written all its parts, now or before a crash. Returns the manifest that counts."""
        counts = self.publish(manifest)
        self.publish_beside(counts)
        return counts

    def publish(self, manifest: ColdJobManifest) -> ColdJobManifest:
        """Publish the manifest and remove parts that it does not name. Returns the manifest that counts."""
        path = self.job_folder(manifest.job_id) / "manifest.json"
        counts = _manifest(path, write_once(path, asdict(manifest)), manifest.job_id)
        named = {part.path for part in counts.parts}
        own = self._own(manifest.job_id)
        for folder in self.folder.glob("day=*"):
            for file in folder.iterdir():
                if own.fullmatch(file.name) and f"{folder.name}/{file.name}" not in named:
                    file.unlink(missing_ok=True)
        return counts

    def publish_beside(self, manifest: ColdJobManifest) -> None:
        """Move near and rejected rows of the attempts that count to their places. May be repeated."""
        for kind, names in ((NEAR, manifest.near_files), (REJECTED, manifest.rejected_files)):
            folder = self.folder / kind / manifest.job_id
            publish(str(folder), names)
            shutil.rmtree(folder / TEMPORARY, ignore_errors=True)

    def first_part(self, job_id: str) -> int | None:
        """The number of a job's first part; None if this folder has no record of its registration."""
        path = self.job_folder(job_id) / "registered.json"
        body = read_json(path)
        if body is None:
            return None
        with _of(path):
            return fields.whole(body, "first_part")

    def registered(self, job_id: str, first_part: int) -> None:
        """Record the number that the cluster gave to a job's first part."""
        path = self.job_folder(job_id) / "registered.json"
        body = write_once(path, {"first_part": first_part})
        with _of(path):
            before = fields.whole(body, "first_part")
        if before != first_part:
            raise ColdError(f"job {job_id} was registered as part {before}, and now as {first_part}")

    # -- jobs that never were registered

    def give_up(self, job_id: str) -> None:
        """Mark a job as one that is not wanted any more. It must not be registered. Files go with `remove_given_up`."""
        write_once(self.job_folder(job_id) / _GIVEN_UP, {"job_id": job_id})

    def is_given_up(self, job_id: str) -> bool:
        """Whether it is, and was not taken back."""
        folder = self.job_folder(job_id)
        return (folder / _GIVEN_UP).exists() or (folder / _REMOVING).exists()

    def take_back(self, job_id: str) -> None:
        """A job that is about to be written or registered is wanted, even if it was given up. Raises ColdError if its
        files are being removed."""
        folder = self.job_folder(job_id)
        (folder / _GIVEN_UP).unlink(missing_ok=True)
        if (folder / _REMOVING).exists():
            raise ColdError(
                f"job {job_id}: it was given up, and its files are being removed; freeze it again after `cold clean`"
            )

    def remove_given_up(self, job_id: str) -> Iterator[Path]:
        """Remove the files of a job that was given up more than LEFT_S ago, or whose removal was broken off. Yields
        each file before it goes. The manifest goes first: what cannot be removed then does not count."""
        folder, marked = self.job_folder(job_id), self.job_folder(job_id) / _GIVEN_UP
        with suppress(FileNotFoundError):  # taken back
            if marked.stat().st_mtime < time.time() - LEFT_S:
                marked.rename(folder / _REMOVING)
        if not (folder / _REMOVING).exists():
            return
        fsync_folder(folder)
        own = self._own(job_id)
        of_days = (file for day in self.folder.glob("day=*") for file in day.iterdir() if own.fullmatch(file.name))
        beside = (path for kind in (NEAR, REJECTED) for path in (self.folder / kind / job_id).rglob("*.parquet"))
        for path in (folder / "manifest.json", *of_days, *beside):
            if path.exists():
                yield path
                path.unlink(missing_ok=True)
        for kind in (NEAR, REJECTED):
            shutil.rmtree(self.folder / kind / job_id, ignore_errors=True)
        shutil.rmtree(folder)

    @staticmethod
    def _own(job_id: str) -> re.Pattern[str]:
        """The names of a job's files in the folders of the days."""
        name = re.escape(job_id)
        return re.compile(rf"{name}-[0-9a-f]{{16}}\.parquet|\.{name}@.*\.tmp")

    def numbered(self, problems: list[str] | None = None) -> dict[int, ColdFile]:
        """All parts that have a number. `problems` gets what is wrong with the records of a job, whose parts are then
        left out; without it raises ColdError."""
        found: dict[int, ColdFile] = {}
        for job_id in self.jobs():
            try:
                first, manifest = self.first_part(job_id), self.manifest(job_id)
            except ColdError as error:
                if problems is None:
                    raise
                problems.append(str(error))
                continue
            if first is not None and manifest is not None:
                found |= {first + place: part for place, part in enumerate(manifest.parts)}
        return found

    def remove(self, path: Path) -> None:
        """Remove a file, and its folders beside the days if it was their last. Raises OSError."""
        path.unlink(missing_ok=True)
        if path.parent.name == TEMPORARY:
            with suppress(OSError):  # something else is in there
                path.parent.rmdir()
                path.parent.parent.rmdir()

    def left(self) -> Iterator[Path]:
        """The unfinished files that killed jobs have left."""
        for kind in (NEAR, REJECTED):
            for folder in self.folder.glob(f"{kind}/*/{TEMPORARY}"):
                if _JOB.fullmatch(folder.parent.name):
                    yield from self._left_beside(folder)
        for pattern in (".*.tmp", "day=*/.*.tmp", f"{JOBS}/*/.*.tmp", f"{IDS}/.*.tmp"):
            for path in self.folder.glob(pattern):
                with suppress(FileNotFoundError):  # it has been finished meanwhile
                    if path.stat().st_mtime < time.time() - LEFT_S:
                        yield path

    def _left_beside(self, folder: Path) -> Iterator[Path]:
        """The same of a job's near or rejected rows. Those that its manifest names count; a repeat publishes them."""
        files = [path for path in folder.iterdir() if path.is_file()]
        if any(path.stat().st_mtime >= time.time() - LEFT_S for path in files):
            return  # a task that has ended waits for the others
        manifest = self.manifest(folder.parent.name)
        named = {*manifest.near_files, *manifest.rejected_files} if manifest is not None else ()
        yield from (path for path in files if path.name not in named)

    def problem_of(self, part: ColdFile) -> str:
        """A quick check of a part's file: the reason why it cannot be the written one, or empty."""
        path = self.folder / part.path
        if not path.is_file():
            return f"{path}: it is missing"
        if path.stat().st_size != part.bytes:
            return f"{path}: it has {path.stat().st_size} bytes, but {part.bytes} were written"
        return ""


def read_part(folder: str | Path, path: str, sha256: str) -> pa.Table:
    """The rows of a part in their order, after a check of the hash and of the columns. Raises ColdError."""
    whole = Path(folder) / path
    try:
        data = whole.read_bytes()
    except OSError as error:
        raise ColdError(f"{whole}: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ColdError(f"{whole}: its bytes differ from those that were written")
    try:
        # Not read as a dataset: the folder's name would become a column.
        table = pq.ParquetFile(pa.BufferReader(data)).read()
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise ColdError(f"{whole}: it is no Parquet file: {str(error).splitlines()[0]}") from error
    wanted = {"topic": pa.types.is_string, "due_ms": pa.types.is_int64, "payload": pa.types.is_binary}
    for name, fits in wanted.items():
        if name not in table.column_names or not fits(table.schema.field(name).type):
            raise ColdError(f"{whole}: column {name} is missing or of another type than was written")
    due_ms = table.column("due_ms")
    if due_ms.null_count or not pc.all(pc.less_equal(due_ms[:-1], due_ms[1:])).as_py():
        raise ColdError(f"{whole}: its rows are not sorted by due_ms")
    return table


def write_ids(store: ColdStore, manifest: ColdJobManifest, first_part: int, text_of: Callable[[int], str]) -> Path:
    """Write the id of every message of a job as Parquet: id, topic, key, due_ms.

    `text_of`: the beginning of the ids of a part, to which the row is appended.
    """
    target = store.folder / IDS / f"{manifest.job_id}.parquet"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.parent / f".{manifest.job_id}-{uuid.uuid4().hex}.tmp"
    schema = pa.schema([("id", pa.string()), ("topic", pa.string()), ("key", pa.string()), ("due_ms", pa.int64())])
    with unfinished(aside):
        with pq.ParquetWriter(aside, schema) as writer:
            for place, part in enumerate(manifest.parts):
                with naming(store.folder / part.path):
                    file = pq.ParquetFile(store.folder / part.path)
                    wanted = [name for name in ("topic", "key", "due_ms") if name in file.schema_arrow.names]
                    table = file.read(columns=wanted)
                prefix = text_of(first_part + place)
                ids = pa.array([f"{prefix}{row}" for row in range(table.num_rows)], pa.string())
                keys = table.column("key") if "key" in wanted else pa.nulls(table.num_rows, pa.string())
                writer.write_table(pa.table([ids, table.column("topic"), keys, table.column("due_ms")], schema=schema))
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        aside.replace(target)
    fsync_folder(target.parent, above=1)
    return target


@contextmanager
def _of(path: Path) -> Iterator[None]:
    """A field that is not what was written makes the file one that cannot be used."""
    try:
        yield
    except ValueError as error:
        raise ColdError(f"{path}: it is damaged: {error}") from None


def _manifest(path: Path, body: dict[str, Any], job_id: str) -> ColdJobManifest:
    with _of(path):
        parts = [fields.made(ColdFile, part) for part in fields.rows(body, "parts")]
        manifest = fields.made(ColdJobManifest, body, parts=parts)
        for part in parts:
            if not _PART.fullmatch(part.path):  # it is read, and deleted once it is loaded
                raise ValueError(f"path: {part.path!r}: a file in the folder of a day")
            if not _SHA256.fullmatch(part.sha256):
                raise ValueError(f"sha256: {part.sha256!r}: 64 hexadecimal digits")
            if not (part.day <= _MS_MAX // DAY_MS and part.due_min_ms <= part.due_max_ms <= _MS_MAX):
                raise ValueError(f"day, due_min_ms, due_max_ms: {part.day}, {part.due_min_ms}, {part.due_max_ms}")
        for name in (*manifest.near_files, *manifest.rejected_files):
            if not _BESIDE.fullmatch(name):
                raise ValueError(f"near_files, rejected_files: {name!r}: the name of a file")
    if manifest.job_id != job_id:
        raise ColdError(f"{path}: it is the manifest of job {manifest.job_id}")
    return manifest
