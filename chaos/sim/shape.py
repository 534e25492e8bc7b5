"""The shape of a run: the properties drawn from its seed that are no faults.

The number of nodes, the coarseness of their loops, the size of their limits. With small limits a short run reaches
states that would otherwise take hours, such as a log cut below a slave, or a backlog of several slices. Coarse loops
and rare syncs resemble a busy machine and a slow network, and are cheap to simulate. Most seeds have them; some have
fine ones, to reach the states in between. Every field is drawn from a separate stream, so fixing one does not change
the others.

In the same time many short runs reach more states than few long ones. Long runs are for effects that take long, such as
many faults in a row. They are coarse except for short spells, and have fewer clients that do less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tickwheel.chaos.sim.world import MS, World

NODES = (3, 3, 3, 3, 3, 3, 5)
LOOP_GAP_US = (200, 1_000, 5_000, 10_000, *(20_000,) * 4, *(30_000,) * 4)
SYNC_PERIOD_MS = (50, 100, 100, 100)
JOURNAL_TAIL_BYTES = (0, 20_000, 64 << 20)
BATCH_ENTRIES = (1_024, 1_024, 8)
BATCH_BYTES = (1 << 20, 1 << 20, 4_096)
APPLY_ENTRIES = (1_024, 1_024, 32)
SETTLE_GRID_MS = (1, 50, 50, 100)
PAUSE_MS = (400, 800, 1_500)
LOG_PAUSE_MS = (40, 40, 40, 2_000)
CHECKPOINT_EVERY = (50, 300, 1 << 60)
WITH = (0, 0, 1)
"""Whether some kind of clients takes part."""
KEYS = (1,)
LONG_SECONDS = 20
"""Shortest long run."""
LONG_SYNC_PERIOD_MS = (100,)
LONG_WITH = (0, 0, 0, 0, 0, 1)
LONG_REST_GAP_US = (90_000,)
LONG_SETTLE_GRID_MS = (50, 100, 100, 100)
WRITE_BLOCKS = (4,)
CONSUMERS = (2,)
MIXING = (0, 1, 1, 2)
LEASE_MS = (3_000,)
SEGMENT_BYTES = (128 << 10,)
WORK_MS = (0, 0, 1_000, 2_500)
BUFFER_BYTES = (64 << 10, 64 << 10, 64 << 10, 4 << 10)
PRELOAD_MS = (10_000, 10_000, 3_000)
HOURS_KEPT = (1, 0)
DISPATCH_AHEAD_MS = (12,)
CHECKPOINT_MS = (5_000, 5_000, 5_000, 1_500)
DENSE_SECONDS = 3
"""Length of a dense run with about as many messages as a long run."""
WRITERS = ("lines", "listeners", "sweeps", "writes", "loads", "parcels", "couriers")
"""Clients that write messages of their own, where they take part."""
SHARING_PERCENT = 75
"""In a long run each kind of writer that takes part makes the pauses of all writers this much longer."""


LOADS_SHARE = 3
"""A load of a window takes this part of what is loaded ahead at most: slower ones would make messages late for good."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a run, as drawn or set."""

    nodes: int
    loop_gap_us: int
    """Least time between two turns of a node's loop."""
    sync_period_ms: int
    """Time between two heartbeats, and between two syncs."""
    journal_tail_bytes: int
    """Kept below a checkpoint for slaves that are behind; those farther behind need the checkpoint."""
    batch_entries: int
    """Entries of one message at most."""
    batch_bytes: int
    """Their bytes at most, unless one entry has more. With a small limit most entries fill a message alone."""
    apply_entries: int
    """Entries applied in one turn at most."""
    settle_grid_ms: int
    """Consumers settle at multiples of this: many at once."""
    pause_ms: int
    """Mean time between two batches of a producer of messages."""
    log_pause_ms: int
    """Between two proposals of a client of the log alone, in the mean. A slave that misses nothing can stand for
    election: in a quiet log faults do other harm than in a busy one."""
    checkpoint_every: int
    """Entries between two checkpoints of the log alone."""
    lines: int = 0
    """Clients of a FIFO topic (lines.py)."""
    pauses: int = 0
    """Operators who pause (pauses.py)."""
    listeners: int = 0
    """A group with a filter that changes, a broadcasting one, and one that is reset (listeners.py)."""
    couriers: int = 0
    """Groups of many topics, of which one at a time is reset (couriers.py)."""
    sweeps: int = 0
    """Cancels and moves in bulk (sweeps.py)."""
    writes: int = 0
    """Bulk writers that stage and commit (writes.py)."""
    write_blocks: int = 4
    """Blocks of the longest of their attempts: many take several rounds to be published."""
    loads: int = 0
    """Loaders of bundles (loads.py)."""
    parcels: int = 0
    """Clients that pull and extend leases, and operators of dead letters (parcels.py)."""
    stewards: int = 0
    """Operators who change settings, and make and delete topics and groups (stewards.py)."""
    twins: int = 0
    """Pairs of programs that share a producer id (twins.py)."""
    cold: int = 0
    """Freezers of the cold tier (cold.py)."""
    schedules: int = 0
    """Users of recurring schedules (timetables.py)."""
    keys: int = 0
    """Programs and callers with unique keys (claims.py)."""
    consumers: int = 2
    """Most consumers of a group. With only one, nobody takes the messages that it hands back when it leaves."""
    mixing: int = 0
    """How many consumers of a group take batches of several topics."""
    lease_ms: int = 3_000
    """Length of a delivery lease."""
    segment_bytes: int = 128 << 10
    """Size of a journal file of a whole node."""
    work_ms: int = 0
    """Longest duration of a merge or of a load of a window until faults are over; a load also takes at most a third of
    `preload_ms`. 0: as long as any work."""
    buffer_bytes: int = 64 << 10
    """Size of the buffer of arrivals in memory. A small buffer causes merges throughout the run."""
    preload_ms: int = 10_000
    """How far ahead of the clock messages are loaded. A short lead means frequent loads while messages still arrive."""
    hours_kept: int = 1
    """Hours before the cursor's hour that are kept though nobody needs them. With 0, crossing an hour removes one."""
    checkpoint_ms: int = 5_000
    """Time between two checkpoints."""
    hour_after_ms: int = 0
    """How long before a full hour the run begins; 0: drawn from the seed."""
    dispatch_ahead_ms: int = 12
    """How long before messages are due their dispatch is proposed."""
    extra_stay: int = 1
    """0: a member leaves for each newcomer that counts."""
    thin: int = 1
    """Factor on the pauses of clients: a long run need not be as dense as a short one."""
    sharing_percent: int = 100
    """Further factor on these pauses, in percent: the more kinds of clients share a long run, the less each does."""
    rest_gap_us: int = 0
    """Least gap between two turns outside spells; during a spell it is `loop_gap_us`. 0: always that (pace.py)."""


