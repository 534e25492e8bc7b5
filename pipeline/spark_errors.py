"""What an error of Spark says in one line: its cause, not the frames of Java and Python around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

_OWN = re.compile(r"^tickwheel\.[\w.]+: (.+)$", re.MULTILINE)
"""The last line of a traceback that ends with an error of ours."""
_FILE = re.compile(r"^\w+Error: \[Errno \d+\] (.+): '(.+)'$", re.MULTILINE)
"""The last line of a traceback that ends with an error of the system: what happened, and to which file."""
_WORKER = re.compile(r"^Traceback .*\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)
"""A traceback of Python; its last line says what happened."""
_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded|File too large")
_WRITTEN = re.compile(r"writing rows to (?:file:)?(.+)\. SQLSTATE")
_WORKER_ENDED = "java.io.EOFException"
"""All that Java says when a Python process of its has ended in the middle of a write's commit."""
_LOCAL = re.compile(r"org\.apache\.spark\.(storage|shuffle|io|memory|broadcast|unsafe|util\.collection)\.")
"""Parts of Spark that write to its local folders."""


def reason_of(error: PySparkException | Py4JJavaError, where: str = "") -> str:
    """The reason in a line. If Python code raised it inside Spark, that is the text of its error; Spark's first line
    only announces a traceback. `where` begins the text, unless a file is named."""
    from py4j.protocol import Py4JJavaError

    if isinstance(error, Py4JJavaError):
        causes = list(_causes(error.java_exception))
        text = str(causes[-1].toString()).strip()
        if full := _NO_ROOM.search(text):
            where = _full_place(causes) or where
            return f"{where}: {full[0]}" if where else full[0]
        if text == _WORKER_ENDED:
            text = (
                "a Python process of Spark has ended in the middle of its work: it was killed, by a user or by the "
                "system for want of memory, or it crashed. Run the same job again, under the same job id if it has one"
            )
    else:
        text = str(error).strip()
    if not _OWN.search(text) and (found := _FILE.findall(text)):
        why, path = found[-1]
        return f"{path}: {why}"  # not `where`: it is often another file
    why = _OWN.findall(text)[-1:] or _WORKER.findall(text)[-1:] or text.splitlines()[:1]
    return ": ".join([where, *why] if where else why)


def _causes(error: Any) -> Iterator[Any]:
    """A Java error that PySpark does not translate and its causes, of which the last names the fault."""
    while error is not None:
        yield error
        error = error.getCause()


def _full_place(causes: list[Any]) -> str:
    """Which disk is full: Java does not say. Empty if that cannot be told."""
    for error in causes:
        if found := _WRITTEN.search(str(error.toString())):
            return found[1]
    frames = [str(frame.getClassName()) for frame in causes[-1].getStackTrace()]
    return "Spark's local folder (SPARK_LOCAL_DIRS or /tmp)" if any(map(_LOCAL.match, frames)) else ""


@contextmanager
def raising(kind: type[Exception], where: str = "") -> Iterator[None]:
    """Errors of Spark become errors of this kind, with `reason_of` as text and Spark's error as their cause."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise kind(reason_of(error, where)) from error
