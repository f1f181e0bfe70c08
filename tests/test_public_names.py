"""Names that people import stay: each package's own, and the modules that documents name.

The record beside this file is written anew by `python tests/test_public_names.py`.
"""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("public_names.json")
PACKAGES = ("parallel_config", "parallel_engine", "parallel_ckpt", "parallel_publish")
PACKAGES += ("parallel_train", "parallel_testing")
SENT = {  # a model card on the Hub names it, and nobody can change that card any more
    "parallel_train.policies.loading": ["load_policy"],
}


def _documents():
    guides = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    readmes = (ROOT / "packages").glob("*/README.md")
    return [*guides, *readmes, *(ROOT / "examples").rglob("*.py")]


def deep_imports():
    """Module to the names taken from it, wherever a document or an example imports one."""
    found = {module: set(names) for module, names in SENT.items()}
    for path in _documents():
        text = path.read_text()
        for module, names in re.findall(r"from (parallel_\w+(?:\.\w+)+) import ([\w, ]+)", text):
            found.setdefault(module, set()).update(n.strip() for n in names.split(","))
        for module in re.findall(r"`(parallel_\w+(?:\.[a-z_]+)+)`", text):
            found.setdefault(module, set())
    return found


def public_names():
    """What each package's `__init__` hands on, names that it imports late included."""
    found = {}
    for package in PACKAGES:
        path = ROOT / "packages" / package.replace("_", "-") / "src" / package / "__init__.py"
        nodes = ast.walk(ast.parse(path.read_text()))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        ours = [node for node in imports if (node.module or "").startswith("parallel_")]
        found[package] = sorted({a.asname or a.name for node in ours for a in node.names})
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_recorded_name_is_still_offered(package):
    recorded = json.loads(RECORD.read_text())["public"][package]
    offered = importlib.import_module(package)
    assert [name for name in recorded if not hasattr(offered, name)] == []


def test_every_recorded_module_still_has_its_names():
    for module, names in json.loads(RECORD.read_text())["deep"].items():
        found = importlib.import_module(module)
        assert [name for name in names if not hasattr(found, name)] == [], module


def test_documents_name_modules_that_exist():
    found = deep_imports()
    assert "parallel_ckpt.convert" in found
    for module, names in found.items():
        imported = importlib.import_module(module)
        assert [name for name in names if not hasattr(imported, name)] == [], module


if __name__ == "__main__":
    deep = {module: sorted(names) for module, names in sorted(deep_imports().items())}
    RECORD.write_text(json.dumps({"public": public_names(), "deep": deep}, indent=1) + "\n")
