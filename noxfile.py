"""The project's checks. `nox` runs what CI runs; `nox -l` lists everything.

The suite of a package runs against built wheels in its own environment. So an import that the
package does not declare fails there. The shared workspace environment would hide it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nox
from nox.virtualenv import UV

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False

ROOT = Path(__file__).parent
PACKAGES = (
    "parallel-config",
    "parallel-engine",
    "parallel-ckpt",
    "parallel-publish",
    "parallel-train",
)
EXTRAS = {"parallel-train": "[vision,sim,tensorboard,plot]"}
"""What a package's suite needs beyond the package."""
CPU = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PARALLEL_DEVICE": "cpu",
    "PYTHONDONTWRITEBYTECODE": "",  # without bytecode, importing torch takes twice as long
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_OFFLINE": "",
}
SIDE_BY_SIDE = ("-q", "-n", "3", "--dist", "loadfile")
"""Tests wait for processes: three keep two cores busy. A file stays together, for its fixtures."""

nox.options.sessions = ["lint", "types", "build", "tests", "product", "cpu4", "docs"]


WORKSPACE = ROOT / ".nox" / "workspace"
"""One environment for every session that works on the whole tree: made once, compiled once."""

_done: set[str] = set()


def _workspace(session: nox.Session) -> None:
    """Install the locked workspace, all packages editable, into the shared environment."""
    if "workspace" in _done:
        return
    options = ["--quiet", "--locked", "--all-packages", "--all-groups", "--all-extras"]
    env = {"UV_PROJECT_ENVIRONMENT": str(WORKSPACE)}
    session.run_install(UV, "sync", *options, env=env, external=True)
    _done.add("workspace")


def _run(session: nox.Session, tool: str, *arguments: str, **options: Any) -> Any:
    """Run a tool of the shared environment, as if that environment were active."""
    path = os.pathsep.join([str(WORKSPACE / "bin"), os.environ.get("PATH", "")])
    env = {**options.pop("env", {}), "PATH": path, "VIRTUAL_ENV": str(WORKSPACE)}
    command = str(WORKSPACE / "bin" / tool)
    return session.run(command, *arguments, env=env, external=True, **options)


def _constraints(session: nox.Session) -> Path:
    """The lock's versions, as a constraints file for installing wheels."""
    path = Path(session.create_tmp()).resolve() / "constraints.txt"
    session.run_install(
        "uv",
        "export",
        "--quiet",
        "--locked",
        "--all-packages",
        "--all-groups",
        "--all-extras",
        "--no-emit-workspace",
        "--no-hashes",
        "--no-annotate",
        "--output-file",
        str(path),
    )
    return path


def _wheels(session: nox.Session) -> None:
    """Build every wheel into dist/, once per run of nox: earlier wheels hold older code."""
    if "wheels" not in _done:
        options = ["--quiet", "--all-packages", "--wheel", "--out-dir", "dist", "--clear"]
        session.run_install("uv", "build", *options)
        _done.add("wheels")


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Format and lint."""
    _workspace(session)
    _run(session, "ruff", "format", "--check", ".")
    _run(session, "ruff", "check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Strict types, of all packages in one run: torch is read once."""
    _workspace(session)
    sources = [f"packages/{package}/src" for package in (*PACKAGES, "parallel-testing")]
    _run(session, "mypy", *sources)


@nox.session
def build(session: nox.Session) -> None:
    """Build every wheel into dist/."""
    _wheels(session)


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def tests(session: nox.Session, package: str) -> None:
    """One package's suite, from wheels, in an environment that holds only what it declares."""
    _wheels(session)
    constraints = _constraints(session)
    wheels = ["--find-links", "dist", "--constraint", str(constraints)]
    for ours in (*PACKAGES, "parallel-testing"):
        wheels += ["--reinstall-package", ours]  # a rebuilt wheel keeps its version
    tools = ["pytest", "pytest-xdist"]
    tools += [] if package == "parallel-config" else ["parallel-testing"]
    session.install(*wheels, f"{package}{EXTRAS.get(package, '')}", *tools)
    session.run_install("uv", "pip", "check", env={"VIRTUAL_ENV": session.virtualenv.location})
    session.run("pytest", *SIDE_BY_SIDE, f"packages/{package}/tests", *session.posargs, env=CPU)


