"""The data directory that a file belongs to, so that a start tells a file of another directory from its own.

A node's journal, votes and founding say what that node has promised. In the directory of another they would make it
break its own promises: it would have forgotten its votes, and would count for entries that it does not have. So these
files name their owner, or hold its `tag` where there is room for a number alone. Files of versions before this one name
none and are taken as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import google_crc32c
from google.protobuf.message import DecodeError

from tickwheel.proto.log_pb2 import Identity
from tickwheel.proto.parsing import parsed
from tickwheel.storage.disk import DiskError
from tickwheel.storage.errors import ADVICE


class ForeignFileError(DiskError):
    """A file was written for another data directory than the one it lies in."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A data directory as its file `identity` names it. Without a disk uuid it names none, and nothing is compared."""

    cluster_id: str = ""
    node_id: str = ""
    disk_uuid: str = ""

    @property
    def tag(self) -> int:
        """32 bits that differ from those of nearly all other owners; 0: none."""
        return (google_crc32c.value(self.disk_uuid.encode()) or 1) if self.disk_uuid else 0

    def pack(self) -> bytes:
        """The owner as bytes behind the content of a file; none if it has no disk."""
        if not self.disk_uuid:
            return b""
        named = Identity(cluster_id=self.cluster_id, node_id=self.node_id, disk_uuid=self.disk_uuid)
        packed: bytes = named.SerializeToString(deterministic=True)
        return packed

    def check(self, path: str, packed: bytes) -> None:
        """Raise ForeignFileError if the file at `path`, which holds these bytes of `pack`, is another owner's."""
        try:
            found = parsed(Identity, packed)
        except DecodeError:  # a later version's; the file's checksum has matched
            return
        if found.disk_uuid and self.disk_uuid and found.disk_uuid != self.disk_uuid:
            whose = f"node {found.node_id} of cluster {found.cluster_id}"
            if (found.cluster_id, found.node_id) == (self.cluster_id, self.node_id):
                whose = "an earlier data directory of this node"
            raise self.foreign(path, whose)

    def check_tag(self, path: str, tag: int) -> None:
        """Raise ForeignFileError if the file at `path`, which holds this tag, is another owner's."""
        if tag and self.tag and tag != self.tag:
            raise self.foreign(path, "another node, or of an earlier data directory of this one")

    def foreign(self, path: str, whose: str) -> ForeignFileError:
        """The refusal of a file that belongs elsewhere."""
        return ForeignFileError(
            f"{path!r} is a file of {whose}, and this directory is that of node {self.node_id}: with it the node would "
            "forget what it has voted for and acknowledged. Nothing was changed. Put this node's own files back, all "
            f"of them and as they were when it stopped last. If they are gone: {ADVICE[0].lower()}{ADVICE[1:]}"
        )


NOBODY = Owner()
"""For a journal that belongs to no node yet, and for tools that read a directory whoever owns it."""
