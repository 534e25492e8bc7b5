"""The output of the command line: tables and sentences for people, one JSON value for programs.

Owns the two consoles and the options that every command shares. Results go to standard output, progress and errors
to standard error. With --json an error is JSON too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any, BinaryIO, Literal, TextIO, TypeVar, get_args, get_type_hints

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tickwheel.client import AsyncClient, TlsFiles
from tickwheel.client.moments import EPOCH, MILLISECOND, duration_of
from tickwheel.node.cli.contexts import TOKEN_VARIABLE, access_for, exposed
from tickwheel.node.cli.hints import hint_for
from tickwheel.node.cli.options import Asked
from tickwheel.node.cli.streams import shortened

PIPE_WIDTH_MAX = 100_000
PAYLOAD_BYTES_MAX = 64 << 20
"""Read of a payload; the cluster's own limit is lower."""
_NUMBER = re.compile(r"-?[0-9]{1,20}")

T = TypeVar("T")

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""As in console/static/dom.js."""


class PlainConsole(Console):
    """Shows control characters, and marks that turn the direction of text, as codes: keys, payloads and errors are
    anybody's, and must not drive the terminal of whoever looks at them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_visible(segment.text))


def _visible(text: str) -> str:
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Text of others, for a line or cell of its own: its line ends are shown as codes, too. It could forge lines."""
    return _visible(text).replace("\n", "\\n")


class PeopleFormatter(logging.Formatter):
    """Of a log for people: each record is one line, a traceback is indented below it. What others wrote into them can
    neither drive a terminal nor forge a record."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return indent(_visible(super().formatException(ei)), "  ", lambda line: True)


def log_to_stderr(level: int) -> None:
    """Have this process log to standard error, for people."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PeopleFormatter())
    logging.basicConfig(level=level, handlers=[handler])


# Without markup: errors, paths and what users name may have brackets. A program that reads a pipe gets whole lines.
out = PlainConsole(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())
err = PlainConsole(stderr=True, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """One line of JSON."""
    _write_json(value, sys.stdout)
    sys.stdout.flush()


def _write_json(value: Any, stream: TextIO) -> None:
    """Characters as they are, but for those that drive a terminal or hide in it, and all if the stream's encoding lacks
    one: these with the codes of JSON, so nothing is lost."""
    text = _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value)
    stream.write(text + "\n")


def as_dict(answer: Any) -> dict[str, Any]:
    """A dataclass as a JSON object.

    A time is in milliseconds, a moment in milliseconds since 1970, and the name says so (`clock_ms`, `delay_ms_max`).
    Bytes are hexadecimal.
    """
    kind: Any = type(answer)
    hints = _hints_of(kind)
    return {
        json_name(found.name, hints[found.name]): _as_json(getattr(answer, found.name))
        for found in dataclasses.fields(answer)
    }


@cache
def _hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def json_name(name: str, hint: Any) -> str:
    """The name of a field in JSON: that of a time says its unit."""
    if not {datetime, timedelta} & {hint, *get_args(hint)}:
        return name
    base = name.removesuffix("_max")
    return f"{base}_ms{name[len(base) :]}"


def _as_json(value: Any) -> Any:
    match value:
        case datetime():
            return _number((value - EPOCH) / MILLISECOND)
        case timedelta():
            return _number(value / MILLISECOND)
        case bytes():
            return value.hex()
        case tuple() | list():
            return [_as_json(item) for item in value]
        case Mapping():
            return {name: _as_json(item) for name, item in value.items()}
        case _ if dataclasses.is_dataclass(value):
            return as_dict(value)
    return value


def _number(value: float) -> float:
    """Without a fraction if it has none."""
    return int(value) if value.is_integer() else value


def fail(message: str, reason: str, metadata: Mapping[str, str], quoted: Sequence[str] = ()) -> None:
    """Print an error with what to do about it, as text or JSON. `quoted`: lines of a log that show the cause."""
    message, hint = shortened(message), hint_for(reason, metadata)
    if Asked.json:
        told = {"error": "\n".join((message, *quoted)), "reason": reason, **metadata, "hint": hint}
        _write_json(told, sys.stderr)
    else:
        err.print(Text.assemble(("tickwheel:", "red"), f" {one_line(message)}"), soft_wrap=True)
        for line in quoted:
            err.print(f"  {one_line(line)}", soft_wrap=True)
        err.print(f"Hint: {hint}.", style="dim", soft_wrap=True)


def warn(message: str) -> None:
    """Print a sentence about what is under way; nothing with --json, where only the result and errors count."""
    if not Asked.json:
        err.print(message, soft_wrap=True)


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> Table:
    """A table. `right`: columns of numbers. These and `whole` columns are wrapped only if no other column can be.

    Titles of columns and cells may have markup: escape in them what is not the program's own.
    """
    made = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        numbers = number in right
        justify: Literal["left", "right"] = "right" if numbers else "left"
        made.add_column(Text.from_markup(name), justify=justify, overflow="fold", no_wrap=numbers or number in whole)
    for row in rows:
        made.add_row(*(Text.from_markup(one_line(str(cell))) for cell in row))  # before its width is measured
    return made


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> None:
    """Print a table, within a terminal's width. In a pipe or file each row is one line, however long."""
    made = table(title, columns, rows, right, whole)
    if out.is_terminal:
        out.print(made)
        return
    PlainConsole(width=PIPE_WIDTH_MAX, highlight=False, markup=False).print(made)


def say(value: Any, text: str) -> None:
    """Print an answer: the value as JSON if that was asked for, otherwise the text."""
    print_json(value) if Asked.json else out.print(text)


