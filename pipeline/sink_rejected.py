"""The `_rejected` output of a write: rows that cannot be messages, as Parquet, with the reason of each.

A task's file stays in `_temporary` until the write is committed, so attempts that do not count leave nothing behind.
Paths are local, or URIs that Arrow knows (s3://, gs://, hdfs://); on a cluster all machines must reach them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from tickwheel.storage.plain_file import fsync_directory

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
    found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(path if "://" in path else f"file://{path}")
    return found


class RejectedFile:
    """The file of one attempt, created with its first row."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder = folder
        self.name = name
        self.rows = 0
        self._writer: pq.ParquetWriter | None = None

    def write(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Add rows."""
        for batch in batches:
            if self._writer is None:
                system, folder = _opened(self._folder)
                system.create_dir(f"{folder}/{TEMPORARY}", recursive=True)
                self._writer = pq.ParquetWriter(f"{folder}/{TEMPORARY}/{self.name}", batch.schema, filesystem=system)
            self._writer.write_batch(batch)
            self.rows += batch.num_rows

    def close(self) -> str:
        """The name to publish; empty if there was no row. Durable on return."""
        if self._writer is None:
            return ""
        self._writer.close()
        system, folder = _opened(self._folder)
        if isinstance(system, fs.LocalFileSystem):  # other systems see to that themselves
            path = Path(folder) / TEMPORARY / self.name
            with path.open("rb") as written:
                os.fsync(written.fileno())
            fsync_folder(path.parent, above=3)
        return self.name


def publish(folder: str, names: Sequence[str], *, replace: bool = False) -> None:
    """Move the files of a committed write into place; durable on return. May be repeated.

    `replace`: they take the place of the files that an earlier run of the same job left.
    """
    named = [name for name in names if name]
    if not named:
        return
    system, base = _opened(folder)
    for name in named:
        source = f"{base}/{TEMPORARY}/{name}"
        if system.get_file_info(source).type != fs.FileType.NotFound:
            system.move(source, f"{base}/{name}")
    if isinstance(system, fs.LocalFileSystem):
        fsync_folder(Path(base))
    if replace:
        for info in system.get_file_info(fs.FileSelector(base)):
            if info.base_name not in named and _NAME.fullmatch(info.base_name):
                system.delete_file(info.path)
    discard(folder, ())


def discard(folder: str, names: Sequence[str]) -> None:
    """Remove files of a write that failed, and the folder for them if it is empty."""
    system, base = _opened(folder)
    for name in names:
        if name and system.get_file_info(f"{base}/{TEMPORARY}/{name}").type != fs.FileType.NotFound:
            system.delete_file(f"{base}/{TEMPORARY}/{name}")
    left = system.get_file_info(fs.FileSelector(f"{base}/{TEMPORARY}", allow_not_found=True))
    if not left and system.get_file_info(f"{base}/{TEMPORARY}").type == fs.FileType.Directory:
        system.delete_dir(f"{base}/{TEMPORARY}")
