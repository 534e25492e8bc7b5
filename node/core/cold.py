"""Requests about the cold tier, on the master: register parts; cancel, move or look up single messages.

The outcome is decided when a command is applied (node/state/cold.py). A message that has been loaded by then is in the
wheel, and the request continues there under its id in the wheel. A loaded message never returns to the cold tier.
"""

from __future__ import annotations

from collections.abc import Callable

from tickwheel.node.core.disk_room import DiskRoom
from tickwheel.node.core.failure import Failure, Permitted, invalid, no_agreed_time
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.publisher import Rescheduled
from tickwheel.node.state.cold import ColdResult, Place
from tickwheel.node.state.cold_marks import CANCELLED, LOADED, MOVED
from tickwheel.proto import admin_pb2, bulk_pb2, cold_pb2, common_pb2, scheduler_pb2
from tickwheel.proto.log_pb2 import Command


class ColdDesk:
    def __init__(self, core: Kernel, disk_room: DiskRoom) -> None:
        self._core = core
        self._disk_room = disk_room

    # -- jobs

    def register(
        self, request: cold_pb2.RegisterColdRequest, done: Callable[[cold_pb2.ColdJob | Failure], None]
    ) -> None:
        """Register the parts of a job."""
        failure = self._core.refusal() or self._disk_room.refusal()
        if failure is not None:
            done(failure)
            return

        def applied(result: object) -> None:
            assert isinstance(result, cold_pb2.ColdJob | Failure)
            done(result)

        self._core.proposer.submit(Command(cold=cold_pb2.ColdCommand(register=request)), applied)

    def parts(
        self, request: cold_pb2.ListColdPartsRequest, done: Callable[[cold_pb2.ColdParts | Failure], None]
    ) -> None:
        """A page of parts."""
        failure = self._core.refusal()
        done(failure or self._core.state.cold.list_parts(request.after, request.waiting_only))

    def moved(
        self, request: cold_pb2.ListColdMovedRequest, done: Callable[[cold_pb2.ColdMoved | Failure], None]
    ) -> None:
        """A page of messages that were moved and are waiting to be loaded."""
        failure = self._core.refusal()
        done(failure or self._core.state.cold.list_moved(request.after, request.due_below_ms))

    def wants(self, request: bulk_pb2.TakeOverRequest, done: Callable[[bulk_pb2.LoadState | Failure], None]) -> bool:
        """Whether a bundle of the cold tier should be taken over. If not, `done` has been called."""
        cold = self._core.state.cold
        units = len(request.cold.ids) // 8
        part = cold.parts.get(request.cold.part)
        failure = cold.problem_of(request.cold, units or (part.rows if part is not None else 0))
        if failure is not None:
            done(failure)
            return False
        if cold.wants(request.cold):
            return True
        done(
            bulk_pb2.LoadState(
                job_id=request.job_id,
                load_sha256=request.load_sha256,
                bundles=request.bundles,
                taken=request.sequence,
            )
        )
        return False

    # -- single messages

    def _permission(self, number: int, permitted: Permitted) -> Failure | None:
        """The refusal of a request for an unloaded message. It has no topic yet, so the request needs the right to
        every topic. For a loaded message the topic's right is checked later."""
        place = self._core.state.cold.place(number)
        return None if place is not None and place.kind == LOADED else permitted("")

    def cancel(
        self,
        number: int,
        done: Callable[[scheduler_pb2.CancelOutcome.ValueType | Failure], None],
        permitted: Permitted,
        loaded: Callable[[int], None],
    ) -> None:
        """Cancel by a cold id. If the message is in the wheel, `loaded` is called with its id there instead of
        `done`."""
        refusal = self._permission(number, permitted)
        if refusal is not None:
            done(refusal)
            return

        def marked(result: Place | Failure | None) -> None:
            if isinstance(result, Failure):
                done(result)
            elif result is None:
                done(scheduler_pb2.NOT_FOUND)
            elif result.kind == LOADED:
                loaded(result.loaded_id)
            else:
                done(scheduler_pb2.CANCELLED)

        self._mark(cold_pb2.ColdMark(id=number), marked)

    def move(
        self,
        number: int,
        due_ms: int,
        done: Callable[[Rescheduled | Failure], None],
        permitted: Permitted,
        loaded: Callable[[int], None],
    ) -> None:
        """Move by a cold id. The new time must be far enough ahead for a job to bring the message. `loaded` as in
        `cancel`."""
        core = self._core
        refusal = self._permission(number, permitted)
        if refusal is not None:
            done(refusal)
            return

        def marked(result: Place | Failure | None) -> None:
            if isinstance(result, Failure):
                done(result)
            elif result is None:
                done(Rescheduled(scheduler_pb2.RESCHEDULE_NOT_FOUND, 0, 0))
            elif result.kind == LOADED:
                loaded(result.loaded_id)
            elif result.kind == CANCELLED:
                done(Rescheduled(scheduler_pb2.RESCHEDULE_CANCELLED, 0, 0))
            else:
                done(Rescheduled(scheduler_pb2.RESCHEDULED, number, due_ms))

        place = core.state.cold.place(number)
        if place is not None and place.kind in (0, MOVED):
            if not core.clock.known:
                done(no_agreed_time())
                return
            lead_ms, now_ms = core.state.settings.cold_lead_ms, core.clock.now_ms()
            if due_ms < now_ms + lead_ms:
                limit = f"at least cold_lead_ms ({lead_ms}) ahead of now ({now_ms}): the message is not loaded yet"
                done(invalid("due_ms", due_ms, limit).failure)
                return
        self._mark(cold_pb2.ColdMark(id=number, due_ms=due_ms), marked)

    def _mark(self, mark: cold_pb2.ColdMark, done: Callable[[Place | Failure | None], None]) -> None:
        core = self._core
        failure = core.refusal()
        if failure is not None:
            done(failure)
            return
        place = core.state.cold.place(mark.id)
        if place is not None and place.kind == LOADED:
            done(place)
            return

        def applied(result: object) -> None:
            if isinstance(result, Failure):
                done(result)
                return
            assert isinstance(result, ColdResult)
            done(result.place)

        core.proposer.submit(Command(cold=cold_pb2.ColdCommand(mark=mark)), applied)

    def get(
        self,
        number: int,
        done: Callable[[scheduler_pb2.GetResponse | Failure], None],
        permitted: Permitted,
        loaded: Callable[[int], None],
    ) -> None:
        """State of a message by its cold id. `loaded` as in `cancel`: the wheel then has its content."""
        core = self._core
        failure = core.refusal() or self._permission(number, permitted)
        if failure is not None:
            done(failure)
            return
        place = core.state.cold.place(number)
        if place is None:
            text = f"{number >> 32}-{number & 0xFFFFFFFF}"
            done(Failure(common_pb2.UNKNOWN_NAME, f"no message {text}", {"field": "id", "value": text}))
            return
        if place.kind == LOADED:
            loaded(place.loaded_id)
            return
        state = scheduler_pb2.MESSAGE_CANCELLED if place.kind == CANCELLED else scheduler_pb2.COLD
        response = scheduler_pb2.GetResponse(state=state)
        response.message.id.wheel_group = core.identity.wheel_group
        response.message.id.hour, response.message.id.index = number >> 32, number & 0xFFFF_FFFF
        response.message.due_ms = place.due_ms
        done(response)

    # -- operators

    def status(self) -> admin_pb2.ColdStatus:
        """What is waiting in the cold tier, and whether it is late."""
        core = self._core
        cold = core.state.cold
        next_ms = cold.next_due_ms()
        ahead_ms = next_ms - core.clock.now_ms()
        lead_ms = core.state.settings.cold_lead_ms
        state = admin_pb2.COLD_IN_TIME
        if not next_ms:
            state = admin_pb2.COLD_EMPTY
        elif core.clock.known:
            if ahead_ms < 0:
                state = admin_pb2.COLD_LATE
            elif ahead_ms < lead_ms:
                state = admin_pb2.COLD_DUE_SOON
            elif ahead_ms < lead_ms + core.state.settings.cold_warn_ms:
                state = admin_pb2.COLD_BEHIND
        return admin_pb2.ColdStatus(
            state=state,
            parts=cold.parts.waiting,
            days=cold.parts.waiting_days(),
            messages=cold.parts.waiting_rows,
            cancelled=cold.marks.count(CANCELLED),
            moved=cold.marks.count(MOVED),
            next_due_ms=next_ms,
            late_ms=max(0, -ahead_ms) if state == admin_pb2.COLD_LATE else 0,
            loaded_late=cold.late,
            loaded_late_ms_max=cold.late_ms_max,
        )
