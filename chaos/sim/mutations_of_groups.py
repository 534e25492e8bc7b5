"""Old bugs of what groups and operators are promised; mutations.py knows them all."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tickwheel.chaos.sim.mutation_table import Patches, aimed, mutation
from tickwheel.node.core.delivery import delivery, fifo, settlements
from tickwheel.node.core.delivery.broadcast import Broadcasts
from tickwheel.node.core.delivery.delivery import Delivery
from tickwheel.node.core.delivery.fifo import FifoChannel
from tickwheel.node.core.delivery.returns import Returns
from tickwheel.node.core.delivery.sessions import CREDITS_MAX
from tickwheel.node.core.delivery.settlements import Settlements
from tickwheel.node.core.promise import Reply
from tickwheel.node.core.schedule import sweeper
from tickwheel.node.state import filtering, snapshot
from tickwheel.node.state.administration import Administration
from tickwheel.node.state.results import SettleResult
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


@mutation()
def message_groups_ignored(patches: Patches) -> None:
    """Every message of a FIFO topic is a message group of its own."""
    numbers = itertools.count()

    patches.replace(fifo, "meta_of", lambda original, data: MessageMeta(message_group=str(next(numbers))))


@mutation(Retrying, "settle")
def retries_leave_their_place(original: Any, self: Retrying, *args: Any, in_place: bool = False) -> Any:
    """A retry in a FIFO topic leaves its place, as elsewhere."""
    return original(self, *args)


@mutation(FifoChannel, "_attempt_of_head")
def paused_heads_passed_over(original: Any, self: FifoChannel, name: str, lane: Any) -> int:
    """A message group is free again as soon as its lease has run out."""
    attempt: int = original(self, name, lane)
    if attempt > 1 and len(lane.waiting) > 1:
        lane.waiting.rotate(-1)
        attempt = original(self, name, lane)
    return attempt


# -- deletions


@mutation(Sweeps, "_step", aim=aimed("kill", "isolate", nodes=3, stewards=1))
def deletion_cancels_nothing(original: Any, self: Sweeps, command: SweepStep, *args: Any) -> Any:
    """A deletion cancels nothing of what is pending."""
    job = self.get(command.job_id)
    if job is not None and job.WhichOneof("action") in DELETIONS:
        command = SweepStep(job_id=command.job_id, number=command.number, last=True)
    return original(self, command, *args)


@mutation(Administration, "deletion_went_on", aim=aimed("kill", "isolate", nodes=3, stewards=1))
def deleted_topics_stay(original: Any, self: Administration, job: Sweep, looked: Any) -> Any:
    """A deletion ends and leaves its topic there."""
    state: Any = self._state
    topic = state.deletion_target(job)
    if job.state != SWEEP_FINISHED or not isinstance(topic, Topic):
        return original(self, job, looked)
    topic.closing = topic.paused = False
    return job


# -- pauses


@mutation()
def pauses_not_in_checkpoints(patches: Patches) -> None:
    """A pause is not in the checkpoint."""

    def restored(original: Any, *args: Any) -> Any:
        found = original(*args)
        found.paused = False
        return found

    patches.replace(snapshot, "_restore_topic", restored)
    patches.replace(snapshot, "_restore_group", restored)


@mutation(StateView, "group_paused")
def group_pauses_not_asked(original: Any, self: StateView, group_id: Any) -> Any:
    """A pause of a group holds its topics that are paused too, no others."""
    return False


# -- bulk cancels and moves


@mutation(Sweeps, "_step")
def sweeps_skip_some(original: Any, self: Sweeps, step: SweepStep, *args: Any) -> Any:
    """A sweep goes on a little behind the place where its last step ended."""
    step.next_due_ms += 100
    return original(self, step, *args)


@mutation(sweeper, "make_query")
def sweeps_take_newcomers(
    original: Any, core: Any, selection: Any, stamped_ms_max: int | None = None, retries: bool = True
) -> Any:
    """A sweep takes what is scheduled while it runs."""
    return original(core, selection, None, retries)


@mutation(Sweeps, "_step")
def sweeps_count_too_late(original: Any, self: Sweeps, step: SweepStep, *args: Any) -> Any:
    """What a sweep comes too late for it counts as done."""
    result = original(self, step, *args)
    job = self.get(step.job_id)
    if job is not None:
        job.done, job.too_late = job.done + job.too_late, 0
    return result


# -- retries and dead letters


@mutation(Retrying, "_retry", aim=aimed("kill", nodes=3))
def retries_lost(original: Any, self: Retrying, *args: Any) -> None:
    """A nack settles the delivery, and its retry is not appended."""


@mutation(Retrying, "revive", aim=aimed("kill", nodes=3, parcels=1))
def replays_lost(original: Any, self: Retrying, *args: Any) -> None:
    """A replay removes dead letters and appends nothing."""


# -- limits of what is out


@mutation(Delivery, "_room", aim=aimed("kill", "handover", nodes=3, in_flight_max=30))
def in_flight_not_counted(original: Any, self: Delivery, group_id: int) -> int:
    """A limit of what a group has out holds for each pass by itself."""
    return self._state.settings.group_in_flight_max or CREDITS_MAX


# -- filters, broadcasting, resets


@mutation(filtering, "begin")
def filters_for_newcomers_only(original: Any, group: Any, subscription: Subscription) -> None:
    """A changed filter holds for what is dispatched from then on only."""
    subscription.checked = subscription.stop if group.filter else None


@mutation(TagFilter, "wanted")
def filters_take_one_tag_only(original: Any, self: TagFilter, units: Any) -> Any:
    """A filter lets nothing through that has several tags."""
    return original(self, units) & ((units["flags"] & ONE_TAG) != 0)


@mutation(StateView, "group_broadcasting")
def broadcasts_to_one(original: Any, self: StateView, group_id: Any) -> Any:
    """A broadcasting group is served like any other."""
    return False


@mutation(Broadcasts, "answered")
def broadcasts_retried(original: Any, self: Broadcasts, key: Any, session_id: int, positions: Any) -> int:
    """A broadcasting group's consumer starts over when its lease runs out."""
    count: int = original(self, key, session_id, positions)
    if count > 2:
        self._audiences[key].readers.pop(session_id, None)
    return count


