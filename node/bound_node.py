"""A node's command line that ends with the process that started it, however that ends: in order, as by a SIGTERM.

`python -m tickwheel.node.bound_node --parent PID node --config FILE`, started by the process of that id.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading


def _end_with(parent: int) -> None:
    """`parent`: by its own word, since it may have ended before this process could ask for it. The kernel's own signal
    for this (PR_SET_PDEATHSIG) comes once for each thread of the parent, and a node takes a second one for haste."""
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        sys.exit(1)
    if os.getppid() != parent:
        sys.exit(1)

    def watch() -> None:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        ended.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.argv.pop(1)
    _end_with(int(sys.argv.pop(1)))

    from tickwheel.node.cli.main import main

    main()
