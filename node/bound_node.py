"""A node's command line that ends with the process that started it, however that ends: in order, as by a SIGTERM.

`python -m tickwheel.node.bound_node --parent PID node --config FILE`, started by the main thread of that process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def _end_with(parent: int) -> None:
    """`parent`: by its own word, since it may have ended before this process could ask for it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    sys.argv.pop(1)
    _end_with(int(sys.argv.pop(1)))

    from tickwheel.node.cli.main import main

    main()
