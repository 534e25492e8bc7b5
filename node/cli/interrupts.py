"""What signals do while no command runs. Ctrl-C ends the process at once, with the exit code of an interrupted command.

A KeyboardInterrupt would show a traceback then, or be lost: wherever an import happens to be, inside a compiled module,
or in the end of the interpreter. A command gets its KeyboardInterrupt as always.
"""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130


def _end(number: int, frame: object) -> None:
    os._exit(EXIT_INTERRUPTED)


def _replace(old: object, new: object) -> None:
    # Only the main thread may, and only it runs commands for people.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)  # type: ignore[arg-type]


def end_at_once() -> None:
    """From now on SIGINT ends the process. Does nothing if somebody else handles or ignores it."""
    _replace(signal.default_int_handler, _end)


def serves(words: list[str]) -> bool:
    """Whether the arguments of the command line name a command that serves until a SIGTERM."""
    while words and words[0].startswith("-"):
        words = words[2 if words[0] == "--context" else 1 :]
    return words[:1] in (["node"], ["gateway"], ["console"])


def end_when_terminated() -> None:
    """From now on SIGTERM ends the process with 0, and a SIGHUP without a terminal, as of a reload, does nothing. The
    first process of a container gets only signals that it has handlers for, so the later one would wait in vain."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if not os.isatty(0):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def interrupt_again() -> None:
    """From now on SIGINT raises KeyboardInterrupt again: a command begins. Undoes `end_at_once`, and nothing else."""
    _replace(_end, signal.default_int_handler)


@contextmanager
def importing() -> Iterator[None]:
    """For a command that imports much before it begins: until then SIGINT ends the process, and no reference cycles
    are collected. Modules stay: walking over them again and again took a twentieth of a node's start."""
    end_at_once()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        interrupt_again()
