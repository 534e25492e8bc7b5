"""A program that uses the client may start other programs."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio, os, subprocess, threading
from tickwheel.transport.channel import Channel
from tickwheel.transport.limits import Limits
from tickwheel.transport.server import Server, bind

async def busy(ready):
    async def answer(request, context):
        await asyncio.sleep(0.001)
        return request

    class Handler(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.unary_unary_rpc_method_handler(answer)

    server, bound = Server(Limits()), bind("127.0.0.1", 0)
    server.add_generic_rpc_handlers([Handler()])
    server.listen(bound, None)
    await server.start()
    channel = Channel(f"127.0.0.1:{bound.getsockname()[1]}", Limits())
    echo = channel.unary_unary("/a/B", bytes, bytes)
    while True:
        await asyncio.gather(*(echo(b"x") for _ in range(8)))
        ready.set()

import grpc

ready = threading.Event()
threading.Thread(target=asyncio.run, args=(busy(ready),), daemon=True).start()
ready.wait()
# With a function to call first, as Spark has, the child is forked and not spawned.
ended = [subprocess.run(["true"], preexec_fn=lambda: None).returncode for _ in range(60)]
print(len([code for code in ended if code]), flush=True)
os._exit(0)
"""


def test_a_child_that_is_forked_beside_calls_runs() -> None:
    """Spark's JVM is one. grpcio's own channels, with its default handlers for fork, ended a fifth of such children."""
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "0", found.stderr[-500:]
