"""The form of an entry of the log: one byte that says its kind, then what the kind has.

- REGULAR: a command of the node.
- NO_OP: nothing; pysyncobj writes one when a master is elected.
- VOTERS: length and list of the ids of all voters from then on, by commas, sorted; then a command of the node.

Whoever reads a journal, the log itself or a command on a node that stands still, takes commands out with `command_of`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

REGULAR = b"\x00"
NO_OP = b"\x01"
VOTERS = b"\x10"
"""pysyncobj's own kinds are 0 to 3."""

_LENGTH = struct.Struct("<H")


def regular(command: bytes) -> bytes:
    """An entry that holds a command and changes no voters."""
    return REGULAR + command


def naming(voters: Sequence[str], command: bytes) -> bytes:
    """An entry that names the voters and holds the command by which they change."""
    names = ",".join(sorted(voters)).encode()
    return VOTERS + _LENGTH.pack(len(names)) + names + command


def split(entry: bytes) -> tuple[tuple[str, ...], bytes]:
    """Voters and command of an entry that names voters. Raises ValueError if it is none."""
    if entry[:1] != VOTERS or len(entry) < 1 + _LENGTH.size:
        raise ValueError("the entry names no voters")
    begin = 1 + _LENGTH.size
    end = begin + _LENGTH.unpack_from(entry, 1)[0]
    if end > len(entry):
        raise ValueError("the list of voters is longer than its entry")
    names = entry[begin:end].decode()
    return tuple(names.split(",")) if names else (), entry[end:]


def command_of(entry: bytes) -> bytes:
    """The node's command in an entry; empty: it has none. Raises ValueError for a kind that this log never writes."""
    kind = entry[:1]
    if kind == REGULAR:
        return entry[1:]
    if kind == VOTERS:
        return split(entry)[1]
    if kind == NO_OP:
        return b""
    raise ValueError(f"a command of kind {kind!r}, which this log never writes")
