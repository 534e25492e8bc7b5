"""The pages of the site that come from the code: Python API, protocol, commands, alerts.

Each function returns texts by the file of their page. The pages of the Python API are reStructuredText that names
classes to Sphinx's autodoc; the others are Markdown.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
import yaml
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from scripts.docs_site.pages import ROOT
from tickwheel.client.blocking import Blocking, calling, each, following, following_all, making, reading, waiting
from tickwheel.node.cli import commands
from tickwheel.node.cli.program import app

PYTHON = {
    "Clients": ["client.AsyncClient", "client.TlsFiles", "client.tracing.Tracing"],
    "Schedule": [
        *("client.messages.MessageOptions", "client.messages.Content", "client.Receipt"),
        *("client.CancelOutcome", "client.RescheduleOutcome", "client.RescheduleResult"),
        *("client.Producer", "client.BatchReceipt"),
    ],
    "Consume": [
        *("client.Consumer", "client.Delivery", "client.DeliveredBatch", "client.SettleReceipt", "client.StartFrom"),
        "client.pulling.PullClient",
    ],
    "Workers": [
        *("client.Worker", "client.worker.WorkerOptions", "client.Handler", "client.Action", "client.Retry"),
        *("client.Dead", "client.Drop", "client.HandlerTimeout", "client.WorkerMetrics"),
        *("client.worker_metrics.TopicMetrics", "client.worker_metrics.Times"),
    ],
    "What is pending": [
        *("client.async_client.Conditions", "client.Message", "client.MessageState", "client.PendingPage"),
        *("client.PendingCount", "client.Bucket", "client.sweeps.SweepClient", "client.Selection", "client.Sweep"),
        "client.SweepState",
    ],
    "Recurring schedules": [
        *("client.schedules.ScheduleClient", "client.Schedule", "client.ScheduleState", "client.PutResult"),
        *("client.ScheduleRun", "client.RunOutcome", "client.RunCounts", "client.Missed", "client.Overlap"),
    ],
    "Dead letters": ["client.dead.DeadClient", "client.DeadLetter", "client.DeadCause", "client.dead.Changed"],
    "Administration": [
        *("client.admin.AdminClient", "client.RetryPolicy", "client.ExponentialBackoff"),
        "client.access.AccessClient",
    ],
    "Bulk": [
        *("client.staging.StagingClient", "client.staging.StagedAttemptWriter", "client.staging.Rows"),
        *("client.snapshot.SnapshotClient", "client.snapshot.Pin", "client.snapshot.SettledPin"),
        *("client.snapshot.SettledTopic", "client.bulk.BulkClient", "client.cold.ColdClient"),
    ],
    "Without a loop": [
        *("client.Client", "client.sync_client.SyncProducer", "client.SyncConsumer", "client.SyncDelivery"),
        *("client.SyncBatch", "client.SyncWorker", "client.sync_client.SyncAdmin", "client.sync_client.SyncAccess"),
        *("client.sync_client.SyncDead", "client.sync_client.SyncSweeps", "client.sync_client.SyncSchedules"),
        *("client.sync_client.SyncPulling", "client.sync_client.SyncStaging", "client.sync_client.SyncStagedAttempt"),
        *("client.sync_client.SyncSnapshot", "client.sync_client.SyncBulk", "client.sync_client.SyncCold"),
    ],
    "Errors": [
        *("client.TickwheelError", "client.RequestRefused", "client.FilterDiffers", "client.NotFound"),
        *("client.PayloadError", "client.LimitReached", "client.ClusterUnavailable", "client.OutcomeUnknown"),
        *("client.SequenceError", "client.SequenceTaken", "client.ClientClosed", "client.PermissionRefused"),
    ],
    "Testing": [
        *("testing.FakeCluster", "testing.Clock", "testing.SyncFakeCluster", "testing.SyncClock"),
        "testing.clock.Span",
    ],
}
"""Page -> its classes, below `tickwheel`."""

BLOCKING = {
    reading: "The same",
    calling: "The same",
    waiting: "Without ``await``",
    each: "Iterate without ``async``",
    making: "The blocking kind",
    following: "A ``concurrent.futures.Future``, once there is room",
    following_all: "A list of ``concurrent.futures.Future``, once there is room",
}
"""How a member of a blocking class differs from that of the asynchronous class."""


def python() -> dict[str, str]:
    """The pages of the Python API. Raises ValueError if a public name has no page."""
    listed = {name for names in PYTHON.values() for name in names}
    for package in ("client", "testing"):
        public = {f"{package}.{name}" for name in import_module(f"tickwheel.{package}").__all__}
        if public - listed:
            raise ValueError(f"no page of the Python API has {', '.join(sorted(public - listed))}")
    pages = {}
    for title, names in PYTHON.items():
        entries = [entry for name in names for entry in _class_entry(f"tickwheel.{name}")]
        pages[f"reference/python/{_slug(title)}.rst"] = "\n".join([title, "=" * len(title), "", *entries])
    contents = [f"   python/{_slug(title)}" for title in PYTHON]
    head = [
        *("Python API", "==========", ""),
        "What the packages ``tickwheel.client`` and ``tickwheel.testing`` have, from their docstrings.",
        "The guides are :doc:`/client` and :doc:`/testing`.",
        *("", ".. toctree::", "   :maxdepth: 2", ""),
    ]
    return pages | {"reference/python.rst": "\n".join([*head, *contents, ""])}


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _class_entry(path: str) -> Iterator[str]:
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name)
    directive = "autoexception" if issubclass(kind, BaseException) else "autoclass"
    yield from (name, "-" * len(name), "", f".. {directive}:: {path}")
    if kind.__bases__ != (object,) and not issubclass(kind, Blocking):
        yield "   :show-inheritance:"
    if not issubclass(kind, Blocking):
        yield from ("   :members:", "   :undoc-members:", "")
        return
    own = [key for key, value in vars(kind).items() if inspect.isfunction(value) or isinstance(value, property)]
    own = [key for key in own if not key.startswith("_")]
    yield from ([f"   :members: {', '.join(own)}"] if own else [])
    yield ""
    ways: dict[str, list[str]] = {}
    for key, value in vars(kind).items():
        if key.startswith("_") or type(value) not in BLOCKING:
            continue
        asynchronous = getattr(kind, key)
        asynchronous = getattr(asynchronous, "fget", asynchronous)
        owner, _, name_there = asynchronous.__qualname__.partition(".")
        place = f"{_place_of(getattr(import_module(asynchronous.__module__), owner))}.{name_there}"
        ways.setdefault(BLOCKING[type(value)], []).append(f":py:obj:`{key} <{place}>`")
    yield from (f"   | {way}: {', '.join(members)}." for way, members in ways.items())
    yield ""


def _place_of(kind: type) -> str:
    """Where a page of the Python API has a class."""
    listed = [f"tickwheel.{name}" for names in PYTHON.values() for name in names]
    [place] = [path for path in listed if path.rpartition(".")[2] == kind.__name__]
    return place


# -- the protocol

SERVICE, MESSAGE, ENUM = 6, 4, 5
TYPES = {value: name.removeprefix("TYPE_").lower() for name, value in FieldDescriptorProto.Type.items()}
NODES_ONLY = ("log", "peer", "state")
"""Files that programs have nothing to do with."""


def proto() -> dict[str, str]:
    """A page for each .proto file, from its comments."""
    names = sorted(path.name for path in (ROOT / "proto").glob("*.proto"))
    with tempfile.TemporaryDirectory() as aside:
        output = Path(aside) / "all"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-Itickwheel/proto={ROOT / 'proto'}"]
        command += ["--include_source_info", f"--descriptor_set_out={output}"]
        subprocess.run([*command, *(f"tickwheel/proto/{name}" for name in names)], check=True)
        files = FileDescriptorSet.FromString(output.read_bytes()).file
    homes = {
        f".{file.package}.{name}": Path(file.name).stem
        for file in files
        for name in [*_message_names(file.message_type), *(enum.name for enum in file.enum_type)]
    }
    pages, rows = {}, {False: list[str](), True: list[str]()}
    for file in sorted(files, key=lambda file: file.name):
        stem = Path(file.name).stem
        page = _ProtoPage(file, homes)
        pages[f"reference/proto/{stem}.md"] = page.text()
        rows[stem in NODES_ONLY].append(f"| [{stem}.proto](proto/{stem}.md) | {page.about} |")
    contents = "\n".join(f"proto/{Path(name).stem}" for name in names)
    index = [
        "# Protocol\n",
        "What a node speaks, from the comments of the files. Any language with gRPC can use it.\n",
        *("| file | |\n|---|---|", *rows[False], "\n## Between nodes and on disk\n"),
        "Programs have nothing to do with these.\n",
        *("| file | |\n|---|---|", *rows[True]),
        f"\n```{{toctree}}\n:hidden:\n\n{contents}\n```\n",
    ]
    return pages | {"reference/proto.md": "\n".join(index)}


def _message_names(messages: Iterable[DescriptorProto], within: str = "") -> Iterator[str]:
    for message in messages:
        yield f"{within}{message.name}"
        yield from _message_names(message.nested_type, f"{within}{message.name}.")
        yield from (f"{within}{message.name}.{enum.name}" for enum in message.enum_type)


class _ProtoPage:
    """The text of one file."""

    def __init__(self, file: FileDescriptorProto, homes: dict[str, str]) -> None:
        self.file = file
        self.homes = homes
        self.comments = {
            tuple(place.path): place.leading_comments or place.trailing_comments
            for place in file.source_code_info.location
            if place.leading_comments or place.trailing_comments
        }
        self.about = self._said((12,))

    def _said(self, *paths: Sequence[int]) -> str:
        """The comment at a path, in one line."""
        text = " ".join(self.comments.get(tuple(path), "").strip() for path in paths)
        return _plain(re.sub(r"\s+", " ", text))

    def text(self) -> str:
        """All of it."""
        lines = [f"# {Path(self.file.name).name}\n", f"{self.about}\n"]
        for number, service in enumerate(self.file.service):
            lines += self._service(service, (SERVICE, number))
        for number, message in enumerate(self.file.message_type):
            lines += self._message(message, (MESSAGE, number), "")
        for number, enum in enumerate(self.file.enum_type):
            lines += self._enum(enum, (ENUM, number), "")
        return "\n".join(lines)

    def _link(self, name: str) -> str:
        home = self.homes.get(name)
        short = name.removeprefix(f".{self.file.package}.").rpartition("google.protobuf")[2].lstrip(".")
        if home is None:
            return f"`{name.lstrip('.')}`"
        own = home == Path(self.file.name).stem
        return f"[{short}]({'' if own else f'{home}.md'}#{short.lower().replace('.', '')})"

    def _service(self, service: ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield f"## Service {service.name}\n"
        yield f"{self._said(path)}\n\n| method | takes | returns | |\n|---|---|---|---|"
        for number, method in enumerate(service.method):
            takes = f"{'stream ' if method.client_streaming else ''}{self._link(method.input_type)}"
            returns = f"{'stream ' if method.server_streaming else ''}{self._link(method.output_type)}"
            yield f"| `{method.name}` | {takes} | {returns} | {self._said((*path, 2, number))} |"
        yield ""

    def _message(self, message: DescriptorProto, path: tuple[int, ...], within: str) -> Iterator[str]:
        name = f"{within}{message.name}"
        yield f"## {name}\n"
        yield f"{self._said(path)}\n"
        if message.field:
            yield "| | field | type | |\n|---|---|---|---|"
        maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
        for number, field in enumerate(message.field):
            kind = self._type_of(field)
            if entry := maps.get(field.type_name.rpartition(".")[2]):
                kind = f"map of {self._type_of(entry.field[0])} to {self._type_of(entry.field[1])}"
            elif field.label == FieldDescriptorProto.LABEL_REPEATED:
                kind = f"repeated {kind}"
            elif field.proto3_optional:
                kind = f"optional {kind}"
            elif field.HasField("oneof_index"):
                kind = f"{kind} (one of `{message.oneof_decl[field.oneof_index].name}`)"
            yield f"| {field.number} | `{field.name}` | {kind} | {self._said((*path, 2, number))} |"
        for number, oneof in enumerate(message.oneof_decl):
            if said := self._said((*path, 8, number)):
                yield f"\n`{oneof.name}`: {said}"
        yield ""
        for number, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, (*path, 3, number), f"{name}.")
        for number, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, 4, number), f"{name}.")

    def _type_of(self, field: FieldDescriptorProto) -> str:
        return self._link(field.type_name) if field.type_name else f"`{TYPES[field.type]}`"

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...], within: str) -> Iterator[str]:
        yield f"## {within}{enum.name}\n"
        yield f"{self._said(path)}\n\n| | value | |\n|---|---|---|"
        for number, value in enumerate(enum.value):
            yield f"| {value.number} | `{value.name}` | {self._said((*path, 2, number))} |"
        yield ""


def _plain(text: str) -> str:
    """A text that Markdown shows as it is; code between backticks stays code, and a table's cell stays one."""
    pieces = re.split(r"(`[^`]*`)", text)
    escaped = [piece if piece[:1] == "`" else re.sub(r"([*_<>\[\]\\{}])", r"\\\1", piece) for piece in pieces]
    return "".join(escaped).replace("|", "\\|")


