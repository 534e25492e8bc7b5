"""The list of a build's bundles: `manifest.json` in its folder, and its check.

It is written last, aside, then renamed: a folder without it is not a finished build. It lists each bundle with its
checksums, so a load brings exactly the bundles that were built. The checksum of the list names the load.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import google_crc32c

from tickwheel.pipeline import fields
from tickwheel.pipeline.bundling import BUNDLES
from tickwheel.storage.bundle import SUFFIX, is_name
from tickwheel.storage.plain_file import fsync_directory, replace_file

FILE_NAME = "manifest.json"
VERSION = 1
_BLOCK_BYTES = 1 << 20


class ManifestError(Exception):
    """The folder holds no whole build; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class BuiltBundle:
    """One bundle of a build."""

    name: str
    bytes: int
    units: int
    hour_min: int
    hour_max: int
    crc32c: int
    topics: list[str]

    def path(self, folder: Path) -> Path:
        """The path of its file."""
        return folder / BUNDLES / f"{self.name}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole build, in the order in which its bundles are loaded."""

    slot_ms: int
    units: int
    rejected: int
    bundles: list[BuiltBundle]

    @property
    def sha256(self) -> str:
        """The checksum of the list, which names the load."""
        facts = [[b.name, b.bytes, b.units, b.topics] for b in self.bundles]
        return hashlib.sha256(json.dumps([self.slot_ms, facts]).encode()).hexdigest()

    @property
    def topics(self) -> list[str]:
        """The topics of all bundles."""
        return sorted({topic for built in self.bundles for topic in built.topics})

    @property
    def bytes(self) -> int:
        """The bytes of all bundles together."""
        return sum(built.bytes for built in self.bundles)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which finishes a build; durable on return."""
    body = {"version": VERSION, **asdict(manifest)}
    text = json.dumps(body, sort_keys=True)
    content = json.dumps({"crc32c": google_crc32c.value(text.encode()), "build": body}, sort_keys=True, indent=1)
    fsync_directory(folder / BUNDLES)  # the workers fsync only the bundles themselves
    fsync_directory(folder.parent)
    replace_file(folder / FILE_NAME, content.encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a build. Raises ManifestError if it is missing or damaged."""
    path = folder / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        body = content["build"]
        if google_crc32c.value(json.dumps(body, sort_keys=True).encode()) != content["crc32c"]:
            raise ManifestError(f"{path}: it does not match its checksum; build again")
        if body.pop("version") != VERSION:
            raise ManifestError(f"{path}: it is not of version {VERSION}; use the version that built it")
        built = [fields.made(BuiltBundle, row) for row in fields.rows(body, "bundles")]
        manifest = fields.made(Manifest, body, bundles=built)
    except FileNotFoundError:
        raise ManifestError(f"{path}: it is missing, so {folder} is not a finished build") from None
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise ManifestError(f"{path}: it cannot be read ({error}); build again") from error
    for bundle in manifest.bundles:
        if not is_name(bundle.name) or not bundle.path(folder).is_file():
            raise ManifestError(f"{bundle.path(folder)}: the manifest names it, but it is missing; build again")
        size = bundle.path(folder).stat().st_size
        if size != bundle.bytes:
            raise ManifestError(f"{bundle.path(folder)}: it has {size} bytes, not {bundle.bytes}; build again")
    return manifest


def check_content(folder: Path, bundle: BuiltBundle) -> None:
    """Raises ManifestError if a bundle's bytes are not those that were built."""
    crc = 0
    with bundle.path(folder).open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = google_crc32c.extend(crc, block)
    if crc != bundle.crc32c:
        raise ManifestError(f"{bundle.path(folder)}: its bytes have changed since it was built; build again")
