"""A queue that serves its flows side by side: a flow with much waiting does not hold up one with little.

Self-clocked fair queueing (S. J. Golestani, INFOCOM 1994). An item's tag is its size in bytes after the tag of the last
item of its flow, or after the tag served last if the flow had nothing waiting. The lowest tag is served first. So each
of several flows that wait gets the same share of bytes, and a flow alone is served in order of arrival.

Keys bind items of different flows: those of one key are served in the order in which they came.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

STALE_TAGS_MAX = 1_024
"""Tags that were served already are thrown away once there may be so many of them."""


class Item(Protocol):
    """One request or several. It may grow while it waits (`FairQueue.grow`)."""

    @property
    def bytes(self) -> int: ...

    def __len__(self) -> int: ...


AnItem = TypeVar("AnItem", bound=Item)


@dataclass(slots=True)
class Waiting:
    """How much waits, of a flow or of all."""

    bytes: int = 0
    requests: int = 0


class FairQueue(Generic[AnItem]):
    def __init__(self) -> None:
        self.all = Waiting()
        self._heap: list[tuple[int, int, str, AnItem]] = []
        """Tag, number, flow, item. Tags may be equal, numbers are not."""
        self._flows: dict[str, Waiting] = {}
        """Flows that wait for something."""
        self._number = 0
        self._served = 0
        """Tag of the item served last."""
        self._flow_tags: dict[str, int] = {}
        """Flow -> tag of its last item, and the bytes by which its items have grown since."""
        self._key_tags: dict[str, int] = {}
        """Key -> tag of its last item."""

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[AnItem]:
        """All items, in no order."""
        return (item for *_, item in self._heap)

    @property
    def head(self) -> AnItem | None:
        """The item that is served next; None: none waits."""
        return self._heap[0][3] if self._heap else None

    @property
    def flows(self) -> int:
        """Number of flows that wait for something."""
        return len(self._flows)

    def of(self, flow: str) -> Waiting:
        """How much waits of a flow."""
        return self._flows.get(flow) or Waiting()

    def put(self, item: AnItem, flow: str, keys: Sequence[str] = ()) -> int:
        """Queue an item; returns its tag."""
        after, size = max(self._served, self._flow_tags.get(flow, 0)), item.bytes
        for key in keys:
            last = self._key_tags.get(key, 0)
            if last > after:
                after = last
        tag = after + size
        if len(self._flow_tags) + len(self._key_tags) > STALE_TAGS_MAX + 4 * self.all.requests:
            # A tag that was served binds nothing more.
            self._flow_tags = {flow: tag for flow, tag in self._flow_tags.items() if tag >= self._served}
            self._key_tags = {key: tag for key, tag in self._key_tags.items() if tag >= self._served}
        self._flow_tags[flow] = tag
        for key in keys:
            self._key_tags[key] = tag
        heapq.heappush(self._heap, (tag, self._number, flow, item))
        self._number += 1
        self._note(flow, size, len(item))
        return tag

    def may_grow(self, tag: int, key: str) -> bool:
        """Whether a request of this key may become a part of the waiting item with this tag: nothing of the key waits
        behind that."""
        return self._key_tags.get(key, 0) <= tag

    def grow(self, tag: int, flow: str, key: str, size: int) -> None:
        """The waiting item with this tag and flow has grown by a request of so many bytes and this key."""
        self._flow_tags[flow] += size
        self._key_tags[key] = tag
        self._note(flow, size, 1)

    def pop(self) -> AnItem:
        """Take out the item that is served next. Raises IndexError if none waits."""
        tag, _, flow, item = heapq.heappop(self._heap)
        self._served = tag
        self._note(flow, -item.bytes, -len(item))
        return item

    def remove(self, unwanted: Callable[[AnItem], bool]) -> list[AnItem]:
        """Take out all unwanted items, in the order in which they would have been served."""
        out = sorted((entry for entry in self._heap if unwanted(entry[3])), key=lambda entry: entry[:2])
        numbers = {number for _, number, _, _ in out}
        self._heap = [entry for entry in self._heap if entry[1] not in numbers]
        heapq.heapify(self._heap)
        for _, _, flow, item in out:
            self._note(flow, -item.bytes, -len(item))
        if not self._heap:
            # Nobody is served for tags of items that were taken out: later items must not wait for their turns.
            self._flow_tags.clear()
            self._key_tags.clear()
        return [item for *_, item in out]

    def _note(self, flow: str, size: int, requests: int) -> None:
        waiting, everything = self._flows.get(flow), self.all
        if waiting is None:
            waiting = self._flows[flow] = Waiting()
        waiting.bytes += size
        waiting.requests += requests
        everything.bytes += size
        everything.requests += requests
        if not waiting.requests:
            del self._flows[flow]