# -- commands


def command_line() -> dict[str, str]:
    """Every command with its arguments and options, as its help has them."""
    lines = [
        "# Commands\n",
        "Every command of `tickwheel`, as `--help` says it. [The command line](../cli.md) has what they share: "
        "addresses, TLS, contexts, durations, exit codes.\n",
    ]
    root = typer.Context(typer.main.get_command(app), info_name="tickwheel")
    own = [name for name, found in commands.others().items() if found.dist and found.dist.name == "tickwheel"]
    for name in sorted([*commands.every(), *own]):
        command = commands.load(name)
        lines += _command(command, typer.Context(command, parent=root, info_name=name), 2)
    return {"reference/commands.md": "\n".join(lines)}


def _command(command: Any, context: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} {context.command_path}\n"
    yield f"{_plain(inspect.cleandoc(command.help or ''))}\n"
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        pieces = [piece for piece in command.collect_usage_pieces(context) if not piece.startswith("COMMAND")]
        yield f"```text\n{' '.join([context.command_path, *pieces])}\n```\n"
    records = [record for parameter in command.get_params(context) if (record := _parameter(parameter, context))]
    if records:
        yield "| | |\n|---|---|"
        yield from records
        yield ""
    for name, below in subcommands.items():
        if not below.hidden:
            yield from _command(below, type(context)(below, parent=context, info_name=name), level + 1)


