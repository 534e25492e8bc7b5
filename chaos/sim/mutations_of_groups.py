"""Old bugs of what groups and operators are promised; mutations.py knows them all."""

from __future__ import annotations

import itertools
from typing import Any

from tickwheel.chaos.sim.aims import Aim
from tickwheel.chaos.sim.mutation_table import Patches, mutation
from tickwheel.node.core.delivery import fifo
from tickwheel.node.core.delivery.broadcast import Broadcasts
from tickwheel.node.core.delivery.fifo import FifoChannel
from tickwheel.node.core.schedule import sweeper
from tickwheel.node.state import filtering, snapshot
from tickwheel.node.state.administration import Administration
from tickwheel.node.state.retrying import Retrying
from tickwheel.node.state.subscription import Subscription
from tickwheel.node.state.sweeps import DELETIONS, Sweeps
from tickwheel.node.state.topics import Topic
from tickwheel.node.state.view import StateView
from tickwheel.proto.admin_pb2 import ResetGroupRequest
from tickwheel.proto.common_pb2 import MessageMeta
from tickwheel.proto.consumer_pb2 import LATEST, TIME
from tickwheel.proto.log_pb2 import SweepStep
from tickwheel.proto.scheduler_pb2 import SWEEP_FINISHED, Sweep
from tickwheel.wheel.filters import TagFilter
from tickwheel.wheel.units import ONE_TAG

# -- message groups


@mutation("every message of a FIFO topic is a message group of its own")
def message_groups_ignored(patches: Patches) -> None:
    numbers = itertools.count()

    def other(data: bytes) -> MessageMeta:
        return MessageMeta(message_group=str(next(numbers)))

    patches.replace(fifo, "meta_of", lambda original: other)


@mutation("a retry in a FIFO topic leaves its place, as elsewhere")
def retries_leave_their_place(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def settle(self: Retrying, *args: Any, in_place: bool = False) -> Any:
            return original(self, *args)

        return settle

    patches.replace(Retrying, "settle", make)


@mutation("a message group is free again as soon as its lease has run out")
def paused_heads_passed_over(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def attempt_of_head(self: FifoChannel, name: str, lane: Any) -> int:
            attempt: int = original(self, name, lane)
            if attempt > 1 and len(lane.waiting) > 1:
                lane.waiting.rotate(-1)
                attempt = original(self, name, lane)
            return attempt

        return attempt_of_head

    patches.replace(FifoChannel, "_attempt_of_head", make)


# -- deletions


@mutation(
    "a deletion cancels nothing of what is pending", aim=Aim(("kill", "isolate"), nodes=3, shape=(("stewards", 1),))
)
def deletion_cancels_nothing(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def step(self: Sweeps, command: SweepStep, *args: Any) -> Any:
            job = self.get(command.job_id)
            if job is not None and job.WhichOneof("action") in DELETIONS:
                command = SweepStep(job_id=command.job_id, number=command.number, last=True)
            return original(self, command, *args)

        return step

    patches.replace(Sweeps, "_step", make)


@mutation("a deletion ends and leaves its topic there", aim=Aim(("kill", "isolate"), nodes=3, shape=(("stewards", 1),)))
def deleted_topics_stay(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def deletion_went_on(self: Administration, job: Sweep, looked: Any) -> Any:
            state: Any = self._state
            topic = state.deletion_target(job)
            if job.state != SWEEP_FINISHED or not isinstance(topic, Topic):
                return original(self, job, looked)
            topic.closing = topic.paused = False
            return job

        return deletion_went_on

    patches.replace(Administration, "deletion_went_on", make)


# -- pauses


@mutation("a pause is not in the checkpoint")
def pauses_not_in_checkpoints(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def restored(*args: Any) -> Any:
            found = original(*args)
            found.paused = False
            return found

        return restored

    patches.replace(snapshot, "_restore_topic", make)
    patches.replace(snapshot, "_restore_group", make)


@mutation("a pause of a group holds its topics that are paused too, no others")
def group_pauses_not_asked(patches: Patches) -> None:
    patches.replace(StateView, "group_paused", lambda original: lambda self, group_id: False)


# -- bulk cancels and moves


@mutation("a sweep goes on a little behind the place where its last step ended")
def sweeps_skip_some(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def step(self: Sweeps, step: SweepStep, *args: Any) -> Any:
            step.next_due_ms += 100
            return original(self, step, *args)

        return step

    patches.replace(Sweeps, "_step", make)


@mutation("a sweep takes what is scheduled while it runs")
def sweeps_take_newcomers(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def make_query(core: Any, selection: Any, stamped_ms_max: int | None = None, retries: bool = True) -> Any:
            return original(core, selection, None, retries)

        return make_query

    patches.replace(sweeper, "make_query", make)


@mutation("what a sweep comes too late for it counts as done")
def sweeps_count_too_late(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def step(self: Sweeps, step: SweepStep, *args: Any) -> Any:
            result = original(self, step, *args)
            job = self.get(step.job_id)
            if job is not None:
                job.done, job.too_late = job.done + job.too_late, 0
            return result

        return step

    patches.replace(Sweeps, "_step", make)


# -- filters, broadcasting, resets


@mutation("a changed filter holds for what is dispatched from then on only")
def filters_for_newcomers_only(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def begin(group: Any, subscription: Subscription) -> None:
            subscription.checked = subscription.stop if group.filter else None

        return begin

    patches.replace(filtering, "begin", make)


@mutation("a filter lets nothing through that has several tags")
def filters_take_one_tag_only(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def wanted(self: TagFilter, units: Any) -> Any:
            return original(self, units) & ((units["flags"] & ONE_TAG) != 0)

        return wanted

    patches.replace(TagFilter, "wanted", make)


@mutation("a broadcasting group is served like any other")
def broadcasts_to_one(patches: Patches) -> None:
    patches.replace(StateView, "group_broadcasting", lambda original: lambda self, group_id: False)


@mutation("a consumer of a broadcasting group begins anew when its lease runs out")
def broadcasts_retried(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def answered(self: Broadcasts, key: Any, session_id: int, positions: Any) -> int:
            count: int = original(self, key, session_id, positions)
            if count > 2:
                self._readers[key].pop(session_id, None)
            return count

        return answered

    patches.replace(Broadcasts, "answered", make)


@mutation("a reset leaves the channels of a group where they are")
def resets_without_epoch(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def reset(self: Subscription, position: int, start_ms: int) -> None:
            epoch = self.epoch
            original(self, position, start_ms)
            self.epoch = epoch

        return reset

    patches.replace(Subscription, "reset", make)


@mutation("a reset to a time begins with what comes next")
def resets_to_the_end(patches: Patches) -> None:
    def make(original: Any) -> Any:
        def reset(self: Administration, request: ResetGroupRequest) -> Any:
            if request.start_from == TIME:
                request.start_from = LATEST
            return original(self, request)

        return reset

    patches.replace(Administration, "_reset", make)
