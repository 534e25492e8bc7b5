"""Requests about the cold tier, on the master: register parts; cancel, move or look up single messages.

The outcome is decided when a command is applied (node/state/cold.py). A message that has been loaded by then is in the
wheel, and the request continues there under its id in the wheel. A loaded message never returns to the cold tier.
"""

from __future__ import annotations

from tickwheel.node.core.disk_room import DiskRoom
from tickwheel.node.core.kernel import Kernel, require_current
from tickwheel.node.core.message_ids import fill_message_id, no_message
from tickwheel.node.failure import Permitted, RequestError, invalid, no_agreed_time, refuse
from tickwheel.node.state.cold import CANCELLED, LOADED, MOVED, ColdResult, Place
from tickwheel.proto import admin_pb2, bulk_pb2, cold_pb2, scheduler_pb2
from tickwheel.proto.log_pb2 import Command


class ColdRequests:
    def __init__(self, core: Kernel, disk_room: DiskRoom) -> None:
        self._core = core
        self._disk_room = disk_room

    # -- jobs

    async def register(self, request: cold_pb2.RegisterColdRequest) -> cold_pb2.ColdJob:
        """Register the parts of a job."""
        refuse(self._disk_room.refusal())
        command = Command(cold=cold_pb2.ColdCommand(register=request))
        return await self._core.proposer.propose(command, cold_pb2.ColdJob)

    async def parts(self, request: cold_pb2.ListColdPartsRequest) -> cold_pb2.ColdParts:
        """A page of parts."""
        return self._core.state.cold.list_parts(request.after, request.waiting_only)

    async def moved(self, request: cold_pb2.ListColdMovedRequest) -> cold_pb2.ColdMoved:
        """A page of messages that were moved and are waiting to be loaded."""
        return self._core.state.cold.list_moved(request.after, request.due_below_ms)

    def unwanted(self, request: bulk_pb2.TakeOverRequest) -> bulk_pb2.LoadState | None:
        """The answer for a bundle of the cold tier that was taken over before; None: it should be taken over. Raises
        RequestError: its `cold` is wrong."""
        cold = self._core.state.cold
        units = len(request.cold.ids) // 8
        part = cold.parts.get(request.cold.part)
        refuse(cold.problem_of(request.cold, units or (part.rows if part is not None else 0)))
        if cold.wants(request.cold):
            return None
        return bulk_pb2.LoadState(
            job_id=request.job_id,
            load_sha256=request.load_sha256,
            bundles=request.bundles,
            taken=request.sequence,
        )

    # -- single messages

    def _require(self, number: int, permitted: Permitted) -> None:
        """Raise the refusal of a request for an unloaded message. It has no topic yet, so the request needs the right
        to every topic. For a loaded message the topic's right is checked later."""
        place = self._core.state.cold.place(number)
        if place is None or place.kind != LOADED:
            refuse(permitted(""))

    async def cancel(self, number: int, permitted: Permitted) -> Place | None:
        """Cancel by a cold id. Returns where the message is then: in the wheel it is not cancelled yet. None: there is
        no such message."""
        self._require(number, permitted)
        return await self._mark(cold_pb2.ColdMark(id=number))

    async def move(self, number: int, due_ms: int, permitted: Permitted) -> Place | None:
        """Move by a cold id. The new time must be far enough ahead for a job to bring the message. Returns as
        `cancel`."""
        core = self._core
        self._require(number, permitted)
        place = core.state.cold.place(number)
        if place is not None and place.kind in (0, MOVED):
            if not core.clock.known:
                raise RequestError(no_agreed_time())
            lead_ms, now_ms = core.state.settings.cold_lead_ms, core.clock.now_ms()
            if due_ms < now_ms + lead_ms:
                limit = f"at least cold_lead_ms ({lead_ms}) ahead of now ({now_ms}): the message is not loaded yet"
                raise invalid("due_ms", due_ms, limit)
        return await self._mark(cold_pb2.ColdMark(id=number, due_ms=due_ms))

    async def _mark(self, mark: cold_pb2.ColdMark) -> Place | None:
        core = self._core
        core.require_master()
        place = core.state.cold.place(mark.id)
        if place is not None and place.kind == LOADED:
            return place
        return (await core.proposer.propose(Command(cold=cold_pb2.ColdCommand(mark=mark)), ColdResult)).place

    def find(self, number: int, permitted: Permitted) -> Place:
        """Where a message is. Raises RequestError: there is none, or `permitted` refuses."""
        self._core.require_master()
        self._require(number, permitted)
        place = self._core.state.cold.place(number)
        if place is None:
            require_current(self._core)
            raise RequestError(no_message(number, self._core.identity.wheel_group))
        return place

    def describe(self, number: int, place: Place) -> scheduler_pb2.GetResponse:
        """State of a message that is not loaded."""
        state = scheduler_pb2.MESSAGE_CANCELLED if place.kind == CANCELLED else scheduler_pb2.COLD
        response = scheduler_pb2.GetResponse(state=state)
        fill_message_id(response.message.id, number, self._core.identity.wheel_group)
        response.message.due_ms = place.due_ms
        return response

    # -- operators

    def status(self) -> admin_pb2.ColdStatus:
        """Parts that wait in the cold tier, and whether they are late."""
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
