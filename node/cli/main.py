"""The console script `tickwheel`: Ctrl-C ends it with 130 and without a traceback, also while Python still imports. A
service ends in order by then, too.

Imports nothing itself but what puts that in order: program.py and what hangs off it take tenths of a second.
"""

try:
    import sys

    from tickwheel.node.cli.interrupts import end_at_once, end_when_terminated, serves

    end_at_once()
    if serves(sys.argv[1:]):
        end_when_terminated()
except KeyboardInterrupt:
    raise SystemExit(130) from None


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
