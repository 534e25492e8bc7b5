"""Listings that a node gives in pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from tickwheel.client.errors import TickwheelError


class Page(Protocol):
    """One answer; `more`: further items follow its last one."""

    @property
    def more(self) -> bool: ...


A = TypeVar("A")
Q = TypeVar("Q", bound=Page, covariant=True)


async def listed(fetch: Callable[[A | None], Awaitable[Q]], items: Callable[[Q], Sequence[A]]) -> tuple[list[A], Q]:
    """(all items, the last page). `fetch` asks for the page behind an item; None: for the first page.

    Raises TickwheelError for a page that is empty and says that more follows: the next question would be the same.
    """
    found: list[A] = []
    while True:
        page = await fetch(found[-1] if found else None)
        shown = items(page)
        found += shown
        if not page.more:
            return found, page
        if not shown:
            raise TickwheelError("a node gave an empty page of a listing and said that more follows", "INTERNAL")
