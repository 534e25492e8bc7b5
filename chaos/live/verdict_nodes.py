"""Judges the nodes' statements about themselves by P6, P7, P8, P10 and P11, and finds who led when.

Fed with the supervisor's records in the order of time (`observe`), then asked for the end (`finish`). Shares no code
with a node. A status is dated by when it was heard, which may be a little after it was true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tickwheel.chaos.live.history import Record

Report = Callable[[str, float, str], None]

HEARD_LATE_MS = 500.0
"""Greatest age of a status when it is heard, while its node runs."""
RESUME_MS_MAX = 10_000.0
"""P10 is broken after this time without a serving master while a majority is connected. The promise says a second or
two. One machine that runs a whole cluster, its load and its faults is given more, and time in which nodes had no
processor does not count."""
STARVED_SHARE_MAX = 0.5
"""P10 is not judged over a time in which nodes waited for a processor for more than this share: leases, timeouts and
faults follow true time, so nobody can tell what nodes with a processor would have done."""
FAULT_TAIL_MS = 4_000.0
"""An election within this time after a fault is put down to it: processes start, connections come back."""
NOT_SHOWN = "RECOVERING"
BOUNDED = ("AGREED", "HOLDOVER")
"""States of the cluster clock in which the error that a node reports is a bound."""
MEMORY_BYTES_MAX = 512 << 20
"""P11: a node under the load of a short run holds 50 to 180 MiB. Unbounded growth exceeds this."""
UNCOMMITTED_MAX = 4_096
"""P11: entries that a master may have in flight."""


@dataclass(slots=True)
class FaultWindow:
    """One fault as it was carried out."""

    number: int
    kind: str
    family: str
    struck: list[str]
    detail: str
    from_ms: float
    until_ms: float = float("inf")
    count: int = 0
    unit: str = ""


@dataclass(slots=True)
class Mastership:
    """One node as the master of one term, as far as it was seen to serve."""

    term: int
    node: str
    from_ms: float
    until_ms: float


@dataclass(frozen=True, slots=True)
class Failover:
    """From one mastership to the next."""

    at_ms: float
    """Time until which the old master was seen to serve."""
    old: str
    new: str
    term: int
    without_ms: float
    cause: str
    """The faults that were on, or empty."""


@dataclass(slots=True)
class _Seen:
    cursor: tuple[int, int] = (0, 0)
    synced: tuple[int, int, tuple[int, int]] = (0, 0, (0, 0))
    """Life, term, (tick, local)."""


@dataclass(slots=True)
class Nodes:
    """One run's nodes."""

    broken: Report
    faults: dict[int, FaultWindow] = field(default_factory=dict)
    masterships: list[Mastership] = field(default_factory=list)
    roles: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """By node: times of changes of its role: master, aligning, slave, candidate, recovering, halted, silent."""
    last_heard_ms: dict[str, float] = field(default_factory=dict)
    healed_s: float | None = None
    statuses: int = 0
    clock_errors_ms: dict[int, float] = field(default_factory=dict)
    """Second of true time to the largest error of its time that a master named in it."""
    ahead_ms: float = 0.0
    """The most by which a serving master's time was ahead of true time."""
    beyond_ms: float = 0.0
    """The most by which it was ahead beyond the error that the master reported."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """The most that each node held."""
    unjudged_ms: list[float] = field(default_factory=list)
    """Times without a master that would have broken P10 if the nodes had had a processor."""
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _masters: dict[int, str] = field(default_factory=dict)
    _leases: dict[int, tuple[float, str]] = field(default_factory=dict)
    """Term to when its master was first heard with a lease."""
    _late_words: set[str] = field(default_factory=set)
    """Nodes whose newest status came long after they had made it."""
    _without_majority: list[tuple[float, float]] = field(default_factory=list)
    _without_agreement: list[tuple[float, float]] = field(default_factory=list)
    """Times in which no majority of the clocks could agree: a master then does not serve for long."""
    _processors: list[tuple[float, float, float]] = field(default_factory=list)
    """(time, length in ms, ms of it in which a node was ready but had no processor)."""
    _holes: list[tuple[float, float]] = field(default_factory=list)
    """Times in which one and the same master did not serve."""
    _digests: dict[str, Record] = field(default_factory=dict)

    def observe(self, record: Record) -> None:
        """Take the next record of the supervisor; others are left alone."""
        take = getattr(self, f"_on_{record['k']}", None)
        if take is not None:
            take(record)

    # -- faults

    def _on_begin(self, record: Record) -> None:
        self.faults[record["n"]] = FaultWindow(
            record["n"], record["kind"], record["family"], record["struck"], record["detail"], record["t"]
        )

    def _on_over(self, record: Record) -> None:
        window = self.faults[record["n"]]
        window.until_ms, window.count, window.unit = record["t"], record["count"], record["unit"]

    def _on_majority(self, record: Record) -> None:
        _note(self._without_majority, record)

    def _on_agreement(self, record: Record) -> None:
        _note(self._without_agreement, record)

    def _on_died(self, record: Record) -> None:
        self.broken(
            "process", record["t"], f"{record['node']} ended by itself with code {record['code']}:\n{record['log']}"
        )

    def _on_wrong(self, record: Record) -> None:
        self.broken("process", record["t"], record["text"])

    def _on_healed(self, record: Record) -> None:
        self.healed_s = record["seconds"]

    def _on_memory(self, record: Record) -> None:
        held, before = record["bytes"], self.memory_bytes.get(record["node"], 0)
        self.memory_bytes[record["node"]] = max(held, before)
        if held > MEMORY_BYTES_MAX >= before:
            text = f"{record['node']} holds {held >> 20} MiB of memory; at most {MEMORY_BYTES_MAX >> 20} are allowed"
            self.broken("P11", record["t"], text)

    def _on_cpu(self, record: Record) -> None:
        self._processors.append((record["t"], record["ms"], record["waited"]))

    def starved_share(self, from_ms: float, until_ms: float) -> float:
        """Share of a time in which the nodes were ready to run and had no processor."""
        within = [(ms, waited) for at_ms, ms, waited in self._processors if from_ms <= at_ms <= until_ms]
        return min(1.0, sum(waited for _, waited in within) / max(1.0, sum(ms for ms, _ in within)))

    # -- statuses

    def _on_silent(self, record: Record) -> None:
        self._role(record["node"], record["t"], "silent")

    def _on_status(self, record: Record) -> None:
        node: str = record["node"]
        at_ms: float = record["t"]
        self.statuses += 1
        before_ms = self.last_heard_ms.get(node, at_ms)
        if at_ms - before_ms > HEARD_LATE_MS:
            self._role(node, before_ms, "silent")
        self.last_heard_ms[node] = at_ms
        serving = record["role"] == "MASTER" and record["lease"] and record["state"] == "SERVING"
        self._role(node, at_ms, _role_of(record))
        self._judge_cursor(record)
        again = node in self._late_words
        self._late_words.discard(node)
        if record["role"] == "MASTER":
            self._judge_master(record, again)
            if record["agreed"] in BOUNDED:
                second = int(at_ms // 1_000)
                self.clock_errors_ms[second] = max(record["error"], self.clock_errors_ms.get(second, 0.0))
        if serving and record["uncommitted"] > UNCOMMITTED_MAX:
            text = f"{node} has {record['uncommitted']} entries in flight; at most {UNCOMMITTED_MAX} are allowed"
            self.broken("P11", at_ms, text)
        if serving and record["agreed"] in BOUNDED:
            self.ahead_ms = max(self.ahead_ms, record["clock"])
            self.beyond_ms = max(self.beyond_ms, record["clock"] - record["error"])
        if serving:
            last = self.masterships[-1] if self.masterships else None
            if last is not None and (last.term, last.node) == (record["term"], node):
                if at_ms - last.until_ms > RESUME_MS_MAX:
                    self._holes.append((last.until_ms, at_ms))
                last.until_ms = at_ms
            elif last is None or record["term"] > last.term:
                self.masterships.append(Mastership(record["term"], node, at_ms, at_ms))

    def _role(self, node: str, at_ms: float, role: str) -> None:
        told = self.roles.setdefault(node, [])
        if not told or told[-1][1] != role:
            told.append((at_ms, role))

    def _judge_cursor(self, record: Record) -> None:
        node, at_ms = record["node"], record["t"]
        seen = self._seen.setdefault(node, _Seen())
        if record["state"] == NOT_SHOWN:
            return
        cursor = (record["cursor"][0], record["cursor"][1])
        if cursor < seen.cursor:
            self.broken("P6", at_ms, f"the cursor of {node} went back from {seen.cursor} to {cursor}")
        seen.cursor = max(cursor, seen.cursor)
        if record["role"] == "SLAVE":
            synced = (record["synced"][0], record["synced"][1])
            life, term, before = seen.synced
            if (life, term) == (record["life"], record["term"]) and synced < before:
                self.broken(
                    "P6", at_ms, f"the synced tick of {node} went back from {before} to {synced} in term {term}"
                )
            seen.synced = (record["life"], record["term"], synced)

    def _judge_master(self, record: Record, again: bool) -> None:
        """`again`: the status before came late, too."""
        node, at_ms, term = record["node"], record["t"], record["term"]
        other = self._masters.setdefault(term, node)
        if other != node:
            self.broken("P7", at_ms, f"{other} and {node} both said to be master of term {term}")
        if not record["lease"]:
            return
        self._leases.setdefault(term, (at_ms, node))
        newest = max(self._leases)
        since_ms, successor = self._leases[newest]
        if term < newest and at_ms > since_ms + HEARD_LATE_MS:
            made_ms = at_ms + record["clock"]
            if made_ms <= since_ms + HEARD_LATE_MS and record["agreed"] in BOUNDED and not again:
                # Stopped between making this word and sending it. A node whose clock is behind says the same again.
                self._late_words.add(node)
                return
            late_ms = at_ms - since_ms
            what = f"{node} held its lease of term {term} {late_ms:,.0f} ms after {successor} got that of {newest}"
            self.broken("P7", at_ms, what)

    def clock_error_ms(self, at_ms: float) -> float:
        """The clock error that a master reported around that time."""
        second = int(at_ms // 1_000)
        return max(self.clock_errors_ms.get(near, 0.0) for near in (second - 1, second, second + 1))

    # -- the end

    def _on_digest(self, record: Record) -> None:
        self._digests[record["node"]] = record

    def finish(self, nodes: int, load_ms: float, end_ms: float) -> list[Failover]:
        """Judge the whole: rest and equality of all nodes, time without a master. The failovers since the load."""
        if self.healed_s is None:
            self.broken("P10", end_ms, "after the heal the nodes did not agree on a master in time")
        self._judge_digests(nodes, end_ms)
        for from_ms, until_ms in self._holes:
            self._judge_standstill(from_ms, until_ms)
        failovers = []
        for old, new in zip(self.masterships, self.masterships[1:], strict=False):
            self._judge_standstill(old.until_ms, new.from_ms)
            if new.from_ms >= load_ms:
                failovers.append(
                    Failover(
                        old.until_ms,
                        old.node,
                        new.node,
                        new.term,
                        new.from_ms - old.until_ms,
                        self._cause(old.until_ms, new.from_ms),
                    )
                )
        if self.masterships:
            self._judge_standstill(self.masterships[-1].until_ms, end_ms)
        else:
            self.broken("P10", end_ms, "no master was ever seen to serve")
        return failovers

    def _judge_digests(self, nodes: int, end_ms: float) -> None:
        found = self._digests
        if len(found) < nodes:
            self.broken("P10", end_ms, f"only {', '.join(sorted(found)) or 'no node'} answered at the end")
        if len({digest["applied"] for digest in found.values()}) > 1:
            where = ", ".join(f"{node} at {digest['applied']}" for node, digest in sorted(found.items()))
            self.broken("P10", end_ms, f"the nodes did not come to rest at one index: {where}")
        by_index: dict[int, Record] = {}
        for node, digest in sorted(found.items()):
            other = by_index.setdefault(digest["applied"], digest)
            if other["digest"] != digest["digest"]:
                parts = [name for name, part in digest["parts"].items() if other["parts"].get(name) != part]
                self.broken(
                    "P8", end_ms, f"{other['node']} and {node} differ at index {digest['applied']}: {', '.join(parts)}"
                )

    def _judge_standstill(self, from_ms: float, until_ms: float) -> None:
        """The longest time in there during which a majority was connected."""
        at_ms, longest_ms = from_ms, 0.0
        for gone_ms, back_ms in sorted(self._without_majority + self._without_agreement):
            if back_ms > from_ms and gone_ms < until_ms:
                longest_ms = max(longest_ms, gone_ms - at_ms)
                at_ms = max(at_ms, back_ms)
        longest_ms = max(longest_ms, until_ms - at_ms)
        starved = self.starved_share(from_ms, until_ms)
        if longest_ms * (1 - starved) <= RESUME_MS_MAX:
            return
        if starved > STARVED_SHARE_MAX:
            self.unjudged_ms.append(longest_ms)
        else:
            what = f"{longest_ms / 1_000:.1f} s without a master that serves, with a majority connected"
            self.broken("P10", from_ms, f"{what}; its nodes waited for a processor {starved:.0%} of the time")

    def _cause(self, from_ms: float, until_ms: float) -> str:
        on = [
            window
            for window in self.faults.values()
            if window.from_ms <= until_ms and window.until_ms + FAULT_TAIL_MS >= from_ms
        ]
        return ", ".join(f"#{window.number} {window.kind}" for window in on)


def _note(without: list[tuple[float, float]], record: Record) -> None:
    if not record["holds"]:
        without.append((record["t"], float("inf")))
    elif without:
        without[-1] = (without[-1][0], record["t"])


def _role_of(record: Record) -> str:
    if record["state"] == "READ_ONLY":
        return "halted"
    if record["state"] == NOT_SHOWN:
        return "recovering"
    if record["role"] == "MASTER":
        return "master" if record["lease"] and record["state"] == "SERVING" else "aligning"
    return str(record["role"]).lower()
