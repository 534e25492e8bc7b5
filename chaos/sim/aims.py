"""Directed scenarios for old bugs and missing guards that the default faults do not reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aim:
    """Faults and settings of a run that walks into one gap. With nothing switched off or broken such a run is clean."""

    faults: tuple[str, ...]
    nodes: int = 0
    """0: by the dice of the seed."""
    shape: tuple[tuple[str, int], ...] = ()
    """Fields of shape.Shape that are not left to the dice."""
    without: str = ""
    """A guard in front of the one in question that is taken away too (mutations.LAYERS)."""
    seconds: int = 0
    """Length of load and faults, where the gap takes longer to reach than a run of its level lasts; 0: that length."""

    def words(self) -> str:
        """For the table."""
        parts = [", ".join(self.faults)]
        if self.nodes:
            parts.append(f"{self.nodes} nodes")
        parts += [f"{name} {value}" for name, value in self.shape]
        if self.without:
            parts.append(self.without)
        if self.seconds:
            parts.append(f"{self.seconds} s")
        return "; ".join(parts)


def aimed(*faults: str, nodes: int = 0, without: str = "", seconds: int = 0, **shape: int) -> Aim:
    """An aim; `shape` are fields of shape.Shape."""
    return Aim(faults, nodes, tuple(shape.items()), without, seconds)


FEW_CLIENTS = tuple(
    (name, 0)
    for name in (
        *("lines", "pauses", "sweeps", "writes", "loads", "parcels"),
        *("stewards", "twins", "cold", "schedules", "keys"),
    )
)
"""A directed run has no more clients than it needs, so that it stays what it is when kinds of clients are added."""

GUARD_AIMS: dict[str, Aim] = {
    "answers_fenced": aimed("old-answers", nodes=5, log_pause_ms=2_000, without="repeats_taken"),
    "votes_counted_once": aimed("votes-twice", nodes=5, without="repeats_taken"),
    "pickle_refused": aimed("pickled-frame"),
    "foreign_commands_fatal": aimed("foreign-entry"),
    "bare_commit_clamped": aimed("left-behind", nodes=3, journal_tail_bytes=0, checkpoint_every=50),
    "starts_silent": aimed("restart-bridge", nodes=3, log_pause_ms=2_000),
    "apply_errors_fatal": aimed("failed-apply"),
    "transfer_marked": aimed("handover", nodes=5),
    "input_drained_first": aimed("freeze", nodes=3),
    "votes_sticky": aimed("bridge", nodes=3, log_pause_ms=2_000),
    "lease_from_sending": aimed("delay", nodes=3),
    "dumps_refused": aimed("library-calls"),
    "proposals_local": aimed("library-calls"),
}
"""By guard (replication.guards.Guards)."""
