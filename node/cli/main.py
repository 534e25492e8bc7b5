"""The console script `tickwheel`: Ctrl-C ends it with 130 and without a traceback, also while Python still imports.

Imports nothing itself but what puts that in order: program.py and what hangs off it take tenths of a second.
"""

try:
    from tickwheel.node.cli.interrupts import end_at_once

    end_at_once()
except KeyboardInterrupt:
    raise SystemExit(130) from None

import sys


def main() -> None:
    """Run the command that the arguments name, and end the process with its exit code."""
    from tickwheel.node.cli.streams import let_go, make_usable

    make_usable()
    from tickwheel.node.cli.program import run

    try:
        code = run()
    except OSError:  # of telling an error: nobody takes it
        code = 1
    end_at_once()
    let_go()
    sys.exit(code)


if __name__ == "__main__":
    main()
