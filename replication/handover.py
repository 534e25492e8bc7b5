"""The planned handover of mastership: a state machine, driven by the master's ticks.

idle      -> parking   a transfer was requested: proposals are refused from now on
parking   -> asked     the target has all entries and all are applied here: the lease is given up, TimeoutNow is sent
asked     -> idle      another node leads: done
parking   -> idle      the target did not catch up in time: this node keeps leading
asked     -> idle      nobody became master in time: stand down, since TimeoutNow may still arrive
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from tickwheel.replication.config import RaftConfig
from tickwheel.replication.ports import NS_PER_MS

Done = Callable[[str | None], None]


class _Phase(enum.Enum):
    IDLE = "idle"
    PARKING = "parking"
    ASKED = "asked"


class Handover:
    """At most one handover at a time. Its `done` is called once, with None or the reason why it failed."""

    def __init__(self, config: RaftConfig) -> None:
        self._wait_ns = config.handover_wait_ms * NS_PER_MS
        self._answer_ns = config.handover_answer_ms * NS_PER_MS
        self._phase = _Phase.IDLE
        self._until_ns = 0
        self._term = 0
        self._done: Done | None = None
        self.target: str | None = None
        self.applying = True
        """Whether the handover waits until this node has applied everything."""

    @property
    def parks_proposals(self) -> bool:
        """Whether proposals must be refused now."""
        return self._phase is not _Phase.IDLE

    @property
    def lease_given_up(self) -> bool:
        """Whether the master has given up its lease and must no longer act."""
        return self._phase is _Phase.ASKED

    def begin(
        self,
        target_id: str | None,
        candidates: Mapping[str, int],
        term: int,
        now_ns: int,
        done: Done,
        *,
        applying: bool = True,
    ) -> bool:
        """Start a handover to `target_id`; None: to the candidate with the longest log. False: `done` was told why not.

        `candidates`: the last index that each other connected voter holds.
        """
        if target_id is not None and target_id not in candidates:
            done(f"{target_id} is not a connected member that counts")
            return False
        if not candidates:
            done("no other member that counts is connected")
            return False
        if self._phase is not _Phase.IDLE:
            done("a handover is under way")
            return False
        self._phase = _Phase.PARKING
        self._until_ns = now_ns + self._wait_ns
        self._term = term
        self.applying = applying
        self.target = target_id or max(candidates, key=lambda peer: (candidates[peer], peer))
        self._done = done
        return True

    def step(self, now_ns: int, *, leading: bool, term: int, leader_id: str | None, caught_up: bool) -> bool:
        """Advance the machine. True: send TimeoutNow to `target` now."""
        if self._phase is _Phase.PARKING:
            if not leading or term != self._term:
                self._end("mastership was lost before the handover")
            elif caught_up:
                self._phase = _Phase.ASKED
                self._until_ns = now_ns + self._answer_ns
                return True
            elif now_ns >= self._until_ns:
                self._end(f"{self.target} did not catch up in time")
        elif self._phase is _Phase.ASKED:
            if not leading and leader_id is not None and term > self._term:
                self._end(None)
            elif now_ns >= self._until_ns:
                self._end(f"{self.target} did not become master in time")
        return False

    def wanted_ns(self) -> int:
        """The latest monotonic_ns at which `step` is needed; 0 for none."""
        return self._until_ns if self._phase is not _Phase.IDLE else 0

    def abandon(self, problem: str) -> None:
        """The log stops: `done` gets `problem`."""
        if self._phase is not _Phase.IDLE:
            self._end(problem)

    def clear(self) -> None:
        """This node leads a new term, so a handover of an earlier term has failed."""
        if self._phase is not _Phase.IDLE:
            self._end("this node was elected again")

    def _end(self, problem: str | None) -> None:
        self._phase = _Phase.IDLE
        self.target = None
        done, self._done = self._done, None
        if done is not None:
            done(problem)
