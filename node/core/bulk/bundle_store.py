"""Bundles on a node's disk, complete ones and incoming ones.

Owns the directory `bulk/`. `<name>.bundle` is complete, checked against its name and on stable storage. `<name>.part`
is incoming, and worthless after a restart. A bundle is held once the rename and its directory have been synced.

A claimed bundle (taken over, or named by the newest checkpoint) stays. Any other is removed UNCLAIMED_MS after the last
request for it, but not while this node has unapplied entries of the log: one of them may claim it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import google_crc32c

from tickwheel.node.core.promise import Reply
from tickwheel.node.core.world import SteadyMs
from tickwheel.node.failure import Failure, RequestError, invalid, limit_reached, refused
from tickwheel.proto import common_pb2
from tickwheel.proto.bulk_pb2 import BundleState
from tickwheel.replication.ports import Executor
from tickwheel.storage.bundle import DIRECTORY, FILE_BYTES_MAX, SUFFIX, bundle_path, is_name
from tickwheel.storage.disk import Disk, DiskFullError, File, FsyncFailedError

PARTS_MAX = 32
"""Bundles that may be incoming at once."""
PART_IDLE_MS = 120_000
"""An incoming bundle without progress is dropped after this."""
UNCLAIMED_MS = 3_600_000
PIECE_BYTES_MAX = 1 << 20
SPACE_RESERVE_BYTES = 256 << 20
"""Disk space that bundles from clients leave to everything else."""
CHECK_PERIOD_MS = 30_000
PART_SUFFIX = ".part"


Taken = Reply[BundleState]


@dataclass(slots=True)
class BulkCounts:
    """Counts of bulk load since the node's start, for metrics and status."""

    received_bytes: int = 0
    """Bytes of bundles from clients and peers, including bundles that were never completed."""
    received: int = 0
    """Bundles completed on this node,"""
    fetched: int = 0
    """and of those, bundles that it lacked and fetched from peers."""
    removed: int = 0
    """Unclaimed bundles that were removed."""
    takeover_ms: int = 0
    """Total time from request to answer of successful takeovers, on the master."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refusals by step: `offer`, `piece`, `take_over`."""

    @contextmanager
    def counting(self, step: str) -> Iterator[None]:
        """Count a RequestError that is raised in a `with`."""
        try:
            yield
        except RequestError:
            self.refused[step] += 1
            raise


@dataclass(slots=True, eq=False)
class _Part:
    name: str
    total_bytes: int
    touched_ms: int
    bytes: int = 0
    busy: bool = False
    file: File | None = None
    sha: hashlib._Hash = field(default_factory=hashlib.sha256)


class _DamagedError(Exception):
    """The received bytes differ from those sent, or from those that the name demands."""


