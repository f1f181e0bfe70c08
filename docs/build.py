"""Check the documentation and write its generated page.

python docs/build.py            # fails on a dead link, an unknown command or flag, an outdated page
python docs/build.py --write    # writes docs/reference.md
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from parallel_config.codec import to_plain
from parallel_train.cli.flags import flag_table
from parallel_train.cli.parsing import COMMANDS
from parallel_train.config import TrainConfig
from parallel_train.policies.registry import POLICIES

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs/reference.md"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Every page that a reader of the repository may open."""
    # What begins with _ is made for the site.
    guide = [page for page in ROOT.glob("docs/**/*.md") if "/_" not in page.as_posix()]
    return sorted({*ROOT.glob("*.md"), *guide, *ROOT.glob("packages/*/*.md")})


def problems() -> Iterator[str]:
    """One line for each problem."""
    for page in pages():
        text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT)
        for target in LINK.findall(text):
            path = target.partition("#")[0]
            if path and "://" not in target and not (page.parent / path).exists():
                yield f"{name}: dead link {target}"
        for language, block in FENCE.findall(text):
            if language == "bash":
                for line in block.replace("\\\n", " ").splitlines():
                    yield from (f"{name}: {problem}: {line.strip()}" for problem in _command(line))
    if REFERENCE.read_text(encoding="utf-8") != reference():
        yield "docs/reference.md is outdated. Run: python docs/build.py --write"


def _command(line: str) -> Iterator[str]:
    words = shlex.split(line, comments=True)
    if "ptrain" in words:
        words = words[words.index("ptrain") + 1 :]
    elif "parallel_train" in words:
        words = words[words.index("parallel_train") + 1 :]
    else:
        return
    if not words or words[0].startswith("-"):
        return  # `ptrain --help` and the like: no command to check
    command = COMMANDS.get(words[0])
    if command is None:
        yield f"unknown command {words[0]!r}"
        return
    known = _flags(command)
    for word in words[1:]:
        flag = word.partition("=")[0].removeprefix("--").replace("-", "_").replace("no_", "", 1)
        if word.startswith("--") and flag not in known:
            yield f"unknown flag {word!r}"


def _flags(command: type) -> set[str]:
    required = {
        f.name: ""
        for f in dataclasses.fields(command)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    names = flag_table(command(**required))
    found = {name.removeprefix("run.").removeprefix("launch.") for name in names}
    for policy in POLICIES.names():
        config = POLICIES.resolve(policy, trusted=True)()
        found |= {f"policy.{name}" for name in flag_table(config)}
    return found | {"policy.type"}


def reference() -> str:
    """Every flag with its default and help, from the dataclasses."""
    lines = [
        "# Reference of every flag",
        "",
        "Generated from the dataclasses by `python docs/build.py --write`.",
        "The same names are the keys of `train_config.json` and of config files.",
    ]
    sections = [("", TrainConfig())]
    sections += [
        (f"policy (--policy.type {name})", POLICIES.resolve(name, trusted=True)())
        for name in POLICIES.names()
    ]
    for title, config in sections:
        lines += ["", f"## {title or 'run'}", "", "| flag | default | meaning |", "|---|---|---|"]
        prefix = "policy." if title else ""
        lines += [
            row for row in _rows(config, prefix) if title or not row.startswith("| `--policy")
        ]
    return "\n".join(lines) + "\n"


def _rows(config: object, prefix: str) -> Iterator[str]:
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _rows(value, f"{prefix}{field.name}.")
            continue
        meaning = _docs(type(config)).get(field.name, "").replace("|", "\\|")
        choices = _choices(hints[field.name])
        if choices:
            meaning += f" One of: {', '.join(f'`{choice}`' for choice in choices)}."
        yield f"| `--{prefix}{field.name}` | `{to_plain(value)}` | {meaning} |"


def _choices(hint: object) -> list[str]:
    """The words that a flag takes, where they are few: of a Literal, or of an Enum."""
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [str(choice.value) for choice in hint]
    # `X | None` is read as X.
    return [choice for option in get_args(hint) for choice in _choices(option)]


def _docs(cls: type) -> dict[str, str]:
    """The string under each field, on one line, by the name of the field."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def main() -> None:
    """Write the reference, or check all pages."""
    if "--write" in sys.argv[1:]:
        REFERENCE.write_text(reference(), encoding="utf-8")
        return
    found = list(problems())
    print("\n".join(found) or f"{len(pages())} pages are right")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
