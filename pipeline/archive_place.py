"""The folder of an archive, in any file system that Spark has.

`day=YYYY-MM-DD/` holds its rows, `_marks/<group>/<number>.json` the progress of each group. The highest number counts:
a new mark is written before the old ones are removed, so a crash loses none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tickwheel.pipeline.places import PlaceError, spark_folder

A = TypeVar("A")


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
        try:
            path = self._path(below)
            return work(path.getFileSystem(self._spark._jsc.hadoopConfiguration()), path)
        except (Py4JJavaError, PySparkException) as error:
            why = str(error.java_exception if isinstance(error, Py4JJavaError) else error).splitlines()[0]
            where = f"{self.uri}/{below}" if below else self.uri
            raise ArchiveError(f"{where}: Spark says: {why} (a path, or a URI of a file system that it has)") from None

    def make(self) -> None:
        """Create the folder if it does not exist."""
        if not self._do("", lambda system, path: system.mkdirs(path)):  # Hadoop does not say why
            raise ArchiveError(f"{self.uri}: the folder cannot be made; look at path, owner and free space")

    def has_days(self) -> bool:
        """Whether the archive has any rows."""
        return bool(self._do("day=*", lambda system, path: bool(system.globStatus(path))))

    def mark(self, group: str) -> str:
        """The mark stored last; empty if there is none."""
        numbers = self._numbers(group)
        if not numbers:
            return ""

        def read(system: Any, path: Any) -> bytes:
            jvm = self._spark._jvm
            assert jvm is not None
            stream = system.open(path)
            try:
                return bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

        return self._do(f"_marks/{group}/{max(numbers)}.json", read).decode(errors="replace")

    def put_mark(self, group: str, number: int, text: str) -> None:
        """Replace the mark of a group. The new mark gets `number`, or a higher one if needed to be the newest."""
        before = self._numbers(group)
        name = f"_marks/{group}/{max([number, *(old + 1 for old in before)])}"

        def write(system: Any, path: Any) -> None:
            stream = system.create(path, True)
            try:
                stream.write(bytearray(text.encode()))
            finally:
                stream.close()

        self._do(f"{name}.new", write)
        target = self._path(f"{name}.json")
        # Hadoop answers false for a rename that has failed.
        if not self._do(f"{name}.new", lambda system, path: system.rename(path, target)):
            raise ArchiveError(f"{self.uri}/{name}.new: it cannot be renamed to {name}.json; run the archive again")
        for old in before:
            self._do(f"_marks/{group}/{old}.json", lambda system, path: system.delete(path, False))

    def _numbers(self, group: str) -> list[int]:
        found = self._do(f"_marks/{group}/*.json", lambda system, path: system.globStatus(path))
        numbers = []
        for status in found or ():
            with suppress(ValueError):
                numbers.append(int(status.getPath().getName().removesuffix(".json")))
        return numbers