@mutation(Subscription, "reset")
def resets_without_epoch(original: Any, self: Subscription, position: int, start_ms: int) -> None:
    """A reset leaves the channels of a group where they are."""
    epoch = self.epoch
    original(self, position, start_ms)
    self.epoch = epoch


@mutation(Administration, "_reset")
def resets_to_the_end(original: Any, self: Administration, request: ResetGroupRequest) -> Any:
    """A reset to a time begins with what comes next."""
    if request.start_from == TIME:
        request.start_from = LATEST
    return original(self, request)


@mutation(Returns, "positions", aim=aimed("kill", "slow-disk", couriers=1, lines=1, resets=1, lease_ms=300))
def returns_outlive_resets(original: Any, self: Returns, key: Any, epoch: int) -> Any:
    """After a reset, messages still wait for returns of before it."""
    waiting = [positions for (channel, _), positions in self._under_way.items() if channel == key]
    return np.array(sorted(set().union(*waiting)), np.uint64)


# -- deliveries and settlements that hold several topics

MANY_TOPICS = aimed("kill", couriers=1, mixing=2)


@mutation(delivery, "batch_of", aim=MANY_TOPICS)
def rows_under_the_next_topic(original: Any, shares: Any, *args: Any) -> Any:
    """A row at the border of two topics is delivered under the next one."""
    batch = original(shares, *args)
    counts = np.frombuffer(batch.topic_counts, "<u4").copy()
    if len(counts) > 1 and counts[0] > 1:
        counts[0], counts[1] = counts[0] - 1, counts[1] + 1
        batch.topic_counts = counts.tobytes()
    return batch


@mutation(Settlements, "propose", aim=MANY_TOPICS)
def first_topic_settled_only(
    original: Any, self: Settlements, columns: list[Any], reply: Reply[Any], *, awaited: bool = True
) -> None:
    """A settlement of several topics settles the rows of the first one only."""
    others = [SettleResult(settled=len(some.ids) // 8) for some in columns[1:]]
    first: Reply[Any] = Reply(lambda result: reply.done(SettleResult.of((*result.parts, *others))), reply.fail)
    original(self, columns[:1], first, awaited=awaited)


@mutation(settlements, "by_topic", aim=aimed("kill", couriers=1, mixing=2, settle_grid_ms=1_500, seconds=10))
def resets_of_one_topic_ignored(original: Any, batch: Any) -> Any:
    """A settlement of several topics counts though one of them was reset since the delivery."""
    return [rows._replace(epoch=None) for rows in original(batch)]
