"""Bulk writers: drivers whose tasks stage rows under (job, partition, attempt), and which commit or give up.

A driver is one run at one batch of a job. Its tasks are tried again and doubled; it commits one attempt of each
partition, or aborts, or dies and leaves everything to the expiry. Some jobs happen once and some are streams of
batches, in which each is committed before the next; some are run by two drivers at once, and some again when they are
long done. Any answer may be lost. Every attempt has messages of its own, so that a delivery shows its attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tickwheel.chaos.sim.asking import AskingClients, founding, succeeded
from tickwheel.chaos.sim.clients import Call, Wires, served
from tickwheel.chaos.sim.consumers import Consumers, Crowd
from tickwheel.chaos.sim.history_bulk import AbortAnswered, BlockStaged, CommitAnswered, CommitAsked, WriteSeen
from tickwheel.chaos.sim.history_messages import Row, ScheduleSent
from tickwheel.chaos.sim.producers import UID
from tickwheel.chaos.sim.world import HOUR_MS, MS
from tickwheel.node.core.core import NodeCore
from tickwheel.node.core.schedule.intake import KIND_DUE, IncomingBatch
from tickwheel.node.failure import Failure
from tickwheel.proto import admin_pb2, common_pb2, staging_pb2
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.proto.staging_pb2 import STAGED_PUBLISHED, STAGED_PUBLISHING, StagedJob, StagedState

TOPIC = "imports"
GROUPS = ("ledger", "search")
CROWDS = tuple(Crowd(group, (TOPIC,), consumers=1) for group in GROUPS)
EXPIRY_MS = 2_000
"""Staged rows without a commit are dropped this long after they were last touched."""
JOB_EVERY_NS = 700 * MS
BATCH_EVERY_NS = 200 * MS
"""Between two batches of a stream."""
OPEN_MOST = 4
"""Drivers at a time."""
ANSWERS_LOST = 0.05
REFUSED = "REFUSED"


@dataclass(slots=True)
class _Attempt:
    partition: int
    number: int
    blocks: list[tuple[Row, ...]]
    staged: int = 0
    gives_up: int = 1 << 30
    """Number of blocks after which the attempt sends nothing more."""

    @property
    def rows(self) -> int:
        return sum(map(len, self.blocks))


@dataclass(slots=True)
class _Driver:
    """One run. `over` when it has nothing more to do."""

    job: str
    batch: int
    run: str
    stream: bool
    plan: str
    """How the run ends: commit, abort, late (a commit after its abort) or leave."""
    attempts: list[_Attempt] = field(default_factory=list)
    decided: bool = False
    over: bool = False


class Writes(AskingClients):
    """`clients.Clients`."""

    setting = (
        AdminCommand(settings=admin_pb2.Settings(staging_expiry_ms=EXPIRY_MS)),
        *founding((), [(group, (TOPIC,)) for group in reversed(GROUPS)]),
    )
    """With it staged rows expire quickly."""

    def __init__(self, wires: Wires) -> None:
        super().__init__(wires, "writes")
        self._consumers = Consumers(wires, CROWDS, self._rng)
        self._members = (self._consumers,)
        self._drivers: list[_Driver] = []
        self._done: list[tuple[str, int]] = []
        """Jobs that happened once and were committed."""
        self._jobs = 0
        self._runs = 0
        self._began = False

    def _begin(self) -> None:
        self._began = True
        self._world.after(0, self._keep, JOB_EVERY_NS, self._begin_one, False)

    def unfinished(self) -> str:
        if not self._began:
            return "that bulk writers begin"
        for driver in self._drivers:
            return f"the end of run {driver.run} of write {driver.job}/{driver.batch}"
        return self._consumers.unfinished()

    # -- jobs

    async def _begin_one(self) -> None:
        if len(self._drivers) >= OPEN_MOST:
            return
        rng = self._rng
        dice = rng.random()
        if dice < 0.15 and self._done:
            job, batch = rng.choice(self._done)
            self._drive(job, batch, stream=False)
            return
        self._jobs += 1
        self._drive(f"write-{self._jobs}", 0, stream=dice > 0.75)
        if dice < 0.35:
            # A second driver starts for the same job, as if the first was believed dead.
            self._world.after(rng.randrange(800 * MS), self._drive, f"write-{self._jobs}", 0, False)

    def _drive(self, job: str, batch: int, stream: bool) -> None:
        rng = self._rng
        self._runs += 1
        plan = "commit" if stream else rng.choices(("commit", "abort", "late", "leave"), (70, 10, 10, 10))[0]
        driver = _Driver(job, batch, f"run-{self._runs}", stream, plan)
        self._drivers.append(driver)
        for partition in range(rng.choice((1, 1, 2, 3))):
            again = rng.random()
            if again < 0.2:  # a task that fails is tried once more
                self._attempt(driver, partition, gives_up=rng.randrange(3))
            self._attempt(driver, partition)
            if again > 0.85:  # a slow one gets a twin
                self._attempt(driver, partition)
        for attempt in driver.attempts:
            self._later(rng.randrange(100 * MS), self._stage, driver, attempt)

    def _attempt(self, driver: _Driver, partition: int, gives_up: int = 1 << 30) -> None:
        count = self._rng.choice((1, 1, 2, self._wires.shape.write_blocks))
        blocks = [self._rows() for _ in range(count)]
        number = self._rng.getrandbits(63) | 1
        driver.attempts.append(_Attempt(partition, number, blocks, gives_up=gives_up))

    def _rows(self) -> tuple[Row, ...]:
        rng = self._rng
        wall_ms = self._world.wall_ms
        rows = []
        for _ in range(rng.choice((1, 2, 6))):
            dice = rng.random()
            due_ms = wall_ms + rng.randrange(-500, 3_000)
            if dice < 0.1 and not self._wires.winding_down:
                due_ms += HOUR_MS * rng.randrange(1, 100)
            elif dice > 0.6:
                due_ms = due_ms // 500 * 500
            rows.append(Row(self._wires.number(), TOPIC, due_ms, None))
        return tuple(rows)

    # -- tasks

    async def _stage(self, driver: _Driver, attempt: _Attempt) -> None:
        """Stage block after block."""
        while not driver.over and attempt.staged < min(len(attempt.blocks), attempt.gives_up):
            answer = await self._stage_block(driver, attempt, attempt.staged)
            if driver.over:
                return
            if isinstance(answer, Failure):
                self._give_up(driver)
                return
            attempt.staged += 1
            if answer.state in (STAGED_PUBLISHED, STAGED_PUBLISHING):
                attempt.staged = len(attempt.blocks)  # another run has committed: nothing is left to write
            wait_ns = self._rng.randrange(60 * MS)
            self._decide(driver)
            await self._wires.pause(wait_ns)

    async def _stage_block(self, driver: _Driver, attempt: _Attempt, sequence: int) -> StagedJob | Failure:
        rows = attempt.blocks[sequence]
        # The checkers of deliveries count this as a schedule request.
        self._history.note(ScheduleSent, f"{driver.run}/{attempt.number}", sequence, "", rows)
        uids = tuple(row.uid for row in rows)
        self._history.note(BlockStaged, driver.job, driver.batch, driver.run, attempt.number, uids)
        request = staging_pb2.StageRequest(
            job_id=driver.job,
            batch=driver.batch,
            run_id=driver.run,
            partition=attempt.partition,
            attempt=attempt.number,
            sequence=sequence,
        )
        call = self._lossy(served(lambda core: core.parts.staging.stage(request, block_of(rows))))
        answer: StagedJob | Failure = await self._asking.ask(
            call, lambda answer: driver.over or succeeded(answer) or _refused(answer)
        )
        return answer

    def _decide(self, driver: _Driver) -> None:
        """Carry out the driver's plan once every partition has a complete attempt."""
        whole: dict[int, _Attempt] = {}
        for attempt in driver.attempts:
            if attempt.staged >= len(attempt.blocks):
                whole.setdefault(attempt.partition, attempt)
        if driver.decided or len(whole) < len({attempt.partition for attempt in driver.attempts}):
            return
        driver.decided = True
        wait_ns = self._rng.randrange(200 * MS)
        if driver.plan == "leave":
            self._end(driver)
        else:
            act = self._commit if driver.plan == "commit" else self._abort
            self._later(wait_ns, act, driver, list(whole.values()))

    # -- drivers

    async def _commit(self, driver: _Driver, attempts: list[_Attempt]) -> None:
        numbers = tuple(attempt.number for attempt in attempts)
        self._history.note(CommitAsked, driver.job, driver.batch, driver.run, numbers)
        named = [
            staging_pb2.StagedAttempt(
                partition=attempt.partition, attempt=attempt.number, blocks=len(attempt.blocks), rows=attempt.rows
            )
            for attempt in attempts
        ]
        request = staging_pb2.CommitStagedRequest(
            job_id=driver.job, batch=driver.batch, run_id=driver.run, attempts=named
        )
        answer = await self._ask_to_commit(driver, request)
        if isinstance(answer, Failure):
            self._give_up(driver)
            return
        self._wires.run(self._follow(driver))
        if self._rng.random() < 0.2:  # the answer is lost: the asker does not know of it
            await self._ask_to_commit(driver, request)

    async def _ask_to_commit(self, driver: _Driver, request: staging_pb2.CommitStagedRequest) -> StagedJob | Failure:
        call = self._lossy(served(lambda core: core.parts.staging.commit(request)))
        answer: StagedJob | Failure = await self._asking.ask(call, lambda answer: succeeded(answer) or _refused(answer))
        state = REFUSED if isinstance(answer, Failure) else StagedState.Name(answer.state)
        self._history.note(CommitAnswered, driver.job, driver.batch, driver.run, state)
        return answer

    async def _follow(self, driver: _Driver) -> None:
        """Ask until all of it is scheduled."""
        request = staging_pb2.GetStagedJobRequest(job_id=driver.job, batch=driver.batch)
        while True:
            answer: StagedJob = await self._asking.served(lambda core: core.parts.staging.job(request))
            counts = (answer.rows, answer.rows_published, answer.rows_discarded)
            self._history.note(WriteSeen, driver.job, driver.batch, StagedState.Name(answer.state), *counts)
            if answer.state == STAGED_PUBLISHED:
                break
            await self._wires.pause(50 * MS)
        self._end(driver)
        if not driver.stream:
            self._done.append((driver.job, driver.batch))
            return
        await self._wires.pause(self._wires.pause_ns(BATCH_EVERY_NS, self._rng))
        if not self._wires.winding_down:  # the next batch of the stream
            self._drive(driver.job, driver.batch + 1, True)

    async def _abort(self, driver: _Driver, attempts: list[_Attempt]) -> None:
        asked_ns = self._world.now_ns
        request = staging_pb2.AbortStagedRequest(job_id=driver.job, batch=driver.batch, run_id=driver.run)
        call = self._lossy(served(lambda core: core.parts.staging.abort(request)))
        answer: StagedJob = await self._asking.ask(call)
        state = StagedState.Name(answer.state)
        self._history.note(AbortAnswered, driver.job, driver.batch, driver.run, state, asked_ns)
        if driver.plan == "late" and self._world.now_ns - asked_ns < EXPIRY_MS * MS // 2:
            await self._commit(driver, attempts)
        else:
            self._end(driver)

    def _give_up(self, driver: _Driver) -> None:
        """Its run is over; a batch of a stream has to happen before the next one may."""
        self._end(driver)
        if driver.stream:
            self._drive(driver.job, driver.batch, True)

    def _end(self, driver: _Driver) -> None:
        driver.over = True
        if driver in self._drivers:
            self._drivers.remove(driver)

    def _lossy(self, call: Call) -> Call:
        """The same call, whose answer may be lost on its way though the request took effect."""

        def lossy(core: NodeCore, answer: Callable[[Any], None]) -> None:
            lost = self._rng.random() < ANSWERS_LOST
            call(core, (lambda lost: None) if lost else answer)

        return lossy


def _refused(answer: Any) -> bool:
    """Whether the refusal is final: the run is over, or its staged rows are gone."""
    return (
        isinstance(answer, Failure)
        and answer.reason == common_pb2.WRONG_STATE
        and answer.metadata.get("field") in ("run_id", "attempts")
    )


def block_of(rows: tuple[Row, ...]) -> IncomingBatch:
    """Rows as the service hands them to the core."""
    records = [UID.pack(row.uid) + b"," * (row.uid * 7919 % 90) for row in rows]
    return IncomingBatch(
        producer_id="",
        sequence=0,
        count=len(rows),
        topics=[TOPIC],
        topic_of=None,
        when=np.array([row.due_ms for row in rows], np.int64),
        kinds=KIND_DUE,
        sizes=np.array([len(record) for record in records], np.uint32),
        records=b"".join(records),
    )
