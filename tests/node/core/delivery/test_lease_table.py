"""The master's lease table against a plain model: of each position of a channel, its end and whose it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from random import Random

import numpy as np
import pytest

from tickwheel.node.core.delivery import leases
from tickwheel.node.core.delivery.leases import ChannelKey, Lease, LeaseTable

CHANNELS = [(group_id, topic_id) for group_id in (1, 2, 3) for topic_id in (1, 2)]
SESSIONS = [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, turn in (("TURN_FRESH", 3), ("TURN_CHANNELS", 2), ("TURN_DROPPED", 2)):
        monkeypatch.setattr(leases, name, turn)


class Model:
    """Does the same to a table and to a dictionary. What is settled may be forgotten at any time."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.steps = "gggggggxxxscdfffuuuu" + "ee" * (seed % 2)  # a lease that was extended is in the lists at once
        self.table = LeaseTable()
        self.out: dict[ChannelKey, dict[int, tuple[int, int]]] = {key: {} for key in CHANNELS}
        """Position -> (end, session)."""
        self.floors = dict.fromkeys(CHANNELS, 0)
        self.ends = dict.fromkeys(CHANNELS, 0)
        self.now_ms = 0
        self.upkeep: list[Iterator[None]] = []

    def lease(self, key: ChannelKey, positions: Iterable[int]) -> Lease:
        """A lease of these positions, which the model knows from now on."""
        session_id, until_ms = self.rng.choice(SESSIONS), self.now_ms + self.rng.randint(1, 60)
        given = np.array(sorted(positions), np.uint64)
        self.out[key].update(dict.fromkeys(given.tolist(), (until_ms, session_id)))
        return Lease(key, given, np.ones(len(given), np.uint32), until_ms, session_id)

    def give(self, key: ChannelKey) -> None:
        first = self.ends[key] = max(self.ends[key], self.floors[key]) + self.rng.randint(0, 2)
        self.ends[key] += self.rng.randint(1, 5)
        self.table.give(self.lease(key, range(first, self.ends[key])))

    def extend(self, key: ChannelKey) -> None:
        held = [position for position in self.out[key] if position >= self.floors[key]]
        if held:
            some = self.rng.sample(held, self.rng.randint(1, min(4, len(held))))
            assert self.table.holds(key, np.array(sorted(some), np.uint64)).all()
            self.table.extend(self.lease(key, some))

    def ended(
        self, found: Iterable[Lease], *, until_ms: int = 1 << 40, session_id: int = 0, some: bool = False
    ) -> None:
        """Each position once, none of another end or session, and all of them unless `some` do."""
        gone: dict[ChannelKey, list[int]] = {key: [] for key in CHANNELS}
        for lease in found:
            gone[lease.channel] += lease.positions.tolist()
        for key, positions in gone.items():
            wanted = {p for p, (end_ms, of) in self.out[key].items() if end_ms <= until_ms and session_id in (0, of)}
            assert len(positions) == len(set(positions)) and wanted.issuperset(positions)
            assert some or wanted.difference(positions) <= set(range(self.floors[key]))
            for position in positions if some else wanted:
                del self.out[key][position]

    def step(self) -> None:
        rng, key = self.rng, self.rng.choice(CHANNELS)
        match rng.choice(self.steps):
            case "g":
                self.give(key)
            case "e":
                self.extend(key)
            case "x":
                self.now_ms += rng.randint(1, 30)
                self.ended(self.table.expire(self.now_ms), until_ms=self.now_ms)
            case "s":
                session_id, most = rng.choice(SESSIONS), rng.choice([None, 1, 2])
                self.ended(self.table.close_session(session_id, most), session_id=session_id, some=most is not None)
            case "c" if rng.random() < 0.3:
                self.table.clear()
                self.out = {key: {} for key in CHANNELS}
            case "d":
                self.table.drop(key)
                self.out[key].clear()
            case "f":
                self.floors[key] += rng.randint(0, 6)
            case "u":
                self.upkeep += rng.choice(
                    [[self.table.close_dropped()], [self.table.forget_settled(self.floors.__getitem__)]]
                )
        if self.upkeep and rng.random() < 0.6:
            turns = rng.choice(self.upkeep)
            if next(turns, self) is self:
                self.upkeep.remove(turns)

    def check(self) -> None:
        """Nothing that counts is missing, and the next end is not behind the first."""
        open_ends = [end_ms for key in CHANNELS for p, (end_ms, _) in self.out[key].items() if p >= self.floors[key]]
        next_ms = self.table.next_end_ms()
        assert not open_ends or (next_ms is not None and next_ms <= min(open_ends))
        for key in CHANNELS:
            known = itertools.chain.from_iterable(lease.positions.tolist() for lease in self.table.of_channel(key))
            assert {p for p in self.out[key] if p >= self.floors[key]} <= set(known)


@pytest.mark.parametrize("seed", range(40))
def test_the_table_holds_what_was_given(seed: int) -> None:
    """Through extensions, settlements, drops and turns of the upkeep that lie between. At the end nothing is left."""
    model = Model(seed)
    for number in range(200):
        model.step()
        if not number % 7:
            model.check()
    table = model.table
    for turns in (*model.upkeep, table.close_dropped(), table.forget_settled(model.floors.__getitem__)):
        for _ in turns:
            pass
    model.ended(table.expire(model.now_ms + 1_000))
    assert not table.out() and not table.out_by_group() and not table.groups() and not table.channels()
    assert all(lease.closed for _, _, lease in table._heap) and not table._sessions and not table._counting
