"""Questions that are repeated to the current master until the answer is definite.

A try without an answer in time counts as lost, and its late answer is ignored. So a question may have taken effect
before it is answered, and more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from random import Random
from typing import Any

from tickwheel.chaos.sim.clients import TIMEOUT_NS, Wires
from tickwheel.chaos.sim.world import MS
from tickwheel.node.core.core import NodeCore, serve
from tickwheel.node.failure import Failure
from tickwheel.proto.admin_pb2 import CreateGroupRequest, CreateTopicRequest
from tickwheel.proto.log_pb2 import AdminCommand

PAUSE_NS = 150 * MS

Call = Callable[[NodeCore, Callable[[Any], None]], None]
"""Puts the question to a node's core; the function is for its answer."""


class Asking:
    """Questions of one kind of clients; `open` is how many have no answer."""

    def __init__(self, wires: Wires, rng: Random) -> None:
        self._wires = wires
        self._rng = rng
        self.open = 0

    def ask(self, call: Call, taken: Callable[[Any], bool]) -> None:
        """Repeat a call until `taken` says that an answer (perhaps a Failure) is definite."""
        self.open += 1
        self._try(call, taken, self._rng.randrange(3))

    def command(self, call: Call, then: Callable[[Any], None]) -> None:
        """Repeat a call until the answer is no Failure; `then` gets it."""

        def taken(answer: Any) -> bool:
            if isinstance(answer, Failure):
                return False
            then(answer)
            return True

        self.ask(call, taken)

    def served(self, request: Callable[[NodeCore], Coroutine[Any, Any, Any]], then: Callable[[Any], None]) -> None:
        """As `command`, for a request that a core serves in steps."""
        self.command(lambda core, answer: serve(core, request(core), answer), then)

    def admin(self, command: AdminCommand, then: Callable[[Any], None]) -> None:
        """As `command`, for a command of an operator."""
        self.served(lambda core: core.parts.requests.admin(command), then)

    def found(
        self, topics: Sequence[str], groups: Iterable[tuple[str, Sequence[str]]], then: Callable[[], None]
    ) -> None:
        """Create topics, then groups of (name, topics), one after the other; then `then`."""
        created = [AdminCommand(create_topic=CreateTopicRequest(name=topic)) for topic in topics]
        created += [AdminCommand(create_group=CreateGroupRequest(name=name, topics=of)) for name, of in groups]
        self.set_up(created, then)

    def set_up(self, commands: Sequence[AdminCommand], then: Callable[[], None]) -> None:
        """Commands of an operator, each once the one before is done; then `then`."""
        left = list(commands)

        def go_on(_: object = None) -> None:
            if not left:
                then()
                return
            self.admin(left.pop(0), go_on)

        go_on()

    def _try(self, call: Call, taken: Callable[[Any], bool], target: int) -> None:
        over: list[bool] = []

        def take(answer: Any) -> None:
            if over:
                return
            over.append(True)
            self.open -= 1
            if taken(answer):
                return
            self.open += 1
            turn = self._wires.redirect(answer, target) if isinstance(answer, Failure) else target
            self._wires.world.after(PAUSE_NS, self._try, call, taken, turn)

        def timed_out() -> None:
            if not over:
                over.append(True)
                self._try(call, taken, target + 1)

        self._wires.call(
            self._wires.machine(target), lambda core: call(core, lambda answer: self._wires.back(take, answer))
        )
        self._wires.world.after(TIMEOUT_NS, timed_out)


class AskingClients:
    """The base of clients that ask questions, with a stream of random numbers named after them."""

    def __init__(self, wires: Wires, name: str) -> None:
        self._wires = wires
        self._world = wires.world
        self._history = wires.history
        self._rng = wires.world.stream(f"clients/{name}")
        self._asking = Asking(wires, self._rng)
