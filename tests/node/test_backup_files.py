"""A backup's directory: unfinished until everything is on stable storage, gone on with by a later process."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from tickwheel.client.copies import BackupChunk, HeldFile, chunk_of
from tickwheel.node.backup_files import LIST_NAME, UNFINISHED_NAME, BackupError, BackupWriter, restore_backup
from tickwheel.proto import admin_pb2
from tickwheel.storage.disk import LOCK_NAME, DiskError, DiskFullError

FILES = {"wheel/1/log": bytes(range(200)), "state/empty": b"", "state/ready/a.ids.0": b"ids", "manifest": b"manifest"}
PIECE = 70


def chunks(files: dict[str, bytes], held: Sequence[HeldFile] = (), cluster_id: str = "c") -> list[BackupChunk]:
    """The stream of a node with these files, to a caller that holds some."""
    known = {file.path: file for file in held}
    sent: list[admin_pb2.BackupChunk] = []
    for path, content in files.items():
        has = known.get(path, HeldFile(path, 0, 0))
        same = has.bytes <= len(content) and google_crc32c.value(content[: has.bytes]) == has.crc32c
        begin = has.bytes if same else 0
        if has.bytes:
            sent.append(admin_pb2.BackupChunk(path=path, comparing=True))
        for offset in range(begin, max(begin + 1, len(content)), PIECE):
            data = content[offset : offset + PIECE]
            crc32c = google_crc32c.value(data)
            sent.append(
                admin_pb2.BackupChunk(path=path, offset=offset, data=data, crc32c=crc32c, file_bytes=len(content))
            )
    sent[0].origin.CopyFrom(admin_pb2.BackupOrigin(cluster_id=cluster_id, node_id="n"))
    sent[-1].last = True
    return list(map(chunk_of, sent))


def a_chunk(**fields: Any) -> BackupChunk:
    """One chunk of a stream, without what it does not say."""
    return chunk_of(admin_pb2.BackupChunk(**fields))


def whole(directory: Path, files: dict[str, bytes] = FILES) -> None:
    """A copy from its beginning or from where one ended, to its end."""
    writer = BackupWriter(directory)
    for chunk in chunks(files, writer.begin()):
        writer.write(chunk)
    writer.finish()
    writer.close()


def restored(directory: Path, target: Path) -> dict[str, bytes]:
    """What a restore takes from a backup."""
    restore_backup(directory, target, lambda done, total: None, lambda disk: None)
    files = [path for path in target.rglob("*") if path.is_file() and path.name != LOCK_NAME]
    return {path.relative_to(target).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("cut", range(len(chunks(FILES)) + 1))
def test_a_copy_that_was_cut_anywhere_is_refused_and_gone_on_with(cut: int, tmp_path: Path) -> None:
    """By a restore, with what to do, and by the next copy: both together carry each byte once."""
    copy = tmp_path / "copy"
    first = BackupWriter(copy)
    came = 0
    for chunk in chunks(FILES, first.begin())[:cut]:
        first.write(chunk)
        came += len(chunk.data)
    first.close()
    if cut:
        with pytest.raises(BackupError, match=r"interrupted.*`tickwheel backup .*` goes on"):
            restored(copy, tmp_path / "data")
    second = BackupWriter(copy)
    assert second.held_bytes == came
    for chunk in chunks(FILES, second.begin()):
        second.write(chunk)
        came += len(chunk.data)
    second.finish()
    second.close()
    assert came == second.bytes == sum(map(len, FILES.values()))
    assert restored(copy, tmp_path / "data") == FILES
    assert {path.name for path in copy.iterdir()} == {"wheel", "state", "manifest", LIST_NAME}
    with pytest.raises(BackupError, match="whole backup: name a new directory"):
        BackupWriter(copy)


def test_a_later_checkpoint_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    """The node has written another meanwhile: a file has grown, one differs, one is gone."""
    copy = tmp_path / "copy"
    first = BackupWriter(copy)
    for chunk in chunks(FILES, first.begin())[:-1]:
        first.write(chunk)
    first.close()
    later = {"wheel/1/log": FILES["wheel/1/log"] + b"more", "state/ready/b.ids.0": b"b", "manifest": b"another"}
    whole(copy, later)
    assert restored(copy, tmp_path / "data") == later
    assert not (copy / "state/ready/a.ids.0").exists()


def test_what_a_crash_left_half_written_is_sent_anew(tmp_path: Path) -> None:
    """Of a lost machine the file's length may be there, and not its bytes."""
    copy = tmp_path / "copy"
    first = BackupWriter(copy)
    for chunk in chunks(FILES, first.begin())[:2]:
        first.write(chunk)
    first.close()
    (copy / "wheel/1/log").write_bytes(bytes(140))
    whole(copy)
    assert restored(copy, tmp_path / "data") == FILES


