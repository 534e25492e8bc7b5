"""What reading a file can find wrong with it. Errors of writing are in `disk.py`."""

from __future__ import annotations

from tickwheel.storage.disk import DiskError

ADVICE = (
    "Remove the member and add it anew under a new id, with an empty data directory; if no other member is left, "
    "restore a backup"
)
"""What helps against damaged data. A directory that was emptied under the old id has forgotten votes: it is refused."""


class CorruptFileError(DiskError):
    """Bytes on disk are not what was written. Names the file, the offset and what the operator should do."""

    def __init__(self, path: str, offset: int, cause: str, advice: str) -> None:
        super().__init__(f"{path!r} is damaged at byte {offset}: {cause}. {advice}")
        self.path = path
        self.offset = offset
        self.cause = cause
        self.advice = advice


class UnknownVersionError(DiskError):
    """A file was written in a version of its format that this program does not know."""

    def __init__(self, path: str, found: int, known_max: int) -> None:
        super().__init__(
            f"{path!r} has format version {found}, but this program reads up to {known_max}: "
            "start the version that wrote it"
        )
        self.path = path
        self.found = found
        self.known_max = known_max
