"""Who may know whom. The tables here are the rule; docs/ARCHITECTURE.md explains it."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.project.imports import FOLDERS, ROOT, Import, all_imports, below, modules

MAY_KNOW = {
    "proto": set(),
    "storage": {"proto"},
    "wheel": {"storage"},
    "transport": set(),
    "replication": {"proto", "storage", "transport"},
    "client": {"proto", "transport"},
    "node": {"proto", "storage", "transport", "wheel", "replication"},
    "chaos": {"proto", "storage", "wheel", "transport", "replication", "client", "node", "pipeline", "testing"},
    "pipeline": {"proto", "client", "storage"},
    "gateway": {"client", "node", "proto", "console"},
    "testing": {"proto", "storage", "wheel", "transport", "replication", "client", "node"},
    "console": {"proto", "client"},
    "bench": {"proto", "storage", "wheel", "replication", "client", "node", "chaos", "pipeline"},
}
"""Folder -> the other folders it may import. Only bench imports chaos, and only these two pipeline; the
command line finds them by their entry points."""

MAY_KNOW_CLIENT = (
    *("tickwheel.node.cli", "tickwheel.node.demo", "tickwheel.node.local_cluster"),
    "tickwheel.node.backup_files",
)
"""Parts of node/ that are users of a cluster, not parts of a server."""

MAY_KNOW_LOCAL_CLUSTER = ("tickwheel.pipeline.demo", "tickwheel.pipeline.cli")
"""The demonstration of the pipeline starts a cluster of its own, with the flights of the other demonstration."""
LOCAL_CLUSTER = ("tickwheel.node.local_cluster", "tickwheel.node.demo")

COMMAND_LINE = ("tickwheel.node.cli.options", "tickwheel.node.cli.output", "tickwheel.node.cli.trace")
"""What the console shares with the other commands: their options, and the story of a message. The pipeline's commands
share how options are declared."""

OF_NODES = ("tickwheel.node.tls", "tickwheel.node.config.fields")
"""What the console shares with the nodes: how they read whose a certificate is, and where to listen."""

MAY_KNOW_NAMES = {("wheel", "tickwheel.proto.log_pb2.ManifestFile")}
"""Single names beyond the table: a checkpoint of the wheel says which files it needs in the manifest's own words."""

SANS_IO = ("tickwheel.wheel", "tickwheel.node.state", "tickwheel.node.core", "tickwheel.replication")
"""They decide; time, randomness, files and peers reach them as arguments and ports."""

ROOMS = {
    "schedule": set(),
    "watch": {"schedule"},
    "delivery": {"schedule", "watch"},
    "bulk": {"schedule", "watch"},
    "repair": {"delivery"},
}
"""Folder of node/core -> the other folders there that it may import. All use the modules of node/core itself; of these
only those that compose import a folder."""

SANS_IO_EXCEPT = ("tickwheel.replication.grpc_network",)
"""The real network behind the port: asyncio and sockets are its trade."""

CALENDAR = "tickwheel.node.core.schedule.calendar"
"""It computes with dates and time zones, and asks no clock."""

WORLD = (
    *("asyncio", "threading", "concurrent", "multiprocessing", "subprocess", "selectors", "select", "signal", "queue"),
    *("time", "datetime", "random", "secrets", "uuid", "os", "socket", "ssl", "pathlib", "tempfile", "shutil"),
    *("grpc", "uvloop"),
)
"""What a module of SANS_IO must not import: clocks, chance, threads, files and sockets."""

PYSYNCOBJ_ONLY_IN = ("tickwheel.replication.pysyncobj_seam", "tickwheel.replication.pysyncobj_globals")
UNSAFE = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve")
WRITES_PICKLES = "tickwheel.chaos.sim.library_faults"
"""Writes what a stranger would send, and reads nothing."""

WITH_PYTEST = "tickwheel.testing.fixtures"
"""Imported by pytest alone: who uses it has pytest."""

OTHER_NAMES = {"google": {"protobuf", "googleapis-common-protos", "google-crc32c"}}
"""Import names that several distributions share."""


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    """All imports of the package."""
    found = all_imports()
    assert len(found) > 100, "the package was not found"
    return found


def folder_of(name: str) -> str:
    """`wheel` of `tickwheel.wheel.cursor`; empty for the top."""
    parts = name.split(".")
    return parts[1] if parts[0] == "tickwheel" and len(parts) > 1 else ""


