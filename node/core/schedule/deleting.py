"""Deletes topics and groups. Their messages are counted first, and cancelled if the request confirms that.

A deletion is a sweep of the replicated state (node/state/sweeps.py). From its first command on, the target accepts and
hands out nothing. The master of the moment cancels the pending messages step by step; at the end the target is removed.
This module decides whether a deletion may begin, and answers when it has ended.

An unconfirmed request is judged by a count. Messages scheduled between that count and the first command, a moment
later, are cancelled, counted and recorded like the others.

A call that is repeated because its answer was lost carries the same request id. It gets the sweep that the first try
began, whether the target still exists, is gone, or exists again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tickwheel.node.core.kernel import Kernel, require_current
from tickwheel.node.core.part import Part
from tickwheel.node.core.promise import Promise
from tickwheel.node.core.schedule.pending import PendingRequests, deletion_query
from tickwheel.node.core.schedule.sweeper import Sweeper
from tickwheel.node.core.world import Now, SteadyMs
from tickwheel.node.failure import Failure, refused
from tickwheel.node.state.results import SweepResult
from tickwheel.node.state.schema import TOPIC_DEAD_LEVEL
from tickwheel.node.state.sweeps import DELETIONS
from tickwheel.proto import common_pb2
from tickwheel.proto.admin_pb2 import DeleteGroupRequest, DeleteTopicRequest
from tickwheel.proto.scheduler_pb2 import SWEEP_FINISHED, SWEEP_RUNNING, Selection, Sweep

ANSWER_MS_MAX = 2_000
"""A deletion that takes longer is answered with its state so far, and goes on. Less than the 3 s after which the Python
client repeats a call: a repeat would wait anew, and no try would ever get an answer."""
LETTERS_MAX = 65_536
"""Dead letters that a count reads in one turn."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A caller that is answered when the job has ended, or at `until_ms`."""

    job_id: str
    until_ms: int
    answer: Promise[Sweep]


