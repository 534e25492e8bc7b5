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
from dataclasses import dataclass, field, fields
from typing import Any

from tickwheel.chaos.sim.world import MS, World

LONG_SECONDS = 20
"""Shortest long run."""
DENSE_SECONDS = 3
"""Length of a dense run with about as many messages as a long run."""
WRITERS = ("lines", "listeners", "sweeps", "writes", "loads", "parcels", "couriers")
"""Clients that write messages of their own, where they take part."""
BULK = ("sweeps", "writes", "loads", "cold")
NAMELESS = ("stewards", "clerks", "twins", "sizes")
HOURS_AFTER_MS = (2_500, 4_500, 6_000)
SHARING_PERCENT = 75
"""In a long run each kind of writer that takes part makes the pauses of all writers this much longer."""
LOADS_SHARE = 3
"""A load of a window takes this part of what is loaded ahead at most: slower ones would make messages late for good."""


def _drawn(*values: int, long: Sequence[int] = ()) -> Any:
    """A field that is one of `values`; in a long run one of `long`, if that is given."""
    return field(metadata={"short": values, "long": long or values})


def _present() -> Any:
    """Whether some kind of clients takes part."""
    return _drawn(0, 0, 1, long=(0, 0, 0, 0, 0, 1))


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a run, as drawn or set."""

    nodes: int = _drawn(3, 3, 3, 3, 3, 3, 5)
    loop_gap_us: int = _drawn(200, 1_000, 5_000, 10_000, *(20_000,) * 4, *(30_000,) * 4)
    """Least time between two turns of a node's loop."""
    sync_period_ms: int = _drawn(50, 100, 100, 100, long=(100,))
    """Time between two heartbeats, and between two syncs."""
    journal_tail_bytes: int = _drawn(0, 20_000, 64 << 20)
    """Kept below a checkpoint for slaves that are behind; those farther behind need the checkpoint."""
    batch_entries: int = _drawn(1_024, 1_024, 8)
    """Entries of one message at most."""
    batch_bytes: int = _drawn(1 << 20, 1 << 20, 4_096)
    """Their bytes at most, unless one entry has more. With a small limit most entries fill a message alone."""
    apply_entries: int = _drawn(1_024, 1_024, 32)
    """Entries applied in one turn at most."""
    settle_grid_ms: int = _drawn(1, 50, 50, 100, long=(50, 100, 100, 100))
    """Consumers settle at multiples of this: many at once."""
    pause_ms: int = _drawn(400, 800, 1_500)
    """Mean time between two batches of a producer of messages."""
    log_pause_ms: int = _drawn(40, 40, 40, 2_000)
    """Between two proposals of a client of the log alone, in the mean. A slave that misses nothing can stand for
    election: in a quiet log faults do other harm than in a busy one."""
    checkpoint_every: int = _drawn(50, 300, 1 << 60)
    """Entries between two checkpoints of the log alone."""
    lines: int = _present()
    """Clients of a FIFO topic (lines.py)."""
    pauses: int = _present()
    """Operators who pause (pauses.py)."""
    listeners: int = _present()
    """A group with a filter that changes, a broadcasting one, and one that is reset (listeners.py)."""
    couriers: int = _present()
    """Groups of many topics, of which one at a time is reset (couriers.py)."""
    sweeps: int = _present()
    """Cancels and moves in bulk (sweeps.py)."""
    writes: int = _present()
    """Bulk writers that stage and commit (writes.py)."""
    write_blocks: int = _drawn(4)
    """Blocks of the longest of their attempts: many take several rounds to be published."""
    loads: int = _present()
    """Loaders of bundles (loads.py)."""
    parcels: int = _present()
    """Clients that pull and extend leases, and operators of dead letters (parcels.py)."""
    stewards: int = _present()
    """Operators who change settings, and make and delete topics and groups (stewards.py)."""
    clerks: int = _present()
    """Operators of limits, users and a group that is made again and again (clerks.py)."""
    twins: int = _present()
    """Pairs of programs that share a producer id (twins.py)."""
    cold: int = _present()
    """Freezers of the cold tier (cold.py)."""
    schedules: int = _present()
    """Users of recurring schedules (timetables.py)."""
    keys: int = _drawn(1)
    """Programs and callers with unique keys (claims.py)."""
    consumers: int = _drawn(2)
    """Most consumers of a group. With only one, nobody takes the messages that it hands back when it leaves."""
    mixing: int = _drawn(0, 1, 1, 2)
    """How many consumers of a group take batches of several topics."""
    splits: int = _drawn(0, 0, 0, 1)
    """Whether consumers settle half of the batches in two parts, the second much later."""
    lease_ms: int = _drawn(3_000)
    """Length of a delivery lease."""
    segment_bytes: int = _drawn(128 << 10)
    """Size of a journal file of a whole node."""
    work_ms: int = _drawn(0, 0, 1_000, 2_500)
    """Longest duration of a merge or of a load of a window until faults are over; a load also takes at most a third of
    `preload_ms`. 0: as long as any work."""
    buffer_bytes: int = _drawn(64 << 10, 64 << 10, 64 << 10, 4 << 10)
    """Size of the buffer of arrivals in memory. A small buffer causes merges throughout the run."""
    preload_ms: int = _drawn(10_000, 10_000, 3_000)
    """How far ahead of the clock messages are loaded. A short lead means frequent loads while messages still arrive."""
    hours_kept: int = _drawn(1, 0)
    """Hours before the cursor's hour that are kept though nobody needs them. With 0, crossing an hour removes one."""
    checkpoint_ms: int = _drawn(5_000, 5_000, 5_000, 1_500)
    """Time between two checkpoints."""
    hour_after_ms: int = _drawn(0)
    """How long before a full hour the run begins; 0: drawn from the seed."""
    dispatch_ahead_ms: int = _drawn(*(12,) * 5, 400)
    """How long before the first of its messages is due a dispatch is proposed. With a long time topics rest that wait
    for it."""
    spaced_rate_min: int = _drawn(500, 500, 500, 1)
    """Messages a second from which on entries of the log are spaced. No run has as many as a busy cluster."""
    turn: int = _drawn(*(0,) * 6, 1, 8)
    """How little is done in one turn of work that is done in turns: so many messages handed out, leases taken over or
    units sorted, or a few more (node_load.py). 0: as the product has it, more than a run ever needs."""
    resets: int = _drawn(0, 1)
    """Whether groups that are reset have two consumers that also nack and declare dead, and a group of the FIFO topic
    is reset, too."""
    past_moves: int = _drawn(0, 0, 0, 1)
    """Whether some moves are to a time that is long over (changes.py)."""
    tight: int = _drawn(0, 0, 0, 1)
    """Whether limits that no run reaches are small (tight.py)."""
    in_flight_max: int = _drawn(*(0,) * 8, 30, 100)
    """`group_in_flight_max` of the cluster from its founding on; 0: none."""
    users: int = _present()
    """Users whose rights come and go (users.py)."""
    sizes: int = _present()
    """Programs near the limits of batches, which change (sizes.py)."""
    producers_max: int = _drawn(0, 0, 0, 60)
    """`producers_max` of the cluster from its founding on; then a user floods it with ids (floods.py). 0: more than a
    run has."""
    retention_ms: int = _drawn(*(0,) * 5, 1_500, 3_000)
    """`retention_ms` of the cluster from its founding on: hours and dead letters go in the middle of the run, whatever
    groups have settled by then. 0: long after it."""
    window_messages: int = _drawn(*(0,) * 7, 12)
    """`window_messages_max` of the cluster from its founding on: a message that is not settled soon stops its group in
    its topic. 0: more than a run has."""
    extra_stay: int = _drawn(1, long=(0,))
    """0: a member leaves for each newcomer that counts."""
    thin: int = _drawn(1)
    """Factor on the pauses of clients: a long run need not be as dense as a short one."""
    sharing_percent: int = _drawn(100)
    """Further factor on these pauses, in percent: the more kinds of clients share a long run, the less each does."""
    rest_gap_us: int = _drawn(0, long=(90_000,))
    """Least gap between two turns outside spells; during a spell it is `loop_gap_us`. 0: always that."""

    @property
    def has_ports(self) -> bool:
        """Whether nodes have client ports: some clients call through them."""
        return bool(self.users or self.sizes)


