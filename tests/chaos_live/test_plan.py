"""The plan of a live run: drawn from a seed alone, within its time, each kind before any comes again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.chaos.live.plan import FAMILIES, KINDS, WARM_S, UnknownFamily, families_of, plan

FAMILY_SETS = st.lists(st.sampled_from(list(FAMILIES)), min_size=1, unique=True)


@given(seed=st.integers(0, 1 << 31), seconds=st.floats(20, 900), families=FAMILY_SETS)
def test_a_plan_is_its_seed_and_fits_its_time(seed: int, seconds: float, families: list[str]) -> None:
    """Same seed, same plan; only what was asked for; the warm-up stays free and the end too; no two of a family at
    once. Otherwise a replay would not be one, or a fault would end another's."""
    faults = plan(seed, seconds, families)
    assert faults == plan(seed, seconds, families)
    assert faults
    for fault in faults:
        assert fault.family in families
        assert fault.at_s >= WARM_S[0]
        assert fault.end_s < seconds
        assert KINDS[fault.kind].length_s[0] <= fault.length_s + 0.001
    for one, other in itertools.combinations(faults, 2):
        if one.family == other.family:
            assert one.end_s < other.at_s


def test_a_pause_outlasts_the_lease() -> None:
    """A stop shorter than a master's lease (300 ms) would prove nothing about deposed masters."""
    assert min(KINDS[kind].length_s[0] for kind in FAMILIES["pause"]) > 0.3


@pytest.mark.parametrize("packets", [False, True])
def test_every_kind_comes_before_any_comes_again(packets: bool) -> None:
    """In a run that is long enough no kind is left out by the dice; what only a network of packets can do is planned
    for one alone, since elsewhere it would have no effect."""
    kinds = [fault.kind for fault in plan(5, 600, tuple(FAMILIES), packets=packets)]
    known = {kind for family in FAMILIES.values() for kind in family if packets or not KINDS[kind].of_packets}
    assert set(kinds[: len(known)]) == known
    assert packets or not any(KINDS[kind].of_packets for kind in kinds)


def test_faults_of_different_families_overlap_sometimes() -> None:
    """Two things wrong at once are part of every longer run."""
    faults = plan(5, 600, tuple(FAMILIES))
    assert any(one.end_s > other.at_s for one, other in itertools.pairwise(faults))


def test_families_are_named_by_words() -> None:
    """What --faults takes; a wrong name is refused and the right ones are told."""
    assert families_of("kill, pause") == ("kill", "pause")
    assert families_of("all") == tuple(FAMILIES)
    assert families_of("none") == ()
    with pytest.raises(UnknownFamily, match="kill, pause, partition"):
        families_of("kil")
