"""Questions that are repeated to the current master until the answer is definite.

A try without an answer in time counts as lost, and its late answer is ignored. So a question may have taken effect
before it is answered, and more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from random import Random
from typing import Any, ParamSpec

from tickwheel.chaos.sim.clients import NO_ANSWER, Call, Clients, Course, Wires, served
from tickwheel.chaos.sim.history_messages import CancelAnswered, CancelSent
from tickwheel.chaos.sim.history_operators import ResetAnswered, ResetAsked
from tickwheel.chaos.sim.world import MS
from tickwheel.node.core.core import NodeCore
from tickwheel.node.failure import Failure
from tickwheel.proto.admin_pb2 import CreateGroupRequest, CreateTopicRequest, ResetGroupRequest
from tickwheel.proto.consumer_pb2 import EARLIEST, LATEST, TIME
from tickwheel.proto.log_pb2 import AdminCommand
from tickwheel.proto.scheduler_pb2 import CancelOutcome

PAUSE_NS = 150 * MS
Q = ParamSpec("Q")


def succeeded(answer: object) -> bool:
    """Whether it is no refusal."""
    return not isinstance(answer, Failure)


def founding(topics: Sequence[str], groups: Iterable[tuple[str, Sequence[str]]]) -> list[AdminCommand]:
    """Commands that create topics, and then groups of (name, topics)."""
    return [
        *(AdminCommand(create_topic=CreateTopicRequest(name=topic)) for topic in topics),
        *(AdminCommand(create_group=CreateGroupRequest(name=name, topics=of)) for name, of in groups),
    ]


class Asking:
    """Questions of one kind of clients; `open` is how many have no answer."""

    def __init__(self, wires: Wires, rng: Random) -> None:
        self._wires = wires
        self._rng = rng
        self.open = 0

    async def ask(self, call: Call, definite: Callable[[Any], bool] = succeeded) -> Any:
        """Repeat a call until its answer (perhaps a Failure) is definite."""
        wires = self._wires
        self.open += 1
        target = self._rng.randrange(3)
        while True:
            answer = await wires.answer(wires.machine(target), call)
            if answer is NO_ANSWER:
                target += 1
                continue
            if definite(answer):
                self.open -= 1
                return answer
            if isinstance(answer, Failure):
                target = wires.redirect(answer, target)
            await wires.pause(PAUSE_NS)

    async def served(
        self, request: Callable[[NodeCore], Coroutine[Any, Any, Any]], definite: Callable[[Any], bool] = succeeded
    ) -> Any:
        """As `ask`, for a request that a core serves in steps."""
        return await self.ask(served(request), definite)

    async def admin(self, *commands: AdminCommand) -> None:
        """Commands of an operator, each once the one before is done."""
        for command in commands:
            await self.served(partial(_administering, command))


def _administering(command: AdminCommand, core: NodeCore) -> Coroutine[Any, Any, Any]:
    return core.parts.requests.admin(command)


class AskingClients:
    """The base of clients that ask questions, with a stream of random numbers named after them."""

    setting: Sequence[AdminCommand] = ()
    """Commands after which they begin."""
    asks_for = "answers"
    """In words, what they ask for."""

    def __init__(self, wires: Wires, name: str) -> None:
        self._wires = wires
        self._world = wires.world
        self._history = wires.history
        self._rng = wires.world.stream(f"clients/{name}")
        self._asking = Asking(wires, self._rng)
        self._members: tuple[Clients, ...] = ()
        """Producers and consumers among them, which begin first and must be done at the end."""

    def start(self) -> None:
        self._wires.run(self._set_up())

    async def _set_up(self) -> None:
        await self._asking.admin(*self.setting)
        for member in self._members:
            member.start()
        self._begin()

    def _begin(self) -> None:
        """All that they need is there."""

    def unfinished(self) -> str:
        if self._asking.open:
            return self.asks_for
        return next(filter(None, (member.unfinished() for member in self._members)), "")

    def _later(self, wait_ns: int, act: Callable[Q, Course], *args: Q.args, **named: Q.kwargs) -> None:
        """Act some time later."""
        self._world.after(wait_ns, lambda: self._wires.run(act(*args, **named)))

    def _every(self, mean_ns: int, act: Callable[[], Course]) -> None:
        """Act now and, until faults are over, again: each time when the act and a pause are over."""
        self._wires.run(self._repeat(mean_ns, act))

    async def _repeat(self, mean_ns: int, act: Callable[[], Course]) -> None:
        while not self._wires.winding_down:
            await act()
            await self._wires.pause(self._wires.pause_ns(mean_ns, self._rng, cheap=True))

    def _keep(self, mean_ns: int, act: Callable[[], Course], cheap: bool = True) -> None:
        """Act now and, until faults are over, after each pause. `cheap`: as of `Wires.pause_ns`."""
        if not self._wires.winding_down:
            self._world.after(self._wires.pause_ns(mean_ns, self._rng, cheap), self._keep, mean_ns, act, cheap)
            self._wires.run(act())

    async def _reset_anywhere(self, group: str, topic: str) -> None:
        """Reset a group in one topic to the beginning, the end or a time near now, by the dice."""
        request = ResetGroupRequest(name=group, topics=[topic])
        dice = self._rng.random()
        if dice < 0.2:
            request.start_from, from_ms = EARLIEST, 0
        elif dice < 0.4:
            request.start_from, from_ms = LATEST, -1
        else:
            from_ms = self._world.wall_ms + self._rng.randrange(-5_000, 1_000)
            request.start_from, request.start_ms = TIME, from_ms
        await self._reset_group(request, from_ms)

    async def _reset_group(self, request: ResetGroupRequest, from_ms: int) -> None:
        """Reset a group in one topic. `from_ms`: as of ResetAsked."""
        [topic] = request.topics
        self._history.note(ResetAsked, request.name, from_ms, topic)
        await self._asking.admin(AdminCommand(reset_group=request))
        self._history.note(ResetAnswered, request.name, from_ms, topic)

    async def _cancel(self, uid: int, id64: int) -> None:
        """Cancel a message that nobody else cancels."""
        self._history.note(CancelSent, uid, id64)
        outcome = await self._asking.served(lambda core: core.parts.requests.cancel(id64))
        self._history.note(CancelAnswered, uid, id64, CancelOutcome.Name(outcome))
