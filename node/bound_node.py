"""A node's command line that ends with the process that started it, however that ends: in order, as by a SIGTERM.

`python -m tickwheel.node.bound_node --parent PID node --config FILE`, started by the process of that id.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

LOOK_S = 0.5


def _end_with(parent: int) -> None:
    """`parent`: by its own word, since it may have ended before this process could look.

    Looked at, not waited for: the kernel's signal for this (PR_SET_PDEATHSIG) comes once for each thread of the parent,
    and a node takes a second one for haste; older kernels and some sandboxes have no pidfd.
    """
    if os.getppid() != parent:
        sys.exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.argv.pop(1)
    _end_with(int(sys.argv.pop(1)))

    from tickwheel.node.cli.main import main

    main()
