"""A copy that broke anywhere resumes, and no file is ever put together from two versions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar
from unittest import mock

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.proto.common_pb2 import HeldFile
from tickwheel.replication import copied_file
from tickwheel.replication.copied_file import Piece, pieces
from tickwheel.storage.partial_copy import CopyError, PartialCopy
from tickwheel.storage.simulated import SimulatedDisk

T = TypeVar("T")
Files = dict[str, bytes]
CHUNK_BYTES = 5


@dataclass(frozen=True)
class Sent:
    """One file as its sender sees it."""

    path: str
    bytes: int


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits")


async def all_of(stream: AsyncIterator[Piece]) -> list[Piece]:
    """What an iterator gives."""
    return [piece async for piece in stream]


def sent(files: Files, held: list[HeldFile]) -> list[tuple[str, int, bytes]]:
    """The chunks that a sender of these files gives to who holds that."""
    known = {file.path: file for file in held}
    chunks: list[tuple[str, int, bytes]] = []
    for path, content in files.items():

        async def read(offset: int, size: int, content: bytes = content) -> bytes:
            return content[offset : offset + size]

        given_pieces = at_once(all_of(pieces(Sent(path, len(content)), known.get(path), read)))
        chunks += [(path, piece.offset, piece.data) for piece in given_pieces if not piece.compared]
    return chunks


def received(disk: SimulatedDisk, files: Files, chunks_max: int = 1 << 30) -> int:
    """One try of a receiver on this disk, in a new process, that breaks after so many chunks; the bytes that came."""
    copy = PartialCopy(disk, "", lambda path: path != "mark")
    for path, offset, data in sent(files, copy.begin())[:chunks_max]:
        copy.take(path, offset, data, google_crc32c.value(data))
    if chunks_max == 1 << 30:
        copy.fsync()
    copy.pause()
    return copy.bytes


def on(disk: SimulatedDisk) -> Files:
    """What lies on the disk."""
    return {path: disk.open(path).read_at(0, 1 << 20) for path in disk.files("") if path != "mark"}


CONTENTS = st.dictionaries(st.sampled_from(["a", "b/c", "b/d"]), st.binary(max_size=23), min_size=1)


@mock.patch.object(copied_file, "CHUNK_BYTES", CHUNK_BYTES)
@given(first=CONTENTS, then=CONTENTS, grows=st.booleans(), cut=st.integers(0, 20), harm=st.integers(-1, 80))
def test_a_broken_copy_ends_as_the_version_that_came_last(
    first: Files, then: Files, grows: bool, cut: int, harm: int
) -> None:
    """Cut after any chunk, with a byte of the receiver's disk spoilt or not; the sender has by then what it had, files
    that have grown, or others."""
    if grows:
        then = {path: first.get(path, b"") + tail for path, tail in then.items()}
    disk = SimulatedDisk(Random(1))
    disk.open("mark", create=True)
    received(disk, first, cut)
    spoilt = 0
    for path, content in on(disk).items():
        if 0 <= harm - spoilt < len(content):
            disk.open(path).write_at(harm - spoilt, bytes([content[harm - spoilt] ^ 1]))
        spoilt += len(content)
    received(disk, then)
    assert on(disk) == then
    assert disk.exists("mark"), "it is not the copy's"


@pytest.mark.parametrize("cut", range(13))
def test_what_has_arrived_is_not_sent_again(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a cut at any chunk both tries together carry each byte once."""
    monkeypatch.setattr(copied_file, "CHUNK_BYTES", CHUNK_BYTES)
    files = {"a": bytes(range(23)), "b": b"", "c": bytes(range(10)), "d": b"x"}
    disk = SimulatedDisk(Random(1))
    came = received(disk, files, cut)
    assert came + received(disk, files) == sum(map(len, files.values()))
    assert on(disk) == files


def test_bytes_that_nobody_compared_never_count() -> None:
    """A chunk behind a gap, or behind less than is held, is refused; so are a wrong checksum and a strange path."""
    copy = PartialCopy(SimulatedDisk(Random(1)), "", lambda path: path == "a")
    copy.take("a", 0, b"abcd", google_crc32c.value(b"abcd"))
    for path, offset, crc32c, match in (
        ("a", 3, 0, "expected 4"),
        ("a", 5, 0, "expected 4"),
        ("a", 4, 1, "checksum"),
        ("b", 0, 0, "does not hold"),
    ):
        with pytest.raises(CopyError, match=match):
            copy.take(path, offset, b"", crc32c)
