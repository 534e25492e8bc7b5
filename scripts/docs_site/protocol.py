"""The pages of the protocol: a .proto file each, from its comments."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from scripts.docs_site.markdown import plain
from scripts.docs_site.pages import ROOT

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
        return plain(re.sub(r"\s+", " ", text))

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
