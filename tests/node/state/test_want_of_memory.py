"""Bytes that a node cannot decode for want of memory are not taken for bytes that nobody can decode."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LIMITED = """
import resource
from pathlib import Path
from tickwheel.node.server.door import read_request
from tickwheel.node.state.schema import read_entry
from tickwheel.proto import log_pb2, scheduler_pb2
from tickwheel.proto.parsing import wants_memory

records = bytes(40 << 20)
entry = log_pb2.LogEntry(format_version=1)
entry.commands.add().publish.records = records
request = scheduler_pb2.ColumnBatch(topic="t", payloads=records)
message, entry, request = entry, entry.SerializeToString(), request.SerializeToString()
pages = int(Path("/proc/self/statm").read_text().split()[0])
bytes_max = pages * resource.getpagesize() + (30 << 20)
resource.setrlimit(resource.RLIMIT_AS, (bytes_max, bytes_max))
try:
    print("passed over" if read_entry(entry) is None else "decoded")
except MemoryError as error:
    print(error)
print(read_request(scheduler_pb2.ColumnBatch, request).failure.grpc_code_name)
try:
    message.SerializeToString()
except Exception as error:
    print(type(error).__name__, wants_memory(error))
"""
"""With room for 30 MiB more, of an entry and a request of 40 MiB."""


def test_an_entry_for_which_there_is_no_memory_is_not_passed_over() -> None:
    """P8 and P1: protobuf has one error for both. The node left out a committed entry that all others applied. A client
    was told that its request was malformed."""
    ended = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60, check=False)
    entry, request, encoded = ended.stdout.splitlines()
    assert entry.startswith("no memory to decode") and request == "RESOURCE_EXHAUSTED", ended.stderr
    assert encoded == "EncodeError True", "an entry for which there is none is no bug"


def test_nothing_else_decodes() -> None:
    """What a node keeps and is asked is decoded by `parsed` alone. Frames of peers are the transport's: one that cannot
    be decoded ends its connection, and comes again."""
    root = Path(__file__).parents[3]
    sources = [path for name in ("node", "replication", "storage", "wheel") for path in (root / name).rglob("*.py")]
    calls = re.compile(r"(?:FromString|ParseFrom\w+)\(")
    assert len(sources) > 100
    assert not [path for path in sources if calls.search(path.read_text(encoding="utf-8"))]
