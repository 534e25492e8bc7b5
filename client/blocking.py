"""Members of an asynchronous object as members of a synchronous one, for the synchronous client.

Types, docstring and parameters are those of the asynchronous member: `get = waiting(AsyncClient.get)`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B", bound="Blocking[Any]")
T = TypeVar("T", covariant=True)
NO_MORE: Any = object()


class Runner(Protocol):
    """The synchronous client, as far as its methods need it."""

    @property
    def closed(self) -> bool: ...

    def wait(self, work: Coroutine[Any, Any, A], /) -> A: ...

    def begin(self, work: Coroutine[Any, Any, A], /) -> concurrent.futures.Future[A]: ...


class Blocking(Generic[T]):
    """The synchronous side of `inner`."""

    def __init__(self, runner: Runner, inner: T) -> None:
        self.runner = runner
        self.inner = inner


class Closing:
    """A context manager that closes at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Method(Generic[P, A]):
    """A method of a `Blocking`, made of a method of its `inner`."""

    def __init__(self, method: Callable[Concatenate[Any, P], Any]) -> None:
        self._method = method

    @overload
    def __get__(self, holder: None, owner: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, holder: Blocking[Any], owner: type) -> Callable[P, A]: ...
    def __get__(self, holder: Blocking[Any] | None, owner: type) -> Callable[..., Any]:
        # On the class it is the asynchronous method, for help() and editors.
        return self._method if holder is None else partial(self._call, holder)

    def _call(self, holder: Blocking[Any], *args: P.args, **named: P.kwargs) -> A:
        raise NotImplementedError


class waiting(_Method[P, A]):  # used as a decorator is
    """Waits for the result of a coroutine method, or of one that returns a future."""

    def __init__(self, method: Callable[Concatenate[Any, P], Awaitable[A]]) -> None:
        super().__init__(method)

    def _call(self, holder: Blocking[Any], *args: P.args, **named: P.kwargs) -> A:
        async def work() -> A:
            result: A = await self._method(holder.inner, *args, **named)
            return result

        return holder.runner.wait(work())


class calling(_Method[P, A]):
    """Calls a method that needs no loop."""

    def __init__(self, method: Callable[Concatenate[Any, P], A]) -> None:
        super().__init__(method)

    def _call(self, holder: Blocking[Any], *args: P.args, **named: P.kwargs) -> A:
        result: A = self._method(holder.inner, *args, **named)
        return result


class reading(Generic[A]):
    """Reads a property."""

    def __init__(self, read: Callable[[Any], A]) -> None:
        self._property: Any = read

    @overload
    def __get__(self, holder: None, owner: type) -> Any: ...
    @overload
    def __get__(self, holder: Blocking[Any], owner: type) -> A: ...
    def __get__(self, holder: Blocking[Any] | None, owner: type) -> Any:
        return self._property if holder is None else self._property.__get__(holder.inner)


class attribute(Generic[A]):
    """Reads the attribute of the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, holder: None, owner: type) -> attribute[A]: ...
    @overload
    def __get__(self, holder: Blocking[Any], owner: type) -> A: ...
    def __get__(self, holder: Blocking[Any] | None, owner: type) -> Any:
        return self if holder is None else getattr(holder.inner, self._name)


class each(_Method[P, Iterator[A]]):
    """Iterates over what an asynchronous generator yields, in one thread at a time."""

    def __init__(self, method: Callable[Concatenate[Any, P], AsyncIterator[A]]) -> None:
        super().__init__(method)

    def _call(self, holder: Blocking[Any], *args: P.args, **named: P.kwargs) -> Iterator[A]:
        found = self._method(holder.inner, *args, **named)

        async def one() -> Any:
            return await anext(found, NO_MORE)

        try:
            while (item := holder.runner.wait(one())) is not NO_MORE:
                yield item
        finally:
            if not holder.runner.closed:
                holder.runner.wait(found.aclose())


class making(_Method[P, B]):
    """Calls a method on the loop and wraps its result; `defaults` go before those of the method."""

    def __init__(
        self, method: Callable[Concatenate[Any, P], Any], kind: Callable[[Runner, Any], B], **defaults: object
    ) -> None:
        super().__init__(method)
        self._kind = kind
        self._defaults = defaults

    def _call(self, holder: Blocking[Any], *args: P.args, **named: P.kwargs) -> B:
        async def make() -> B:
            options: Any = {**self._defaults, **named}
            return self._kind(holder.runner, self._method(holder.inner, *args, **options))

        return holder.runner.wait(make())


class following(_Method[P, concurrent.futures.Future[A]]):
    """Waits for the future that a coroutine method returns, and gives it to the calling thread."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, asyncio.Future[A]]]) -> None:
        super().__init__(method)

    def _call(self, holder: Blocking[Any], *args: P.args, **named: P.kwargs) -> concurrent.futures.Future[A]:
        return _handed(holder.runner, holder.runner.wait(self._method(holder.inner, *args, **named)))


class following_all(_Method[P, list[concurrent.futures.Future[A]]]):
    """As `following`, for a coroutine method that returns a list of futures."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, list[asyncio.Future[A]]]]) -> None:
        super().__init__(method)

    def _call(self, holder: Blocking[Any], *args: P.args, **named: P.kwargs) -> list[concurrent.futures.Future[A]]:
        futures: list[asyncio.Future[A]] = holder.runner.wait(self._method(holder.inner, *args, **named))
        return [_handed(holder.runner, future) for future in futures]


def _handed(runner: Runner, future: asyncio.Future[A]) -> concurrent.futures.Future[A]:
    async def follow() -> A:
        return await future

    return runner.begin(follow())
