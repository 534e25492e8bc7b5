"""A checkpoint copied from another member is put in place whole or not at all, whenever the power goes."""

from __future__ import annotations

import re
from random import Random

import google_crc32c
import pytest

from tests.node.state.solo import Harm, Solo
from tickwheel.node.core.checkpoint import MANIFEST_PATH
from tickwheel.node.core.install import CheckpointCopy, install_if_complete
from tickwheel.proto.common_pb2 import HeldFile
from tickwheel.proto.peer_pb2 import CheckpointChunk
from tickwheel.storage.bundle import DIRECTORY
from tickwheel.storage.disk import DiskError
from tickwheel.storage.manifest import read_manifest
from tickwheel.storage.partial_copy import CopyError
from tickwheel.storage.simulated import PowerLost
from tickwheel.wheel.units import HOUR_MS

FILE_SITES = {
    "a file that is received": r"staging/(wheel|state)/.*",
    "the manifest that is received": r"staging/manifest",
    "the marker": r"staging/complete\.new",
}
DIRECTORY_SITES = {
    "directories of what is received": r"staging/.+",
    "the directory of what is received": r"staging",
    "the root": r"",
}


def filled(seed: int, messages: int) -> Solo:
    """A node with merged hours, a buffer, ready queues; its checkpoint covers all. Seeds give logs of other length."""
    solo = Solo(seed)
    solo.create("g")
    for _ in range(2):
        solo.publish([solo.now_ms + n * HOUR_MS // messages for n in range(messages)], b"%d" % seed * 40)
        solo.pump()
    for _ in range(3 - seed):
        solo.dispatch(solo.now_ms + HOUR_MS // 4)
    solo.checkpoint()
    return solo


def chunks_of(source: Solo) -> list[CheckpointChunk]:
    """The files of its newest checkpoint, as they are sent."""
    manifest = read_manifest(source.disk)
    assert manifest is not None
    sent = []
    paths = [(file.path, file.bytes) for file in manifest.files]
    for path, size in [*paths, (MANIFEST_PATH, source.disk.size(MANIFEST_PATH))]:
        data = source.disk.open(path).read_at(0, size)
        for at in range(0, max(1, size), 5_000):
            part = data[at : at + 5_000]
            sent.append(CheckpointChunk(path=path, offset=at, data=part, crc32c=google_crc32c.value(part)))
    return sent


def start(behind: Solo, source: Solo) -> bool:
    """As a node starts: whether it has the source's checkpoint; else its own must be whole. Raises Harm."""
    try:
        install_if_complete(behind.disk)
        manifest = read_manifest(behind.disk)
    except DiskError as error:
        raise Harm(str(error)) from error
    node = source if manifest is not None and manifest.applied_index == source.cut else behind
    digest = node.state.digest().digest
    own, node.disk = node.disk, behind.disk
    try:
        node.restart()
        if node.state.digest().digest != digest:
            raise Harm("the digest is another")
        node.check()
    finally:
        node.disk = own
    return node is source


def lives(seed: int, without_file: str = "$.", without_directory: str = "$.") -> tuple[int, int]:
    """Power is lost at any step of copying and installing; how often the copy was there afterwards, and harm came."""
    rng = Random(seed)
    source, installed, harmed = filled(1, 60), 0, 0
    chunks = chunks_of(source)
    for step in range(0, 60, 2):
        behind = filled(2, 20)
        behind.disk.ignore_fsync(lambda path: re.fullmatch(without_file, path) is not None)
        behind.disk.ignore_fsync_dir(lambda path: re.fullmatch(without_directory, path) is not None)
        behind.disk.lose_power_after(step + rng.randrange(2))
        try:
            copy = CheckpointCopy(behind.disk)
            copy.begin()
            for chunk in chunks:
                copy.take(chunk)
            copy.finish()
            install_if_complete(behind.disk)
        except PowerLost:
            pass
        try:
            behind.disk.crash(rng, scattered=True)
            installed += start(behind, source)
        except Harm:
            harmed += 1
    return installed, harmed


def test_power_lost_at_any_step_leaves_the_old_state_or_the_new_one() -> None:
    """Both whole; and both come about."""
    for seed in range(3):
        installed, harmed = lives(seed)
        assert not harmed
        assert 0 < installed < 30


@pytest.mark.parametrize("site", FILE_SITES)
def test_without_a_file_sync_the_copy_is_not_whole(site: str) -> None:
    """Each is needed."""
    assert any(lives(seed, without_file=FILE_SITES[site])[1] for seed in range(20))


@pytest.mark.parametrize("site", DIRECTORY_SITES)
def test_without_a_directory_sync_the_copy_is_not_whole(site: str) -> None:
    """Each is needed."""
    assert any(lives(seed, without_directory=DIRECTORY_SITES[site])[1] for seed in range(20))


@pytest.mark.parametrize("seed", range(3))
def test_tries_that_lose_power_one_after_the_other_end_in_a_whole_copy(seed: int) -> None:
    """Each goes on from what the loss before it left, of the same checkpoint or another, and compares it."""
    rng = Random(seed)
    behind = filled(2, 20)
    sources = [filled(1, 60), filled(0, 50)]
    for n in range(40):
        source = sources[rng.randrange(2)] if n < 30 else sources[0]
        behind.disk.lose_power_after(rng.randrange(20, 40) + n)
        try:
            copy = CheckpointCopy(behind.disk)
            for chunk in left_out(copy.begin(), chunks_of(source)):
                copy.take(chunk)
            copy.finish()
            break
        except PowerLost:
            behind.disk.crash(rng, scattered=True)
    else:
        pytest.fail("no try came to its end")
    behind.disk.lose_power_after(1 << 30)
    files = {path.removeprefix("staging/") for path in behind.disk.files("staging")}
    assert files == {chunk.path for chunk in chunks_of(source)} | {"complete"}
    assert start(behind, source)


def left_out(held: list[HeldFile], chunks: list[CheckpointChunk]) -> list[CheckpointChunk]:
    """As a sender gives them to who holds some of the bytes."""
    contents: dict[str, bytes] = {}
    for chunk in chunks:
        contents[chunk.path] = contents.get(chunk.path, b"") + chunk.data
    known = {file.path: file for file in held}
    sent = []
    for path, data in contents.items():
        earlier = known.get(path, HeldFile())
        same = earlier.bytes <= len(data) and google_crc32c.value(data[: earlier.bytes]) == earlier.crc32c
        offset = earlier.bytes if same else 0
        for at in range(offset, max(offset + 1, len(data)), 5_000):
            part = data[at : at + 5_000]
            sent.append(CheckpointChunk(path=path, offset=at, data=part, crc32c=google_crc32c.value(part)))
    return sent


def test_files_of_another_checkpoint_are_not_put_in_place() -> None:
    """An earlier try left them; the checkpoint that came in the end does not name them."""
    source, behind = filled(1, 30), filled(2, 20)
    earlier = CheckpointCopy(behind.disk)
    part = CheckpointChunk(path=f"{DIRECTORY}/half", data=b"half", crc32c=google_crc32c.value(b"half"))
    earlier.take(part)
    earlier.pause()
    copy = CheckpointCopy(behind.disk)
    assert [(file.path, file.bytes, file.crc32c) for file in copy.begin()] == [(part.path, 4, part.crc32c)]
    for chunk in chunks_of(source):
        copy.take(chunk)
    copy.finish()
    assert not behind.disk.exists(f"staging/{DIRECTORY}/half")
    assert start(behind, source)


def test_a_sender_may_only_leave_out_what_was_named_to_it() -> None:
    """Else bytes that nobody compared would count."""
    behind = filled(2, 20)
    copy = CheckpointCopy(behind.disk)
    copy.take(CheckpointChunk(path="wheel/a", data=b"abcd", crc32c=google_crc32c.value(b"abcd")))
    copy.pause()
    copy.begin()
    for path, offset in (("wheel/a", 2), ("wheel/a", 5), ("wheel/b", 4)):
        with pytest.raises(CopyError, match="expected"):
            copy.take(CheckpointChunk(path=path, offset=offset, crc32c=0))
        copy.begin()


def test_a_checkpoint_without_its_manifest_or_with_other_bytes_is_refused() -> None:
    """Nothing of it is put in place."""
    source, behind = filled(1, 30), filled(2, 20)
    chunks = chunks_of(source)
    copy = CheckpointCopy(behind.disk)
    for chunk in chunks[:-1]:
        copy.take(chunk)
    with pytest.raises(CopyError, match="manifest"):
        copy.finish()
    chunks[0].data = bytes([chunks[0].data[0] ^ 1]) + chunks[0].data[1:]
    with pytest.raises(CopyError, match="checksum"):
        CheckpointCopy(behind.disk).take(chunks[0])
    for path in ("journal/x", "wheel/../journal/x", "synced"):
        with pytest.raises(CopyError, match="does not hold"):
            CheckpointCopy(behind.disk).take(CheckpointChunk(path=path))
    assert not install_if_complete(behind.disk)
    assert not start(behind, source)
