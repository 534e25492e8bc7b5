"""Seeds of the simulation: every fault at once, every promise judged after each step.

A failing seed prints the command that replays it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tickwheel.chaos.sim import twins
from tickwheel.chaos.sim.fault import PlannedFault, Tally
from tickwheel.chaos.sim.faults import MASTER, Injector
from tickwheel.chaos.sim.history import Record
from tickwheel.chaos.sim.history_bulk import ColdLoaded, ColdParked
from tickwheel.chaos.sim.history_messages import CancelAnswered, ScheduleRefused
from tickwheel.chaos.sim.history_operators import Administered
from tickwheel.chaos.sim.mutation_table import FEW_CLIENTS
from tickwheel.chaos.sim.run import Cluster, simulate
from tickwheel.chaos.sim.setup import Level, RunResult, SimulationConfig
from tickwheel.chaos.sim.world import SECOND

WITH_ALL = (("lines", 1), ("listeners", 1), ("pauses", 1), ("sweeps", 1), ("writes", 0), ("loads", 0))
"""Clients that take part by the dice of a seed (shape.py); those in bulk have a test of their own."""

BEFORE_KEYS = (("keys", 0),)
"""Of runs that were chosen before there were clients with unique keys."""


def verdict(seed: int, config: SimulationConfig) -> RunResult:
    result = simulate(seed, config)
    command = (
        f"tickwheel chaos sim --level {config.level.value} --seeds 1 --from {seed} --seconds {config.seconds} --trace"
    )
    assert not result.failed, f"{result.broken}\n{result.where}\nreplay: {command}"
    return result


@pytest.mark.parametrize("seed", range(60))
def test_log_under_faults(seed: int) -> None:
    """The replicated log alone: committed entries stay, one master a term, it comes to rest after the heal."""
    verdict(seed, SimulationConfig(level=Level.LOG, seconds=3))


@pytest.mark.parametrize("seed", range(12))
def test_node_under_faults(seed: int) -> None:
    """Whole nodes with clients that repeat, cancel, move, nack and die: no promise is broken."""
    verdict(seed, SimulationConfig(level=Level.NODE, seconds=4))


def test_what_groups_and_operators_do() -> None:
    """With all of these clients at once, those too that a run has by its dice: no promise is broken, and each of them
    did something."""
    counts: Counter[str] = Counter()
    for seed in range(4):
        counts.update(verdict(seed, SimulationConfig(level=Level.NODE, seconds=5, shape=WITH_ALL)).counts)
    assert all(counts[kind] for kind in ("PauseAnswered", "SweepEnded", "SweptSeen", "FilterAnswered", "ResetAnswered"))


@pytest.mark.parametrize("seed", range(3))
def test_bulk_writers_and_loaders(seed: int) -> None:
    """Staged rows and bundles while nodes die, lose power and are cut off: what was committed or taken over comes once,
    nothing else does; and each of them did something."""
    shape = (("lines", 0), ("listeners", 0), ("pauses", 0), ("sweeps", 0), ("writes", 1), ("loads", 1))
    counts = verdict(seed, SimulationConfig(level=Level.NODE, seconds=4, shape=shape)).counts
    assert all(counts[kind] for kind in ("CommitAnswered", "WriteSeen", "LoadAnswered", "CancelAnswered"))


@pytest.mark.parametrize(
    ("seed", "clients", "kinds"),
    [
        (11, {"sizes": 1}, ("CallRefused", "CallAccepted")),
        (1, {"users": 1}, ("CallRefused", "AuditedAnswer", "AuditSeen")),
        (0, {"producers_max": 60}, ("RepeatAnswered",)),
        (2, {"retention_ms": 1_500}, ("HoursRemoved",)),
        (3, {"window_messages": 12, "mixing": 0}, ("Settled",)),
    ],
)
def test_client_ports_floods_and_retention(seed: int, clients: dict[str, int], kinds: tuple[str, ...]) -> None:
    """Limits and rights that change under the calls of programs and users, a flood of producers, hours removed while
    groups lag, a window of a few messages: each alone. Seed 11 met a node that refused for good by a limit that had
    been raised."""
    shape = dict(FEW_CLIENTS) | {"listeners": 0, "couriers": 0} | clients
    config = SimulationConfig(
        level=Level.NODE, seconds=5, faults=("kill", "isolate", "freeze", "handover"), shape=tuple(shape.items())
    )
    counts = verdict(seed, config).counts
    assert all(counts.get(kind) for kind in kinds), counts


def test_who_pulls_and_extends_and_what_becomes_of_dead_letters() -> None:
    """Batches pulled one by one, leases extended, dead letters replayed and purged under faults; and what each node
    holds for settled at the end was compared."""
    shape = (*((name, 0) for name, _ in WITH_ALL), ("parcels", 1))
    counts: Counter[str] = Counter()
    for seed in (1, 2):
        counts.update(verdict(seed, SimulationConfig(level=Level.NODE, seconds=5, shape=shape)).counts)
    assert all(counts[kind] for kind in ("Extended", "DeadReplayed", "DeadPurged", "SettledSeen"))


def test_settings_change_and_topics_and_groups_go() -> None:
    """While messages of theirs are pending, out with consumers and handed back: nodes bear it and agree."""
    shape = (*((name, 0) for name, _ in WITH_ALL), ("parcels", 0), ("stewards", 1))
    counts: Counter[str] = Counter()
    for seed in range(2):
        counts.update(verdict(seed, SimulationConfig(level=Level.NODE, seconds=5, shape=shape)).counts)
    assert counts["Administered"] > 10


def test_what_freezers_twins_and_stewards_do() -> None:
    """Parts of the cold tier are registered and loaded, and messages of theirs cancelled; programs that share a
    producer id are told; settings change, and topics and groups are deleted."""
    off = (*((name, 0) for name, _ in WITH_ALL), ("parcels", 0), ("keys", 0), ("schedules", 0), ("couriers", 0))
    shape = (*off, ("cold", 1), ("twins", 1), ("stewards", 1))
    kinds = (ColdParked, ColdLoaded, CancelAnswered, ScheduleRefused, Administered)
    seen: list[Record] = []
    cluster = Cluster(3, SimulationConfig(level=Level.NODE, nodes=3, seconds=5, faults=(), shape=shape))
    cluster.history.subscribe(kinds, seen.append)
    cluster.play(Injector(cluster, []))
    assert any(isinstance(record, ColdLoaded) for record in seen)
    frozen = {uid for record in seen if isinstance(record, ColdParked) for uid in record.uids}
    cancelled = [r.uid for r in seen if isinstance(r, CancelAnswered) and r.outcome == "CANCELLED"]
    assert frozen.intersection(cancelled)
    refused = {
        record.producer for record in seen if isinstance(record, ScheduleRefused) and record.reason == "SEQUENCE_TAKEN"
    }
    assert refused.intersection(twins.IDS)
    done = {record.what for record in seen if isinstance(record, Administered) and record.done}
    assert done == {"settings", "delete topic", "delete group"}


def test_groups_are_reset_while_their_consumers_nack() -> None:
    """In a FIFO topic too: what is out, on its way back, waiting for its retry or dead meets resets."""
    off = (("pauses", 0), ("sweeps", 0), ("writes", 0), ("loads", 0), ("parcels", 0), ("keys", 0))
    shape = (*off, ("lines", 1), ("listeners", 1), ("couriers", 1), ("resets", 1), ("past_moves", 1))
    commands: Counter[str] = Counter()
    for seed in range(2):
        run = verdict(seed, SimulationConfig(level=Level.NODE, seconds=5, shape=shape))
        commands.update({name: times for name, (times, _) in run.commands.items()})
    assert commands["admin reset_group"] > 10


def test_in_small_pieces() -> None:
    """Limits that no run reaches are small: what is copied, read, swept or proposed goes in pieces, with faults between
    two of them."""
    shape = (("parcels", 1), ("lines", 1), ("resets", 1), ("tight", 1), ("loads", 0), ("writes", 0), ("keys", 0))
    run = verdict(0, SimulationConfig(level=Level.NODE, seconds=4, shape=shape))
    assert run.commands["settle SETTLE_RETRY"][0] > 10


def test_what_clerks_do() -> None:
    """Limits refuse what others send until they are lifted, users come and go, and a group is made again and again."""
    off = (*((name, 0) for name, _ in WITH_ALL), ("parcels", 0), ("keys", 0), ("schedules", 0), ("couriers", 0))
    run = verdict(1, SimulationConfig(level=Level.NODE, seconds=6, faults=("kill",), shape=(*off, ("clerks", 1))))
    assert {"admin update_group", "sweep begin delete_group"} <= set(run.commands)
    assert any(name.startswith("admin access") for name in run.commands)
    assert any(name.startswith("admin settings") for name in run.commands)


def test_who_comes_back_with_an_empty_disk_is_turned_away() -> None:
    """And is replaced under another id."""
    shape = (*((name, 0) for name, _ in WITH_ALL), ("keys", 0))
    config = SimulationConfig(level=Level.NODE, nodes=3, seconds=5, faults=("wiped-disk", "kill"), shape=shape)
    assert verdict(0, config).tallies["wiped-disk"].effective


def test_power_is_lost_at_files_that_are_seldom_written() -> None:
    """Also where a copied checkpoint is put in place, and again while a node starts."""
    shape = (*FEW_CLIENTS, ("loads", 1), ("journal_tail_bytes", 0), ("segment_bytes", 8 << 10), ("loop_gap_us", 30_000))
    config = SimulationConfig(level=Level.NODE, nodes=3, seconds=5, faults=("power-at-file", "isolate"), shape=shape)
    lost = [verdict(seed, config).tallies.get("power-at-file", Tally()).evidence for seed in range(3)]
    assert sum(lost) > 10


def test_runs_of_schedules() -> None:
    """Put, paused, triggered and deleted under faults: each planned time has one run or a note that says why not."""
    shape = (*((name, 0) for name, _ in WITH_ALL), ("parcels", 0), ("schedules", 1))
    counts: Counter[str] = Counter()
    for seed in range(2):
        counts.update(verdict(seed, SimulationConfig(level=Level.NODE, seconds=5, shape=shape)).counts)
    assert counts["ScheduleChanged"] > 10 and counts["RunSeen"] > 30


def test_unique_keys() -> None:
    """Claimed, replaced, moved and cancelled by key under faults: an order of events explains every answer."""
    shape = (*((name, 0) for name, _ in WITH_ALL), ("parcels", 0), ("couriers", 1))
    counts: Counter[str] = Counter()
    for seed in range(2):
        counts.update(verdict(seed, SimulationConfig(level=Level.NODE, seconds=5, shape=shape)).counts)
    assert counts["KeyedAnswered"] > 15 and counts["KeyAnswered"] > 15 and counts["KeysUsed"] == 6


@pytest.mark.parametrize("seed", range(3))
def test_members_come_and_go(seed: int) -> None:
    """Newcomers come to count, members are removed, the master too, while nodes die: nothing is lost, nobody leads who
    does not count, and each change had an effect."""
    config = SimulationConfig(level=Level.NODE, seconds=8, nodes=3, faults=("newcomer", "replace", "kill"))
    result = verdict(seed, config)
    changes = [result.tallies[kind] for kind in ("newcomer", "replace") if kind in result.tallies]
    assert any(tally.effective for tally in changes)


def test_a_long_run() -> None:
    """A minute with many faults after one another, most of it with coarse loops: no promise is broken."""
    verdict(910_375, SimulationConfig(seconds=60, nodes=3, shape=BEFORE_KEYS))


def test_a_node_that_is_frozen_while_it_leaves() -> None:
    """Its journal failed, it handed over and was frozen for 3.6 s. It stopped when it woke: late, but with cause."""
    verdict(17_000_462, SimulationConfig(seconds=20, only=(1, 2, 3, 5, 6, 8), shape=BEFORE_KEYS))


def test_who_is_killed_with_all_others_just_before_the_heal_comes_back() -> None:
    """The kills come within 50 ms: one that came after the fault had ended hit a process that nobody started again."""
    cluster = Cluster(0, SimulationConfig(level=Level.LOG, nodes=7, seconds=1, faults=()))
    injector = Injector(cluster, [PlannedFault(0, "kill-all", 3 * SECOND - 1, 1, MASTER, 1)])
    cluster.play(injector)
    assert injector.tallies["kill-all"].evidence == 7
    assert all(machine.process is not None for machine in cluster.machines)
