"""Load program for tickwheel on its public Python client: `python -m tickwheel.bench.peers.tickwheel_load ...`.

Arguments and printed lines are those of go/load/load.go; MODE is columns, rows or unary. WINDOW is the number of
callers of `unary`; the others have the client's own windows.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import numpy as np
from numpy.typing import NDArray

from tickwheel.bench.load import (
    BATCH,
    DAY_MS,
    HOUR_MS,
    Consumed,
    Due,
    Scheduled,
    call_unary,
    consuming,
    schedule_columns,
    send_rows,
    spread,
)
from tickwheel.bench.measure import counted
from tickwheel.client import AsyncClient

WARM_S = 3.0
WARM_RATE = 2_000.0
DRAIN_S = 40.0
BATCHES_A_SECOND = 20
"""Messages in a batch of columns if a rate is given."""
ARRIVED_PER_S = 100
LATER = spread(HOUR_MS, DAY_MS)
SOON = spread(2_000, 1_000)


async def produce(client: AsyncClient, arguments: list[str], seconds: float, rate: float, due: Due) -> Scheduled:
    """Send as MODE says."""
    payload_bytes, mode, window = int(arguments[3]), arguments[5], int(arguments[6])
    if mode == "columns":
        batch = min(BATCH, max(1, round(rate / BATCHES_A_SECOND))) if rate else BATCH
        return await schedule_columns(client, seconds, batch, due, rate, payload_bytes)
    if mode == "rows":
        return await send_rows(client, seconds, due, rate, payload_bytes)
    if mode == "unary":
        return await call_unary([client], seconds, due, rate, payload_bytes, window)
    raise ValueError(f"MODE is columns, rows or unary, not {mode}")


def tell(scheduled: Scheduled, consumed: Consumed, began_s: float, *, delivers: bool) -> None:
    """Print the result. A repeat counts as a repeat only, neither for lateness nor for the rate."""
    late, came_s = np.zeros(0, np.int64), np.zeros(0)
    if consumed.ids:
        _, firsts = np.unique(np.concatenate(consumed.ids), return_index=True)
        late = consumed.lateness()[firsts]
        came_s = np.repeat(consumed.arrivals_s, [len(ids) for ids in consumed.ids])[firsts] - began_s
    arrived: NDArray[np.int64] = (came_s * ARRIVED_PER_S).astype(np.int64)
    result = {
        "accepted": scheduled.messages,
        "failed": scheduled.failed,
        "sent_s": scheduled.seconds,
        "delivered": len(late),
        "repeats": consumed.repeats(),
        "missing": consumed.lost(scheduled) if delivers else 0,
        "late_ms": counted(late),
        "arrived_10ms": counted(arrived),
    }
    print("RESULT", json.dumps(result), flush=True)


async def main(arguments: list[str]) -> None:
    """Warm up, and measure between BEGIN and END."""
    case, seconds, rate, addresses = arguments[0], float(arguments[1]), float(arguments[2]), arguments[4]
    consumed = Consumed()
    async with AsyncClient(addresses) as client:
        if case == "schedule":
            await produce(client, arguments, min(WARM_S, seconds), 0.0, LATER)
            began_s = await _told("BEGIN")
            scheduled = await produce(client, arguments, seconds, 0.0, LATER)
            await _told("END")
            tell(scheduled, consumed, began_s, delivers=False)
            return
        async with consuming(client, consumed, one_by_one=arguments[5] != "columns"):
            warmed = await produce(client, arguments, min(WARM_S, seconds), rate or WARM_RATE, SOON)
            await consumed.drained(warmed.messages, DRAIN_S)
            began_s = await _told("BEGIN")
            consumed.clear()
            scheduled = await produce(client, arguments, seconds, rate, SOON)
            await consumed.drained(scheduled.messages, DRAIN_S)
            await _told("END")
            tell(scheduled, consumed, began_s, delivers=True)


async def _told(word: str) -> float:
    """Print a word, and wait for the answering line: by then the caller has read the processor time. Returns when the
    line came."""
    print(word, flush=True)
    if not await asyncio.to_thread(sys.stdin.readline):
        raise EOFError("nobody reads this")
    return time.perf_counter()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