def _parameter(parameter: Any, context: Any) -> str:
    """A row of the table, as help has it; empty for `--help` and what is hidden."""
    record = None if "--help" in parameter.opts else parameter.get_help_record(context)
    if record is None:
        return ""
    name, said = (text.replace("\\[", "[") for text in record)
    return f"| {_plain(f'`{name}`')} | {_plain(' '.join(said.split()))} |"


# -- alerts


def alerts() -> dict[str, str]:
    """Every alert with what it says and the way to what to do."""
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    lines = [
        "# Alerts\n",
        "Each alert of `deploy/prometheus/alerts.yml`. Its name leads to what to do.\n",
    ]
    for group in rules["groups"]:
        lines.append(f"## {group['name'].removeprefix('tickwheel-').capitalize()}\n")
        lines.append("| alert | severity | fires after | says |\n|---|---|---|---|")
        for rule in group["rules"]:
            name = rule["alert"]
            says = re.sub(r"\{\{ \$(?:labels\.)?(\w+).*?\}\}", r"<\1>", rule["annotations"]["summary"])
            anchor = rule["annotations"]["runbook_url"].partition("#")[2]
            after = rule.get("for", "at once")
            lines.append(
                f"| [{name}](monitoring.md#{anchor}) | {rule['labels']['severity']} | {after} | {_plain(says)} |"
            )
        lines.append("")
    return {"alerts.md": "\n".join(lines)}
