"""Imports point downward only; a workspace hides undeclared ones, so the source is read."""

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
# Distribution to the module it brings, where the names differ.
MODULES = {"huggingface_hub": "huggingface_hub"}


def _imports(path: Path) -> set[str]:
    """Top-level names imported anywhere in a file, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


def _sources(module: str) -> list[Path]:
    files = list((ROOT / "packages" / module.replace("_", "-") / "src" / module).rglob("*.py"))
    assert files, f"no sources of {module}"
    return files


@pytest.mark.parametrize("module", OURS)
def test_arrows_point_downward(module):
    allowed = OURS[module] | {module}
    wrong = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in _sources(module)
        if (bad := (_imports(path) & OURS.keys()) - allowed)
    }
    assert wrong == {}


@pytest.mark.parametrize("module", OURS)
def test_what_is_imported_is_declared(module):
    project = tomllib.loads(
        (ROOT / "packages" / module.replace("_", "-") / "pyproject.toml").read_text()
    )["project"]
    lines = list(project["dependencies"])
    for extra in project.get("optional-dependencies", {}).values():
        lines += extra
    declared = {_name(line) for line in lines}
    used = {name for path in _sources(module) for name in _imports(path)}
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