@nox.session(venv_backend="none")
def product(session: nox.Session) -> None:
    """The whole product: arrows, import budget, command line, README commands, examples."""
    _workspace(session)
    suites = ["tests", "packages/parallel-testing/tests"]
    _run(session, "pytest", *SIDE_BY_SIDE, *suites, *session.posargs, env=CPU)


@nox.session(venv_backend="none")
def cpu4(session: nox.Session) -> None:
    """The multi-GPU suite, on 4 gloo ranks."""
    _workspace(session)
    env = {**CPU, "PARALLEL_TEST_DEVICE": "cpu"}
    _run(session, "pytest", "-q", "tests-gpu", *session.posargs, env=env)


@nox.session(venv_backend="none")
def long(session: nox.Session) -> None:
    """What `product` runs in a short form, in full: every page as typed, a hundred updates.

    The guide also runs from top to bottom, in an environment that its test makes from wheels.
    """
    _workspace(session)
    suites = session.posargs or ["tests/test_guide.py", "tests/test_numbers.py"]
    _run(session, "pytest", *SIDE_BY_SIDE, *suites, env={**CPU, "PARALLEL_LONG": "1"})


@nox.session(venv_backend="none")
def gpu4(session: nox.Session) -> None:
    """The multi-GPU suite, on 4 GPUs."""
    _on_gpus(session, 4)


@nox.session(venv_backend="none")
def gpu1(session: nox.Session) -> None:
    """The part of the multi-GPU suite that one GPU can run."""
    _on_gpus(session, 1)


def _on_gpus(session: nox.Session, wanted: int) -> None:
    """Missing GPUs are an error; `-- --allow-missing` skips instead. The suite itself counts them.

    `-rs` names whatever was skipped: a run on one GPU cannot show every kind.
    """
    _workspace(session)
    env = {"PARALLEL_TEST_DEVICE": "cuda", "PARALLEL_TEST_GPUS": str(wanted)}
    _run(session, "pytest", "-q", "-rs", "-s", "tests-gpu", *session.posargs, env=env)


@nox.session(python="3.12")
def lowest(session: nox.Session) -> None:
    """The package suites on Python 3.12 and the lowest versions that the packages declare."""
    for package in PACKAGES:
        tools = ["pytest>=8.4", "pytest-xdist>=3.6"]
        tools += [] if package == "parallel-config" else ["-e", "packages/parallel-testing"]
        extras = EXTRAS.get(package, "")
        # Without an upgrade, newer versions from the suite before would stay.
        lowest = ["--upgrade", "--resolution", "lowest-direct"]
        session.install(*lowest, "-e", f"packages/{package}{extras}", *tools)
        session.run("pytest", *SIDE_BY_SIDE, f"packages/{package}/tests", *session.posargs, env=CPU)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Damage every kind of file that a reader takes, at random, for the seconds of the argument."""
    _workspace(session)
    seconds = session.posargs or ["60"]
    _run(session, "python", "packages/parallel-ckpt/tests/fuzz_readers.py", *seconds, env=CPU)


@nox.session(venv_backend="none")
def kill(session: nox.Session) -> None:
    """Kill saves at random moments. The arguments are the number of trials and the seed."""
    _workspace(session)
    arguments = session.posargs or ["200", "0"]
    _run(session, "python", "packages/parallel-ckpt/tests/test_crash.py", *arguments, env=CPU)


@nox.session(venv_backend="none")
def power(session: nox.Session) -> None:
    """Cut the power after every call of a save. The arguments are the states and the processes."""
    _workspace(session)
    arguments = session.posargs or ["100000", "2"]
    _run(session, "python", "packages/parallel-ckpt/tests/test_power_loss.py", *arguments, env=CPU)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Check every link, command and flag in the documentation, and make the site of it."""
    _workspace(session)
    _run(session, "python", "docs/build.py", env=CPU)
    # A warning of Sphinx is a dead link or a docstring that it cannot read.
    options = ["-q", "--fail-on-warning", "--keep-going"]
    _run(session, "sphinx-build", *options, "docs", "docs/_site", env=CPU)


if os.environ.get("CI"):
    nox.options.stop_on_first_error = True
