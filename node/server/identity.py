"""Whose data a directory holds, checked before anything in it is read.

Owns the file `identity`: cluster id, node id, disk uuid, written once. A directory of another cluster or node is
refused. That a wiped disk comes back under an old id cannot be seen here, where everything is new: the disk uuid is
new too, and the members, who remember the old one, refuse the node.
"""

from __future__ import annotations

import uuid

from google.protobuf.message import DecodeError

from tickwheel.proto.log_pb2 import Identity
from tickwheel.storage.disk import Disk, DiskError
from tickwheel.storage.whole_file import read_whole, write_whole

IDENTITY_PATH = "identity"
FORMAT_VERSION = 1
ADVICE = "Remove this member from the cluster and add it anew under a new id"
FOREIGN_NAMES = ("manifest", "journal", "state", "wheel")
"""What an earlier run leaves: if one is there without an identity, the identity was lost."""


class IdentityError(Exception):
    """This directory must not be used by this node; the text says what to do."""


def read_identity(disk: Disk) -> Identity | None:
    """What the directory says; None if it has no identity. Raises DiskError."""
    content = read_whole(disk, IDENTITY_PATH, advice=ADVICE)
    if content is None:
        return None
    identity = Identity()
    try:
        identity.ParseFromString(content)
    except DecodeError as error:
        raise DiskError(f"{IDENTITY_PATH} is not an identity file. {ADVICE}") from error
    return identity


def new_identity(cluster_id: str, node_id: str) -> Identity:
    """One that no other directory has."""
    return Identity(format_version=FORMAT_VERSION, cluster_id=cluster_id, node_id=node_id, disk_uuid=str(uuid.uuid4()))


def store_identity(disk: Disk, identity: Identity) -> None:
    """Durable on return."""
    write_whole(disk, IDENTITY_PATH, identity.SerializeToString(deterministic=True))


def open_identity(disk: Disk, cluster_id: str, node_id: str, root: str) -> Identity:
    """The directory's identity; made when the directory is new. Raises IdentityError, DiskError."""
    identity = read_identity(disk)
    if identity is None:
        left = [name for name in disk.list("") if name in FOREIGN_NAMES]
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
        raise IdentityError(
            f"{root} holds data of cluster {identity.cluster_id}, this node is configured for {cluster_id}. "
            "Correct cluster.id or node.data_dir"
        )
    if identity.node_id != node_id:
        raise IdentityError(
            f"{root} holds data of node {identity.node_id}, this node is configured as {node_id}. "
            "Correct node.id or node.data_dir"
        )
    return identity
