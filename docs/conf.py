"""How Sphinx makes a site of the guide: `nox -s docs`, then open docs/_site/index.html.

The pages stay plain Markdown, as a reader of the repository sees them. The API reference is made
from the docstrings of every public name, which `tests/public_names.json` records.
"""

import importlib
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
os.environ["PARALLEL_DEVICE"] = "cpu"  # nothing runs here, and a GPU need not be touched

project = "parallel"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "parallel"
exclude_patterns = ["_site"]
root_doc = "index"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return "autoexception" if issubclass(value, BaseException) else "autoclass"
    return "autofunction" if callable(value) else "autodata"


def _api_page(module: str, names: list[str]) -> str:
    """One package's public names, as a page with a directive for each."""
    found = importlib.import_module(module)
    blocks = [f"# {module}\n"]
    for name in names:
        kind = _kind(getattr(found, name))
        members = "   :members:\n" if kind in ("autoclass", "autoexception") else ""
        blocks.append(f"```{{eval-rst}}\n.. {kind}:: {module}.{name}\n{members}```\n")
    return "\n".join(blocks)


def _write(path: Path, text: str) -> None:
    # Only what has changed: Sphinx reads a page anew when its file is new.
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _generated_pages() -> None:
    record = json.loads((ROOT / "tests/public_names.json").read_text(encoding="utf-8"))
    modules = {**record["public"], **{m: names for m, names in record["deep"].items() if names}}
    for module, names in modules.items():
        _write(DOCS / "_api" / f"{module}.md", _api_page(module, names))
    listed = "\n".join(sorted(modules))
    _write(
        DOCS / "_api/index.md",
        "# API reference\n\nWhat each package offers: every other name may change.\n\n"
        f"```{{toctree}}\n{listed}\n```\n",
    )
    for package in sorted((ROOT / "packages").iterdir()):
        changes = package / "CHANGELOG.md"
        if changes.exists():
            text = changes.read_text(encoding="utf-8").replace(
                "# Changelog", f"# {package.name}", 1
            )
            _write(DOCS / "_changes" / f"{package.name}.md", text)
    names = "\n".join(sorted(path.stem for path in (DOCS / "_changes").glob("parallel-*.md")))
    _write(DOCS / "_changes/index.md", f"# Changes\n\n```{{toctree}}\n{names}\n```\n")


def _name_files_of_the_repository(app: object, page: str, source: list[str]) -> None:
    """A link to a README outside of `docs` becomes its name: the site does not hold that page."""
    source[0] = re.sub(r"\[([^\]]*)\]\((?:\.\./)+([^)#]+\.md)[^)]*\)", r"\1 (`\2`)", source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _name_files_of_the_repository)


_generated_pages()
