"""The plan of faults, drawn from a seed before the run begins: equal for equal seed and options.

Owns the kinds of faults, their families (what `--faults` names) and their lengths. The target of
a fault is drawn as a wish (the master, a slave, any node, a certain node). Its start decides which node that is. Faults
of one family never overlap, so ending one does not undo another. Faults of different families may overlap.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "kill": ("kill", "kill-master", "kill-all", "crash-loop"),
    "pause": ("pause", "pause-master"),
    "partition": ("split", "one-way", "master-alone", "majority-without-master"),
    "net": ("delay", "jitter", "throttle", "stall", "cut", "loss"),
    "disk": ("disk-full", "slow-disk", "failed-sync"),
    "skew": ("skew", "drift", "step"),
}
"""Families that a run can ask for, with their kinds. docs/CHAOS.md describes each kind."""

OF_PACKETS = frozenset({"loss"})
"""Kinds that only a network of packets can carry out."""

FAMILY_OF = {kind: family for family, kinds in FAMILIES.items() for kind in kinds}

LENGTH_S: Mapping[str, tuple[float, float]] = {
    "kill": (0.2, 4.0),
    "kill-master": (0.2, 4.0),
    "kill-all": (0.2, 1.5),
    "crash-loop": (4.0, 8.0),
    "pause": (0.6, 4.0),
    "pause-master": (0.6, 4.0),
    "split": (1.0, 5.0),
    "one-way": (1.0, 5.0),
    "master-alone": (1.5, 5.0),
    "majority-without-master": (1.5, 5.0),
    "delay": (2.0, 5.0),
    "jitter": (2.0, 5.0),
    "throttle": (2.0, 5.0),
    "stall": (0.5, 3.0),
    "cut": (0.3, 2.0),
    "loss": (2.0, 5.0),
    "disk-full": (2.0, 5.0),
    "slow-disk": (2.0, 5.0),
    "failed-sync": (1.0, 4.0),
    "skew": (3.0, 8.0),
    "drift": (4.0, 8.0),
    "step": (3.0, 8.0),
}
"""Shortest and longest. A pause is longer than a master's lease (0.3 s), whatever the dice say."""

MASTER, SLAVE, ANY, ALL = "master", "slave", "any", "all"
TARGETS: Mapping[str, tuple[str, ...]] = {
    "kill": (SLAVE, ANY),
    "kill-master": (MASTER,),
    "kill-all": (ALL,),
    "crash-loop": (SLAVE,),
    "pause": (SLAVE, ANY),
    "pause-master": (MASTER,),
    "master-alone": (MASTER,),
    "majority-without-master": (MASTER,),
    "skew": (MASTER, SLAVE),
    "drift": (MASTER, SLAVE),
    "step": (MASTER, SLAVE),
    "disk-full": (MASTER, SLAVE),
    "slow-disk": (MASTER, SLAVE),
    "failed-sync": (MASTER, SLAVE),
}
"""The targets that a kind may strike; MASTER or ANY for kinds without an entry."""

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
        return FAMILY_OF[self.kind]

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
            deck = [kind for family in families for kind in FAMILIES[family] if packets or kind not in OF_PACKETS]
            rng.shuffle(deck)
        kind = deck.pop()
        length_s = rng.uniform(*LENGTH_S[kind])
        at_s = max(at_s, over_s[FAMILY_OF[kind]])
        if at_s + LENGTH_S[kind][0] + LAST_CALM_S > seconds:
            break
        length_s = round(min(length_s, seconds - LAST_CALM_S - at_s), 3)
        target = rng.choice(TARGETS.get(kind, (MASTER, ANY)))
        faults.append(Fault(len(faults) + 1, kind, target, round(at_s, 3), length_s, rng.getrandbits(32)))
        over_s[FAMILY_OF[kind]] = at_s + length_s + CALM_S[0]
        if rng.random() < OVERLAPPING_SHARE and len(families) > 1:
            at_s += rng.uniform(0.2, length_s)
        else:
            at_s = max(fault.end_s for fault in faults) + rng.uniform(*CALM_S)
    return faults
