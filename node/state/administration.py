"""Applies admin commands: the cluster, topics, groups, members, settings, removal of hours.

Creating something that exists with the same settings gets the first answer again; with other settings the answer is
NAME_TAKEN. A command is checked whole before it changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tickwheel.node.failure import RequestError, invalid, limit_reached, refused
from tickwheel.node.state import filtering
from tickwheel.node.state.cluster import ClusterState
from tickwheel.node.state.dead_letters import DeadLetters
from tickwheel.node.state.groups import Group, policy_of
from tickwheel.node.state.membership import KINDS, MEMBERS_MAX, after, member_of
from tickwheel.node.state.names import check_group_name, check_node_id, check_topic_name
from tickwheel.node.state.ports import WheelPort
from tickwheel.node.state.ready import ReadyLog, new_ready_log
from tickwheel.node.state.results import AdminResult, ImpossibleStateError
from tickwheel.node.state.settings import Settings, changed
from tickwheel.node.state.subscription import Subscription
from tickwheel.node.state.sweeps import DELETIONS
from tickwheel.node.state.topics import Topic
from tickwheel.proto import admin_pb2
from tickwheel.proto import common_pb2 as pb
from tickwheel.proto.consumer_pb2 import EARLIEST, LATEST, TIME, StartFrom
from tickwheel.proto.log_pb2 import AdminCommand, CreateCluster, DeadRange, RemoveHours
from tickwheel.proto.scheduler_pb2 import SWEEP_FINISHED, SWEEP_RUNNING, Sweep
from tickwheel.wheel.units import HOUR_MS


def _unknown(what: str, name: str) -> RequestError:
    return refused(pb.UNKNOWN_NAME, f"{what} {name} does not exist", field=what, value=name)


def _closing(what: str, name: str) -> RequestError:
    return refused(pb.WRONG_STATE, f"{what} {name} is being deleted", field="name", value=name)


class Administration:
    """`slot_ms`: slot width of the wheel; None: not compared with the cluster's."""

    def __init__(self, state: ClusterState, wheel: WheelPort, slot_ms: int | None) -> None:
        self._state = state
        self._wheel = wheel
        self._slot_ms = slot_ms
        self._carry_out: dict[str, Callable[[AdminCommand, int], AdminResult]] = {
            "create_topic": lambda command, _: self._create_topic(command.create_topic, command.actor),
            "delete_topic": lambda command, _: self._delete_topic(command.delete_topic.name),
            "create_group": lambda command, _: self._create_group(command.create_group, command.actor),
            "update_group": lambda command, _: self._update_group(command.update_group),
            "delete_group": lambda command, _: self._delete_group(command.delete_group.name),
            "set_group_filter": lambda command, _: self._set_filter(command.set_group_filter),
            "set_topic_paused": lambda command, _: self._pause_topic(command.set_topic_paused),
            "set_group_paused": lambda command, _: self._pause_group(command.set_group_paused),
            "reset_group": lambda command, _: self._reset(command.reset_group),
            "settings": lambda command, stamped_ms: self._change_settings(command.settings, stamped_ms),
            "access": lambda command, stamped_ms: state.access.apply(command.access, stamped_ms, state.settings.rights),
            **dict.fromkeys(KINDS, lambda command, _: self._change_members(command)),
            "remove_hours": lambda command, _: self._remove_hours(command.remove_hours),
        }
        """By kind of command, for a cluster that has been created."""

    def apply(self, command: AdminCommand, stamped_ms: int) -> AdminResult:
        """Carry out one command; `stamped_ms`: when it was proposed."""
        kind = command.WhichOneof("body")
        try:
            if kind == "create_cluster":
                return self._create_cluster(command.create_cluster)
            if not self._state.cluster_id:
                raise refused(pb.WRONG_STATE, "the cluster has not been created yet")
            if kind not in self._carry_out:
                raise refused(pb.WRONG_STATE, f"admin command {kind} is not known to this version")
            return self._carry_out[kind](command, stamped_ms)
        except RequestError as error:  # what a command asks for is checked before anything changes
            return AdminResult(failure=error.failure)

    # -- cluster and settings

    def _create_cluster(self, command: CreateCluster) -> AdminResult:
        state = self._state
        if state.cluster_id:
            raise refused(pb.WRONG_STATE, f"the cluster exists already: {state.cluster_id}", value=state.cluster_id)
        if not command.cluster_id:
            raise invalid("cluster_id", "", "not empty")
        settings = changed(Settings(), command.settings, creating=True)
        if self._slot_ms is not None and self._slot_ms != settings.slot_ms:
            raise ImpossibleStateError(
                f"the cluster has slot_ms {settings.slot_ms}, this node was started with {self._slot_ms}: "
                "start it with an empty data directory and the cluster's slot_ms"
            )
        members = [replace(member_of(message), learner=False) for message in command.members]
        for member in members:
            problem = check_node_id(member.node_id)
            if problem:
                raise invalid("members.node_id", member.node_id, problem)
        if not 1 <= len(members) <= MEMBERS_MAX or len({m.node_id for m in members}) != len(members):
            raise invalid("members", len(members), f"1 to {MEMBERS_MAX}, each once")
        state.cluster_id = command.cluster_id
        state.settings = settings
        state.members = {member.node_id: member for member in members}
        return AdminResult(settings=settings.message(), members=tuple(members))

    def _change_settings(self, update: admin_pb2.Settings, stamped_ms: int) -> AdminResult:
        state = self._state
        settings = changed(state.settings, update)
        if settings.rights and not state.settings.rights and next(state.access.administrators(), None) is None:
            text = "rights: nobody could administer the cluster; create a user with the role administrator first"
            raise refused(pb.WRONG_STATE, text, field="rights", value="true")
        state.settings = settings
        for subscription in state.groups.subscriptions():
            subscription.window_messages_max = settings.window_messages_max
        state.producers.trim(settings, stamped_ms)
        return AdminResult(settings=settings.message())

    # -- topics

    def _topic(self, name: str, *, closing: bool = True) -> Topic:
        """A topic. Raises RequestError: there is none, or it is being deleted and `closing` False."""
        topic = self._state.topics.named(name)
        if topic is None:
            raise _unknown("topic", name)
        if topic.closing and not closing:
            raise _closing("topic", name)
        return topic

    def _create_topic(self, request: admin_pb2.CreateTopicRequest, owner: str) -> AdminResult:
        state = self._state
        found = state.topics.named(request.name)
        if found is not None:
            if found.closing:
                raise _closing("topic", request.name)
            if found.fifo != request.fifo:
                text = f"topic {request.name} exists with fifo = {found.fifo}"
                raise refused(pb.NAME_TAKEN, text, field="name", value=request.name)
            return AdminResult(topic=found.message())
        problem = check_topic_name(request.name)
        if problem:
            raise invalid("name", request.name, problem)
        if len(state.topics) >= state.settings.topics_max:
            raise RequestError(limit_reached("topics_max", state.settings.topics_max))
        self._check_owned(owner, topics=1)
        return AdminResult(topic=self._new_topic(request.name, owner, request.fifo).message())

    def _check_owned(self, owner: str, *, topics: int = 0, groups: int = 0) -> None:
        """Raise RequestError if a user would own too many topics or groups with these more."""
        user = self._state.access.user(owner)
        if user is None:
            return
        for name, limit, more, owned in (
            ("quotas.topics_max", user.quotas.topics_max, topics, self._state.topics.owned_by(owner)),
            ("quotas.groups_max", user.quotas.groups_max, groups, self._state.groups.owned_by(owner)),
        ):
            if limit and more and owned + more > limit:
                raise invalid(name, f"{owned} of user {owner}, {more} more wanted", f"at most {limit}")

    def _new_topic(self, name: str, owner: str, fifo: bool = False) -> Topic:
        state = self._state
        topic_id = state.topics.last_id + 1
        ready = new_ready_log(state.disk, state.directory, topic_id, state.settings.slot_ms)
        topic = Topic(topic_id, name, fifo, ready, owner=owner)
        state.topics.add(topic)
        return topic

    def _delete_topic(self, name: str) -> AdminResult:
        topic = self._topic(name)
        self._remove_topic(topic)
        return AdminResult(topic=topic.message())

    def _remove_topic(self, topic: Topic) -> None:
        state = self._state
        state.topics.remove(topic)
        state.groups.forget_topic(topic.topic_id)
        state.doomed += [path for sequence in topic.ready.sequences() for path in sequence.paths()]

    # -- groups

    def _group(self, name: str, *, closing: bool = True) -> Group:
        """As `_topic`."""
        group = self._state.groups.named(name)
        if group is None:
            raise _unknown("group", name)
        if group.closing and not closing:
            raise _closing("group", name)
        return group

    def _create_group(self, request: admin_pb2.CreateGroupRequest, owner: str) -> AdminResult:
        state = self._state
        settings = state.settings
        group = state.groups.named(request.name)
        if group is not None and group.closing:
            raise _closing("group", request.name)
        if group is not None and group.broadcasting != request.broadcasting:
            text = f"group {request.name} exists as another kind"
            raise refused(pb.NAME_TAKEN, text, field="name", value=request.name)
        if group is not None:
            filtering.check_stated(group, request.filter)
        expression = filtering.checked_filter(request.filter)
        retry = policy_of(request.retry, settings.delay_ms_max)
        if group is not None and request.HasField("retry") and group.retry != retry:
            text = f"group {request.name} exists with another retry policy: update it"
            raise refused(pb.NAME_TAKEN, text, field="name", value=request.name)
        problem = check_group_name(request.name)
        if problem:
            raise invalid("name", request.name, problem)
        if group is None and not request.topics:
            raise invalid("topics", "none", "at least one")
        if group is None and len(state.groups) >= settings.groups_max:
            raise RequestError(limit_reached("groups_max", settings.groups_max))
        names = list(dict.fromkeys(request.topics))
        closing = [name for name in names if (found := state.topics.named(name)) is not None and found.closing]
        if closing:
            raise _closing("topic", closing[0])
        missing = [name for name in names if state.topics.named(name) is None]
        if missing and not settings.topics_auto_create:
            raise _unknown("topic", missing[0])
        for name in missing:
            problem = check_topic_name(name)
            if problem:
                raise invalid("topics", name, problem)
        if len(state.topics) + len(missing) > settings.topics_max:
            raise RequestError(limit_reached("topics_max", settings.topics_max))
        self._check_owned(owner, topics=len(missing), groups=group is None)
        if group is None:
            group_id = state.groups.last_id + 1
            dead = DeadLetters(state.disk, state.directory, group_id)
            group = Group(group_id, request.name, expression, request.broadcasting, dead, retry=retry, owner=owner)
            state.groups.add(group)
        for name in names:
            topic = state.topics.named(name) or self._new_topic(name, owner)
            if topic.topic_id not in group.subscriptions:
                state.groups.subscribe(group, self._subscription(group, topic, request))
        return AdminResult(group=self.describe(group))

    def _subscription(self, group: Group, topic: Topic, request: admin_pb2.CreateGroupRequest) -> Subscription:
        ready = topic.ready
        state = self._state
        window_max = state.settings.window_messages_max
        subscription = Subscription(group.group_id, topic.topic_id, ready, window_max, state.backlog)
        position, subscription.start_ms = self._start(ready, request.start_from, request.start_ms)
        subscription.begin(position)
        filtering.begin(group, subscription)
        return subscription

    def _start(self, ready: ReadyLog, start_from: StartFrom.ValueType, start_ms: int) -> tuple[int, int]:
        """(first position of a group that starts there, due time before which messages do not count for it)."""
        if start_from == LATEST:
            return ready.count, 0
        if start_from == TIME:
            if start_ms > self._wheel.cursor.due_ms:
                return ready.count, start_ms
            return ready.position_of_due(start_ms), 0
        return ready.first_retained, 0

    def _reset(self, request: admin_pb2.ResetGroupRequest) -> AdminResult:
        state = self._state
        group = self._group(request.name)
        if request.start_from not in (EARLIEST, LATEST, TIME):
            raise invalid("start_from", request.start_from, "EARLIEST, LATEST or TIME")
        chosen = dict(group.subscriptions)
        if request.topics:
            topics = {name: state.topics.named(name) for name in request.topics}
            ids = {name: topic.topic_id for name, topic in topics.items() if topic is not None}
            for name in topics:
                if ids.get(name) not in chosen:
                    raise invalid("topics", name, f"a topic of group {request.name}")
            chosen = {topic_id: chosen[topic_id] for topic_id in ids.values()}
        for topic_id, subscription in chosen.items():
            topic = state.topics.get(topic_id)
            assert topic is not None, "a subscription goes with its topic"
            subscription.reset(*self._start(topic.ready, request.start_from, request.start_ms))
            filtering.begin(group, subscription)
        return AdminResult(group=self.describe(group))

    def _pause_topic(self, request: admin_pb2.SetPausedRequest) -> AdminResult:
        topic = self._topic(request.name, closing=False)
        topic.paused = request.paused
        return AdminResult(topic=topic.message())

    def _pause_group(self, request: admin_pb2.SetPausedRequest) -> AdminResult:
        group = self._group(request.name, closing=False)
        group.paused = request.paused
        return AdminResult(group=self.describe(group))

    def _set_filter(self, request: admin_pb2.SetGroupFilterRequest) -> AdminResult:
        group = self._group(request.name)
        filtering.set_filter(group, request.filter)
        return AdminResult(group=self.describe(group))

    def describe(self, group: Group) -> admin_pb2.Group:
        """A group as operators see it."""
        topics = [self._state.topics.get(topic_id) for topic_id in group.subscriptions]
        return group.message([topic.name for topic in topics if topic is not None])

    def _update_group(self, request: admin_pb2.UpdateGroupRequest) -> AdminResult:
        group = self._group(request.name)
        group.retry = policy_of(request.retry, self._state.settings.delay_ms_max)
        return AdminResult(group=self.describe(group))

    def _delete_group(self, name: str) -> AdminResult:
        group = self._group(name)
        described = self.describe(group)
        self._remove_group(group)
        return AdminResult(group=described)

    def _remove_group(self, group: Group) -> None:
        state = self._state
        state.groups.remove(group)
        state.doomed += [path for sequence in group.dead.sequences() for path in sequence.paths()]

    # -- deletion of topics and groups that have messages: a sweep

    def check_deletion(self, wanted: Sweep) -> None:
        """Raise RequestError if a sweep deletes something that is not there, or is being deleted."""
        action = wanted.WhichOneof("action")
        if action not in DELETIONS:
            return
        what, name = action.removeprefix("delete_"), getattr(wanted, action)
        target = self._state.deletion_target(wanted)
        if target is None or target.name != name:
            raise _unknown(what, name)
        if target.closing:
            raise _closing(what, name)

    def deletion_went_on(self, job: Sweep, looked: Sequence[DeadRange]) -> Sweep:
        """A deletion began, made a step or ended: update its target. `looked`: where a step looks for dead letters.
        Returns the job as it is then."""
        state = self._state
        target = state.deletion_target(job)
        if target is None:
            return job
        target.closing = job.state == SWEEP_RUNNING
        if target.closing:
            target.paused = True
        ended = job.state == SWEEP_FINISHED
        undelivered = dead = 0
        if isinstance(target, Topic):
            if job.with_dead:
                dead = self._remove_letters(target.topic_id, looked, to_end=ended)
            if ended:
                undelivered = sum(item.backlog for item in state.groups.of_topic(target.topic_id))
                self._remove_topic(target)
                for group in state.groups:
                    group.waiting.forget_topic(target.topic_id)
        elif ended:
            undelivered, dead = sum(item.backlog for item in target.subscriptions.values()), target.dead.count
            self._remove_group(target)
        state.unsettled_removed += undelivered + dead
        return state.sweeps.note_removed(job.job_id, undelivered, dead)

    def _remove_letters(self, topic_id: int, looked: Sequence[DeadRange], *, to_end: bool) -> int:
        """Remove a topic's dead letters in these ranges, and with `to_end` behind them; returns how many."""
        ranges = {found.group_id: found for found in looked}
        removed = 0
        for subscription in self._state.groups.of_topic(topic_id):
            group = self._state.groups.get(subscription.group_id)
            assert group is not None, "a subscription belongs to a group"
            found = ranges.get(group.group_id)
            if found is None and not to_end:
                continue
            first = 0 if found is None else found.first
            below = group.dead.next_number if found is None or to_end else found.below
            count = group.dead.remove(group.dead.numbers_of_topic(topic_id, first, below))
            if count:
                subscription.forget_how()  # the messages of these letters now look like acknowledged ones
            removed += count
        return removed

    # -- members

    def _change_members(self, command: AdminCommand) -> AdminResult:
        state = self._state
        made = after(command, state.members, state.removed_ids)
        state.members = dict(made.members)
        if made.removed_id:
            state.removed_ids.add(made.removed_id)
        return AdminResult(members=tuple(state.members.values()))

    # -- removal

    def _remove_hours(self, command: RemoveHours) -> AdminResult:
        state = self._state
        below = command.hour_min_kept
        hour_now = self._wheel.cursor.due_ms // HOUR_MS
        if below > hour_now:
            text = f"hour {below} is not over: the cursor is in hour {hour_now}"
            raise refused(pb.WRONG_STATE, text, field="hour_min_kept", value=str(below), limit=str(hour_now))
        if command.HasField("forced_below"):
            # A group may have been created since the master looked: hours within their retention are checked again.
            below = min(below, max(self.retention_over(command.forced_below), self.removable_hours()))
        # Dead letters keep their payloads themselves and hold no hour; but they do not outlive the retention.
        unsettled = 0
        if command.HasField("dead_before_ms"):
            unsettled += sum(group.dead.remove_died_before(command.dead_before_ms) for group in state.groups)
        if below <= state.hour_min_kept:
            state.unsettled_removed += unsettled
            return AdminResult(hour_min_kept=state.hour_min_kept, unsettled_removed=unsettled)
        if not command.HasField("dead_before_ms"):
            over = min(below, command.forced_below) if command.HasField("forced_below") else below
            unsettled += sum(group.dead.remove_died_before(over * HOUR_MS) for group in state.groups)
        for topic in state.topics:
            ready = topic.ready
            first = ready.first_of_hour(below)
            subscriptions = state.groups.of_topic(topic.topic_id)
            unsettled += sum(subscription.raise_floor(first) for subscription in subscriptions)
            if not subscriptions:
                unsettled += first - ready.first_retained
            ready.remove_hours(below)
        state.hour_min_kept = below
        state.unsettled_removed += unsettled
        self._wheel.remove_hours(below)
        state.cold.forget(below)
        return AdminResult(hour_min_kept=below, unsettled_removed=unsettled)

    def retention_over(self, hour: int) -> int:
        """Hours below this one are over for a retention that reaches back to the start of `hour`.

        It counts from when messages could be delivered: a message that was long due when it was scheduled lies in an
        old hour.
        """
        over = hour
        for topic in self._state.topics:
            oldest = topic.ready.oldest_hour
            if oldest is not None and oldest < over:
                kept = topic.ready.first_hour_dispatched_since(hour)
                over = over if kept is None else min(over, kept)
        return over

    def removable_hours(self) -> int:
        """Hours below this one hold no message that a group still needs: propose RemoveHours with it.

        A topic without groups keeps its messages.
        """
        state = self._state
        least = self._wheel.cursor.due_ms // HOUR_MS
        for topic in state.topics:
            oldest = topic.ready.oldest_hour
            if oldest is None or oldest >= least:
                continue  # it holds nothing older than the oldest hour known to be needed
            if topic.topic_id not in state.backlog.by_topic and state.groups.of_topic(topic.topic_id):
                continue  # everything is settled
            floors = [subscription.floor for subscription in state.groups.of_topic(topic.topic_id)]
            hour = topic.ready.hour_of(min(floors, default=topic.ready.first_retained))
            if hour is not None:
                least = min(least, hour)
        return max(least, state.hour_min_kept)
