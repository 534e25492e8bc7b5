"""The owner of a data directory, checked before anything else in it is read.

Owns the file `identity`: cluster id, node id and disk uuid, written once. A directory of another cluster or node is
refused. A wiped disk under an old node id cannot be detected here, since a new directory looks the same. But its disk
uuid is new too, and the members remember the old one and refuse the node. So it must be if everything but this file was
removed.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from google.protobuf.message import DecodeError

from tickwheel.node.core.checkpoint import cluster_of
from tickwheel.node.core.founding import PATH as FOUNDING_PATH
from tickwheel.proto.log_pb2 import Identity
from tickwheel.proto.parsing import parsed
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.storage.owner import NOBODY, Owner
from tickwheel.storage.whole_file import read_whole, write_whole

IDENTITY_PATH = "identity"
FORMAT_VERSION = 1
ADVICE = "Remove this member from the cluster and add it anew under a new id"
UNFINISHED_RESTORE = "restore.unfinished"
"""A file that is there while `tickwheel restore` makes the directory (node/backup_files.py)."""
FOREIGN_NAMES = ("manifest", "journal", "state", "wheel")
"""Files of an earlier run: if one exists without an identity, the identity was lost."""
FIRST_NAMES = (*FOREIGN_NAMES, FOUNDING_PATH)
"""A node has one of these before it speaks to any other."""


class IdentityError(Exception):
    """This node must not use this directory; the text says what to do."""


def read_identity(disk: Disk) -> Identity | None:
    """The identity of the directory; None if it has none. Raises DiskError."""
    content = read_whole(disk, IDENTITY_PATH, advice=ADVICE)
    if content is None:
        return None
    try:
        return parsed(Identity, content)
    except DecodeError as error:
        raise DiskError(f"{IDENTITY_PATH} is not an identity file. {ADVICE}") from error


def owner_of(identity: Identity | None) -> Owner:
    """The directory that an identity names."""
    return NOBODY if identity is None else Owner(identity.cluster_id, identity.node_id, identity.disk_uuid)


def new_identity(cluster_id: str, node_id: str) -> Identity:
    """An identity with a new disk uuid, which no other directory has."""
    return Identity(format_version=FORMAT_VERSION, cluster_id=cluster_id, node_id=node_id, disk_uuid=str(uuid.uuid4()))


def store_identity(disk: Disk, identity: Identity) -> None:
    """Write the identity; durable on return. Raises DiskError."""
    write_whole(disk, IDENTITY_PATH, identity.SerializeToString(deterministic=True))


def open_identity(disk: Disk, cluster_id: str, node_id: str, root: str) -> Identity:
    """The identity of the directory, created if the directory is new. Raises IdentityError, DiskError."""
    identity = read_identity(disk)
    names = disk.list("")
    check_restored(disk, root)
    if identity is None:
        left = [name for name in names if name in FOREIGN_NAMES]
        if left:
            raise IdentityError(
                f"{root} holds data ({', '.join(left)}) but no identity file. Empty the directory, remove the member "
                "from the cluster and add the node under a new id; or restore a backup (tickwheel restore)"
            )
        identity = new_identity(cluster_id, node_id)
        store_identity(disk, identity)
        return identity
    if identity.format_version > FORMAT_VERSION:
        raise IdentityError(
            f"{root} was written by a newer version (format {identity.format_version}, this one knows {FORMAT_VERSION})"
        )
    if identity.cluster_id != cluster_id:
        if cluster_of(disk) == cluster_id:
            raise IdentityError(
                f"{root}: tickwheel recover was interrupted, which was to make cluster {cluster_id} of cluster "
                f"{identity.cluster_id}. Run it again, or put the copy of the directory back"
            )
        raise IdentityError(
            f"{root} holds data of cluster {identity.cluster_id}, this node is configured for {cluster_id}. "
            "Correct cluster.id or node.data_dir"
        )
    if identity.node_id != node_id:
        raise IdentityError(
            f"{root} holds data of node {identity.node_id}, this node is configured as {node_id}. "
            "Correct node.id or node.data_dir"
        )
    if not any(name in FIRST_NAMES for name in names):
        # Nobody has heard of this uuid yet, or the disk has forgotten what its node said.
        identity = new_identity(cluster_id, node_id)
        store_identity(disk, identity)
    return identity


def check_restored(disk: Disk, root: str) -> None:
    """Raise IdentityError if a restore into this directory has not ended. Raises DiskError."""
    if disk.exists(UNFINISHED_RESTORE):
        raise IdentityError(
            f"{root}: tickwheel restore was interrupted. Run it again: it starts over, in the same directory"
        )


def why_gone(path: Path) -> str:
    """Why there is no file at `path`. Empty: there is one, or the system cannot tell, as when a remote disk does not
    answer or memory is short."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        return error.strerror or str(error)
    except OSError:  # what is wrong with the disk shows where it is read and written
        return ""
    return ""
