"""P10: with everything healed, work resumes soon and all that is due gets delivered; no election without a cause."""

from __future__ import annotations

from typing import ClassVar

from tickwheel.chaos.sim.checkers.base import Checker
from tickwheel.chaos.sim.history import (
    Drained,
    Healed,
    ProposalEnded,
    Record,
    RoleSeen,
    RunBegan,
    ScheduleAcknowledged,
)
from tickwheel.chaos.sim.world import SECOND

RESUME_NS_MOST = 4 * SECOND


class Live(Checker):
    """`resumed_after_ns` is how long the first acknowledgement after the heal took."""

    promise: ClassVar[str] = "P10"
    kinds: ClassVar[tuple[type[Record], ...]] = (
        RunBegan,
        Healed,
        ScheduleAcknowledged,
        ProposalEnded,
        Drained,
        RoleSeen,
    )

    def __init__(self) -> None:
        self.resumed_after_ns: int | None = None
        self._healed_ns: int | None = None
        self._faultless = False
        self._terms: set[int] = set()

    def observe(self, record: Record) -> None:
        match record:
            case RunBegan():
                self._faultless = not record.faults
            case Healed():
                self._healed_ns = record.at_ns
            case ScheduleAcknowledged():
                self._accepted(record.at_ns)
            case ProposalEnded():
                if record.verdict == "COMMITTED":
                    self._accepted(record.at_ns)
            case RoleSeen():
                if record.role == "master":
                    self._terms.add(record.term)
                    if self._faultless and len(self._terms) > 1:
                        self.broken(record.at_ns, f"{record.node} was elected without any fault")
            case Drained():
                if record.reason:
                    self.broken(record.at_ns, f"does not come to rest after the heal: {record.reason}")

    def _accepted(self, at_ns: int) -> None:
        if self._healed_ns is not None and self.resumed_after_ns is None:
            self.resumed_after_ns = at_ns - self._healed_ns

    def settle_accounts(self, at_ns: int) -> None:
        if self._healed_ns is None:
            return
        if self.resumed_after_ns is None:
            self.broken(at_ns, "nothing was accepted after the heal")
        if self.resumed_after_ns > RESUME_NS_MOST:
            self.broken(at_ns, f"the first acknowledgement after the heal took {self.resumed_after_ns / SECOND:.3f} s")
