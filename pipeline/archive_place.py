"""The folder of an archive, in any file system that Spark has.

`day=YYYY-MM-DD/` holds its rows, `_marks/<group>/<number>.json` the records of each group's runs; the highest number
counts. A run writes its rows to `_staging/<group>/<run>/`, and then its record, which names them, under the number
after the one that it began from. Only one run can write that record. Its rows are moved to their days after that, by
the run itself or, if it was killed, by the next one. So rows come once, whatever is killed, and however many runs there
are at a time. Nothing is locked.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tickwheel.pipeline.places import PlaceError, spark_folder
from tickwheel.storage.plain_file import fsync_directory, make_directory, naming, unfinished

A = TypeVar("A")

MARKS, STAGING = "_marks", "_staging"
RECORDS_KEPT = 64
"""A run that stood still for as many others finds its number still taken."""
LEFT_S = 86_400
"""Age at which staged rows were left by a run that was killed."""
_ONLY_NEW = "fs.option.create.conditional.overwrite"
"""Hadoop's option of a file that is made only if there is none, for object stores, whose renames are copies."""
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class ArchiveError(ValueError):
    """An archive cannot be read or written; the text says why."""


class ArchivePlace:
    """One archive's folder. All methods raise ArchiveError."""

    def __init__(self, spark: SparkSession, folder: str | Path) -> None:
        try:
            self.uri = spark_folder(folder, "archive")
        except PlaceError as error:
            raise ArchiveError(str(error)) from None
        self._spark = spark

    def _path(self, below: str = "") -> Any:
        jvm = self._spark._jvm
        assert jvm is not None
        return jvm.org.apache.hadoop.fs.Path(f"{self.uri}/{below}" if below else self.uri)

    def _do(self, below: str, work: Callable[[Any, Any], A]) -> A:
        """Call `work` with Hadoop's file system and the path of `below`."""
        where = f"{self.uri}/{below}" if below else self.uri
        try:
            path = self._path(below)
            return work(path.getFileSystem(self._spark._jsc.hadoopConfiguration()), path)
        except (Py4JJavaError, PySparkException) as error:
            why = str(error.java_exception if isinstance(error, Py4JJavaError) else error).splitlines()[0]
            raise ArchiveError(f"{where}: Spark says: {why} (a path, or a URI of a file system that it has)") from None
        except OSError as error:
            raise ArchiveError(f"{error.filename or where}: {error.strerror or error}") from error

    def make(self) -> None:
        """Create the folder if it does not exist."""
        if not self._do("", lambda system, path: system.mkdirs(path)):  # Hadoop does not say why
            raise ArchiveError(f"{self.uri}: the folder cannot be made; look at path, owner and free space")

    def has_days(self) -> bool:
        """Whether the archive has any rows."""
        return bool(self._do("day=*", lambda system, path: bool(system.globStatus(path))))

    # -- the records of a group's runs

    def groups(self) -> list[str]:
        """The groups that have records or staged rows."""
        found = (*self._listed(MARKS), *self._listed(STAGING))
        return sorted({name for name, is_folder, _ in found if is_folder})

    def newest(self, group: str) -> tuple[int, str]:
        """(number, text) of the newest record; (0, "") if there is none."""
        number = max(self._numbers(group), default=0)
        if not number:
            return 0, ""

        def read(system: Any, path: Any) -> bytes:
            jvm = self._spark._jvm
            assert jvm is not None
            stream = system.open(path)
            try:
                return bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

        return number, self._do(f"{MARKS}/{group}/{number}.json", read).decode(errors="replace")

    def record(self, group: str, after: int, text: str) -> bool:
        """Write the record that follows number `after`. False, and nothing is written: another run has written it."""
        if not self._do(f"{MARKS}/{group}/{after + 1}.json", lambda system, path: self._created(system, path, text)):
            return False
        numbers = self._numbers(group)
        if max(numbers) > after + 1:  # it was written, and removed since because it was old
            self._delete(f"{MARKS}/{group}/{after + 1}.json")
            return False
        for old in sorted(numbers)[:-RECORDS_KEPT]:
            self._delete(f"{MARKS}/{group}/{old}.json")
        return True

    def _numbers(self, group: str) -> list[int]:
        numbers = []
        for name, _, _ in self._listed(f"{MARKS}/{group}"):
            with suppress(ValueError):
                numbers.append(int(name.removesuffix(".json")) if name.endswith(".json") else 0)
        return numbers

    def _created(self, system: Any, path: Any, text: str) -> bool:
        """Create a file, whole and durable; False if it exists. Of several that try, one succeeds."""
        system.mkdirs(path.getParent())
        folder = self._local(system, path.getParent())
        if folder is not None:
            return _linked(folder / path.getName(), text)
        data = bytearray(text.encode())
        if system.hasPathCapability(path, _ONLY_NEW):
            return self._written_only_new(system, path, data)
        aside = self._path_beside(path)
        stream = system.create(aside, True)
        try:
            stream.write(data)
        finally:
            stream.close()
        try:
            # Neither HDFS nor others replace a file by a rename.
            moved = not system.exists(path) and system.rename(aside, path)
        except Py4JJavaError:
            if not system.exists(path):
                raise
            moved = False
        if not moved:
            system.delete(aside, False)
            if not system.exists(path):
                raise ArchiveError(f"{path}: it cannot be written; run the archive again")
        return bool(moved)

    @staticmethod
    def _written_only_new(system: Any, path: Any, data: bytearray) -> bool:
        try:
            stream = system.createFile(path).overwrite(True).must(_ONLY_NEW, "true").build()
            stream.write(data)
            stream.close()  # the store compares now
        except Py4JJavaError:
            if system.exists(path):
                return False
            raise
        return True

    def _path_beside(self, path: Any) -> Any:
        jvm = self._spark._jvm
        assert jvm is not None
        return jvm.org.apache.hadoop.fs.Path(path.getParent(), f".{uuid.uuid4().hex}.new")

    @staticmethod
    def _local(system: Any, path: Any) -> Path | None:
        """An existing path, if it is in a file system of this machine."""
        uri = system.resolvePath(path).toUri()
        return Path(uri.getPath()) if uri.getScheme() == "file" else None

    # -- staged rows

    def staging(self, group: str, run: str) -> str:
        """The folder of a run's rows, for Spark to write to."""
        return f"{self.uri}/{STAGING}/{group}/{run}"

    def harden(self, group: str, run: str) -> None:
        """Bring a run's rows to stable storage; other file systems than this machine's see to that themselves."""

        def work(system: Any, path: Any) -> None:
            folder = self._local(system, path) if system.exists(path) else None
            if folder is None:
                return
            for place in (path_ for path_ in folder.rglob("*") if path_.is_file()):
                with naming(place), place.open("rb") as file:
                    os.fsync(file.fileno())
            for place in (*(path_ for path_ in folder.rglob("*") if path_.is_dir()), folder, *folder.parents[:3]):
                fsync_directory(place)

        self._do(f"{STAGING}/{group}/{run}", work)

    def publish(self, group: str, run: str) -> None:
        """Move the rows of a recorded run to their days, if they are not there. May be repeated, and run twice."""
        staged = f"{STAGING}/{group}/{run}"
        for day, is_folder, _ in self._listed(staged):
            if not (is_folder and day.startswith("day=")):
                continue
            self._do(day, lambda system, path: system.mkdirs(path))
            for name, is_folder, size in self._listed(f"{staged}/{day}"):
                if not is_folder:
                    self._move(f"{staged}/{day}/{name}", f"{day}/{name}", size)
            self._do(day, self._fsync)
        self._do("", self._fsync)
        self._delete(staged)

    def _move(self, source: str, target: str, size: int) -> None:
        """Move a file, unless another process that moves it is first."""
        to = self._path(target)

        def there(system: Any) -> bool:
            return bool(system.exists(to) and system.getFileStatus(to).getLen() == size)

        def work(system: Any, path: Any) -> bool:
            if there(system):  # copied, and then killed
                return True
            try:
                return bool(system.rename(path, to)) or there(system)
            except Py4JJavaError:
                if there(system):
                    return True
                raise

        if not self._do(source, work):
            raise ArchiveError(f"{self.uri}/{source}: it cannot be moved to {target}; run the archive again")

    def _fsync(self, system: Any, path: Any) -> None:
        folder = self._local(system, path)
        if folder is not None:
            fsync_directory(folder)

    def drop(self, group: str, run: str) -> None:
        """Remove the rows of a run that was not recorded."""
        self._delete(f"{STAGING}/{group}/{run}")

    def clean(self, group: str) -> None:
        """Remove what killed runs have left. To be called after a record of this run: no other that began before it,
        however slow, can be recorded any more."""
        for below in self.left(group):
            self._delete(below)

    def left(self, group: str) -> list[str]:
        """What killed runs have left, as far as that can be told: it has not changed for LEFT_S."""
        oldest_ms = (time.time() - LEFT_S) * 1_000
        found = [f"{STAGING}/{group}/{run}" for run, _, _ in self._listed(f"{STAGING}/{group}")]
        found += [f"{MARKS}/{group}/{name}" for name, _, _ in self._listed(f"{MARKS}/{group}") if name.endswith(".new")]
        return [below for below in found if self._do(below, _newest_ms) < oldest_ms]

    # -- both

    def _listed(self, below: str) -> list[tuple[str, bool, int]]:
        """(name, whether it is a folder, bytes) of what is in a folder; empty if it does not exist."""

        def work(system: Any, path: Any) -> list[tuple[str, bool, int]]:
            try:
                found = system.listStatus(path)
            except Py4JJavaError as error:
                if error.java_exception.getClass().getName() == "java.io.FileNotFoundException":
                    return []
                raise
            return [(status.getPath().getName(), status.isDirectory(), status.getLen()) for status in found]

        return self._do(below, work)

    def _delete(self, below: str) -> None:
        self._do(below, lambda system, path: system.delete(path, True))


def _newest_ms(system: Any, path: Any) -> float:
    """When a folder or a file below it was changed last."""
    newest = 0.0
    with suppress(Py4JJavaError):  # its run has ended meanwhile
        newest = time.time() * 1_000
        found = system.getFileStatus(path).getModificationTime()
        files = system.listFiles(path, True)
        while files.hasNext():
            found = max(found, files.next().getModificationTime())
        newest = found
    return newest


def _linked(path: Path, text: str) -> bool:
    """Create a local file, whole and durable; False if it exists."""
    make_directory(path.parent)
    aside = path.parent / f".{uuid.uuid4().hex}.new"
    with unfinished(aside):
        with aside.open("wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(aside, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _alone(path, text)
        finally:
            aside.unlink()
    fsync_directory(path.parent)
    return True


def _alone(path: Path, text: str) -> bool:
    """The same where there are no links: a process that is killed in here leaves a file that nobody can read."""
    try:
        with path.open("xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    fsync_directory(path.parent)
    return True