def test_folders_know_only_whom_they_may(imports: list[Import]) -> None:
    """Imports between folders follow the table, which has a row for every folder."""
    assert sorted(MAY_KNOW) == FOLDERS
    wrong = [
        item
        for item in imports
        if (target := folder_of(item.name)) in MAY_KNOW
        and target != (source := folder_of(item.importer))
        and target not in MAY_KNOW[source]
        and (source, item.name) not in MAY_KNOW_NAMES
        and not (target == "client" and item.importer.startswith(MAY_KNOW_CLIENT))
        and not (source == "console" and below(item.name, (*COMMAND_LINE, *OF_NODES)))
        and not (item.importer.startswith("tickwheel.pipeline.cli") and below(item.name, COMMAND_LINE[:1]))
        and not (below(item.name, LOCAL_CLUSTER) and below(item.importer, MAY_KNOW_LOCAL_CLUSTER))
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_rooms_of_the_core_know_only_whom_they_may(imports: list[Import]) -> None:
    """The folders of the core have an order: what schedules knows nothing of deliveries, and nothing of repair."""
    core = "tickwheel.node.core."
    assert {path.parent.name for path in (ROOT / "node/core").glob("*/__init__.py")} == set(ROOMS)
    wrong = [
        item
        for item in imports
        if item.importer.startswith(core)
        and item.name.startswith(core)
        and (source := item.importer.removeprefix(core).split(".")[0]) in ROOMS
        and (target := item.name.removeprefix(core).split(".")[0]) in ROOMS
        and target != source
        and target not in ROOMS[source]
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_what_decides_imports_nothing_of_the_world(imports: list[Import]) -> None:
    """Engine, state machine, core and replication hold no clock, chance, thread, file or socket."""
    wrong = [
        item
        for item in imports
        if below(item.importer, SANS_IO)
        and not below(item.importer, SANS_IO_EXCEPT)
        and below(item.name, WORLD)
        and not (item.importer == CALENDAR and below(item.name, ("datetime",)))
    ]
    assert not wrong, "\n".join(map(str, wrong))
    text = (ROOT / f"{CALENDAR.removeprefix('tickwheel.').replace('.', '/')}.py").read_text(encoding="utf-8")
    assert not any(clock in text for clock in (".now(", ".today(", "utcnow", "tzlocal"))


def test_storage_knows_no_network_and_no_loop(imports: list[Import]) -> None:
    """Files only: what waits for a disk is run in a worker by others."""
    wrong = [
        item
        for item in imports
        if folder_of(item.importer) == "storage" and below(item.name, ("asyncio", "grpc", "socket", "uvloop"))
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_only_the_seam_knows_pysyncobj(imports: list[Import]) -> None:
    """One file knows the library's internals, so one file changes with its version."""
    wrong = [
        item for item in imports if below(item.name, ("pysyncobj",)) and not below(item.importer, PYSYNCOBJ_ONLY_IN)
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_nothing_unpickles(imports: list[Import]) -> None:
    """No byte from a socket or a file reaches a module that can run code from it."""
    wrong = [item for item in imports if below(item.name, UNSAFE) and item.importer != WRITES_PICKLES]
    assert not wrong, "\n".join(map(str, wrong))
    text = (ROOT / f"{WRITES_PICKLES.removeprefix('tickwheel.').replace('.', '/')}.py").read_text(encoding="utf-8")
    assert ".load" not in text and "Unpickler" not in text


def test_all_that_is_imported_is_declared(imports: list[Import]) -> None:
    """Each foreign module comes from a distribution that pyproject.toml names, so an installation is complete."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + [
        line for extra, lines in project["optional-dependencies"].items() if extra != "dev" for line in lines
    ]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    known = packages_distributions()
    wrong = []
    for item in imports:
        top = item.name.split(".")[0]
        if top == "tickwheel" or top in sys.stdlib_module_names or (item.importer, top) == (WITH_PYTEST, "pytest"):
            continue
        sources = OTHER_NAMES.get(top) or {canonicalize_name(name) for name in known.get(top, [])}
        if not sources & declared:
            wrong.append(f"{item} (of {', '.join(sorted(sources)) or 'nothing installed'})")
    assert not wrong, "\n".join(wrong)


def cycles(arrows: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of nodes of a graph that reach each other (Tarjan's strongly connected components of two or more)."""
    found: set[frozenset[str]] = set()
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []

    def visit(node: str) -> None:
        numbers[node] = lowest[node] = len(numbers)
        path.append(node)
        for target in sorted(arrows.get(node, ())):
            if target not in numbers:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in path:
                lowest[node] = min(lowest[node], numbers[target])
        if lowest[node] == numbers[node]:
            at = path.index(node)
            if len(path) - at > 1:
                found.add(frozenset(path[at:]))
            del path[at:]

    for node in sorted(arrows):
        if node not in numbers:
            visit(node)
    return found


def test_cycles_are_found() -> None:
    """Two that know each other, a ring of three behind an entrance, and none in a diamond."""
    assert cycles({"a": {"b"}, "b": {"a"}}) == {frozenset("ab")}
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b", "e"}}) == {frozenset("bcd")}
    assert cycles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}}) == set()


def test_modules_know_each_other_one_way(imports: list[Import]) -> None:
    """A module is understood without its users: no import cycle, not even one for types alone or inside a function."""
    known = {name for folder in FOLDERS for name, _ in modules(folder)}
    arrows: dict[str, set[str]] = {}
    for item in imports:
        target = item.name
        while target and target not in known:
            target = target.rpartition(".")[0]
        if target and target != item.importer:
            arrows.setdefault(item.importer, set()).add(target)
    assert len(arrows) > 300, "the package was not found"
    assert cycles(arrows) == set()


def test_parts_do_not_know_the_core(imports: list[Import]) -> None:
    """Only what builds a core, and what stands before it, names `NodeCore`; its parts know `Kernel`."""
    knows = {item.importer for item in imports if below(item.name, ("tickwheel.node.core.core",))}
    assert {name for name in knows if name.startswith("tickwheel.node.core.")} == {
        "tickwheel.node.core.host",
        "tickwheel.node.core.watch.listings",
        "tickwheel.node.core.watch.status",
    }
