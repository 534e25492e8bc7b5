"""Pure parts of the server: identity of a directory, failures as statuses, credits of a slow consumer."""

from __future__ import annotations

import base64
import errno
import os
import urllib.parse
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
from google.rpc import error_details_pb2

from tickwheel.node.failure import Failure, invalid
from tickwheel.node.server.errors import METADATA_BYTES_MAX, abort, status_of
from tickwheel.node.server.identity import IdentityError, open_identity, why_gone
from tickwheel.node.server.outbox import SLICE_MIN, CreditGate
from tickwheel.proto import common_pb2
from tickwheel.storage.local import LocalDisk


def test_identity_is_kept_and_foreign_data_refused(tmp_path: Path) -> None:
    """The disk uuid stays; another cluster's or node's configuration, or data without identity, is refused."""
    disk = LocalDisk(str(tmp_path))
    first = open_identity(disk, "c", "n1", "d")
    disk.open("founding", create=True).close()
    assert open_identity(disk, "c", "n1", "d") == first
    with pytest.raises(IdentityError, match="data of cluster c"):
        open_identity(disk, "other", "n1", "d")
    with pytest.raises(IdentityError, match="data of node n1"):
        open_identity(disk, "c", "n2", "d")
    disk.remove("identity")
    disk.make_dir("journal")
    with pytest.raises(IdentityError, match="no identity file"):
        open_identity(disk, "c", "n1", "d")


def test_a_disk_of_which_all_else_was_removed_is_another_one(tmp_path: Path) -> None:
    """P1: its node has forgotten what it acknowledged and voted. Under the old uuid the others would count it."""
    disk = LocalDisk(str(tmp_path))
    first = open_identity(disk, "c", "n1", "d")
    disk.make_dir("journal")
    assert open_identity(disk, "c", "n1", "d") == first
    disk.remove("journal")
    second = open_identity(disk, "c", "n1", "d")
    assert second.disk_uuid != first.disk_uuid
    disk.open("founding", create=True).close()
    assert open_identity(disk, "c", "n1", "d") == second


def test_a_file_counts_as_gone_only_if_the_system_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remote disk that does not answer for a moment ended the node for good, as if its files had been removed."""
    file = tmp_path / "d" / "identity"
    assert why_gone(file) == os.strerror(errno.ENOENT)
    file.parent.mkdir()
    file.touch()
    assert why_gone(file) == "" and why_gone(file / "identity") == os.strerror(errno.ENOTDIR)
    for number in (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOMEM, errno.ETIMEDOUT):

        def failing(path: Path, number: int = number) -> NoReturn:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Path, "stat", failing)
        assert why_gone(file) == ""


def test_details_of_failures() -> None:
    """ErrorInfo always, BadRequest for a field, RetryInfo when waiting helps."""
    status = status_of(invalid("payload", 0, "at least one byte").failure)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info) and status.details[1].Unpack(bad)
    assert (info.reason, bad.field_violations[0].field) == ("INVALID_FIELD", "payload")
    retry = error_details_pb2.RetryInfo()
    status = status_of(Failure(common_pb2.NO_MASTER, "no master", {"retry_after_ms": "1500"}))
    assert status.details[1].Unpack(retry) and retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize("text", ["x" * (3 << 20), "\U0001f600" * 70_000, "a\nb\r\0" * 50_000, "\ud800" * 9_000])
async def test_a_refusal_fits_the_metadata_of_a_call(text: str) -> None:
    """A name that a caller made up comes back in the refusal: as far as it fits, and with the code that it has."""
    facts = {"field": "name", "value": text, "expected": text, "id": text, "limit": text, "retry_after_ms": "1500"}
    sent: list[tuple[grpc.StatusCode, str, int]] = []

    class Context:
        async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
            size = sum(len(key) + len(base64.b64encode(value)) for key, value in trailing_metadata)
            sent.append((code, details, size + len(urllib.parse.quote(details, safe=" "))))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await abort(Context(), Failure(common_pb2.INVALID_FIELD, f"{text} does not exist", facts))
    code, details, size = sent[0]
    assert code is grpc.StatusCode.INVALID_ARGUMENT and details.endswith("…") and size < METADATA_BYTES_MAX
    short = Failure(common_pb2.UNKNOWN_NAME, "topic ü does not exist", {"value": "ü"})
    assert status_of(short).message == short.message


def test_credits_reach_the_core_in_slices() -> None:
    """Large messages that wait for a slow connection hold credits back; none is lost."""
    gate = CreditGate(16 << 20)
    passed = gate.add(100_000)
    assert passed < 100_000
    total, outstanding = passed, passed
    while outstanding:
        gate.queued(1, 4 << 20)
        outstanding += (more := gate.written(1)) - 1
        total += more
        assert outstanding <= max(passed, SLICE_MIN)
    assert total == 100_000 and gate.held == 0
