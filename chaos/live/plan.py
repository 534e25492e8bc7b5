"""The plan of faults, drawn from a seed before the run begins: equal for equal seed and options.

Owns the kinds of faults, their families (what `--faults` names) and their lengths. The target of
a fault is drawn as a wish (the master, a slave, any node, a certain node). Its start decides which node that is. Faults
of one family never overlap, so ending one does not undo another. Faults of different families may overlap.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MASTER, SLAVE, ANY, ALL = "master", "slave", "any", "all"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault; docs/CHAOS.md describes each."""

    family: str
    length_s: tuple[float, float]
    """Shortest and longest. A pause is longer than a master's lease (0.3 s), whatever the dice say."""
    targets: tuple[str, ...] = (MASTER, ANY)
    """The targets that it may strike."""
    of_packets: bool = False
    """Only a network of packets can carry it out."""


KINDS: Mapping[str, Kind] = {
    "kill": Kind("kill", (0.2, 4.0), (SLAVE, ANY)),
    "kill-master": Kind("kill", (0.2, 4.0), (MASTER,)),
    "kill-all": Kind("kill", (0.2, 1.5), (ALL,)),
    "crash-loop": Kind("kill", (4.0, 8.0), (SLAVE,)),
    "pause": Kind("pause", (0.6, 4.0), (SLAVE, ANY)),
    "pause-master": Kind("pause", (0.6, 4.0), (MASTER,)),
    "split": Kind("partition", (1.0, 5.0)),
    "one-way": Kind("partition", (1.0, 5.0)),
    "master-alone": Kind("partition", (1.5, 5.0), (MASTER,)),
    "majority-without-master": Kind("partition", (1.5, 5.0), (MASTER,)),
    "delay": Kind("net", (2.0, 5.0)),
    "jitter": Kind("net", (2.0, 5.0)),
    "throttle": Kind("net", (2.0, 5.0)),
    "stall": Kind("net", (0.5, 3.0)),
    "cut": Kind("net", (0.3, 2.0)),
    "loss": Kind("net", (2.0, 5.0), of_packets=True),
    "disk-full": Kind("disk", (2.0, 5.0), (MASTER, SLAVE)),
    "slow-disk": Kind("disk", (2.0, 5.0), (MASTER, SLAVE)),
    "failed-sync": Kind("disk", (1.0, 4.0), (MASTER, SLAVE)),
    "skew": Kind("skew", (3.0, 8.0), (MASTER, SLAVE)),
    "drift": Kind("skew", (4.0, 8.0), (MASTER, SLAVE)),
    "step": Kind("skew", (3.0, 8.0), (MASTER, SLAVE)),
}
FAMILIES: Mapping[str, tuple[str, ...]] = {
    family: tuple(name for name, kind in KINDS.items() if kind.family == family)
    for family in dict.fromkeys(kind.family for kind in KINDS.values())
}
"""Families that a run can ask for, with their kinds."""

WARM_S = (3.0, 10.0)
"""Time without faults at the start: a twelfth of the run within these bounds. The load is judged by it."""
CALM_S = (2.0, 5.0)
"""Time between two faults that do not overlap."""
OVERLAPPING_SHARE = 0.3
LAST_CALM_S = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault; times in seconds since the load began."""

    number: int
    kind: str
    target: str
    at_s: float
    length_s: float
    dice: int
    """Seed of all that the fault still has to draw, such as the delay or the direction."""

    @property
    def family(self) -> str:
        return KINDS[self.kind].family

    @property
    def end_s(self) -> float:
        return self.at_s + self.length_s


class UnknownFamily(ValueError):
    """A name of no family. The text lists the known ones."""


def families_of(text: str) -> tuple[str, ...]:
    """Families named with commas; `all` are all, `none` none."""
    if text in ("all", "none"):
        return tuple(FAMILIES) if text == "all" else ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in FAMILIES]
    if unknown or not names:
        raise UnknownFamily(f"{', '.join(unknown) or 'nothing'}: known are {', '.join(FAMILIES)}, and all, none")
    return names


def plan(seed: int, seconds: float, families: Sequence[str], *, packets: bool = False) -> list[Fault]:
    """The faults of a run with `seconds` of load. Each kind comes once before any comes again. `packets`: include the
    kinds that need a network of packets."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    deck: list[str] = []
    over_s = dict.fromkeys(families, 0.0)
    at_s = min(max(seconds / 12, WARM_S[0]), WARM_S[1])
    while families:
        if not deck:
            deck = [name for family in families for name in FAMILIES[family] if packets or not KINDS[name].of_packets]
            rng.shuffle(deck)
        name = deck.pop()
        kind = KINDS[name]
        length_s = rng.uniform(*kind.length_s)
        at_s = max(at_s, over_s[kind.family])
        if at_s + kind.length_s[0] + LAST_CALM_S > seconds:
            break
        length_s = round(min(length_s, seconds - LAST_CALM_S - at_s), 3)
        target = rng.choice(kind.targets)
        faults.append(Fault(len(faults) + 1, name, target, round(at_s, 3), length_s, rng.getrandbits(32)))
        over_s[kind.family] = at_s + length_s + CALM_S[0]
        if rng.random() < OVERLAPPING_SHARE and len(families) > 1:
            at_s += rng.uniform(0.2, length_s)
        else:
            at_s = max(fault.end_s for fault in faults) + rng.uniform(*CALM_S)
    return faults
