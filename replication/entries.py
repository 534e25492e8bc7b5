"""The format of an entry of the log: one byte for its kind, then the body of that kind.

- REGULAR: a command of the node.
- NO_OP: no body; pysyncobj writes one when a master is elected.
- VOTERS: the ids of all voters from this entry on, as a u16 length and a sorted list with commas; then a command.

Every reader of a journal, the running log or an offline tool, takes the command out with `command_of`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

REGULAR = b"\x00"
NO_OP = b"\x01"
VOTERS = b"\x10"
"""Beyond pysyncobj's own kinds, which are 0 to 3."""

_LENGTH = struct.Struct("<H")


def regular(command: bytes) -> bytes:
    """An entry that holds a command and changes no voters."""
    return REGULAR + command


def naming(voters: Sequence[str], command: bytes) -> bytes:
    """An entry that lists all voters after the change, and holds the command of the change."""
    names = ",".join(sorted(voters)).encode()
    return VOTERS + _LENGTH.pack(len(names)) + names + command


def split(entry: bytes) -> tuple[tuple[str, ...], bytes]:
    """(voters, command) of a VOTERS entry. Raises ValueError for another kind or a damaged list."""
    if entry[:1] != VOTERS or len(entry) < 1 + _LENGTH.size:
        raise ValueError("the entry names no voters")
    begin = 1 + _LENGTH.size
    end = begin + _LENGTH.unpack_from(entry, 1)[0]
    if end > len(entry):
        raise ValueError("the list of voters is longer than its entry")
    names = entry[begin:end].decode()
    return tuple(names.split(",")) if names else (), entry[end:]


def command_of(entry: bytes) -> bytes:
    """The node's command in an entry; empty if it has none. Raises ValueError for a kind that this log never writes."""
    kind = entry[:1]
    if kind == REGULAR:
        return entry[1:]
    if kind == VOTERS:
        return split(entry)[1]
    if kind == NO_OP:
        return b""
    raise ValueError(f"a command of kind {kind!r}, which this log never writes")
