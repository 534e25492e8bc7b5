"""The folder of a report: what is in it is whole.

A report is written to OUT/_unfinished and moved to OUT when it is complete. So what a run left that failed or was
killed is not taken for a report, and the same command can be given again. One run at a time holds the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tickwheel.storage.plain_file import ASIDE_SUFFIX, unfinished

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNFINISHED = "_unfinished"
_LOCK, _MOVING = "lock", "moving"
"""The file that a run locks, and the names of what it moves, from when the report is complete."""


class InUseError(Exception):
    """Another run writes to the folder; the text names it."""


@contextlib.contextmanager
def folder_made(path: Path) -> Iterator[None]:
    """The folder and those above it exist in this context. If it fails, those that it made are removed, unless
    something is in them."""
    made = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # something is in it
            for place in made:
                place.rmdir()
        raise


@contextlib.contextmanager
def report_in(out: Path) -> Iterator[Path]:
    """A new folder to write a report to. At the end all that is in it is moved to `out`: first folders, then files by
    their names. If the context fails, what was written is removed. What a killed run has left, in `out` too, is removed
    before the context begins. Raises InUseError, OSError."""
    place = out / UNFINISHED
    with folder_made(out):
        place.mkdir(exist_ok=True)
        with (place / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InUseError(f"{out}: another command is writing a report there") from None
            try:
                _move_back(place, out)
                for path in _content(place):
                    _remove(path)
                yield place
                write_whole(place / _MOVING, "\n".join(path.name for path in _content(place)).encode())
                try:
                    for path in _content(place):
                        path.rename(out / path.name)
                    (place / _MOVING).unlink()
                except BaseException:
                    _move_back(place, out)
                    raise
            finally:
                shutil.rmtree(place, ignore_errors=True)


def _content(place: Path) -> list[Path]:
    found = (path for path in place.iterdir() if path.name not in (_LOCK, _MOVING))
    return sorted(found, key=lambda path: (path.is_file(), path))


def _move_back(place: Path, out: Path) -> None:
    """Remove from `out` what a run had moved there that was killed before it had moved all."""
    moving = place / _MOVING
    for name in moving.read_text(encoding="utf-8").splitlines() if moving.exists() else ():
        if not (place / name).exists():
            _remove(out / name)
    moving.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there only once it is whole; an older one stays until then. Raises OSError."""
    aside = path.with_name(path.name + ASIDE_SUFFIX)
    with unfinished(aside):
        aside.write_bytes(data)
        aside.replace(path)


def write_plot(figure: Figure, path: Path) -> None:
    """The same with a plot, as PNG."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    write_whole(path, picture.getvalue())
