"""Files for people and other programs, without a header of ours: each is replaced whole.

A write has four steps, as in whole_file.py: write aside, fsync, rename into place, fsync the directory. So after a
crash a file is either the old one or the new one. One writer at a time: callers that may run beside others hold a lock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ASIDE_SUFFIX = ".part"
"""Suffix of the file that a killed process leaves; the next write of the same file replaces it."""


@contextlib.contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Errors of the system in this context name `path`, unless they name a file. The system's calls on open files, and
    libraries, leave that out."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror or os.strerror(error.errno), str(path)) from error


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[None]:
    """`path` is written in this context. If that fails, it is removed, or repeats would fill a full disk, and an error
    of the system names it."""
    try:
        with naming(path):
            yield
    except BaseException:
        with contextlib.suppress(OSError):  # the first error counts
            path.unlink(missing_ok=True)
        raise


def replace_file(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by a file of this mode; durable on return. A symbolic link is replaced, not followed.

    Raises OSError. Then the old file is still in place, or the new one if only its durability is in doubt.
    """
    aside = path.with_name(path.name + ASIDE_SUFFIX)
    aside.unlink(missing_ok=True)
    with unfinished(aside):
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        aside.replace(path)
    fsync_directory(path.parent)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and those above it, unless they exist; durable on return. Raises OSError."""
    made = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(mode, parents=True, exist_ok=True)
    for place in made:
        fsync_directory(place.parent)


def fsync_directory(path: Path) -> None:
    """Bring the entries of a directory to stable storage. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
