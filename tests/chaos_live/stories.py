"""Small histories of a run that never was, for the verdict to judge: a good one, and pieces to spoil it with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Record = dict[str, Any]

BEGAN_MS = 1_800_000_000_000.0
NODES = ("n1", "n2", "n3")
GROUPS = ("steady", "moody")
MESSAGES = 60
"""In each request; a request every STEP_MS."""
STEP_MS = 250.0
KILL_MS, BACK_MS, HEAL_MS, DRAIN_MS, END_MS = 4_000.0, 4_600.0, 8_000.0, 9_000.0, 16_000.0
LEASE_MS = 5_000.0


class Story:
    """Records of one run; times are ms since the load began."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.requests = 0
        self.batches = 0

    def tell(self, at_ms: float, k: str, **fields: Any) -> None:
        self.records.append({"t": BEGAN_MS + at_ms, "k": k, **fields})

    def sorted(self) -> list[Record]:
        return sorted(self.records, key=lambda record: record["t"])

    def all_of(self, k: str) -> list[Record]:
        return [record for record in self.records if record["k"] == k]

    def drop(self, wanted: Callable[[Record], bool]) -> None:
        self.records = [record for record in self.records if not wanted(record)]

    # -- what a workload writes

    def send(self, at_ms: float, due_ms: float, uids: list[int], how: str = "due") -> int:
        self.requests += 1
        self.tell(at_ms, "send", b=self.requests, how=how, uids=uids, asked=[BEGAN_MS + due_ms] * len(uids))
        return self.requests

    def ack(self, at_ms: float, request: int, uids: list[int]) -> None:
        self.tell(at_ms, "ack", b=request, ids=[1_000 + uid for uid in uids])

    def got(self, at_ms: float, group: str, uids: list[int], *, term: int = 1, attempt: int = 1, **other: Any) -> int:
        self.batches += 1
        fields = {
            "consumer": f"{group}-1",
            "session": f"{group}-1/1.0",
            "until": BEGAN_MS + at_ms + LEASE_MS,
            "ids": [1_000 + uid for uid in uids],
            **other,
        }
        attempts = [attempt] * len(uids)
        self.tell(at_ms, "got", g=self.batches, group=group, term=term, uids=uids, attempts=attempts, **fields)
        return self.batches

    def settle(self, at_ms: float, batch: int, rows: list[int], what: str = "ack") -> None:
        self.tell(at_ms, "settle", s=batch, g=batch, what=what, rows=rows)
        self.tell(at_ms + 5, "settled", s=batch, committed=len(rows), stale=0, unknown=0)

    def messages(self, at_ms: float, due_ms: float, uids: list[int], term: int) -> None:
        """Scheduled, delivered to both groups and settled."""
        self.ack(at_ms + 5, self.send(at_ms, due_ms, uids), uids)
        for group in GROUPS:
            self.settle(due_ms + 10, self.got(due_ms + 3, group, uids, term=term), list(range(len(uids))))

    # -- what a supervisor writes

    def status(self, at_ms: float, node: str, role: str, term: int, **other: Any) -> None:
        fields = {
            "life": 1,
            "role": role,
            "state": "SERVING",
            "term": term,
            "master": "n1" if term == 1 else "n2",
            "lease": role == "MASTER",
            "cursor": [int(BEGAN_MS + at_ms), 0],
            "tick": [int(at_ms // 1_000), 0],
            "synced": [int(at_ms // 1_000), 0],
            "applied": int(at_ms),
            "uncommitted": 2,
            "pending": 0,
            "ready": 0,
            "clock": 0,
            "error": 2.0,
            "agreed": "AGREED",
            "lag": 1,
            **other,
        }
        self.tell(at_ms, "status", node=node, **fields)


def good() -> Story:
    """A run in which the master is killed once and everything is as it should be."""
    story = Story()
    story.tell(-1_000, "run", seed=1, seconds=8, nodes=3, families=["kill"], rate=240, planned=1)
    story.tell(-500, "groups", groups=list(GROUPS))
    story.tell(0, "load")
    story.tell(0, "majority", holds=True)
    at_ms, uid = 10.0, 1
    while at_ms < DRAIN_MS:
        uids = list(range(uid, uid + MESSAGES))
        uid += MESSAGES
        due_ms = at_ms + 100
        if not KILL_MS - 200 < at_ms < BACK_MS + 100:
            story.messages(at_ms, due_ms, uids, 1 if at_ms < KILL_MS else 2)
        at_ms += STEP_MS
    story.tell(KILL_MS, "begin", n=1, kind="kill-master", family="kill", struck=["n1"], detail="")
    story.tell(6_000, "over", n=1, count=1, unit="processes killed")
    for tick in range(int(END_MS // 100)):
        at_ms = tick * 100.0
        if at_ms < KILL_MS:
            story.status(at_ms, "n1", "MASTER", 1)
        elif at_ms > 6_000:
            story.status(at_ms, "n1", "SLAVE", 2, life=2)
        story.status(at_ms, "n2", "SLAVE" if at_ms < BACK_MS else "MASTER", 1 if at_ms < BACK_MS else 2)
        story.status(at_ms, "n3", "SLAVE", 1 if at_ms < BACK_MS else 2)
    story.tell(HEAL_MS, "heal")
    story.tell(HEAL_MS + 50, "healed", seconds=0.05)
    story.tell(DRAIN_MS, "drain")
    story.tell(END_MS, "end", waiting=0)
    story.tell(END_MS + 10, "drained", code=0)
    for node in NODES:
        story.tell(END_MS + 20, "digest", node=node, applied=77, digest="aa", parts={"wheel": "bb", "groups": "cc"})
    story.tell(END_MS + 30, "topics", topics={"chaos": 1})
    story.tell(END_MS + 40, "done")
    return story