class Deleter(Part):
    def __init__(
        self, core: Kernel, pending: PendingRequests, sweeper: Sweeper, all_understand: Callable[[int], bool]
    ) -> None:
        """`all_understand` tells whether every member reads a log of a level."""
        self._core = core
        self._all_understand = all_understand
        self._pending = pending
        self._sweeper = sweeper
        self._waiting: list[_Waiting] = []
        self._counting: list[Promise[None]] = []
        """Each is a count of dead letters that goes on in the next tick."""

    async def topic(self, request: DeleteTopicRequest) -> Sweep:
        """Delete a topic. If it holds anything, the request must confirm. Returns the deleting sweep, once it has ended
        or takes long."""
        state = self._core.state
        topic_id = state.topic_id(request.name)
        owed = {} if topic_id is None else {"undelivered": state.topic_undelivered(topic_id)}
        wanted = Sweep(delete_topic=request.name, selection=Selection(topic=request.name))
        return await self._delete(
            "topic", request.name, topic_id, wanted, owed, request.cancel_pending, request.request_id
        )

    async def group(self, request: DeleteGroupRequest) -> Sweep:
        """Delete a group, with the same answer. If it holds anything, the request must confirm."""
        state = self._core.state
        group_id = state.group_id(request.name)
        owed = {} if group_id is None else state.group_owed(group_id)
        wanted = Sweep(delete_group=request.name)
        return await self._delete("group", request.name, group_id, wanted, owed, request.discard, request.request_id)

    async def _delete(
        self,
        what: str,
        name: str,
        target_id: int | None,
        wanted: Sweep,
        owed: dict[str, int],
        confirmed: bool,
        request_id: int,
    ) -> Sweep:
        core = self._core
        begun = next((job.job_id for job in core.state.sweeps if _is_of(job, wanted, request_id)), None)
        if begun is not None:
            return await self._ended(begun)
        if target_id is None:
            require_current(core)
            raise refused(common_pb2.UNKNOWN_NAME, f"{what} {name} does not exist", field=what, value=name[:127])
        wanted.target_id = target_id
        running = next((job.job_id for job in core.state.sweeps if _deletes(job, wanted)), None)
        if running is not None:
            return await self._ended(running)
        call = f"{request_id:x}" if request_id else str(core.applied.index)
        wanted.job_id = f"delete-{what}-{target_id}-{call}"
        if what == "topic":
            wanted.with_dead = self._takes_letters()
            if not (confirmed and wanted.with_dead):
                owed["dead"] = await self._letters(target_id)
        if not confirmed:
            pending = await self._pending.count_all(deletion_query(wanted))
            found = {"pending" if what == "topic" else "retries": pending, **owed}
            if any(found.values()):
                words = ", ".join(f"{count} {word.replace('_', ' ')}" for word, count in found.items() if count)
                text = f"{what} {name} still has {words}: confirm that they are to go with it"
                facts = {word: str(count) for word, count in found.items()}
                raise refused(common_pb2.WRONG_STATE, text, field=what, value=name, **facts)
        if what == "topic" and not wanted.with_dead and owed["dead"]:
            text = "a member of the cluster runs a version that leaves dead letters behind, or has not been heard yet"
            raise refused(common_pb2.RECOVERING, text, field="members", retry_after_ms=200)
        job = await self._sweeper.begin_deletion(wanted)
        return await self._ended(job.job_id)

    def _takes_letters(self) -> bool:
        """Whether a topic's deletion may take its dead letters along: every member can apply that, or the log has such
        a deletion already."""
        return any(job.with_dead for job in self._core.state.sweeps) or self._all_understand(TOPIC_DEAD_LEVEL)

    async def _letters(self, topic_id: int) -> int:
        """Count a topic's dead letters in all groups, in turns."""
        core = self._core
        count, left = 0, LETTERS_MAX
        for group_id in core.state.groups_of_topic(topic_id):
            at = 0
            while (dead := core.state.dead_letters(group_id)) is not None and dead.count:
                at = max(at, dead.oldest_number)
                below = min(at + left, dead.next_number)
                count += len(dead.numbers_of_topic(topic_id, at, below))
                left -= below - at
                at = below
                if left:
                    break
                await self._turn()
                left = LETTERS_MAX
        return count

    async def _turn(self) -> None:
        """Go on in the next tick. Raises RequestError once this node leads no more."""
        turn: Promise[None] = Promise()
        self._counting.append(turn)
        await turn

    async def _ended(self, job_id: str) -> Sweep:
        """The job when it has ended, or as it is after ANSWER_MS_MAX."""
        answer: Promise[Sweep] = Promise()
        self._waiting.append(_Waiting(job_id, self._core.steady_ms() + ANSWER_MS_MAX, answer))
        self._answer(self._core.steady_ms())
        return await answer

    def tick(self, now: Now) -> None:
        """Go on counting. Answer the callers whose job has ended or whose time is up."""
        counting, self._counting = self._counting, []
        for turn in counting:
            turn.keep(None)
        if now.acting and self._waiting:
            self._answer(now.steady_ms)

    def wait_ms(self, now: Now) -> int | None:
        """0 while a count goes on; else until the time of a caller is up."""
        if self._counting:
            return 0
        return min((caller.until_ms - now.steady_ms for caller in self._waiting), default=None) if now.acting else None

    def _answer(self, steady_ms: SteadyMs) -> None:
        left: list[_Waiting] = []
        ended: list[tuple[_Waiting, Sweep | None]] = []
        for caller in self._waiting:
            job = self._core.state.sweeps.get(caller.job_id)
            if job is None or job.state != SWEEP_RUNNING or steady_ms >= caller.until_ms:
                ended.append((caller, job))
            else:
                left.append(caller)
        self._waiting = left
        for caller, job in ended:
            if job is None:
                text = f"sweep {caller.job_id} is forgotten"
                caller.answer.refuse(Failure(common_pb2.UNKNOWN_NAME, text))
            else:
                caller.answer.keep(job)

    def end(self, failure: Failure) -> None:
        """Answer the waiting callers with `failure`; the next master carries the deletions on."""
        counting, self._counting = self._counting, []
        for turn in counting:
            turn.refuse(failure)
        waiting, self._waiting = self._waiting, []
        for caller in waiting:
            caller.answer.refuse(failure)


def _deletes(job: Sweep, wanted: Sweep) -> bool:
    """Whether a running job deletes the same target."""
    same = job.WhichOneof("action") == wanted.WhichOneof("action") and job.target_id == wanted.target_id
    return same and job.state == SWEEP_RUNNING


def _is_of(job: Sweep, wanted: Sweep, request_id: int) -> bool:
    """Whether an earlier try of the same call began the job."""
    same = (job.delete_topic, job.delete_group) == (wanted.delete_topic, wanted.delete_group)
    return bool(request_id) and same and job.job_id.endswith(f"-{request_id:x}")


def has_removed(result: SweepResult) -> bool:
    """Whether a command of a sweep has ended a deletion, so that its topic or group is gone."""
    job = result.sweep
    return job is not None and job.WhichOneof("action") in DELETIONS and finished(job)


def finished(job: Sweep) -> bool:
    """Whether the target of a deletion is gone."""
    return job.state == SWEEP_FINISHED
