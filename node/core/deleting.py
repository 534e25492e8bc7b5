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

from tickwheel.node.core.failure import Failure
from tickwheel.node.core.kernel import Kernel
from tickwheel.node.core.part import Part
from tickwheel.node.core.pending import PendingDesk, deletion_query
from tickwheel.node.core.sweeper import Sweeper
from tickwheel.node.core.world import Now, SteadyMs
from tickwheel.proto import common_pb2
from tickwheel.proto.admin_pb2 import DeleteGroupRequest, DeleteTopicRequest
from tickwheel.proto.scheduler_pb2 import SWEEP_FINISHED, SWEEP_RUNNING, Selection, Sweep

ANSWER_MS_MAX = 5_000
"""A deletion that takes longer is answered with its state so far, and goes on."""

Done = Callable[[Sweep | Failure], None]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A caller that is answered when the job has ended, or at `until_ms`."""

    job_id: str
    until_ms: int
    done: Done


class Deleter(Part):
    def __init__(self, core: Kernel, pending: PendingDesk, sweeper: Sweeper) -> None:
        self._core = core
        self._pending = pending
        self._sweeper = sweeper
        self._waiting: list[_Waiting] = []

    def topic(self, request: DeleteTopicRequest, done: Done) -> None:
        """Delete a topic. If it holds anything, the request must confirm."""
        state = self._core.state
        topic_id = state.topic_id(request.name)
        owed = {} if topic_id is None else {"undelivered": state.topic_undelivered(topic_id)}
        wanted = Sweep(delete_topic=request.name, selection=Selection(topic=request.name))
        self._delete("topic", request.name, topic_id, wanted, owed, request.cancel_pending, request.request_id, done)

    def group(self, request: DeleteGroupRequest, done: Done) -> None:
        """Delete a group. If it holds anything, the request must confirm."""
        state = self._core.state
        group_id = state.group_id(request.name)
        owed = {} if group_id is None else state.group_owed(group_id)
        wanted = Sweep(delete_group=request.name)
        self._delete("group", request.name, group_id, wanted, owed, request.discard, request.request_id, done)

    def _delete(
        self,
        what: str,
        name: str,
        target_id: int | None,
        wanted: Sweep,
        owed: dict[str, int],
        confirmed: bool,
        request_id: int,
        done: Done,
    ) -> None:
        core = self._core
        failure = core.refusal()
        begun = next((job.job_id for job in core.state.sweeps if _is_of(job, wanted, request_id)), None)
        if failure is None and begun is not None:
            self._wait(begun, done)
            return
        if failure is None and target_id is None:
            text = f"{what} {name} does not exist"
            failure = Failure(common_pb2.UNKNOWN_NAME, text, {"field": what, "value": name[:127]})
        if failure is not None or target_id is None:
            done(failure or Failure(common_pb2.UNKNOWN_NAME, name))
            return
        wanted.target_id = target_id
        running = next((job.job_id for job in core.state.sweeps if _deletes(job, wanted)), None)
        if running is not None:
            self._wait(running, done)
            return
        call = f"{request_id:x}" if request_id else str(core.applied_index)
        wanted.job_id = f"delete-{what}-{target_id}-{call}"
        if confirmed:
            self._begin(wanted, done)
            return

        def counted(pending: int | Failure) -> None:
            if isinstance(pending, Failure):
                done(pending)
                return
            found = {"pending" if what == "topic" else "retries": pending, **owed}
            if not any(found.values()):
                self._begin(wanted, done)
                return
            words = ", ".join(f"{count} {word.replace('_', ' ')}" for word, count in found.items() if count)
            text = f"{what} {name} still has {words}: confirm that they are to go with it"
            facts = {word: str(count) for word, count in found.items()}
            done(Failure(common_pb2.WRONG_STATE, text, {"field": what, "value": name, **facts}))

        self._pending.count_all(deletion_query(wanted), counted)

    def _begin(self, wanted: Sweep, done: Done) -> None:
        def begun(job: Sweep | Failure) -> None:
            if isinstance(job, Failure):
                done(job)
            else:
                self._wait(job.job_id, done)

        self._sweeper.begin_deletion(wanted, begun)

    def _wait(self, job_id: str, done: Done) -> None:
        self._waiting.append(_Waiting(job_id, self._core.steady_ms() + ANSWER_MS_MAX, done))
        self._answer(self._core.steady_ms())

    def tick(self, now: Now) -> None:
        """Answer the callers whose job has ended or whose time is up."""
        if now.acting and self._waiting:
            self._answer(now.steady_ms)

    def _answer(self, steady_ms: SteadyMs) -> None:
        left: list[_Waiting] = []
        answers: list[tuple[Done, Sweep | Failure]] = []
        for caller in self._waiting:
            job = self._core.state.sweeps.get(caller.job_id)
            if job is None:
                answers.append((caller.done, Failure(common_pb2.UNKNOWN_NAME, f"sweep {caller.job_id} is forgotten")))
            elif job.state != SWEEP_RUNNING or steady_ms >= caller.until_ms:
                answers.append((caller.done, job))
            else:
                left.append(caller)
        self._waiting = left
        for done, answer in answers:
            done(answer)

    def end(self, failure: Failure) -> None:
        """Answer the waiting callers with `failure`; the next master carries the deletions on."""
        waiting, self._waiting = self._waiting, []
        for caller in waiting:
            caller.done(failure)


def _deletes(job: Sweep, wanted: Sweep) -> bool:
    """Whether a running job deletes the same target."""
    same = job.WhichOneof("action") == wanted.WhichOneof("action") and job.target_id == wanted.target_id
    return same and job.state == SWEEP_RUNNING


def _is_of(job: Sweep, wanted: Sweep, request_id: int) -> bool:
    """Whether an earlier try of the same call began the job."""
    same = (job.delete_topic, job.delete_group) == (wanted.delete_topic, wanted.delete_group)
    return bool(request_id) and same and job.job_id.endswith(f"-{request_id:x}")


def finished(job: Sweep) -> bool:
    """Whether the target of a deletion is gone."""
    return job.state == SWEEP_FINISHED