def draw(world: World, seconds: int, fixed: Sequence[tuple[str, int]] = ()) -> Shape:
    """The shape of a seed for a run of `seconds`. Fields in `fixed` are not drawn."""
    given = dict(fixed)
    long = seconds >= LONG_SECONDS
    choices: dict[str, Sequence[int]] = {
        item.name: item.metadata["long" if long else "short"] for item in fields(Shape)
    }

    def one(name: str) -> int:
        return given[name] if name in given else world.stream(f"shape/{name}").choice(choices[name])

    if any(one(name) for name in ("sweeps", "listeners", "couriers")) or (one("lines") and one("resets")):
        # At the end every swept message is looked up, and a reset goes back to messages in these hours.
        choices["hours_kept"] = (1,)
    if one("retention_ms"):
        # The full hour comes early enough for the retention to be over in the run. Nobody reads old hours at its end,
        # and what comes in bulk is owed without an exception.
        choices["hour_after_ms"] = HOURS_AFTER_MS
        choices["hours_kept"] = (0,)
        choices["pauses"] = (1,)
        choices |= dict.fromkeys(BULK, (0,))
    if one("producers_max"):
        # They use many producer ids without an owner, and so displace each other.
        choices |= dict.fromkeys(NAMELESS, (0,))
    if one("tight"):
        # Both bound what a node reads and hands out in a turn of its loop. With both it cannot keep up.
        choices["turn"] = (0,)
    if long:
        choices["thin"] = (seconds // DENSE_SECONDS,)
        choices["sharing_percent"] = (100 + SHARING_PERCENT * sum(map(one, WRITERS)),)
    if "loop_gap_us" in given:
        choices["rest_gap_us"] = (0,)
    return Shape(**{name: one(name) for name in choices})


def slow_work_ns(shape: Shape) -> dict[str, int]:
    """By name of the function: longest duration of work that is slower than other work."""
    load_ms = min(shape.work_ms, shape.preload_ms // LOADS_SHARE)
    return {"MergeJob.run": shape.work_ms * MS, "LoadJob.run": load_ms * MS}
