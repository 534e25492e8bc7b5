"""A node's command line that ends with the process that started it, however that ends.

`python -m tickwheel.testing.bound_node PARENT_PID node --config FILE`, started by the main thread of PARENT_PID.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from tickwheel.node.cli.main import main

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent = int(sys.argv.pop(1))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        sys.exit(1)
    main()
