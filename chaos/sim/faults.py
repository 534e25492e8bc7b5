"""The kinds of faults, the plan of a run's faults, and the evidence of their effects.

`plan` draws from a seed once, before the run: a list of numbered faults, each with its time, length and target. To
leave one out (`only`) changes no other fault; that is how a failing run is shrunk. A kind is a function that begins a
fault, yields until its end, ends it, and returns the count of its effects.

To add one: write such a function in the module of its noun (`network_faults.py` ...), put it into `KINDS` with the
range of its length.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from tickwheel.chaos.sim import (
    checkpoint_faults,
    clock_faults,
    disk_faults,
    library_faults,
    member_faults,
    moment_faults,
    network_faults,
    process_faults,
    repeated_faults,
)
from tickwheel.chaos.sim.fault import Active, Going, Kind, PlannedFault, Scene, Tally
from tickwheel.chaos.sim.history import FaultBegan, FaultEnded
from tickwheel.chaos.sim.world import MS, SECOND, World

MASTER = "master"


_directed = partial(Kind, default=False)
_of_nodes = partial(Kind, node_only=True)
_directed_of_nodes = partial(_directed, node_only=True)

KINDS: dict[str, Kind] = {
    "reset": Kind(network_faults.reset, (1, 2), "frames lost, connections broken"),
    "delay": Kind(network_faults.delay, (300, 5_000), "frames late"),
    "replay": Kind(network_faults.replay, (500, 6_000), "frames twice"),
    "one-way": Kind(network_faults.one_way, (200, 6_000), "frames held or lost"),
    "partition": Kind(network_faults.partition, (200, 8_000), "frames held or lost"),
    "isolate": Kind(network_faults.isolate, (200, 6_000), "frames held or lost"),
    "bridge": Kind(network_faults.bridge, (500, 6_000), "frames held or lost"),
    "flap": Kind(network_faults.flap, (500, 5_000), "frames held or lost"),
    # Directed: a node far behind hears of commits that it cannot judge.
    "left-behind": _directed(network_faults.left_behind, (3_000, 6_000), "copies that failed"),
    "kill": Kind(process_faults.kill, (20, 4_000), "processes killed"),
    "power": Kind(process_faults.power, (20, 4_000), "pages and directory changes lost"),
    "kill-all": Kind(process_faults.kill_all, (60, 2_000), "processes killed"),
    "power-all": Kind(process_faults.power_all, (60, 2_000), "pages and directory changes lost"),
    # Directed: finds acknowledgements that came before their fdatasync. Not in the default set.
    "power-slaves": _directed(process_faults.power_slaves, (1_500, 3_000), "pages and directory changes lost"),
    # Directed: leads to a term that is not stored.
    "full-voter": _directed(process_faults.full_voter, (1_000, 2_500), "writes refused"),
    "wrong-start": _directed(process_faults.wrong_start, (1_500, 4_000), "readings of a wrong clock"),
    "restart": Kind(process_faults.restart, (20, 2_000), "processes stopped"),
    "freeze": Kind(process_faults.freeze, (100, 4_000), "inputs that waited"),
    "slow-disk": Kind(disk_faults.slow_disk, (500, 5_000), "syncs slowed"),
    "failed-sync": Kind(disk_faults.failed_sync, (200, 3_000), "syncs failed"),
    "disk-full": Kind(disk_faults.disk_full, (500, 5_000), "writes refused"),
    "kill-voters": Kind(moment_faults.kill_voters, (1_000, 6_000), "voters killed"),
    "cut-candidates": Kind(moment_faults.cut_candidates, (1_000, 6_000), "candidates cut off"),
    "restart-bridge": Kind(moment_faults.restart_bridge, (1_500, 6_000), "restarts of the bridge"),
    "failed-apply": Kind(process_faults.failed_apply, (200, 2_000), "applies that raised"),
    "hung-disk": Kind(disk_faults.hung_disk, (500, 4_000), "works that hung"),
    "read-error": Kind(disk_faults.read_error, (200, 3_000), "reads failed"),
    "power-in-work": Kind(disk_faults.power_in_work, (500, 4_000), "powers lost between two writes"),
    "power-at-file": _directed_of_nodes(disk_faults.power_at_file, (2_000, 8_000), "powers lost between two writes"),
    # Directed: ways of pysyncobj's that nothing in a node takes.
    "library-calls": _directed(library_faults.library_calls, (1_000, 4_000), "calls"),
    "foreign-entry": _directed(library_faults.foreign_entry, (200, 2_000), "entries read"),
    "pickled-frame": _directed(library_faults.pickled_frame, (500, 2_000), "frames"),
    # Directed: what the envelope of a frame would drop.
    "votes-twice": _directed(repeated_faults.votes_twice, (1_500, 3_000), "votes twice"),
    "old-answers": _directed(repeated_faults.old_answers, (4_000, 6_000), "answers of before"),
    "late-syncs": _directed_of_nodes(repeated_faults.late_syncs, (5_000, 8_000), "frames late"),
    "handover": Kind(moment_faults.handover, (1_000, 3_000), "handovers done"),
    "power-checkpoint": _of_nodes(
        checkpoint_faults.power_checkpoint, (1_000, 6_000), "pages and directory changes lost"
    ),
    "kill-returning": _of_nodes(moment_faults.kill_returning, (1_000, 6_000), "masters killed"),
    "kill-installed": _directed_of_nodes(checkpoint_faults.kill_installed, (3_000, 5_000), "masters killed"),
    "power-in-checkpoint": _directed_of_nodes(
        checkpoint_faults.power_in_checkpoint, (1_000, 6_000), "pages and directory changes lost"
    ),
    "power-removing": _directed_of_nodes(
        checkpoint_faults.power_removing, (8_000, 10_000), "powers lost between two writes"
    ),
    "handover-delivering": _directed_of_nodes(moment_faults.handover_delivering, (3_000, 5_000), "handovers done"),
    "kill-left": _directed_of_nodes(moment_faults.kill_left, (1_000, 3_000), "masters killed"),
    "hung-install": _directed_of_nodes(checkpoint_faults.hung_install, (2_000, 4_000), "works that hung"),
    "newcomer": _of_nodes(member_faults.newcomer, (3_000, 8_000), "members that came to count"),
    "replace": _of_nodes(member_faults.replace_member, (3_000, 10_000), "members removed"),
    "wiped-disk": _of_nodes(member_faults.wiped_disk, (500, 3_000), "starts refused", apart=True),
    "broken-copy": _of_nodes(checkpoint_faults.broken_copy, (4_000, 8_000), "copies broken midway", apart=True),
    "stale-founders": _of_nodes(member_faults.stale_founders, (3_500, 6_000), "meetings", apart=True, at_start=True),
    # Directed: which nodes are let in by one that knows no member.
    "strangers": _directed_of_nodes(member_faults.strangers, (6_000, 12_000), "slaves that came back to strangers"),
    "skew": Kind(clock_faults.skew, (500, 10_000), "readings of a wrong clock"),
    "drift": Kind(clock_faults.drift, (2_000, 20_000), "readings of a wrong clock"),
    "clock-steps": Kind(clock_faults.steps, (500, 8_000), "readings of a wrong clock"),
}
DEFAULT_KINDS = tuple(name for name, kind in KINDS.items() if kind.default)
MEAN_GAP_NS = 2_500 * MS
APART_SHARE_MOST = 12
"""A kind that is drawn apart is as rare as one of all kinds, or as one of this many if there are more. One that begins
with the run does so in one of as many seeds."""


def plan(world: World, kinds: Sequence[str], names: Sequence[str], begin_ns: int, end_ns: int) -> list[PlannedFault]:
    """The faults of a seed. One seed takes some of the kinds, so that each also comes alone; those that are drawn apart
    have the last numbers, in the order of KINDS."""
    rng = world.stream("faults")
    together = sorted(kind for kind in kinds if not KINDS[kind].apart)
    planned: list[PlannedFault] = []
    if together:
        chosen = sorted(rng.sample(together, rng.randint(1, len(together))))
        _plan_some(planned, rng, chosen, names, MEAN_GAP_NS, begin_ns, end_ns)
    share = max(1, min(len(together), APART_SHARE_MOST))
    for kind in (name for name in KINDS if name in kinds and name not in together):
        rng = world.stream(f"faults/{kind}")
        if not KINDS[kind].at_start:
            _plan_some(planned, rng, [kind], names, MEAN_GAP_NS * share, begin_ns, end_ns)
        elif rng.randrange(share) == 0:
            planned.append(_throw(len(planned), rng, kind, names, 0))
    return planned


def _plan_some(
    planned: list[PlannedFault],
    rng: random.Random,
    chosen: Sequence[str],
    names: Sequence[str],
    gap_ns: int,
    begin_ns: int,
    end_ns: int,
) -> None:
    now_ns = begin_ns
    while True:
        now_ns += int(rng.expovariate(1.0 / gap_ns))
        if now_ns >= end_ns:
            return
        planned.append(_throw(len(planned), rng, rng.choice(chosen), names, now_ns))


def _throw(number: int, rng: random.Random, kind: str, names: Sequence[str], at_ns: int) -> PlannedFault:
    low, high = KINDS[kind].length_ms
    length_ns = int(low * (high / low) ** rng.random()) * MS
    target = MASTER if rng.random() < 0.5 else rng.choice(list(names))
    return PlannedFault(number, kind, at_ns, length_ns, target, rng.getrandbits(32))


@dataclass(slots=True)
class Injector:
    """Begins and ends the planned faults of one run."""

    scene: Scene
    planned: Sequence[PlannedFault]
    tallies: dict[str, Tally] = field(default_factory=dict)
    _active: dict[int, tuple[PlannedFault, str, Active]] = field(default_factory=dict)

    def arm(self) -> None:
        """Put all faults on the agenda."""
        for planned in self.planned:
            self.scene.world.at(planned.at_ns, self._begin, planned)

    def _begin(self, planned: PlannedFault) -> None:
        scene = self.scene
        machine = scene.master() if planned.target == MASTER else None
        if machine is None:
            names = {m.name: m for m in scene.machines}
            machine = names.get(planned.target) or scene.machines[planned.seed % len(scene.machines)]
        name = f"#{planned.number} {planned.kind} {machine.name}"
        scene.history.note(FaultBegan, name)
        scene.world.tell("fault", f"begins: {name} for {planned.length_ns / SECOND:.3f} s")
        going = Going(scene, planned.length_ns)
        active = Active(KINDS[planned.kind].begin(scene, machine, going, random.Random(planned.seed)), going)
        self._active[planned.number] = (planned, name, active)
        scene.world.after(planned.length_ns, self._end, planned.number)

    def _end(self, number: int) -> None:
        entry = self._active.pop(number, None)
        if entry is None:
            return
        planned, name, active = entry
        active.end()
        evidence = active.evidence
        tally = self.tallies.setdefault(planned.kind, Tally(unit=KINDS[planned.kind].unit))
        tally.add(Tally(1, int(evidence > 0), evidence))
        self.scene.history.note(FaultEnded, name)
        self.scene.world.tell("fault", f"ends: {name}; {evidence} {KINDS[planned.kind].unit}")

    def end_all(self) -> None:
        """End all faults now."""
        for number in sorted(self._active):
            self._end(number)

    @property
    def unfinished(self) -> bool:
        return bool(self._active)
