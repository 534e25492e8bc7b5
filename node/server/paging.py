"""Pages of a listing: filled up to the size of one answer, without blocking the loop for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.message import Message

from tickwheel.node.core.metas import ANSWER_BYTES_MAX, FIELD_BYTES

TURN_S = 0.005
"""A listing yields to heartbeats and deliveries after this long."""

M = TypeVar("M", bound=Message)


async def page(found: Iterable[M], wanted: Callable[[M], bool] = lambda one: True) -> tuple[list[M], bool]:
    """(the wanted items that fit an answer, but at least one; whether further wanted items follow)."""
    loop = asyncio.get_running_loop()
    gathered: list[M] = []
    left = ANSWER_BYTES_MAX
    until = loop.time() + TURN_S
    for one in found:
        if wanted(one):
            left -= one.ByteSize() + FIELD_BYTES
            if gathered and left < 0:
                return gathered, True
            gathered.append(one)
        if loop.time() >= until:
            await asyncio.sleep(0)
            until = loop.time() + TURN_S
    return gathered, False
