"""How much work something is, whatever the machine does beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(work: Callable[[], object]) -> int:
    """Calls of functions in Python."""
    count = 0

    def note(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def lines_of(work: Callable[[], object]) -> int:
    """Lines of Python that it executes, each time counted."""
    count = 0

    def note(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
