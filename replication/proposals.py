"""The proposals that this node has appended as master and not yet applied.

Each `done` is called exactly once: when the entry is applied, or when mastership is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tickwheel.replication.log import ProposalOutcome, ProposalResult

Done = Callable[[ProposalResult], None]


@dataclass(slots=True)
class _Proposal:
    term: int
    bytes: int
    done: Done


class Proposals:
    """The waiting proposals by index. The caller checks `full` before `add`; the last one may exceed the bytes."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._waiting: dict[int, _Proposal] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._count_max or self._bytes >= self._bytes_max

    def add(self, index: int, term: int, size: int, done: Done) -> None:
        """An entry of `size` bytes was appended at `index`."""
        self._waiting[index] = _Proposal(term, size, done)
        self._bytes += size

    def applied(self, index: int, term: int, value: object) -> None:
        """The entry at `index` was applied. In another term it is not the proposed one, which then ends UNKNOWN."""
        proposal = self._waiting.pop(index, None)
        if proposal is None:
            return
        self._bytes -= proposal.bytes
        if proposal.term == term:
            proposal.done(ProposalResult(ProposalOutcome.COMMITTED, index, value))
        else:
            proposal.done(ProposalResult(ProposalOutcome.UNKNOWN))

    def fail(self, outcome: ProposalOutcome) -> None:
        """Mastership is over: end all waiting proposals with this outcome, in order of their indexes."""
        waiting, self._waiting = self._waiting, {}
        self._bytes = 0
        for index in sorted(waiting):
            waiting[index].done(ProposalResult(outcome))
