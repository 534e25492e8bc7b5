"""When a core wants to be called again, if nothing comes in before."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tickwheel.node.core.core import NodeCore

NEVER_MS = 1 << 62


def wait_ms(core: NodeCore, now_ms: int, steady_ms: int, may_dispatch: bool) -> int:
    """How long none of its parts has anything to do. `now_ms`: cluster time, `steady_ms`: for waiting."""
    steady = (core.consumers.wanted_ms(), core.bulk.wanted_ms(), core.salvage.wanted_ms(), core.mending.wanted_ms())
    wanted = [core.background.wanted_ms(now_ms)]
    wait = 0 if core.checkpointer.capturing else NEVER_MS
    if core.leading:
        if core.publisher.cut_short:
            wait = 0
        wanted.append(core.proposer.wanted_ms())
        if core.may_act():
            wanted += [core.delivery.wanted_ms(), core.staging.wanted_ms(), core.filter_sweep.wanted_ms()]
            if may_dispatch:
                wanted.append(core.dispatcher.wanted_ms(now_ms))
    for until_ms in steady:
        if until_ms is not None:
            wait = min(wait, until_ms - steady_ms)
    for until_ms in wanted:
        if until_ms is not None:
            wait = min(wait, until_ms - now_ms)
    return wait
