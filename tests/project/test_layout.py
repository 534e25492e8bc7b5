"""The layout: links, generated stubs, licence, version, documents."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version

from tests.project.imports import FOLDERS, PACKAGE, ROOT, modules

LINES_MAX = 900
"""Beyond this a module probably has two owners. Reported, not refused: cutting needs judgement."""
ARGUMENTS_MAX = 10
MANY_ARGUMENTS = {
    "tickwheel.client.async_client.AsyncClient.consumer": "the constructor of Consumer, for users",
    "tickwheel.client.schedules.ScheduleClient.put": "the definition of a schedule, for users",
}
"""Function -> why it takes more."""


CORE_LINES_MAX = 200
"""Of the class that drives the parts of a node: what it could do itself belongs to a part."""


def test_the_core_only_drives_its_parts() -> None:
    """`NodeCore` stays short."""
    tree = ast.parse((ROOT / "node/core/core.py").read_text(encoding="utf-8"))
    [core] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "NodeCore"]
    assert core.end_lineno is not None and core.end_lineno - core.lineno + 1 < CORE_LINES_MAX


def test_every_package_folder_has_its_link() -> None:
    """A folder at the top with an __init__.py is reached as tickwheel.<folder>, through a relative link."""
    folders = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    assert folders == FOLDERS
    for name in folders:
        link = PACKAGE / name
        assert link.is_symlink(), f"src/tickwheel/{name} is no link"
        assert str(link.readlink()) == f"../../{name}"


def test_every_package_folder_is_banned_under_its_bare_name() -> None:
    """`import wheel` instead of `tickwheel.wheel` would make a second copy of every class."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    banned = settings["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert sorted(banned) == FOLDERS


def test_nested_folders_are_packages() -> None:
    """setuptools leaves a folder without __init__.py out of the wheel."""
    missing = sorted(
        str(path.parent.relative_to(ROOT))
        for name in FOLDERS
        for _, path in modules(name)
        if not (path.parent / "__init__.py").exists()
    )
    assert not missing


def test_tests_mirror_folders_without_being_packages() -> None:
    """Test folders carry no __init__.py: pytest and mypy then agree on the name of every test module."""
    packages = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("__init__.py")]
    assert not packages, "remove them; `from tests.wheel.models import ...` works without"


def test_stubs_are_fresh() -> None:
    """The committed stubs are what the .proto files give."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate_stubs.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_licence() -> None:
    """The licence that pyproject.toml names is the one that lies there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


def test_changelog_has_the_version() -> None:
    """The newest entry of the changelog is the version that is built and installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == project["version"] == version("tickwheel")


def test_every_module_says_what_it_is() -> None:
    """Each module that holds anything starts with a docstring."""
    silent = [
        name
        for folder in FOLDERS
        for name, path in modules(folder)
        if (text := path.read_text(encoding="utf-8").strip()) and not text.lstrip("#! ").startswith(('"""', 'r"""'))
    ]
    assert not silent


def test_links_in_documents_lead_somewhere() -> None:
    """Relative links of README and docs/ point at files and at headings that exist."""
    broken = []
    for document in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http:", "https:", "mailto:")):
                continue
            path, _, heading = target.partition("#")
            file = (document.parent / path) if path else document
            if not file.exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
            elif heading and file.suffix == ".md" and heading not in anchors(file.read_text(encoding="utf-8")):
                broken.append(f"{document.relative_to(ROOT)}: {target} (no such heading)")
    assert not broken


def test_names_in_documents_exist() -> None:
    """Python files that README and docs/ name, and members of classes and messages, written as `Class.member`."""
    defining: dict[str, str] = {}
    sources = [*ROOT.glob("proto/*.proto"), *(path for folder in FOLDERS for _, path in modules(folder))]
    for path in sources:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^(?:class|message|service) (\w+)", text, re.MULTILINE):
            defining[name] = defining.get(name, "") + text
    folders = (*FOLDERS, "scripts", "tests")
    files = {f"/{path.relative_to(ROOT)}" for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")}
    wrong = []
    for document in [ROOT / "README.md", ROOT / "replication/DESIGN.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = document.read_text(encoding="utf-8")
        for name, member in re.findall(r"`([A-Z][a-z]\w+)\.(\w+)(?:\(\))?`", text):
            if not re.search(rf"\b{member}\b", defining.get(name, "")):
                wrong.append(f"{document}: {name}.{member}")
        named = re.findall(r"`([\w/]+\.py)`", text)
        wrong += [f"{document}: {name}" for name in named if not any(file.endswith(f"/{name}") for file in files)]
    assert not wrong


def anchors(text: str) -> set[str]:
    """The fragment names that headings of a document get."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_module_sizes_are_reported() -> None:
    """Writes the sizes to the test's output (`-rP` shows it) and names the long ones."""
    sizes = sorted(
        ((len(path.read_text(encoding="utf-8").splitlines()), name) for f in FOLDERS for name, path in modules(f)),
        reverse=True,
    )
    for lines, name in sizes:
        if lines > LINES_MAX:
            print(f"{lines:5} lines, more than {LINES_MAX}: {name}")
    assert sum(lines for lines, _ in sizes) > 0


def test_functions_take_few_arguments() -> None:
    """At most ten; a constructor takes what its object is made of, and a command of typer its options."""

    def functions(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            inner = f"{name}.{child.name}" if hasattr(child, "name") else name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield inner, child
            yield from functions(child, inner)

    def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        called = [item.func for item in function.decorator_list if isinstance(item, ast.Call)]
        return any(isinstance(item, ast.Attribute) and item.attr in ("command", "callback") for item in called)

    def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        names = [item.arg for item in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
        return len(names) - (names[:1] in (["self"], ["cls"]))

    many = {
        name
        for folder in FOLDERS
        for module, path in modules(folder)
        for name, function in functions(ast.parse(path.read_text(encoding="utf-8")), module)
        if arguments(function) > ARGUMENTS_MAX and function.name != "__init__" and not is_command(function)
    }
    assert many == set(MANY_ARGUMENTS)


def test_callbacks_say_what_they_take() -> None:
    """A callback that takes any object leaves it to its reader to find out what comes."""
    anything = re.compile(r"Callable\[\[(object|Any)\], None\]")
    loose = [
        name
        for folder in FOLDERS
        if folder != "chaos"  # mutations and simulated clients stand for callers of any kind
        for name, path in modules(folder)
        if anything.search(path.read_text(encoding="utf-8"))
    ]
    assert not loose


def test_generated_documents_are_fresh() -> None:
    """Pages that come from the code are what the code gives now."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate_docs.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
