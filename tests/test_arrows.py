"""Imports point downward only; a workspace hides undeclared ones, so the source is read.

Imports inside of functions count as well: a late import is an arrow like any other.
"""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {
    "parallel_config": set(),
    "parallel_engine": {"parallel_config"},
    "parallel_ckpt": {"parallel_config"},
    "parallel_publish": {"parallel_config", "parallel_ckpt"},
    "parallel_train": {"parallel_config", "parallel_engine", "parallel_ckpt", "parallel_publish"},
    "parallel_testing": {"parallel_config"},
}
ROOMS = {
    "parallel_ckpt": {
        "errors": set(),
        "layout": {"errors"},
        "ranks": {"errors"},
        "formats": {"errors", "layout"},
        "store": {"errors", "layout", "ranks", "formats"},
        "state": {"errors", "formats"},
        "save": {"errors", "layout", "ranks", "formats", "store", "state"},
        "load": {"errors", "layout", "ranks", "formats", "store", "state"},
        "convert": {"errors", "layout", "formats", "store"},
        "inspect": {"errors", "layout", "formats", "store"},
        "verify": {"errors", "layout", "formats", "store"},
    },
    "parallel_train": {
        "data": set(),
        "policies": {"data"},
        "config": {"data", "policies"},
        "metrics": {"config", "data", "policies"},
        "run": {"config", "data", "metrics", "policies"},
        "hub": {"config", "data", "metrics", "policies", "run"},
        "sim": {"config", "data", "policies"},
        "train": {"config", "data", "hub", "metrics", "run"},
        "cli": {"config", "data", "hub", "metrics", "policies", "run", "sim", "train"},
    },
}
"""What a room of a package may import from its neighbours."""
WITHOUT_TORCH = {"errors", "layout", "ranks", "formats", "store", "convert", "inspect", "verify"}
"""Rooms of ckpt: looking at a checkpoint does not wait for torch, whose import takes seconds."""


def _source(module: str) -> Path:
    return ROOT / "packages" / module.replace("_", "-") / "src"


def _files(package: str) -> dict[str, Path]:
    """Every file of a package by the dotted name of its module."""
    root = _source(package)
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (root / package).rglob("*.py")
    }
    assert files, f"no sources of {package}"
    return files


def _tree(path: Path) -> list[ast.stmt | ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def _imports(path: Path) -> set[str]:
    """Top-level names imported anywhere in a file, inside functions too."""
    names: set[str] = set()
    for node in _tree(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


def _imported_files(path: Path, files: dict[str, Path]) -> set[str]:
    """Modules among `files` that a file imports, whole or for a name of theirs."""
    found: set[str] = set()
    for node in _tree(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in files}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found |= {name for name in (whole, node.module) if name in files} - (
                    {node.module} if whole in files else set()
                )
    return found


def _graph(package: str) -> dict[str, set[str]]:
    files = _files(package)
    return {name: _imported_files(path, files) - {name} for name, path in files.items()}


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@pytest.mark.parametrize("module", OURS)
def test_arrows_point_downward(module):
    allowed = OURS[module] | {module}
    wrong = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in _files(module).values()
        if (bad := (_imports(path) & OURS.keys()) - allowed)
    }
    assert wrong == {}


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_the_rooms_below(package):
    allowed = ROOMS[package]
    arrows = {
        (_room(name), _room(other)) for name, others in _graph(package).items() for other in others
    }
    rooms = {_room(name) for name in _files(package)}
    assert rooms == allowed.keys() | ({"__init__", "__main__"} & rooms)
    entries = {"__init__", "__main__"}
    wrong = [(a, b) for a, b in arrows if a != b and not {a, b} & entries and b not in allowed[a]]
    assert sorted(wrong) == []


@pytest.mark.parametrize("package", OURS)
def test_no_circle_of_files(package):
    """Files that nobody imports are taken away until none is left; what stays is in a circle."""
    graph = _graph(package)
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert sorted(graph) == []


def test_what_reads_a_checkpoint_is_loaded_without_torch():
    files = {n: p for n, p in _files("parallel_ckpt").items() if _room(n) in WITHOUT_TORCH}
    assert len(files) > 20
    heavy = {"torch", "numpy", "safetensors"}
    loaded = {name: _at_load(ast.parse(path.read_text())) & heavy for name, path in files.items()}
    assert {name: found for name, found in loaded.items() if found} == {}


def _at_load(tree: ast.AST) -> set[str]:
    """Top-level names that are imported when a file is, so not in functions or for types alone."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif not isinstance(node, ast.FunctionDef) and not _is_for_types(node):
            found |= _at_load(node)
    return found


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@pytest.mark.parametrize("module", OURS)
def test_what_is_imported_is_declared(module):
    project = tomllib.loads((_source(module).parent / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in project.get("optional-dependencies", {}).values():
        lines += extra
    declared = {_name(line) for line in lines}
    used = {name for path in _files(module).values() for name in _imports(path)}
    ours = {name for name in used if name in OURS and name != module}
    assert ours <= declared
    heavy = {"torch", "accelerate", "safetensors", "huggingface_hub", "tyro", "rich", "pyarrow"}
    heavy |= {"pydantic", "xxhash", "numpy", "torchvision", "av", "metaworld", "gymnasium"}
    assert used & heavy <= declared | {"gymnasium"}


def test_the_lock_names_only_the_public_index():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    registries = {p["source"]["registry"] for p in lock["package"] if "registry" in p["source"]}
    assert registries == {"https://pypi.org/simple"}
    urls = [w["url"] for p in lock["package"] for w in p.get("wheels", [])]
    assert urls
    assert all(url.startswith("https://files.pythonhosted.org/") for url in urls)


def _name(requirement: str) -> str:
    for end, character in enumerate(requirement):
        if character in "<>=!~[; ":
            return requirement[:end].replace("-", "_")
    return requirement.replace("-", "_")
