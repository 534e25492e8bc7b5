"""Serving of clients' requests: an error in one of them fails that request alone, and the node continues.

A request is served in pieces: at once, when a worker has read something, when its entry of the log is applied. Owns
the request whose piece runs now. A callback that is to be called later is `bound`: it is a piece of the same request.

Invariants, once a server has called `contain`:
- An error in a piece of a request fails that request alone. The answer is NODE_FAULT with an id, under which the
  traceback was reported. Work that the request had begun may be done, half done or undone. If it
  failed for want of memory, the answer says so; if the node's own work fails for that, the node ends.
- An error in work of no request propagates and ends the node. Work done during a request (`own`) raises OwnWorkError.
  Work that can be left out or tried again without harm (`side`) is left out, and its error is reported.
- FATAL errors propagate from any piece: the node cannot continue after them.
- Damage in the node's own files fails the request that met it, and `damage` names it: the next request for the same
  bytes would meet it again, so the node leaves in order.
- Damage that cuts off the node's own work halfway makes the node `stuck`: it leaves in order, too, and until then only
  its log works. Whoever drives the node does so through `attempt`: a tick, a frame, the end of a worker's work. A
  failed fdatasync does so wherever it is met: no checkpoint may be written any more that relies on the same file.

Without `contain` every error propagates: in the simulation a mistake must not pass for a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from tickwheel.node.core.promise import Promise, Reply
from tickwheel.node.failure import Failure, RequestError, no_memory, node_fault, outcome_unknown
from tickwheel.node.state.results import ImpossibleStateError
from tickwheel.proto.parsing import wants_memory
from tickwheel.replication.judge import ImpossibleMessageError
from tickwheel.storage.disk import DiskError, FsyncFailedError
from tickwheel.storage.errors import CorruptFileError, is_damage


class OwnWorkError(Exception):
    """The node's own work failed while it was done in passing for a request; its state may be half changed."""


FATAL = (OwnWorkError, ImpossibleStateError, ImpossibleMessageError)
"""The log or the state cannot be as it is: the node must not go on."""

P = ParamSpec("P")
T = TypeVar("T")
Fail = Callable[[Failure], None]


