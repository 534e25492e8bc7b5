"""Parquet that commands read: which files of a folder count, whoever reads them.

All files below the folder count, except in hidden places: names that begin with a dot or an underscore. A folder whose
name contains `=` stands for a column and is never hidden. Links are followed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tickwheel.pipeline.places import PlaceError, local_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class InputError(ValueError):
    """A folder cannot be read as a whole; the text names the place and says why."""


def files_below(folder: Path) -> list[Path]:
    """The files of a local folder that count, sorted. Raises InputError."""
    found: list[Path] = []
    open_: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while open_:
        place, above = open_.pop()
        try:
            info = place.stat()
            here = (info.st_dev, info.st_ino)
            if here in above:
                raise InputError(
                    f"{place}: it leads back to a folder above it, so each file would be read many times; remove the "
                    "link, or name the folder that is meant"
                )
            for path in place.iterdir():
                if path.name.startswith(".") or (path.name.startswith("_") and "=" not in path.name):
                    continue
                if path.is_dir():
                    open_.append((path, above | {here}))
                elif path.is_file():
                    found.append(path)
        except OSError as error:
            raise InputError(f"{error.filename or place}: {error.strerror or error}") from error
    return sorted(found)


def read_parquet(spark: SparkSession, source: str) -> DataFrame:
    """A frame of a Parquet file or folder, a path or a URI. Raises InputError, and Spark's errors.

    Spark alone would leave out files in folders that stand for no column, without a word.
    """
    from pyspark.errors import AnalysisException

    try:
        local = local_folder(source, "IN.parquet")
    except PlaceError:
        local = None
    if local is not None and local.is_dir():
        files_below(local)
    try:
        whole = spark.read.option("recursiveFileLookup", "true").parquet(source)
    except AnalysisException as error:
        if "TIMESTAMP(NANOS" not in str(error):
            raise
        raise InputError(
            f"{source}: it has times in nanoseconds, which Spark does not read; write them in microseconds (pandas: "
            "to_parquet(..., coerce_timestamps='us', allow_truncated_timestamps=True))"
        ) from error
    try:
        frame = spark.read.parquet(source)  # has the columns that folders stand for
    except AnalysisException:  # all files are in folders that stand for none
        return whole
    return frame if len(frame.inputFiles()) == len(whole.inputFiles()) else whole
