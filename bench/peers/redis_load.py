"""Load program for the usual delayed queue on Redis. Its interpreter has only Redis' client, nothing of tickwheel.

Arguments and printed lines are those of go/load/load.go; WINDOW is the number of messages in a pipeline, fewer at a
given rate. Payloads lie in a hash, due times in a sorted set. A script moves what is due to a second sorted set, where
it stays until it is acknowledged, so a consumer that dies loses nothing. Producer and consumer are a process each.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

redis = import_module("redis")  # of an environment that bench/peers makes; the project does not depend on it

WAITING, PAYLOADS, OUT = "waiting", "payloads", "out"
TAKE = """
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
if #ids == 0 then return {{}, {}} end
redis.call('ZREM', KEYS[1], unpack(ids))
local leases = {}
for place = 1, #ids do
  leases[2 * place - 1] = ARGV[3]
  leases[2 * place] = ids[place]
end
redis.call('ZADD', KEYS[3], unpack(leases))
return {ids, redis.call('HMGET', KEYS[2], unpack(ids))}
"""
TAKEN_MAX = 1_000
LEASE_MS = 60_000
LOOK_S = 0.001
"""Pause between two looks if nothing was due."""
PIPELINES_A_SECOND = 50
"""Pipelines a second if a rate is given."""
WARM_S, WARM_RATE = 3.0, 2_000.0
DRAIN_S = 40.0
LATER_MS, SOON_MS = (3_600_000, 86_400_000), (2_000, 1_000)


def produce(
    server: Any, seconds: float, rate: float, payload: bytes, window: int, due_ms: tuple[int, int], name: str
) -> tuple[int, float]:
    """Send pipelines, one after the other. Returns how many messages were acknowledged, and in how many seconds.

    A message's id is `name`, its number and its due time.
    """
    each = max(1, min(window, round(rate / PIPELINES_A_SECOND))) if rate else window
    began, sent = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        if rate and sent / rate > elapsed:
            time.sleep(sent / rate - elapsed)
        first = time.time() * 1_000 + due_ms[0]
        due = [int(first + random.random() * due_ms[1]) for _ in range(each)]
        ids = {f"{name}:{number}:{at}": at for number, at in enumerate(due, sent)}
        pipeline = server.pipeline(transaction=False)
        # The payload first, so that a due message always has one.
        pipeline.hset(PAYLOADS, mapping=dict.fromkeys(ids, payload))
        pipeline.zadd(WAITING, ids)
        pipeline.execute()
        sent += each
    return sent, time.perf_counter() - began


def consume(port: int, asked: Connection) -> None:
    """Take due messages and acknowledge them. When a number N comes through `asked`, it waits for N different messages,
    at most DRAIN_S; then it sends (different messages, repeats, lateness, arrivals) and begins to count again."""
    server = redis.Redis(port=port)
    take = server.register_script(TAKE)
    seen: set[bytes] = set()
    late: Counter[int] = Counter()
    arrived: Counter[int] = Counter()
    repeats, wanted, began, end = 0, None, time.time(), 0.0
    while True:
        if wanted is None and asked.poll():
            wanted, end = asked.recv(), time.time() + DRAIN_S
        if wanted is not None and (len(seen) >= wanted or time.time() > end):
            asked.send((len(seen), repeats, dict(late), dict(arrived)))
            began = asked.recv()
            seen, late, arrived, repeats, wanted = set(), Counter(), Counter(), 0, None
        now = int(time.time() * 1_000)
        ids, payloads = take(keys=[WAITING, PAYLOADS, OUT], args=[now, TAKEN_MAX, now + LEASE_MS])
        if not ids:
            time.sleep(LOOK_S)
            continue
        assert None not in payloads, "a message has no payload"
        now_s = time.time()
        for one in ids:
            if one in seen:
                repeats += 1
                continue
            seen.add(one)
            late[int(now_s * 1_000) - int(one.rpartition(b":")[2])] += 1
            arrived[int((now_s - began) * 100)] += 1
        pipeline = server.pipeline(transaction=False)
        pipeline.zrem(OUT, *ids)
        pipeline.hdel(PAYLOADS, *ids)
        pipeline.execute()


def tell(word: str) -> None:
    """Print a word, and wait for the answering line: by then the caller has read the processor time."""
    print(word, flush=True)
    if not sys.stdin.readline():
        raise EOFError("nobody reads this")


def main(arguments: list[str]) -> None:
    """Warm up, and measure between BEGIN and END."""
    case, seconds, rate = arguments[0], float(arguments[1]), float(arguments[2])
    payload, port, window = bytes(int(arguments[3])), int(arguments[4]), int(arguments[6])
    server = redis.Redis(port=port)
    delivered, repeats, late, arrived = 0, 0, {}, {}
    if case == "schedule":
        produce(server, min(WARM_S, seconds), 0.0, payload, window, LATER_MS, "warm")
        tell("BEGIN")
        accepted, sent_s = produce(server, seconds, 0.0, payload, window, LATER_MS, "sent")
        tell("END")
        delivered = accepted
    else:
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.Process(target=consume, args=(port, theirs), daemon=True).start()
        ours.send(produce(server, min(WARM_S, seconds), rate or WARM_RATE, payload, window, SOON_MS, "warm")[0])
        ours.recv()
        tell("BEGIN")
        ours.send(time.time())
        accepted, sent_s = produce(server, seconds, rate, payload, window, SOON_MS, "sent")
        ours.send(accepted)
        delivered, repeats, late, arrived = ours.recv()
        tell("END")
    result = {
        "accepted": accepted,
        "failed": 0,
        "sent_s": sent_s,
        "delivered": delivered if case == "deliver" else 0,
        "repeats": repeats,
        "missing": accepted - delivered,
        "late_ms": late,
        "arrived_10ms": arrived,
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
