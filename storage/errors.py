"""Errors found in the content of files. Errors of reading and writing as such are in `disk.py`."""

from __future__ import annotations

from tickwheel.storage.disk import DiskError, DiskFullError

ADVICE = (
    "Remove the member and add it anew under a new id, with an empty data directory; if no other member is left, "
    "restore a backup"
)
"""Remedy for damaged data. The old id with an emptied directory would be refused: it has forgotten its votes."""


class CorruptFileError(DiskError):
    """Bytes on disk differ from those written. Names the file, the offset and the remedy for the operator."""

    def __init__(self, path: str, offset: int, cause: str, advice: str) -> None:
        super().__init__(f"{path!r} is damaged at byte {offset}: {cause}. {advice}")
        self.path = path
        self.offset = offset
        self.cause = cause
        self.advice = advice


def is_damage(error: BaseException | None) -> bool:
    """Whether this error means that a file can no longer be read or written properly, so another node must take over. A
    full disk does not count: it may get room again."""
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
