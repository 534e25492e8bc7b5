"""Errors found in the content of files. Errors of reading and writing as such are in `disk.py`."""

from __future__ import annotations

from tickwheel.storage.disk import DiskError, DiskFullError

ADVICE = (
    "Remove the member and add it anew under a new id, with an empty data directory; if no other member is left, "
    "restore a backup"
)
"""Remedy for damaged data. A directory that was emptied under the old id has forgotten votes, so it is refused."""


class CorruptFileError(DiskError):
    """Bytes on disk differ from those written. Names the file, the offset and the remedy for the operator."""

    def __init__(self, path: str, offset: int, cause: str, advice: str) -> None:
        super().__init__(f"{path!r} is damaged at byte {offset}: {cause}. {advice}")
        self.path = path
        self.offset = offset
        self.cause = cause
        self.advice = advice


def is_damage(error: BaseException | None) -> bool:
    """Whether this error says that a file cannot be read or written as it should be: another node must take over. Not
    so a full disk, which may get room."""
    return isinstance(error, DiskError) and not isinstance(error, DiskFullError)


class UnknownVersionError(DiskError):
    """A file has a format version that this program does not know."""

    def __init__(self, path: str, found: int, known_max: int) -> None:
        super().__init__(
            f"{path!r} has format version {found}, but this program reads up to {known_max}: "
            "start the version that wrote it"
        )
        self.path = path
        self.found = found
        self.known_max = known_max
