"""Which module imports what, read from the syntax trees; shared by the tests of this folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tickwheel"
FOLDERS = sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement's target, absolute: importer `tickwheel.a.b` imports `name` at `line`."""

    importer: str
    name: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name}"


def modules(folder: str) -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module below src/tickwheel/`folder`; generated stubs left out."""
    start = (PACKAGE / folder).resolve()
    for path in sorted(start.rglob("*.py")):
        if path.stem.endswith(("_pb2", "_pb2_grpc")) or "__pycache__" in path.parts:
            continue
        parts = ["tickwheel", folder, *path.relative_to(start).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        yield ".".join(parts), path


def imports_of(module: str, path: Path) -> list[Import]:
    """All imports of a module, also those inside functions and under TYPE_CHECKING.

    `from a import b` counts as `a.b`: b may be a module, and for what it is not the prefix says enough.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += [Import(module, alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_package = path.name == "__init__.py"
                home = module.split(".")
                home = home[: len(home) - node.level + (1 if is_package else 0)]
                base = ".".join([*home, base]) if base else ".".join(home)
            found += [Import(module, f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def all_imports() -> list[Import]:
    """Every import of every module of the package."""
    return [item for folder in FOLDERS for name, path in modules(folder) for item in imports_of(name, path)]


def below(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the prefixes or lies below one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