def open_client(addresses: str, timeout_s: float = 15.0, token: str | None = None) -> AsyncClient:
    """A client from the shared options. Certificates come from TICKWHEEL_TLS_CA, _CERT, _KEY and _NAME or the context,
    a token from TICKWHEEL_TOKEN or the context, unless one is given."""
    access = access_for(addresses)
    if token is None:
        token = access.values.get("token", "")
        if token and access.sources["token"] != TOKEN_VARIABLE and (warning := exposed()):
            warn(warning)
    return AsyncClient(addresses, tls=tls_files(addresses), timeout_s=timeout_s, token=token)


def tls_files(addresses: str) -> TlsFiles | None:
    """The certificate files for these addresses, of the environment or the context; None: without TLS."""
    values = access_for(addresses).values
    if "tls_ca" not in values:
        return None
    return TlsFiles(Path(values["tls_ca"]), values.get("tls_cert"), values.get("tls_key"), values.get("tls_name"))


def ask(call: Callable[[AsyncClient], Awaitable[T]], timeout_s: float = 15.0) -> T:
    """Open a client for the addresses of the command, make a call, and return its answer."""

    async def go() -> T:
        async with open_client(Asked.addresses, timeout_s) as client:
            return await call(client)

    return asyncio.run(go())


async def confirm(question: str) -> None:
    """Ask on the terminal. Raises typer.Abort for a no.

    Waits on the loop: a thread that reads the terminal would not end with Ctrl-C, and the process would wait for it.
    """
    loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
    while True:
        err.print(f"{question} Continue? [y/N]: ", end="", soft_wrap=True)
        typed = asyncio.Event()
        loop.add_reader(terminal, typed.set)
        try:
            await typed.wait()
        finally:
            loop.remove_reader(terminal)
        answer = sys.stdin.readline().strip().lower()
        if answer in {"y", "yes"}:
            return
        if answer in {"", "n", "no"}:
            raise typer.Abort
        err.print("y or n")


def duration(option: str, text: str) -> timedelta:
    """`250ms`, `5s`, `1h30m`; otherwise a usage error that names the option."""
    try:
        return duration_of(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text[:40]!r}: {error}", param_hint=option) from None


def moment_ms(option: str, text: str) -> int:
    """Milliseconds since 1970, or a time in ISO 8601 (without a zone: local); otherwise a usage error that names the
    option."""
    try:
        if _NUMBER.fullmatch(text):
            return int(text)
        return round(datetime.fromisoformat(text).timestamp() * 1_000)
    except (ValueError, OverflowError):
        limit = "a time is milliseconds since 1970 or ISO 8601, such as 2026-01-31T09:00"
        raise typer.BadParameter(f"{text[:40]!r}: {limit}", param_hint=option) from None


def print_listing(
    items: Sequence[T], titles: Sequence[str], row: Callable[[T], Sequence[object]], *, right: Sequence[int] = ()
) -> None:
    """Answers of a cluster as JSON objects, or as rows of a table."""
    if Asked.json:
        print_json([as_dict(item) for item in items])
    else:
        print_table("", titles, [row(item) for item in items], right=right)


def payload_of(payload: str | None, file: Path | None) -> bytes:
    """Of an argument (`-`: standard input) or a file. A usage error unless exactly one is given.

    An argument's bytes are taken as the shell gave them, UTF-8 or not.
    """
    if (payload is None) == (file is None):
        raise typer.BadParameter("give either a payload or --file")
    if file is not None:
        with file.open("rb") as opened:
            return _bounded(opened, str(file))
    return _bounded(sys.stdin.buffer, "standard input") if payload == "-" else os.fsencode(str(payload))


def _bounded(opened: BinaryIO, name: str) -> bytes:
    """All of a file; a usage error for one that no cluster takes, which may have no end."""
    data = opened.read(PAYLOAD_BYTES_MAX + 1)
    if len(data) > PAYLOAD_BYTES_MAX:
        raise typer.BadParameter(f"{name}: a payload has at most {PAYLOAD_BYTES_MAX:,} bytes")
    return data


def payload_as_dict(payload: bytes | None) -> dict[str, str]:
    """What JSON says of a payload: `payload` if it is UTF-8 text, else `payload_hex`; nothing for None."""
    if payload is None:
        return {}
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_hex": payload.hex()}


def payload_text(payload: bytes) -> str:
    """A payload for people, on one line; bytes that are no UTF-8 as codes."""
    return one_line(payload.decode(errors="backslashreplace"))


def headers_of(texts: Sequence[str]) -> dict[str, str]:
    """Headers by name, of arguments NAME=VALUE; otherwise a usage error."""
    headers = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{text[:40]!r}: NAME=VALUE", param_hint="--header")
        headers[name] = value
    return headers


def place(option: str, text: str) -> tuple[str, int]:
    """The start of a group for the clients: earliest, latest, or (`time`, milliseconds since 1970)."""
    return (text, 0) if text in {"earliest", "latest"} else ("time", moment_ms(option, text))


def ms_text(span: timedelta) -> str:
    """A short span for people, in milliseconds."""
    return f"{span / MILLISECOND:.0f} ms"


def time_text(when: int | datetime) -> str:
    """A time for people, in UTC. A number is in milliseconds since 1970."""
    ms = when if isinstance(when, int) else (when - EPOCH) // MILLISECOND
    try:
        moment = datetime.fromtimestamp(ms / 1_000, UTC)
    except (OverflowError, ValueError, OSError):
        return str(ms)
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{ms % 1_000:03}Z"
