"""Runs the tests that others wrote for HTTP/2 and gRPC against this transport: h2spec, and grpc-go's interop client.

    python -m tests.transport.conformance

Needs Go; the tools are built into .venv/go, once. Exit code 1 if a case fails, 3 if the tools cannot be had.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from tests.transport.served import serving
from tickwheel.transport.server import Server

EXIT_NO_TOOLS = 3
TOOLS = Path(sys.prefix) / "go"
H2SPEC = "github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible"
INTEROP = "google.golang.org/grpc/interop/client@v1.75.0"
CASES = (
    *("empty_unary", "large_unary", "client_streaming", "server_streaming", "ping_pong", "empty_stream"),
    *("timeout_on_sleeping_server", "cancel_after_begin", "cancel_after_first_response", "status_code_and_message"),
    *("special_status_message", "custom_metadata", "unimplemented_method", "unimplemented_service"),
)
_F = FieldDescriptorProto
FIELDS: dict[str, tuple[tuple[str, int, int, str], ...]] = {
    "Empty": (),
    "Payload": (("body", 2, _F.TYPE_BYTES, ""),),
    "EchoStatus": (("code", 1, _F.TYPE_INT32, ""), ("message", 2, _F.TYPE_STRING, "")),
    "SimpleRequest": (
        ("response_size", 2, _F.TYPE_INT32, ""),
        ("response_status", 7, _F.TYPE_MESSAGE, "EchoStatus"),
    ),
    "SimpleResponse": (("payload", 1, _F.TYPE_MESSAGE, "Payload"),),
    "StreamingInputCallRequest": (("payload", 1, _F.TYPE_MESSAGE, "Payload"),),
    "StreamingInputCallResponse": (("aggregated_payload_size", 1, _F.TYPE_INT32, ""),),
    "ResponseParameters": (("size", 1, _F.TYPE_INT32, ""), ("interval_us", 2, _F.TYPE_INT32, "")),
    "StreamingOutputCallRequest": (
        ("response_parameters", 2, _F.TYPE_MESSAGE, "*ResponseParameters"),
        ("response_status", 7, _F.TYPE_MESSAGE, "EchoStatus"),
    ),
    "StreamingOutputCallResponse": (("payload", 1, _F.TYPE_MESSAGE, "Payload"),),
}
"""What the interop service's messages hold of interest: name, number, type, message (* for repeated)."""


def _messages() -> dict[str, Any]:
    file = FileDescriptorProto(name="interop.proto", package="grpc.testing", syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, other in fields:
            label: Any = _F.LABEL_REPEATED if other.startswith("*") else _F.LABEL_OPTIONAL
            type_name = f".grpc.testing.{other.strip('*')}" if other else None
            message.field.add(name=field, number=number, type=kind, label=label, type_name=type_name)
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"grpc.testing.{name}")) for name in FIELDS}


M = _messages()


async def _tell(context: Any) -> None:
    """Send the caller's metadata back, as the case `custom_metadata` asks."""
    given = dict(context.invocation_metadata())
    initial, trailing = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"
    if initial in given:
        await context.send_initial_metadata(((initial, given[initial]),))
    if trailing in given:
        context.set_trailing_metadata(((trailing, given[trailing]),))


async def _refuse(status: Any, context: Any) -> None:
    if status.code:
        await context.abort(next(code for code in grpc.StatusCode if code.value[0] == status.code), status.message)


class Interop(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """grpc.testing.TestService."""

    def service(self, details: Any) -> Any:
        unary, joined = grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        streamed, both = grpc.unary_stream_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        made: dict[str, tuple[Any, Any, str]] = {
            "EmptyCall": (unary, self._empty, "Empty"),
            "UnaryCall": (unary, self._unary, "SimpleRequest"),
            "StreamingInputCall": (joined, self._input, "StreamingInputCallRequest"),
            "StreamingOutputCall": (streamed, self._output, "StreamingOutputCallRequest"),
            "FullDuplexCall": (both, self._duplex, "StreamingOutputCallRequest"),
        }
        service, _, method = details.method.rpartition("/")
        if service != "/grpc.testing.TestService" or method not in made:
            return None
        make, behave, request = made[method]
        return make(behave, M[request].FromString, lambda message: message.SerializeToString())

    async def _empty(self, request: Any, context: Any) -> Any:
        return request

    async def _unary(self, request: Any, context: Any) -> Any:
        await _tell(context)
        await _refuse(request.response_status, context)
        return M["SimpleResponse"](payload=M["Payload"](body=bytes(request.response_size)))

    async def _input(self, requests: Any, context: Any) -> Any:
        size = sum([len(request.payload.body) async for request in requests])
        return M["StreamingInputCallResponse"](aggregated_payload_size=size)

    async def _output(self, request: Any, context: Any) -> None:
        for asked in request.response_parameters:
            await asyncio.sleep(asked.interval_us / 1e6)
            await context.write(M["StreamingOutputCallResponse"](payload=M["Payload"](body=bytes(asked.size))))

    async def _duplex(self, requests: Any, context: Any) -> None:
        await _tell(context)
        async for request in requests:
            await _refuse(request.response_status, context)
            await self._output(request, context)


async def _run(*command: str, most_s: float = 60) -> tuple[int, str]:
    """The exit code of a command and what it printed. It is killed after `most_s` seconds."""
    environment = {**os.environ, "GOBIN": str(TOOLS), "GOFLAGS": "-mod=mod"}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(most_s):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        return 1, f"still running after {most_s:.0f} s"
    return process.returncode or 0, output.decode()


async def _tool(name: str, module: str) -> str:
    path = TOOLS / name
    if not path.exists():
        print(f"building {module}", flush=True)
        code, output = await _run("go", "install", module, most_s=900)
        if code:
            print(output, file=sys.stderr)
            raise SystemExit(EXIT_NO_TOOLS)
    return str(path)


async def main() -> int:
    """Run all cases; returns the number of failures, and prints each."""
    if shutil.which("go") is None:
        print("these tests are built with Go, which is not installed (apt install golang-go)", file=sys.stderr)
        raise SystemExit(EXIT_NO_TOOLS)
    h2spec, interop = await _tool("h2spec", H2SPEC), await _tool("client", INTEROP)
    server = Server()
    server.add_generic_rpc_handlers([Interop()])
    failures = 0
    async with serving(server) as address:
        host, _, port = address.rpartition(":")
        code, output = await _run(h2spec, "--host", host, "--port", port, "--strict", "--timeout", "5")
        failures += bool(code)
        print(output if code else "\n".join(output.strip().splitlines()[-1:]))
        for case in CASES:
            code, output = await _run(interop, "-server_host", host, "-server_port", port, "-test_case", case)
            failures += bool(code)
            print(f"{case}: {output if code else 'passed'}")
    return failures


if __name__ == "__main__":
    sys.exit(min(1, asyncio.run(main())))
