"""Repairs rows of a delay index that this node's disk has lost: asks the other members for them and writes them again.

Any reader of an hour's own index that finds a row with a wrong checksum calls `damaged`: a load of coming ticks, a
merge, a look-up, or an entry of the log about to be applied. The node goes on. A worker surveys the hour's index, other
members are asked for the lost units (they have the same ones, P8), and the rows are written again
(wheel/repair_jobs.py). Meanwhile the load waits, and so does an entry of the log that needs such a row (`ready`). A row
with a wrong checksum is never used.

A cluster of one has no member to ask, and heads are in no other member's files: then the node stops and says what to do
(node/rebuild.py). A lost record is another matter (record_repair.py); so is a bundle.

Bounded: HOURS_MAX hours at a time, ASKED_MAX units a question. Goes on through changes of mastership, master or slave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.part import Part
from tickwheel.node.core.repair.record_answers import UNITS_ASKED_MAX, unit_in
from tickwheel.node.core.world import Now, Reported
from tickwheel.node.metrics import MetricValue
from tickwheel.proto.log_pb2 import SETTLE_DEAD, SETTLE_RETRY, LogEntry
from tickwheel.proto.peer_pb2 import PeerFrame, RecordAnswer, RecordAsk, RecordFound
from tickwheel.storage.disk import DiskFullError, FsyncFailedError
from tickwheel.storage.segment import CorruptSegmentError
from tickwheel.wheel.repair_jobs import RepairJob, SurveyJob, UnlikeUnitError

HOURS_MAX = 16
ASK_PERIOD_MS = 100
RETRY_MS = 1_000
"""Pause after a write that failed for a cause that may pass."""
UNLIKE_MAX = 3
TOLD_AFTER_MS = 1_000
"""Status tells of hours that have waited for this long."""

REMEDY_ALONE = "stop the node and run `tickwheel rebuild --config ...`, which tells whether the journal holds enough"


@dataclass(slots=True, eq=False)
class _Case:
    """An hour under repair."""

    hour: int
    error: str
    began_ms: int
    next_ms: int
    survey: SurveyJob | None = None
    """The finished survey; None: it is still to come or under way."""
    units: dict[int, np.void] = field(default_factory=dict)
    """Lost unit -> the unit as another member sent it."""
    working: bool = False
    """A worker is surveying or writing the hour."""
    unlike: int = 0
    """How often the members' units did not fit the index."""

    def lost(self) -> list[int]:
        """Lost units that no member has sent yet."""
        return [] if self.survey is None else [id for id in self.survey.ids.tolist() if id not in self.units]