def test_the_list_is_written_once_everything_is_on_stable_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that an earlier process wrote, too; and the list itself before the mark goes."""
    copy = tmp_path / "copy"
    first = BackupWriter(copy)
    for chunk in chunks(FILES, first.begin())[:4]:
        first.write(chunk)
    first.close()
    durable: list[str] = []
    at_rename: list[set[str]] = []
    sync, rename = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        durable.append(os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), copy))
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        if target.name == LIST_NAME:
            at_rename.append(set(durable))
            durable.clear()
            assert (copy / UNFINISHED_NAME).exists()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    second = BackupWriter(copy)
    for chunk in chunks(FILES, second.begin()):
        second.write(chunk)
    durable.clear()
    second.finish()
    (before,) = at_rename
    assert before >= {*FILES, "wheel/1", "state", "state/ready", ".", f"{LIST_NAME}.part"}
    assert durable[0] == ".", "the rename"


def test_two_processes_do_not_write_to_one_directory(tmp_path: Path) -> None:
    """The second is refused, also before the first has got anything; and goes on once that is gone."""
    copy = tmp_path / "copy"
    first = BackupWriter(copy)
    with pytest.raises(BackupError, match="another process"):
        BackupWriter(copy)
    first.close()
    whole(copy)


def test_a_copy_in_which_nothing_arrived_leaves_no_mark(tmp_path: Path) -> None:
    """A mistyped address."""
    BackupWriter(tmp_path / "copy").close()
    assert not (tmp_path / "copy" / UNFINISHED_NAME).exists()
    whole(tmp_path / "copy")


@pytest.mark.parametrize(
    "path",
    [
        *("../outside", "/etc/passwd", "wheel/../../outside", "wheel//a", "wheel/./a", "wheel/", "wheel", "", "."),
        *(
            "identity",
            "journal/1.segment",
            ".lock",
            LIST_NAME,
            UNFINISHED_NAME,
            "wheel/a\0b",
            "wheel/\x1b[2J",
            "state\\x",
        ),
    ],
)
def test_a_path_that_no_checkpoint_has_is_refused(path: str, tmp_path: Path) -> None:
    """A hostile node writes nothing outside the directory, nor over the list, the mark and the lock."""
    writer = BackupWriter(tmp_path / "copy")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(BackupError, match="does not hold a file"):
        writer.write(a_chunk(path=path, data=b"x", crc32c=google_crc32c.value(b"x"), file_bytes=1))
    assert set(tmp_path.rglob("*")) == before
    writer.close()


def test_a_node_that_breaks_its_word_makes_no_backup(tmp_path: Path) -> None:
    """More bytes than the file has, a file where a directory is, anything after the end, an end too early."""
    writer = BackupWriter(tmp_path / "copy")
    one = a_chunk(path="wheel/a", data=b"x", crc32c=google_crc32c.value(b"x"), file_bytes=2)
    writer.write(one)
    with pytest.raises(BackupError, match="before the end"):
        writer.finish()
    with pytest.raises(DiskError):
        writer.write(a_chunk(path="wheel/a/b", data=b"x", crc32c=one.crc32c, file_bytes=1))
    with pytest.raises(BackupError, match="larger"):
        writer.write(a_chunk(path="wheel/a", offset=1, data=b"xx", file_bytes=2))
    writer.write(a_chunk(path="manifest", data=b"x", crc32c=one.crc32c, file_bytes=1, last=True))
    with pytest.raises(BackupError, match="before the end"):
        writer.finish()
    with pytest.raises(BackupError, match="after the last"):
        writer.write(one)
    assert not (tmp_path / "copy" / LIST_NAME).exists()
    writer.close()


def test_another_clusters_node_does_not_replace_what_has_arrived(tmp_path: Path) -> None:
    """An address mistyped in the second call."""
    copy = tmp_path / "copy"
    first = BackupWriter(copy)
    for chunk in chunks(FILES, first.begin())[:2]:
        first.write(chunk)
    first.close()
    second = BackupWriter(copy)
    with pytest.raises(BackupError, match="unfinished backup of cluster c, and this is cluster other"):
        second.write(chunks({"manifest": b"x"}, second.begin(), "other")[0])
    second.close()
    assert (copy / "wheel/1/log").read_bytes() == FILES["wheel/1/log"][: 2 * PIECE]


def test_a_full_disk_leaves_what_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there is room the copy goes on."""
    copy = tmp_path / "copy"
    writer = BackupWriter(copy)
    sent = chunks(FILES, writer.begin())
    writer.write(sent[0])
    write = os.pwritev

    def full(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        write(descriptor, [memoryview(b"half")], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        with pytest.raises(DiskFullError, match="No space left"):
            writer.write(sent[1])
    writer.close()
    assert (copy / "wheel/1/log").stat().st_size == PIECE
    whole(copy)
    assert restored(copy, tmp_path / "data") == FILES


def test_a_restore_to_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command then says to make room, and not what a backup needs; once there is room, it succeeds."""
    copy, data = tmp_path / "copy", tmp_path / "data"
    whole(copy)

    def full(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        with pytest.raises(DiskFullError, match="No space left"):
            restored(copy, data)
    assert restored(copy, data) == FILES


def test_a_mark_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Of another version, or spoilt: nothing is guessed."""
    for number, (text, said) in enumerate((("{", UNFINISHED_NAME), (json.dumps({"version": 9, "cluster": ""}), "9"))):
        copy = tmp_path / str(number)
        copy.mkdir()
        (copy / UNFINISHED_NAME).write_text(text)
        with pytest.raises(BackupError, match=said):
            BackupWriter(copy)


def test_a_strange_directory_is_left_alone(tmp_path: Path) -> None:
    """Somebody's letters, or what a version before left of an interrupted copy."""
    (tmp_path / "letter").write_text("mine")
    with pytest.raises(BackupError, match="not empty: name a new directory"):
        BackupWriter(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


@pytest.mark.parametrize(
    "listed",
    [
        '{"version": 1, "files": []}',
        '{"version": 1, "files": {"manifest": 1}}',
        '{"version": 1, "files": {"manifest": {"bytes": "8", "crc32c": 1}}}',
        '{"version": 1, "files": {"a\\u0000b": {"bytes": 8, "crc32c": 1}}}',
        "[" * 100_000,
    ],
    ids=["a list", "no facts", "a text", "a zero in a name", "nesting"],
)
def test_a_list_that_somebody_has_edited_is_refused(listed: str, tmp_path: Path) -> None:
    """In words: it ended restore with a traceback."""
    whole(tmp_path / "backup")
    (tmp_path / "backup" / LIST_NAME).write_text(listed)
    with pytest.raises(BackupError, match=r"holds no whole backup|is no part of a backup"):
        restored(tmp_path / "backup", tmp_path / "data")
    assert not (tmp_path / "data").exists() or [path.name for path in (tmp_path / "data").iterdir()] == [LOCK_NAME]
