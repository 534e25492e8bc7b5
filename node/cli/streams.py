"""The standard streams of a command, whatever shell and locale have made of them. Imports next to nothing."""

import io
import os
import re
import sys

_COLUMNS = re.compile(r"[2-9][0-9]|[1-9][0-9]{2,4}")
"""A width in which something can be shown; `docker exec` and the like say 0."""
MESSAGE_CHARACTERS_MAX = 2_000
"""Of an error; beginning and end are shown of a longer one."""


def make_usable() -> None:
    """Each can be read or written from now on, and $COLUMNS is a width or absent.

    A stream that the shell has closed (`>&-`) becomes the null device, so that no file of ours gets its number. A
    character that an encoding lacks is written as a code, such as \\u20ac.
    """
    if not _COLUMNS.fullmatch(os.environ.get("COLUMNS", "")):
        os.environ.pop("COLUMNS", None)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", encoding="utf-8"))
        stream = getattr(sys, name)
        if number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def let_go() -> None:
    """Before the end: what a full disk or a reader that has gone did not take is dropped. Python would try again then,
    print what it ignores, and end with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def shortened(message: str) -> str:
    """A message that may quote a value of any length."""
    half = MESSAGE_CHARACTERS_MAX // 2
    return message if len(message) <= MESSAGE_CHARACTERS_MAX else f"{message[:half]} ... {message[-half:]}"