class IndexRepair(Part):
    def __init__(self, core: Kernel) -> None:
        self._core = core
        self._cases: dict[int, _Case] = {}
        self._given_up: set[int] = set()
        """Hours with damage other than lost rows: not repaired."""
        self.repaired = 0
        """Rows written again."""
        self.holds_log = False
        """The next entry of the log waits for lost rows."""

    @property
    def waiting(self) -> int:
        """Hours with lost rows."""
        return len(self._cases)

    @property
    def reason(self) -> str:
        """The index rows that the node waits for, for an operator; empty if none has waited for long."""
        now_ms = self._core.steady_ms()
        case = next((case for case in self._cases.values() if now_ms - case.began_ms > TOLD_AFTER_MS), None)
        if case is None:
            return ""
        return f"{len(case.lost())} rows of the index of hour {case.hour} are lost, and no member has given them yet"

    def _report(self, level: str, event: str, fields: dict[str, object]) -> None:
        self._core.report(Reported(level, event, fields))

    def damaged(self, error: BaseException) -> bool:
        """Take a read error. True: rows are lost and under repair, so try again later. False: another kind of
        damage."""
        core = self._core
        hour = core.wheel.files.damaged_hour(error)
        if hour is None or not self._repairable(hour):
            return False
        if not self._others():
            facts: dict[str, object] = {"hour": hour, "remedy": REMEDY_ALONE}
            self._report("error", "an index cannot be read, and there is no other member to ask", facts)
            return False
        if hour not in self._cases and len(self._cases) < HOURS_MAX:
            now_ms = core.steady_ms()
            self._cases[hour] = _Case(hour, str(error), now_ms, now_ms)
            facts = {"hour": hour, "error": str(error)}
            self._report("warning", "an index cannot be read here; its rows are asked of the other members", facts)
        return True

    def lost(self, error: CorruptSegmentError) -> None:
        """Take damage that a read met and that nobody can repair. The node leaves, since the other members can read
        these messages. Alone, it serves all others until these are needed."""
        if self._others():
            self._core.serving.damaged(f"a read met damage: {error}", error)
        elif self._core.wheel.files.damaged_hour(error) is None:  # else `damaged` has told it
            facts: dict[str, object] = {"error": str(error), "remedy": REMEDY_ALONE}
            self._report("error", "messages cannot be read, and there is no other member that could serve", facts)

    def _repairable(self, hour: int) -> bool:
        """Whether the hour still exists and only rows of it are damaged."""
        return hour not in self._given_up and hour >= self._core.wheel.holdings.removed_below

    def _others(self) -> list[str]:
        own_id = self._core.identity.node_id
        return [member.node_id for member in self._core.log.members() if member.node_id != own_id]

    # -- entries that must wait

    def ready(self, entry: LogEntry) -> bool:
        """Whether all index rows that this entry needs can be read. Raises CorruptSegmentError if they cannot and
        cannot be repaired."""
        wheel = self._core.wheel
        try:
            for command in entry.commands:
                kind = command.WhichOneof("body")
                if kind == "dispatch":
                    wheel.window.load_to(command.dispatch.due_ms)
                elif kind == "settle":
                    for batch in command.settle.batches:
                        if (batch.kind == SETTLE_RETRY and batch.due_ms) or batch.kind == SETTLE_DEAD:
                            wheel.reads.check_rows(np.frombuffer(batch.ids[: len(batch.ids) // 8 * 8], "<u8"))
        except CorruptSegmentError as error:
            if self.damaged(error):
                self.holds_log = True
                return False
            raise
        return True

    # -- finding lost rows

    def metrics(self) -> Mapping[str, MetricValue]:
        return {"delay_indexes_damaged": float(self.waiting), "index_rows_mended": float(self.repaired)}

    def wait_ms(self, now: Now) -> int | None:
        """Until the next repair is due."""
        times = [case.next_ms for case in self._cases.values() if not case.working]
        return min(times) - now.steady_ms if times else None

    def tick(self, now: Now) -> None:
        """Carry on the repairs that are due."""
        steady_ms = now.steady_ms
        if not self._cases:
            return
        for case in list(self._cases.values()):
            if case.working or case.next_ms > steady_ms:
                continue
            if not self._repairable(case.hour):
                self._over(case)
            elif case.survey is None:
                self._survey(case)
            elif lost := case.lost():
                self._ask(case, lost)
            else:
                self._write(case)

    def _over(self, case: _Case) -> None:
        del self._cases[case.hour]
        self.holds_log = False
        self._core.background.resume()

    def _later(self, case: _Case, pause_ms: int) -> None:
        case.next_ms = self._core.steady_ms() + pause_ms

    def _survey(self, case: _Case) -> None:
        job = SurveyJob(self._core.wheel.holdings.open_hour(case.hour))
        case.working = True

        def surveyed(_: object, error: BaseException | None) -> None:
            case.working = False
            if error is not None:
                self._failed(case, error)
            elif len(job.ids):
                case.survey = job
                self._later(case, 0)
            else:
                self._over(case)  # it can be read again

        self._core.background.submit(job.run, surveyed)

    def _failed(self, case: _Case, error: BaseException) -> None:
        """A survey or a write failed."""
        if not self._repairable(case.hour):
            self._over(case)
        elif isinstance(error, FsyncFailedError):
            self._core.fatal(f"the index of hour {case.hour} cannot be repaired: {error}", error)
        elif isinstance(error, DiskFullError):
            self._later(case, RETRY_MS)
        else:
            # The next reader of the hour finds the damage again, and stops the node if it needs the rows.
            self._given_up.add(case.hour)
            facts: dict[str, object] = {"hour": case.hour, "error": str(error)}
            self._report("error", "an index cannot be repaired", facts)
            self._over(case)

    def _ask(self, case: _Case, lost: list[int]) -> None:
        ask = RecordAsk(ids=np.array(lost[:UNITS_ASKED_MAX], "<u8").tobytes(), units_only=True)
        for peer_id in self._others():
            self._core.log.send_beside(peer_id, PeerFrame(record_ask=ask))
        self._later(case, ASK_PERIOD_MS)

    def answer_in(self, peer_id: str, answer: RecordAnswer) -> None:
        """Take a member's answer."""
        for found in answer.records:
            case = self._cases.get(found.id >> 32)
            if case is None or case.working or found.state != RecordFound.READABLE:
                continue
            unit = unit_in(found)
            if unit is not None and found.id not in case.units:
                case.units[found.id] = unit[0]
                self._later(case, 0)

    def _write(self, case: _Case) -> None:
        core = self._core
        assert case.survey is not None
        count = len(case.units)
        job = RepairJob(
            core.wheel.holdings.open_hour(case.hour), core.state.settings.slot_ms, case.survey.bad, case.units
        )
        case.working = True

        def written(_: object, error: BaseException | None) -> None:
            case.working = False
            if isinstance(error, UnlikeUnitError):
                case.units.clear()
                case.unlike += 1
                if case.unlike < UNLIKE_MAX:
                    self._later(case, RETRY_MS)
                else:
                    self._failed(case, error)
            elif error is not None:
                self._failed(case, error)
            else:
                self.repaired += count
                self._report(
                    "warning",
                    "rows of an index that were lost here are written again, with what other members had",
                    {"hour": case.hour, "rows": count, "error": case.error},
                )
                self._over(case)

        core.background.write(job.run, written)
