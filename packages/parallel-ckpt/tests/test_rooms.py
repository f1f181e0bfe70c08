"""The rooms of the package: who imports whom, what needs torch, and no circle of files."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import parallel_ckpt

ROOT = Path(parallel_ckpt.__file__).parent
BASE = {"errors", "layout"}
# What each room may import of the package. `ranks` is how ranks agree; it knows errors alone.
MAY = {
    "errors": set(),
    "layout": set(),
    "ranks": {"errors"},
    "formats": BASE,
    "store": BASE | {"formats", "ranks"},
    "state": BASE | {"formats"},
    "save": BASE | {"formats", "ranks", "store", "state"},
    "load": BASE | {"formats", "ranks", "store", "state"},
    "convert": BASE | {"formats", "store"},
    "inspect": BASE | {"formats", "store"},
    "verify": BASE | {"formats", "store"},
}
WITHOUT_TORCH = {"errors", "layout", "ranks", "formats", "store", "convert", "inspect", "verify"}


def module_of(path: Path) -> str:
    """`formats.box` of formats/box.py; a room's own name of its `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def imports(tree: ast.AST, *, at_load: bool = False) -> set[str]:
    """Modules that a file imports, and each name from one as `module.name`.

    With `at_load` only those whose import loading the file waits for.
    """
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif not (at_load and is_put_off(node)):
            found |= imports(node, at_load=at_load)
    return found


def is_put_off(node: ast.AST) -> bool:
    """Whether what stands in a node is imported later or never."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef)


def ours(tree: ast.AST) -> set[str]:
    """Modules of the package that a file imports."""
    names = {name.removeprefix("parallel_ckpt.") for name in imports(tree)}
    return names & SOURCES.keys() - {""}


def test_a_room_imports_only_rooms_below_it() -> None:
    wrong = {}
    for module, tree in SOURCES.items():
        room = module.split(".")[0]
        if room:
            rooms = {name.split(".")[0] for name in ours(tree)} - {room}
            wrong |= {module: rooms - MAY[room]} if rooms - MAY[room] else {}
    assert wrong == {}


def test_no_file_needs_one_that_needs_it() -> None:
    arrows = {
        module: {name for name in ours(tree) if name != module}
        for module, tree in SOURCES.items()
        if module
    }
    assert sum(map(len, arrows.values())) > 50
    list(TopologicalSorter(arrows).static_order())  # raises CycleError


def test_what_reads_files_is_loaded_without_torch() -> None:
    heavy = {"torch", "numpy", "safetensors"}
    loaded = {
        module: {name.split(".")[0] for name in imports(tree, at_load=True)} & heavy
        for module, tree in SOURCES.items()
        if module.split(".")[0] in WITHOUT_TORCH
    }
    assert len(loaded) > 20
    assert {module: names for module, names in loaded.items() if names} == {}
