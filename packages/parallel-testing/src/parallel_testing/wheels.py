"""One of our packages installed alone, from its wheel, as a user has it.

An import which the package does not declare fails there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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
    """Output of a command that ends with `code` within its deadline; stderr only of a failure."""
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCH and k != "PYTHONPATH"}
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


def install(package: str, folder: Path, *, root: Path) -> Path:
    """Interpreter of a new environment that holds `package` and what it declares, as locked.

    `root` is the repository's folder.
    """
    uv = shutil.which("uv") or str(root / ".uv/bin/uv")
    wheels, python = folder / "wheels", folder / "venv/bin/python"
    run(uv, "build", "--quiet", "--all-packages", "--wheel", "--out-dir", wheels, cwd=root)
    run(
        uv, "export", "--quiet", "--locked", "--package", package, "--no-hashes",
        "--no-emit-workspace", "--no-annotate", "--output-file", folder / "lock.txt",
        cwd=root,
    )  # fmt: skip
    run(uv, "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
    run(
        uv, "pip", "install", "--quiet", "--python", python, "--find-links", wheels,
        "--constraint", folder / "lock.txt", package,
        cwd=folder, timeout_s=600,
    )  # fmt: skip
    run(uv, "pip", "check", "--quiet", "--python", python, cwd=folder)
    return python


def installed_names(python: Path, cwd: Path) -> set[str]:
    """Distributions of an environment."""
    return set(run(python, "-c", NAMES, cwd=cwd).split())


def ours(names: set[str]) -> set[str]:
    """Those of this repository."""
    return {name for name in names if name.startswith("parallel-")}
