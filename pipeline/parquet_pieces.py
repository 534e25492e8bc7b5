"""Splits Parquet files into pieces that tasks read by themselves, straight into numpy columns, never as rows of Spark.

For plain files only. `find` returns None if Spark's own reader is needed: folder names stand for columns, files have
different schemas, or Arrow does not know the file system.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from tickwheel.pipeline.inputs import files_below

BATCH_ROWS_MAX = 1 << 17
BATCH_BYTES = 16 << 20
"""Approximate bytes of one record batch; a single row may have 4 MiB."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring row groups of a file."""

    path: str
    groups: tuple[int, ...]
    batch_rows: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """All pieces of a file or folder."""

    source: str
    schema: StructType
    pieces: tuple[Piece, ...]

    def read(self, number: int) -> Iterator[pa.RecordBatch]:
        """The record batches of one piece, with the types that Spark would give them."""
        system, _ = _opened(self.source)
        piece = self.pieces[number]
        wanted = to_arrow_schema(self.schema, timezone="UTC")
        with system.open_input_file(piece.path) as file:
            for batch in pq.ParquetFile(file).iter_batches(piece.batch_rows, list(piece.groups)):
                yield batch if batch.schema.equals(wanted) else batch.cast(wanted, safe=False)


def _opened(source: str) -> tuple[fs.FileSystem, str]:
    if "://" in source:
        found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(source)
        return found
    return fs.LocalFileSystem(), source


def find(source: str, piece_bytes: int) -> Pieces | None:
    """Pieces of about `piece_bytes` bytes, of a file or folder. None: only Spark can read it. Raises InputError."""
    try:
        system, path = _opened(source)
        paths = _files(system, path)
        pieces: list[Piece] = []
        schemas: list[pa.Schema] = []
        for name in paths or ():
            with system.open_input_file(name) as file:
                footer = pq.ParquetFile(file)
                schemas.append(footer.schema_arrow.remove_metadata())
                pieces += _groups(name, footer.metadata, piece_bytes)
        if not schemas or any(not schema.equals(schemas[0]) for schema in schemas):
            return None
        return Pieces(source, from_arrow_schema(schemas[0], prefer_timestamp_ntz=True), tuple(pieces))
    except (OSError, pa.ArrowException, TypeError):
        return None  # Spark's reader reports the error


def _files(system: fs.FileSystem, path: str) -> list[str] | None:
    kind = system.get_file_info(path).type
    if kind != fs.FileType.Directory:
        return [path] if kind == fs.FileType.File else None
    if isinstance(system, fs.LocalFileSystem):
        names = [str(name) for name in files_below(Path(path))]
    else:
        found = system.get_file_info(fs.FileSelector(path, recursive=True))
        names = sorted(info.path for info in found if info.type == fs.FileType.File)
    inside = {name: name[len(path) :].strip("/").split("/") for name in names}
    if any("=" in part for parts in inside.values() for part in parts[:-1]):
        return None
    return [name for name, parts in inside.items() if not any(part[0] in "_." for part in parts)]


def _groups(path: str, metadata: pq.FileMetaData, piece_bytes: int) -> Iterator[Piece]:
    held: list[int] = []
    size = rows = 0

    def piece() -> Piece:
        return Piece(path, tuple(held), max(1, min(BATCH_ROWS_MAX, BATCH_BYTES * rows // max(1, size))))

    for number in range(metadata.num_row_groups):
        more = metadata.row_group(number).total_byte_size
        if held and size + more > piece_bytes:
            yield piece()
            held, size, rows = [], 0, 0
        held.append(number)
        size += more
        rows += metadata.row_group(number).num_rows
    if held:
        yield piece()
