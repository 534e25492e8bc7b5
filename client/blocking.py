"""Coroutine methods as methods that wait, for the synchronous client.

Types, docstring and parameters are those of the asynchronous method: `get = waiting(AsyncClient.get)`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
A = TypeVar("A")
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
    """Waits for the result of a coroutine method."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, A]]) -> None:
        super().__init__(method)

    def _call(self, holder: Blocking[Any], *args: P.args, **named: P.kwargs) -> A:
        work: Coroutine[Any, Any, A] = self._method(holder.inner, *args, **named)
        return holder.runner.wait(work)


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


class following(_Method[P, concurrent.futures.Future[A]]):
    """Waits for the future that a coroutine method returns, and gives it to the calling thread."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, asyncio.Future[A]]]) -> None:
        super().__init__(method)

    def _call(self, holder: Blocking[Any], *args: P.args, **named: P.kwargs) -> concurrent.futures.Future[A]:
        future: asyncio.Future[A] = holder.runner.wait(self._method(holder.inner, *args, **named))

        async def follow() -> A:
            return await future

        return holder.runner.begin(follow())