class Serving:
    """Runs pieces of requests and of the node's own work, and decides which errors fail a request alone."""

    def __init__(self, random_bits: Callable[[int], int]) -> None:
        """`random_bits`: for ids of errors."""
        self._random_bits = random_bits
        self._report: Callable[[str, BaseException], None] | None = None
        self.caller: Fail | None = None
        """How the request whose piece runs now is told that it failed, for `run`; None: no request's. Only this class
        changes it."""
        self.damage = ""
        """The first damage in the node's own files that a piece or a worker met: the node leaves. Empty: none."""
        self.stuck = ""
        """Which work of the node's own was cut off halfway by damage: nothing may read the state any more, and the node
        leaves. Empty: none."""
        self.stuck_by: DiskError | None = None
        """The damage that did it, for the log."""
        self.closed: Failure | None = None
        """The answer to every request that comes now: none is served any more."""
        self.faults = 0
        """Errors that failed a request instead of the node."""

    def contain(self, report: Callable[[str, BaseException], None]) -> None:
        """From now on errors fail requests. `report` gets each with its id, inside the handler of the error."""
        self._report = report

    def shut(self, failure: Failure) -> None:
        """Serve no more. `failure` is for requests that have not begun. A request that has begun gets OUTCOME_UNKNOWN
        instead of its next piece: what it proposed may still be carried out. The first call counts."""
        self.closed = self.closed or failure

    def run(self, fail: Fail | None, piece: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """Run a piece of a request and return its result; None after an error. `fail` may be called after its answer,
        and more than once. None: of no request."""
        if fail is not None and self.closed is not None:
            fail(outcome_unknown())
            return None
        if fail is None or self._report is None:
            return piece(*args, **named)
        before, self.caller = self.caller, fail
        try:
            return piece(*args, **named)
        except Exception as error:
            failure = self.fault(error)
            try:
                fail(failure)
            except Exception as another:  # nobody is left to be told
                self.fault(another)
            return None
        finally:
            self.caller = before

    def bound(self, callback: Callable[P, None]) -> Callable[P, None]:
        """The callback as a piece of the request whose piece runs now; unchanged if none does."""
        return self.of(self.caller, callback)

    def bound_reply(self, reply: Reply[T]) -> Reply[T]:
        """As `bound`, for a reply."""
        fail = self.caller
        return reply if fail is None else Reply(self.of(fail, reply.done), self.of(fail, reply.fail))

    def of(self, fail: Fail | None, callback: Callable[P, None]) -> Callable[P, None]:
        """The callback as a piece of the request of `fail`; unchanged if that is None."""
        return callback if fail is None else partial(self.run, fail, callback)

    def start(self, coroutine: Coroutine[Promise[Any], None, T], done: Callable[[T | Failure], None]) -> None:
        """Run a coroutine of the core to its end, each step as a piece of the request whose piece runs now. `done` gets
        what it returns, or the failure of the RequestError that it raises. After any other error, in a step or in a
        piece that a step has bound, the coroutine is closed and the request fails."""
        fail = self.caller
        running = False
        over = False

        def failed(failure: Failure) -> None:
            nonlocal over
            over = True
            if not running:
                coroutine.close()
            assert fail is not None, "only a piece of a request can fail alone"
            fail(failure)

        def step() -> None:
            nonlocal running, over
            if over:
                return
            running = True
            try:
                awaited = coroutine.send(None)
            except StopIteration as end:
                result: T | Failure = end.value
            except RequestError as error:
                result = error.failure
            else:
                if over:
                    coroutine.close()  # a piece of it failed while it ran
                else:
                    awaited.when_kept(resume)
                return
            finally:
                running = False
            if not over:
                over = True
                done(result)

        fails = None if fail is None else failed
        resume = self.of(fails, step)
        self.run(fails, step)

    async def each(self, coroutines: Iterable[Coroutine[Promise[Any], None, T]]) -> list[T]:
        """Run coroutines of the core beside each other, as pieces of the request whose piece runs now. Returns what
        each returned, in their order. Raises the RequestError of one of them once all have ended. Any other error in
        one of them fails the request."""
        results: list[T | None] = []
        refusals: list[RequestError] = []
        left = 0
        all_done: Promise[None] = Promise()
        begun = False

        async def run(place: int, coroutine: Coroutine[Promise[Any], None, T]) -> None:
            nonlocal left
            try:
                results[place] = await coroutine
            except RequestError as error:
                refusals.append(error)
            left -= 1
            if begun and not left:
                all_done.keep(None)

        for place, coroutine in enumerate(coroutines):
            results.append(None)
            left += 1
            self.start(run(place, coroutine), lambda _: None)
        begun = True
        if left:
            await all_done
        if refusals:
            raise refusals[0]
        return cast(list[T], results)

    def own(self, work: Callable[[], None]) -> None:
        """Do the node's own work. Errors end the node; in a piece of a request they raise as OwnWorkError. Damage makes
        the node stuck, and fails the request."""
        before, self.caller = self.caller, None
        try:
            work()
        except FATAL:
            raise
        except Exception as error:
            if before is None:
                raise
            if isinstance(error, DiskError) and is_damage(error):
                self.stick(f"the node's own work met damage: {error}", error)
                raise
            raise OwnWorkError(f"the node's own work failed: {error!r}") from error
        finally:
            self.caller = before

    def stick(self, what: str, error: DiskError) -> None:
        """The node's own work was cut off halfway by this error. The first counts."""
        if not self.stuck:
            self.stuck, self.stuck_by = what, error

    def damaged(self, reason: str, error: BaseException | None) -> bool:
        """Whether the error of a worker is damage: then the node leaves in order, for this reason."""
        if isinstance(error, FsyncFailedError):
            self.stick(reason, error)
        elif is_damage(error):
            self.damage = self.damage or reason
        else:
            return False
        return True

    def attempt(self, what: str, otherwise: T, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Do the node's own work, `what` in words. Damage makes the node stuck, and `otherwise` is returned."""
        try:
            return work(*args, **named)
        except DiskError as error:
            if not is_damage(error):
                raise
            self.stick(f"{what} met damage: {error}", error)
            return otherwise

    def side(self, failed: Callable[[], None], work: Callable[P, None], *args: P.args, **named: P.kwargs) -> None:
        """Do the node's own work on which nothing replicated depends. `failed` is called after an error."""
        self.run(lambda _: failed(), work, *args, **named)

    def fault(self, error: Exception) -> Failure:
        """Report an error that fails a request, and return the answer to it. Raises FATAL errors again."""
        if isinstance(error, FATAL) or self._report is None:
            raise error
        if isinstance(error, FsyncFailedError):
            self.stick(f"met while serving: {error}", error)
        elif isinstance(error, CorruptFileError):
            self.damage = self.damage or f"met while serving: {error}"
        self.faults += 1
        error_id = f"{self._random_bits(48):012x}"
        self._report(error_id, error)
        return no_memory(error_id) if wants_memory(error) else node_fault(error_id)
