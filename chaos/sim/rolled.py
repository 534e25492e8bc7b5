"""Counts the commands of a run's log: what clients and operators did, and what of it met a change of master.

A kind of command that never comes beside such a change is one of which the runs prove little.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, OneofDescriptor

from tickwheel.chaos.sim.world import SECOND
from tickwheel.proto.admin_pb2 import Settings
from tickwheel.proto.log_pb2 import Command, LogEntry, SettleKind

BESIDE_NS = SECOND
"""A command was applied so long before or after the command of a new master at most."""
CONTENTS = ("body", "action")
"""Names of the oneofs that tell kinds of a command apart."""
LEAD = "lead"


class Rolled:
    """Commands by name, each counted when the first node applies it."""

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()
        self.beside: Counter[str] = Counter()
        """Those beside a change of master; the first election of a run is none."""
        self._index = 0
        self._recent: deque[tuple[int, str]] = deque()
        self._changed_ns = -BESIDE_NS

    def applied(self, index: int, entry: LogEntry, now_ns: int) -> None:
        """A node has applied an entry."""
        if index <= self._index:
            return
        self._index = index
        for command in entry.commands:
            for name in names_of(command):
                self._count(name, now_ns)

    def _count(self, name: str, now_ns: int) -> None:
        self.times[name] += 1
        recent = self._recent
        while recent and recent[0][0] < now_ns - BESIDE_NS:
            recent.popleft()
        if name == LEAD and self.times[LEAD] > 1:
            self._changed_ns = now_ns
            self.beside.update(earlier for _, earlier in recent)
            recent.clear()
        if now_ns - self._changed_ns < BESIDE_NS:
            self.beside[name] += 1
        else:
            recent.append((now_ns, name))


def names_of(command: Command) -> Iterator[str]:
    """The names of a command: kind and kind of its content; of settings each field, of settlements each outcome."""
    body: Any = command
    name = ""
    while (oneof := _told_apart(getattr(body, "DESCRIPTOR", None))) is not None:
        which = body.WhichOneof(oneof.name)
        body, name = getattr(body, which), f"{name} {which}".strip()
    if name == "settle":
        yield from (f"settle {SettleKind.Name(batch.kind)}" for batch in body.batches)
    elif name == "admin settings":
        yield from (f"{name} {field.name}" for field, _ in body.ListFields())
    else:
        yield name


def _told_apart(descriptor: Descriptor | None) -> OneofDescriptor | None:
    """The oneof that tells kinds of a message apart; None: there is none."""
    if descriptor is None:  # no message
        return None
    return next((one for one in descriptor.oneofs if one.name in CONTENTS), None)


def all_names() -> list[str]:
    """Every name that a command may have."""
    return sorted(_below(Command.DESCRIPTOR, ""))


def _below(descriptor: Descriptor, before: str) -> Iterator[str]:
    oneof = _told_apart(descriptor)
    assert oneof is not None, f"{descriptor.name} has no kinds"
    for field in oneof.fields:
        name = f"{before} {field.name}".strip()
        content = field.message_type
        if content is not None and _told_apart(content) is not None:
            yield from _below(content, name)
        elif name == "settle":
            yield from (f"settle {kind}" for kind in SettleKind.keys()[1:])
        elif name == "admin settings":
            yield from (f"{name} {setting.name}" for setting in Settings.DESCRIPTOR.fields)
        else:
            yield name
