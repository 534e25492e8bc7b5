"""Carries on the sweeps of the replicated state while this node is master, and answers requests about them.

A sweep goes step by step: find the next messages of its selection (bounded, see pending.py), propose to cancel or move
them, and go on when that is applied. Each job has at most one step under way. If a step is lost with mastership, the
next master finds its messages again. All that is kept here about a job can be lost: whether a step is under way, what
the last step read beyond its own messages, and how far it has looked for dead letters.

The deletion of a topic `with_dead` first looks through the dead letters of the topic's groups, in ranges of bounded
length, and apply removes those of the topic. The following steps look through letters that have come since. The last
step also takes messages that die between its proposal and its apply; nothing of the topic can die later.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tickwheel.node.core.kernel import Kernel, require_current
from tickwheel.node.core.metas import count_fitting
from tickwheel.node.core.part import Part
from tickwheel.node.core.schedule.intake import DUE_MS_LIMIT, KIND_DELAY, KIND_DUE, beyond_longest_delay
from tickwheel.node.core.schedule.pending import Finder, Found, Query, deletion_query, key_of, make_query
from tickwheel.node.core.work import RemovedError
from tickwheel.node.core.world import Now
from tickwheel.node.failure import Failure, RequestError, invalid, no_agreed_time
from tickwheel.node.metrics import MetricValue
from tickwheel.node.state.results import SweepResult
from tickwheel.node.state.sweeps import DELETIONS, unknown_sweep
from tickwheel.proto.common_pb2 import NAME_TAKEN, UNKNOWN_NAME
from tickwheel.proto.log_pb2 import Command, DeadRange, Publish, PublishRequest, SweepCommand, SweepStep
from tickwheel.proto.scheduler_pb2 import SWEEP_RUNNING, BeginSweepRequest, ListSweepsResponse, Sweep
from tickwheel.wheel.queries import Wanted
from tickwheel.wheel.units import HOUR_MS, ONE_TAG, CursorKey, Units, ids_of, picked

STEP_HOURS_MAX = 256
"""Hours of one step: each costs apply about 20 us."""
STEP_BYTES_MAX = 512 << 10
"""Bytes of payloads that a step of a move carries through the log; a single larger one makes a step of its own."""
AHEAD_MAX = 65_536
"""Messages of a job that a step reads ahead for the next ones, if they are in the same tick: 6.5 MiB for each of the
jobs that may run."""
LETTERS_MAX = 65_536
"""Dead letters through which apply looks for those of a topic in one step: 5 MiB of rows."""
RETRY_MS = 500
"""Pause after a step that failed."""


class Sweeper(Part):
    of_master = True

    def __init__(self, core: Kernel) -> None:
        self._core = core
        self._finders: dict[str, Finder] = {}
        """By running job."""
        self._looked: dict[str, dict[int, int]] = {}
        """By running job, for each group: the letters below this number have been looked through."""
        self._under_way: set[str] = set()
        self._wait_until_ms: dict[str, int] = {}
        self._in_range: dict[str, int] = {}
        """By running job whose selection has a time range: messages in it when the job began, about."""
        self.failures = 0
        """Steps that failed and had to be repeated."""

    # -- requests

    async def begin_sweep(self, request: BeginSweepRequest) -> Sweep:
        """Begin a job; a repeated request gets the state of the job that has begun. Raises RequestError if that moves
        to another time. A repeated delay means the time that the first one came to."""
        begun = await self._propose(SweepCommand(begin=self._checked(request)))
        action = request.WhichOneof("action")
        if action in ("due_ms", "shift_ms") and getattr(begun, action) != getattr(request, action):
            text = f"sweep {request.job_id} has begun with another {action}: {getattr(begun, action)}"
            raise RequestError(Failure(NAME_TAKEN, text, {"field": "job_id", "value": request.job_id}))
        return begun

    def _checked(self, request: BeginSweepRequest) -> Sweep:
        core = self._core
        selection = request.selection
        if not (selection.topic or selection.tag or selection.key or selection.key_prefix):
            raise invalid("selection", "empty", "at least one of topic, tag, key and key_prefix")
        make_query(core, selection)
        action = request.WhichOneof("action")
        if action is None or (action == "cancel" and not request.cancel):
            raise invalid("action", "absent", "cancel, due_ms, delay_ms or shift_ms")
        if not core.clock.known:
            raise RequestError(no_agreed_time())
        now_ms = core.clock.now_ms()
        sweep = Sweep(job_id=request.job_id, selection=selection, stamped_ms_max=max(now_ms, core.applied.stamped_ms))
        limit_ms = core.state.settings.delay_ms_max
        if action == "cancel":
            sweep.cancel = True
        elif action == "shift_ms":
            if abs(request.shift_ms) > limit_ms:
                raise invalid("shift_ms", request.shift_ms, f"at most {limit_ms} either way")
            sweep.shift_ms = request.shift_ms
        else:
            value = getattr(request, action)
            if not 0 <= value <= DUE_MS_LIMIT:
                raise invalid(action, value, "0 or more milliseconds")
            full_ms = core.clock.next_full_ms()  # no delay may be short by a fraction of a millisecond
            due_ms = value if action == "due_ms" else full_ms + value
            if due_ms > full_ms + limit_ms:
                kind = KIND_DUE if action == "due_ms" else KIND_DELAY
                raise beyond_longest_delay("", value, kind, due_ms, limit_ms, full_ms)
            sweep.due_ms = due_ms
        return sweep

    async def get(self, job_id: str) -> Sweep:
        """The state of a job."""
        job = self._core.state.sweeps.get(job_id)
        if job is None:
            require_current(self._core)
            raise RequestError(unknown_sweep(job_id))
        return await self._told(job)

    async def list(self) -> ListSweepsResponse:
        """All remembered jobs."""
        require_current(self._core)
        return ListSweepsResponse(sweeps=[await self._told(job) for job in list(self._core.state.sweeps)])

    async def _told(self, job: Sweep) -> Sweep:
        """A job for its answer. Its progress is that in the time range of its selection: of what lies outside nothing
        is examined."""
        chosen = job.selection
        if job.state != SWEEP_RUNNING or not (chosen.due_ms_min or chosen.due_ms_max):
            return job
        total = self._in_range.get(job.job_id)
        if total is None:
            total = job.examined + await self._left(job)
            if job.state != SWEEP_RUNNING:  # it has ended meanwhile
                return job
            self._in_range[job.job_id] = total
        told = Sweep()
        told.CopyFrom(job)
        told.pending = total
        return told

    async def _left(self, job: Sweep) -> int:
        """Messages between the place of a job and the end of its time range."""
        total, start_ms = 0, max(job.selection.due_ms_min, job.next_due_ms)
        end_ms = job.selection.due_ms_max or DUE_MS_LIMIT
        while True:
            count = await self._core.background.count(start_ms, end_ms, HOUR_MS, Wanted())
            total += sum(number for _, number in count.buckets)
            if count.next_ms is None:
                return total
            start_ms = count.next_ms

    async def stop(self, job_id: str) -> Sweep:
        """Stop a job; its changes so far stay."""
        return await self._propose(SweepCommand(stop=job_id))

    async def begin_deletion(self, sweep: Sweep) -> Sweep:
        """Begin to delete a topic or group; see deleting.py."""
        return await self._propose(SweepCommand(begin=sweep))

    async def _propose(self, command: SweepCommand) -> Sweep:
        result = await self._core.proposer.propose(Command(sweep=command), SweepResult)
        if result.sweep is None:
            raise RequestError(unknown_sweep(""))
        return result.sweep

    # -- carrying them on

    def metrics(self) -> Mapping[str, MetricValue]:
        return {"sweep_failures": float(self.failures)}

    def tick(self, now: Now) -> None:
        """Start a step of each running job that has none under way. Cheap when there is no job."""
        core = self._core
        if not now.acting or not core.state.sweeps.running or not core.clock.known:
            self._finders.clear()
            self._looked.clear()
            self._in_range.clear()
            return
        for job in core.state.sweeps:
            if job.state != SWEEP_RUNNING:
                self._finders.pop(job.job_id, None)
                self._looked.pop(job.job_id, None)
                self._in_range.pop(job.job_id, None)
                self._wait_until_ms.pop(job.job_id, None)
                continue
            if job.job_id in self._under_way:
                continue
            if now.steady_ms < self._wait_until_ms.get(job.job_id, 0):
                continue
            self._under_way.add(job.job_id)
            self._begin_step(job)

    def wait_ms(self, now: Now) -> int | None:
        """Until the next step that waits after a failure may begin."""
        if not now.acting or not self._wait_until_ms:
            return None
        return min(
            (until - now.steady_ms for until in self._wait_until_ms.values() if until > now.steady_ms), default=None
        )

    def _begin_step(self, job: Sweep) -> None:
        job_id = job.job_id
        finder = self._finders.setdefault(job_id, Finder(self._core, AHEAD_MAX))
        step = _Step(self._core, finder, job, self._looked.setdefault(job_id, {}))

        def ended(answer: Failure | None) -> None:
            self._under_way.discard(job_id)
            if answer is None:
                self._wait_until_ms.pop(job_id, None)
            else:
                # Its messages are found again after a pause.
                self.failures += 1
                self._wait_until_ms[job_id] = self._core.steady_ms() + RETRY_MS

        serving = self._core.serving
        serving.run(ended, lambda: serving.start(step.run(), ended))

    def end(self, failure: Failure) -> None:
        """Forget the steps under way; they notice by themselves."""
        self._wait_until_ms.clear()
        self._finders.clear()
        self._looked.clear()
        self._in_range.clear()


class _Step:
    """One step of one job."""

    def __init__(self, core: Kernel, finder: Finder, job: Sweep, looked: dict[int, int]) -> None:
        self._core = core
        self._finder = finder
        self._looked = looked
        self._ranges: list[DeadRange] = []
        self._job = job
        self._term = core.term
        self._selection = job.selection
        self._action = job.WhichOneof("action")
        self._moves = self._action in ("due_ms", "shift_ms")
        self._target_ms: int = job.shift_ms if self._action == "shift_ms" else job.due_ms
        self._stamped_ms_max = job.stamped_ms_max
        self._step = SweepStep(job_id=job.job_id, number=job.steps)
        self._start = CursorKey(job.next_due_ms, job.next_index) if job.steps else None
        self._deletion = deletion_query(job) if self._action in DELETIONS else None

    async def run(self) -> None:
        """Find the step's messages and change them. Raises RequestError: the step failed."""
        core = self._core
        if self._job.with_dead and self._look_for_letters():
            self._step.next_due_ms, self._step.next_index = self._job.next_due_ms, self._job.next_index
            await self._propose()
            return
        try:
            query: Query = self._deletion or make_query(core, self._selection, self._stamped_ms_max, retries=False)
        except RequestError as error:
            if error.failure.reason != UNKNOWN_NAME:
                raise
            # The topic was deleted: nothing of it will be delivered any more.
            self._step.last = True
        else:
            found = await self._finder.step(query, self._start, core.config.sweep_step_messages)
            units = self._take(found)
            if self._moves and len(units):
                try:
                    self._move(units, await core.background.records_of(units))
                except RemovedError:
                    return  # dispatched and settled meanwhile; the next look will not see them
        await self._propose()

    async def _propose(self) -> None:
        core = self._core
        if not core.leading or core.term != self._term:
            return
        step = self._step
        # In the last step an empty range says how far letters have been looked through; apply looks on from there.
        step.dead.extend(found for found in self._ranges if step.last or found.first < found.below)
        result = await core.proposer.propose(Command(sweep=SweepCommand(step=step)), SweepResult, may_gather=True)
        if not result.stale:
            self._looked.update((found.group_id, found.below) for found in step.dead)

    def _look_for_letters(self) -> bool:
        """Choose the next ranges of dead letters for the step. Returns whether it may look at no more, so that others
        have to follow before the job can end."""
        state = self._core.state
        left = LETTERS_MAX
        for group_id in state.groups_of_topic(self._job.target_id):
            dead = state.dead_letters(group_id)
            if dead is None or not dead.count:
                continue
            first = max(self._looked.get(group_id, 0), dead.oldest_number)
            below = min(dead.next_number, first + left)
            left -= below - first
            self._ranges.append(DeadRange(group_id=group_id, first=first, below=below))
            if below < dead.next_number:
                return True
        return False

    def _take(self, found: Found) -> Units:
        """Note what the step examines and changes, and where the next one begins. Returns the messages to change."""
        units, next_key = found.units, found.next_key
        self._step.examined = found.passed
        hours = np.flatnonzero(np.diff(units["due_ms"] // HOUR_MS)) + 1
        if len(hours) >= STEP_HOURS_MAX:
            units, next_key = self._cut(found, int(hours[STEP_HOURS_MAX - 1]))
        if self._moves and len(units):
            units, next_key = self._movable(found, units, next_key)
        if next_key is None:
            self._step.last = True
        else:
            self._step.next_due_ms, self._step.next_index = next_key
        self._step.ids = ids_of(units).astype("<u8").tobytes()
        self._step.due_ms = units["due_ms"].astype("<i8").tobytes()
        return units

    def _movable(self, found: Found, units: Units, next_key: CursorKey | None) -> tuple[Units, CursorKey | None]:
        """Of `units`, the first of what was found, those that one step carries, without those that would move too far
        ahead."""
        fit = count_fitting(units["size"], STEP_BYTES_MAX)
        if fit < len(units):
            units, next_key = self._cut(found, fit)
        if self._action == "shift_ms":
            latest_ms = self._core.clock.now_ms() + self._core.state.settings.delay_ms_max
            near = units["due_ms"] + self._target_ms <= latest_ms
            self._step.too_far = int(np.count_nonzero(~near))
            units = picked(units, near)
        return units, next_key

    def _cut(self, found: Found, count: int) -> tuple[Units, CursorKey]:
        """The first `count` units, and where the next step begins."""
        self._step.examined = int(found.ranks[count - 1])
        return found.units[:count], key_of(found.units[count])

    def _move(self, units: Units, records: list[bytes]) -> None:
        """Put the messages at their new times into the step."""
        due_ms = (
            units["due_ms"] + self._target_ms
            if self._action == "shift_ms"
            else np.full(len(units), self._target_ms, np.int64)
        )
        one_tag = (units["flags"] & ONE_TAG) != 0
        self._step.moved.CopyFrom(
            Publish(
                requests=[PublishRequest(count=len(units))],
                due_ms=np.maximum(due_ms, 0).astype("<i8").tobytes(),
                topic_ids=units["topic_id"].astype("<u4").tobytes(),
                sizes=units["size"].astype("<u4").tobytes(),
                meta_sizes=units["meta_size"].astype("<u4").tobytes(),
                tag_hashes=np.where(one_tag, units["tag_hash"], 0).astype("<u4").tobytes(),
                tag_masks=units["tag_mask"].astype("<u8").tobytes(),
                key_hashes=units["key_hash"].astype("<u8").tobytes(),
                records=b"".join(records),
                one_tag_hashes=True,
            )
        )