def draw(world: World, seconds: int, fixed: Sequence[tuple[str, int]] = ()) -> Shape:
    """The shape of a seed for a run of `seconds`. Fields in `fixed` are not drawn."""
    given = dict(fixed)
    long = seconds >= LONG_SECONDS
    sometimes = LONG_WITH if long else WITH
    rests = long and "loop_gap_us" not in given

    def one(name: str, values: Sequence[int]) -> int:
        return given[name] if name in given else world.stream(f"shape/{name}").choice(values)

    writers = sum(one(name, sometimes) for name in WRITERS)
    return Shape(
        nodes=one("nodes", NODES),
        loop_gap_us=one("loop_gap_us", LOOP_GAP_US),
        sync_period_ms=one("sync_period_ms", LONG_SYNC_PERIOD_MS if long else SYNC_PERIOD_MS),
        journal_tail_bytes=one("journal_tail_bytes", JOURNAL_TAIL_BYTES),
        batch_entries=one("batch_entries", BATCH_ENTRIES),
        batch_bytes=one("batch_bytes", BATCH_BYTES),
        apply_entries=one("apply_entries", APPLY_ENTRIES),
        settle_grid_ms=one("settle_grid_ms", LONG_SETTLE_GRID_MS if long else SETTLE_GRID_MS),
        pause_ms=one("pause_ms", PAUSE_MS),
        log_pause_ms=one("log_pause_ms", LOG_PAUSE_MS),
        checkpoint_every=one("checkpoint_every", CHECKPOINT_EVERY),
        lines=one("lines", sometimes),
        pauses=one("pauses", sometimes),
        listeners=one("listeners", sometimes),
        couriers=one("couriers", sometimes),
        sweeps=one("sweeps", sometimes),
        writes=one("writes", sometimes),
        write_blocks=one("write_blocks", WRITE_BLOCKS),
        loads=one("loads", sometimes),
        parcels=one("parcels", sometimes),
        stewards=one("stewards", sometimes),
        twins=one("twins", sometimes),
        cold=one("cold", sometimes),
        schedules=one("schedules", sometimes),
        keys=one("keys", KEYS),
        consumers=one("consumers", CONSUMERS),
        mixing=one("mixing", MIXING),
        lease_ms=one("lease_ms", LEASE_MS),
        segment_bytes=one("segment_bytes", SEGMENT_BYTES),
        work_ms=one("work_ms", WORK_MS),
        buffer_bytes=one("buffer_bytes", BUFFER_BYTES),
        preload_ms=one("preload_ms", PRELOAD_MS),
        # At the end every swept message is looked up, and a reset goes back to messages in these hours.
        hours_kept=one(
            "hours_kept",
            (1,) if any(one(name, sometimes) for name in ("sweeps", "listeners", "couriers")) else HOURS_KEPT,
        ),
        checkpoint_ms=one("checkpoint_ms", CHECKPOINT_MS),
        hour_after_ms=one("hour_after_ms", (0,)),
        dispatch_ahead_ms=one("dispatch_ahead_ms", DISPATCH_AHEAD_MS),
        extra_stay=one("extra_stay", (0 if long else 1,)),
        thin=one("thin", (seconds // DENSE_SECONDS if long else 1,)),
        sharing_percent=one("sharing_percent", (100 + SHARING_PERCENT * writers if long else 100,)),
        rest_gap_us=one("rest_gap_us", LONG_REST_GAP_US if rests else (0,)),
    )


def slow_work_ns(shape: Shape) -> dict[str, int]:
    """By name of the function: longest duration of work that is slower than other work."""
    load_ms = min(shape.work_ms, shape.preload_ms // LOADS_SHARE)
    return {"MergeJob.run": shape.work_ms * MS, "LoadJob.run": load_ms * MS}
