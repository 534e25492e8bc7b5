"""The manifest: which files of a node count, their lengths, and the applied index that they stand for.

Owns the file `manifest`, written whole (`whole_file.py`): after any crash it is the old one or the new one. The order
of a checkpoint is: files fsynced, manifest written, journal cut. The manifest never names bytes that are not on stable
storage. Called by the node's checkpoint and start.
"""

from __future__ import annotations

import google_crc32c
from google.protobuf.message import DecodeError

from tickwheel.proto.log_pb2 import Manifest
from tickwheel.proto.parsing import parsed
from tickwheel.storage.disk import Disk
from tickwheel.storage.errors import ADVICE, CorruptFileError, UnknownVersionError
from tickwheel.storage.whole_file import read_whole, write_whole

FORMAT_VERSION = 1
FILE_NAME = "manifest"
_CHECK_BYTES = 1 << 20


def write_manifest(disk: Disk, manifest: Manifest, path: str = FILE_NAME) -> None:
    """Replace the manifest; durable on return. Sets the format version."""
    manifest.format_version = FORMAT_VERSION
    write_whole(disk, path, manifest.SerializeToString(deterministic=True))


def read_manifest(disk: Disk, path: str = FILE_NAME) -> Manifest | None:
    """Read the manifest; None on a new node. Raises CorruptFileError, UnknownVersionError."""
    content = read_whole(disk, path, advice=ADVICE)
    if content is None:
        return None
    try:
        manifest = parsed(Manifest, content)
    except DecodeError as error:
        raise CorruptFileError(path, 0, f"it is not a manifest: {error}", ADVICE) from error
    if manifest.format_version > FORMAT_VERSION:
        raise UnknownVersionError(path, manifest.format_version, FORMAT_VERSION)
    return manifest


def restore_files(disk: Disk, manifest: Manifest) -> None:
    """Cut each file to the length in the manifest. Raises CorruptFileError if a file is missing, short or changed."""
    for wanted in manifest.files:
        if not disk.exists(wanted.path):
            raise CorruptFileError(wanted.path, 0, "the manifest names it, but it is missing", ADVICE)
        file = disk.open(wanted.path)
        try:
            size = file.size()
            if size < wanted.bytes:
                raise CorruptFileError(
                    wanted.path, size, f"it ends here, but by the manifest it has {wanted.bytes} bytes", ADVICE
                )
            if size > wanted.bytes:
                file.truncate(wanted.bytes)
            if wanted.crc32c:
                crc32c = 0
                for offset in range(0, wanted.bytes, _CHECK_BYTES):
                    crc32c = google_crc32c.extend(
                        crc32c, file.read_at(offset, min(_CHECK_BYTES, wanted.bytes - offset))
                    )
                if crc32c != wanted.crc32c:
                    raise CorruptFileError(wanted.path, 0, "its checksum is not the one in the manifest", ADVICE)
        finally:
            file.close()
