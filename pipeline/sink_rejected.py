"""The `_rejected` output of a write: rows that cannot be messages, as Parquet, with the reason of each.

A task's file stays in `_temporary` until the write is committed, so attempts that do not count leave nothing behind.
Paths are local, or URIs that Arrow knows (s3://, gs://, hdfs://); on a cluster all machines must reach them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from tickwheel.storage.plain_file import fsync_directory, naming

TEMPORARY = "_temporary"
_NAME = re.compile(r"part-\d{5,}-[0-9a-f]{16}\.parquet")
"""The file of an attempt of the sink, as `file_name` gives it."""


def file_name(partition: int, attempt: int) -> str:
    """The name of the file of one attempt of the sink."""
    return f"part-{partition:05}-{attempt:016x}.parquet"


def absolute(path: str) -> str:
    """A relative path made absolute on the driver, for tasks with another working directory."""
    return path if "://" in path else str(Path(path).absolute())


def fsync_folder(path: Path, above: int = 0) -> None:
    """Bring a folder to stable storage, and `above` folders above it, which may be new entries of their parents."""
    for folder in (path, *path.parents[:above]):
        fsync_directory(folder)


def _opened(path: str) -> tuple[fs.FileSystem, str]:
    if "://" not in path:
        return fs.LocalFileSystem(), path  # as it is: in a URI a space, a # or a % means something else
    found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(path)
    return found


class RejectedFile:
    """The file of one attempt, created with its first row. As a context manager: whole and durable at its end, and
    removed if the attempt fails, so that repeats do not fill a disk. Raises OSError, which names the file."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder = folder
        self._name = name
        self.file = ""
        """The name to publish; empty if there was no row."""
        self.rows = 0
        self._writer: pq.ParquetWriter | None = None

    def write(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Add rows."""
        with naming(self._path):
            for batch in batches:
                if self._writer is None:
                    self.file = self._name
                    system, folder = _opened(self._folder)
                    system.create_dir(f"{folder}/{TEMPORARY}", recursive=True)
                    path = f"{folder}/{TEMPORARY}/{self._name}"
                    self._writer = pq.ParquetWriter(path, batch.schema, filesystem=system)
                self._writer.write_batch(batch)
                self.rows += batch.num_rows

    def __enter__(self) -> RejectedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except BaseException:
            self._drop()
            raise
        if kind is not None:
            self._drop()

    def _finish(self) -> None:
        if self._writer is None:
            return
        with naming(self._path):
            self._writer.close()
            system, folder = _opened(self._folder)
            if isinstance(system, fs.LocalFileSystem):  # other systems see to that themselves
                path = Path(folder) / TEMPORARY / self._name
                with path.open("rb") as written:
                    os.fsync(written.fileno())
                fsync_folder(path.parent, above=3)

    def _drop(self) -> None:
        """Remove the file. The folder stays: other tasks may be about to write there."""
        if not self.file:
            return
        with contextlib.suppress(OSError, pa.ArrowException):
            if self._writer is not None:
                self._writer.close()
        with contextlib.suppress(OSError, pa.ArrowException):
            system, folder = _opened(self._folder)
            system.delete_file(f"{folder}/{TEMPORARY}/{self._name}")

    @property
    def _path(self) -> str:
        return f"{self._folder}/{TEMPORARY}/{self._name}"


def publish(folder: str, names: Sequence[str], *, replace: bool = False) -> None:
    """Move the files of a committed write into place; durable on return. May be repeated.

    `replace`: they take the place of the files that another run of the same job left. Two runs that replace each other
    at once may both keep theirs, and lose none.
    """
    named = [name for name in names if name]
    if not named:
        return
    system, base = _opened(folder)
    found = system.get_file_info(fs.FileSelector(base, allow_not_found=True)) if replace else []
    for name in named:
        source = f"{base}/{TEMPORARY}/{name}"
        if system.get_file_info(source).type != fs.FileType.NotFound:
            system.move(source, f"{base}/{name}")
    if isinstance(system, fs.LocalFileSystem):
        fsync_folder(Path(base))
    for info in found:
        if info.base_name not in named and _NAME.fullmatch(info.base_name):
            with contextlib.suppress(FileNotFoundError):  # another run has replaced it
                system.delete_file(info.path)
    discard(folder, ())


def one_of(folder: str, name: str) -> pa.RecordBatch:
    """The first rows of a file that is not published yet."""
    system, base = _opened(folder)
    with naming(f"{folder}/{TEMPORARY}/{name}"), system.open_input_file(f"{base}/{TEMPORARY}/{name}") as file:
        batch: pa.RecordBatch = next(pq.ParquetFile(file).iter_batches(1))
        return batch


def discard(folder: str, names: Sequence[str]) -> None:
    """Remove files of a write that failed, and the folder for them if it is empty."""
    system, base = _opened(folder)
    for name in names:
        if name and system.get_file_info(f"{base}/{TEMPORARY}/{name}").type != fs.FileType.NotFound:
            system.delete_file(f"{base}/{TEMPORARY}/{name}")
    left = system.get_file_info(fs.FileSelector(f"{base}/{TEMPORARY}", allow_not_found=True))
    if not left and system.get_file_info(f"{base}/{TEMPORARY}").type == fs.FileType.Directory:
        if isinstance(system, fs.LocalFileSystem):
            with contextlib.suppress(OSError):  # a task of another run of the job has begun to write there
                Path(base, TEMPORARY).rmdir()
        else:
            system.delete_dir(f"{base}/{TEMPORARY}")
