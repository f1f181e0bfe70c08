"""Installs one of our packages alone, from its wheel, as a user does.

There an import fails if the package does not declare the dependency.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from parallel_config.environment import without_launch

PROCESS = {
    "OMP_NUM_THREADS": "1",
    "PARALLEL_DEVICE": "cpu",
    "PYTHONDONTWRITEBYTECODE": "",  # a fresh environment compiles torch once, not at each start
}
NAMES = """
from importlib.metadata import distributions
print(*sorted({d.name.lower().replace("_", "-") for d in distributions()}))
"""


def run(*words: object, cwd: Path, code: int = 0, timeout_s: float = 300, **variables: str) -> str:
    """Run a command and return its output, with stderr only if `code` is not 0.

    The command must end with `code` within `timeout_s` seconds.
    """
    # PYTHONPATH would let the sources be found in place of the wheels, and launch variables would
    # make the command wait for other ranks.
    kept = without_launch(os.environ)
    kept.pop("PYTHONPATH", None)
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env={**kept, **PROCESS, **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr if code else done.stdout


def install(package: str, folder: Path, *, root: Path, extras: Sequence[str] = ()) -> Path:
    """Make an environment with `package` and its locked dependencies; returns its interpreter.

    `root` is the folder of the repository. `extras` are those of the package.
    """
    chosen = [word for extra in extras for word in ("--extra", extra)]
    named = f"{package}[{','.join(extras)}]" if extras else package
    # A contributor may have uv in .uv alone (CONTRIBUTING.md).
    uv = shutil.which("uv") or str(root / ".uv/bin/uv")
    wheels, python = folder / "wheels", folder / "venv/bin/python"
    run(uv, "build", "--quiet", "--all-packages", "--wheel", "--out-dir", wheels, cwd=root)
    run(
        # Without the workspace: our own packages come from the wheels that were just built.
        uv, "export", "--quiet", "--locked", "--package", package, *chosen, "--no-hashes",
        "--no-emit-workspace", "--no-annotate", "--output-file", folder / "lock.txt",
        cwd=root,
    )  # fmt: skip
    run(uv, "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
    run(
        uv, "pip", "install", "--quiet", "--python", python, "--find-links", wheels,
        "--constraint", folder / "lock.txt", named,
        cwd=folder, timeout_s=600,
    )  # fmt: skip
    # A resolver of the workspace ignores the version bounds between our own packages; this does
    # not.
    run(uv, "pip", "check", "--quiet", "--python", python, cwd=folder)
    return python


def installed_names(python: Path, cwd: Path) -> set[str]:
    """Names of the distributions in an environment."""
    return set(run(python, "-c", NAMES, cwd=cwd).split())


def ours(names: set[str]) -> set[str]:
    """The names that belong to this repository."""
    return {name for name in names if name.startswith("parallel-")}
