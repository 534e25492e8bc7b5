"""The durable term and vote of a node.

One small file, replaced whole. It is durable when `store` returns; only then does a term or a vote count. It never goes
back: a lower term, or another vote in the same term, is a bug of the caller.

Layout of the content: u32 version, u32 length of the name, u64 term, name in UTF-8.
Called by `journal.py` only.
"""

from __future__ import annotations

import struct

from tickwheel.storage.disk import Disk
from tickwheel.storage.errors import CorruptFileError, UnknownVersionError
from tickwheel.storage.whole_file import read_whole, write_whole

FORMAT_VERSION = 1
FILE_NAME = "hard_state"
_HEAD = struct.Struct("<IIQ")
_ADVICE = "This node may have forgotten a vote: remove the member and add it anew under a new id"


class HardState:
    """Term and vote as they are on stable storage."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._path = f"{directory}/{FILE_NAME}"
        self.term = 0
        self.voted_for = ""
        content = read_whole(disk, self._path, advice=_ADVICE)
        if content is None:
            return
        if len(content) < _HEAD.size:
            raise CorruptFileError(self._path, 0, "too short", _ADVICE)
        version, name_bytes, self.term = _HEAD.unpack_from(content)
        if version > FORMAT_VERSION:
            raise UnknownVersionError(self._path, version, FORMAT_VERSION)
        self.voted_for = content[_HEAD.size : _HEAD.size + name_bytes].decode()

    def store(self, term: int, voted_for: str) -> None:
        """Durable on return. Raises FsyncFailedError (fatal) and DiskFullError (then the old state holds)."""
        if (term, voted_for) == (self.term, self.voted_for):
            return
        assert term >= self.term, f"term would go back from {self.term} to {term}"
        assert term > self.term or not self.voted_for, f"second vote in term {term}: {self.voted_for}, {voted_for}"
        name = voted_for.encode()
        write_whole(self._disk, self._path, _HEAD.pack(FORMAT_VERSION, len(name), term) + name)
        self.term, self.voted_for = term, voted_for
