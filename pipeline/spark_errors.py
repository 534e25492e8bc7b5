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


def reason_of(error: PySparkException | Py4JJavaError, where: str = "") -> str:
    """The reason in a line. If Python code raised it inside Spark, that is the text of its error; Spark's first line
    only announces a traceback. `where` begins the text, unless a file is named."""
    from py4j.protocol import Py4JJavaError

    text = _java_text(error.java_exception) if isinstance(error, Py4JJavaError) else str(error).strip()
    if not _OWN.search(text) and (found := _FILE.findall(text)):
        why, path = found[-1]
        return f"{path}: {why}"  # not `where`: it is often another file
    why = _OWN.findall(text)[-1:] or _WORKER.findall(text)[-1:] or text.splitlines()[:1]
    return ": ".join([where, *why] if where else why)


def _java_text(error: Any) -> str:
    """What Java says about an error that PySpark does not translate: of its causes the first, which names the fault."""
    while error.getCause() is not None:
        error = error.getCause()
    return str(error.toString()).strip()


@contextmanager
def raising(kind: type[Exception], where: str = "") -> Iterator[None]:
    """Errors of Spark become errors of this kind, with `reason_of` as text and Spark's error as their cause."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise kind(reason_of(error, where)) from error