class BundleStore:
    """A core that is rebuilt from a checkpoint gets a new store, which knows only the files."""

    def __init__(
        self,
        disk: Disk,
        executor: Executor,
        steady_ms: Callable[[], SteadyMs],
        fatal: Callable[[str, BaseException | None], None],
    ) -> None:
        self._disk = disk
        self._executor = executor
        self._steady_ms = steady_ms
        self._fatal = fatal
        self._parts: dict[str, _Part] = {}
        self._whole: dict[str, int] = {}
        """Name -> when it was last asked for."""
        self._next_ms = 0
        self._stopped = False
        self.counts = BulkCounts()
        now_ms = steady_ms()
        for name in disk.list(DIRECTORY):
            if name.endswith(SUFFIX) and is_name(name.removesuffix(SUFFIX)):
                self._whole[name.removesuffix(SUFFIX)] = now_ms
            else:
                disk.remove(f"{DIRECTORY}/{name}")

    def held(self, name: str) -> bool:
        """Whether this node has the complete bundle. Asking keeps an unclaimed bundle for another UNCLAIMED_MS."""
        if name not in self._whole:
            return False
        self._whole[name] = self._steady_ms()
        return True

    @property
    def held_count(self) -> int:
        """Number of complete bundles."""
        return len(self._whole)

    def bytes_of(self, name: str) -> int:
        """Size of a complete bundle in bytes."""
        return self._disk.size(bundle_path(name))

    def offer(self, name: str, total_bytes: int, *, needed: bool = False) -> BundleState:
        """How much of the bundle this node has; it then accepts the rest. Raises RequestError: it has no room.

        `needed`: the log waits for it. So it may take the room that others leave free: without it this node applies
        nothing, and its journal would fill that room.
        """
        if self._stopped:
            raise RequestError(_starts_anew())
        if not is_name(name):
            raise invalid("name", name, "64 digits of [0-9a-f]")
        if not 0 < total_bytes <= FILE_BYTES_MAX:
            raise invalid("bytes", total_bytes, f"1 to {FILE_BYTES_MAX}")
        if self.held(name):
            return BundleState(name=name, bytes=total_bytes, held=True)
        part = self._parts.get(name)
        if part is None:
            if len(self._parts) >= PARTS_MAX:
                raise RequestError(limit_reached("bundles_coming_in", PARTS_MAX, 1_000))
            wanted = total_bytes + sum(p.total_bytes - p.bytes for p in self._parts.values())
            if self._disk.space_left() < wanted + (0 if needed else SPACE_RESERVE_BYTES):
                text = f"no room for a bundle of {total_bytes} bytes: make some, the load goes on where it was"
                raise refused(common_pb2.DISK_FULL, text, retry_after_ms=5_000)
            part = self._parts[name] = _Part(name, total_bytes, self._steady_ms())
        if part.total_bytes != total_bytes:
            raise invalid("bytes", total_bytes, f"{part.total_bytes}, as was said before")
        part.touched_ms = self._steady_ms()
        return BundleState(name=name, bytes=part.bytes)

    def take(self, name: str, total_bytes: int, offset: int, data: bytes, crc32c: int, reply: Taken) -> None:
        """Append a piece. A piece that does not follow the bytes so far is ignored. `reply` gets how much of the bundle
        is here."""
        try:
            state = self.offer(name, total_bytes)
        except RequestError as error:
            reply.fail(error.failure)
            return
        if state.held:
            reply.done(state)
            return
        if len(data) > PIECE_BYTES_MAX or not data:
            reply.fail(invalid("data", f"{len(data)} bytes", f"1 to {PIECE_BYTES_MAX} bytes").failure)
            return
        part = self._parts[name]
        if part.busy:
            reply.fail(limit_reached("pieces_of_a_bundle", 1, 20))
            return
        if offset != part.bytes or offset + len(data) > total_bytes:
            reply.done(state)
            return
        part.busy = True

        def ended(_: object, error: BaseException | None) -> None:
            part.busy = False
            part.touched_ms = self._steady_ms()
            if self._stopped:
                reply.fail(_starts_anew())
                return
            if error is not None:
                reply.fail(self._failed(part, error))
                return
            part.bytes += len(data)
            self.counts.received_bytes += len(data)
            whole = part.bytes == total_bytes
            if whole:
                self._parts.pop(name, None)
                self._whole[name] = self._steady_ms()
                self.counts.received += 1
            reply.done(BundleState(name=name, bytes=part.bytes, held=whole))

        last = offset + len(data) == total_bytes
        self._executor.submit(lambda: self._write(part, data, crc32c, last=last), ended)

    def _write(self, part: _Part, data: bytes, crc32c: int, *, last: bool) -> None:
        """Runs in a worker."""
        if google_crc32c.value(data) != crc32c:
            raise _DamagedError(f"the piece at {part.bytes} does not match its checksum")
        path = f"{DIRECTORY}/{part.name}{PART_SUFFIX}"
        if part.file is None:
            part.file = self._disk.open(path, create=True)
            part.file.truncate(0)
        part.file.append(data)
        part.sha.update(data)
        if not last:
            return
        if part.sha.hexdigest() != part.name:
            raise _DamagedError("its bytes do not have the checksum that is its name")
        part.file.fsync()
        part.file.close()
        part.file = None
        self._disk.rename(path, bundle_path(part.name))
        self._disk.fsync_dir(DIRECTORY)
        self._disk.fsync_dir("")

    def _failed(self, part: _Part, error: BaseException) -> Failure:
        self._drop(part)
        if isinstance(error, _DamagedError):
            return invalid("data", part.name, f"{error}; send the bundle again from its beginning").failure
        if isinstance(error, DiskFullError):
            return Failure(common_pb2.DISK_FULL, f"bundle {part.name}: {error}", {"retry_after_ms": "5000"})
        what = "could not be synced" if isinstance(error, FsyncFailedError) else "could not be written"
        self._fatal(f"bundle {part.name} {what}: {error}", error)
        return Failure(common_pb2.WRONG_STATE, str(error))

    def _drop(self, part: _Part) -> None:
        self._parts.pop(part.name, None)
        if part.file is not None:
            part.file.close()
            part.file = None
        self._disk.remove(f"{DIRECTORY}/{part.name}{PART_SUFFIX}")

    def tick(self, steady_ms: SteadyMs, claimed: Callable[[], set[str]], applied_all: Callable[[], bool]) -> None:
        """Drop stale incoming bundles and unclaimed complete ones, a few at a time."""
        if steady_ms < self._next_ms:
            return
        self._next_ms = steady_ms + CHECK_PERIOD_MS
        for part in [p for p in self._parts.values() if not p.busy and steady_ms - p.touched_ms > PART_IDLE_MS]:
            self._drop(part)
        if not self._whole:
            return
        names = claimed()
        for name in names & self._whole.keys():
            self._whole[name] = steady_ms
        if not applied_all():
            return
        for name in [name for name, touched_ms in self._whole.items() if steady_ms - touched_ms > UNCLAIMED_MS]:
            del self._whole[name]
            self._disk.remove(bundle_path(name))
            self.counts.removed += 1

    def stop(self) -> None:
        """Stop accepting pieces and drop the incoming bundles: a later store cannot use them."""
        self._stopped = True
        for part in self._parts.values():
            if part.file is not None and not part.busy:
                part.file.close()
                part.file = None


def _starts_anew() -> Failure:
    return Failure(common_pb2.WRONG_STATE, "this node starts anew", {"retry_after_ms": "1000"})
