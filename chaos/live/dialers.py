"""Which node has opened a connection: the process that owns its other end, as /proc tells (Linux).

All nodes dial one and the same address of a peer, since the list of members is replicated; so a proxy has to find out
who calls. No cooperation of the node is needed, and none could mislead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ESTABLISHED = "01"
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def _inode(port: int, remote_port: int) -> str | None:
    """The socket whose own port is `port`, connected to `remote_port`."""
    wanted, remote = f":{port:04X}", f":{remote_port:04X}"
    for table in TABLES:
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except FileNotFoundError:
            continue
        for line in lines:
            fields = line.split()
            if fields[1].endswith(wanted) and fields[2].endswith(remote) and fields[3] == ESTABLISHED:
                return fields[9]
    return None


def _has(pid: int, inode: str) -> bool:
    link = f"socket:[{inode}]"
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                try:
                    if os.readlink(entry.path) == link:  # noqa: PTH115  # a hundred of them for each connection
                        return True
                except FileNotFoundError:
                    continue
    except (FileNotFoundError, ProcessLookupError):
        return False
    return False


def dialer(port: int, remote_port: int, pids: Mapping[str, int]) -> str | None:
    """The node among `pids` (id to process) that connected from `port` to `remote_port`; None if it is none of them."""
    inode = _inode(port, remote_port)
    if inode is None:
        return None
    return next((node_id for node_id, pid in pids.items() if _has(pid, inode)), None)
