"""The guide's policy of one's own: its files are the example's, and its commands run."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/02_own_policy"
PAGE = (ROOT / "docs/own-policy.md").read_text(encoding="utf-8")
HAS_SIM = importlib.util.find_spec("metaworld") is not None  # importing it sets variables
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def on_path(*folders):
    """The environment in which these folders are importable too."""
    before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *before])}


def install(site):
    """What `pip install -e` leaves behind: the sources on the path, and the entry points."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"my_policies-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: my-policies\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return on_path(EXAMPLE / "src", site)


def commands():
    """The page's command lines, each with the variables in front of it."""
    for language, block in FENCE.findall(PAGE):
        for line in block.splitlines() if language == "bash" else ():
            words = shlex.split(line)
            at = words.index("ptrain")
            yield dict(word.split("=", 1) for word in words[:at]), words[at + 1 :]


def snippet():
    (found,) = [block for _, block in FENCE.findall(PAGE) if "load_policy(" in block]
    return found


def run_python(code, cwd, env):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


def test_the_page_shows_the_files_of_the_example():
    shown = re.findall(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert {path for path, _ in shown} == {
        "pyproject.toml",
        "src/my_policies/configuration.py",
        "src/my_policies/modeling.py",
    }
    for path, text in shown:
        assert text == (EXAMPLE / path).read_text(encoding="utf-8"), path


def test_the_commands_of_the_page_run_one_after_another(ptrain, tmp_path):
    by_path = [(env, words) for env, words in commands() if "PYTHONPATH" in env]
    by_name = [words for env, words in commands() if not env]
    assert (len(by_path), len(by_name)) == (2, 5)
    sources = on_path(EXAMPLE / "src")
    for env, words in by_path:
        assert env == {"PYTHONPATH": "src"}
        ptrain(*words, env=sources)
    assert [row["step"] for row in ptrain.rows("outputs/by_path")] == list(range(1, 81))
    assert 0 < ptrain.rows("outputs/by_path")[0]["valid"] <= 1

    installed = install(tmp_path / "site")
    said = {}
    for words in by_name:
        if words[0] == "evaluate" and not HAS_SIM:
            pytest.skip("needs the extra sim")
        said[words[0]] = ptrain(*words, env=installed)
    assert "fsdp" in said["train"]
    assert "(step 300)" in said["resume"]
    assert "blocks.2" in said["plan"]
    assert "policy" in said["evaluate"]
    rows = ptrain.rows("outputs/mlp")
    assert rows[-1]["step"] == 400
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    done = run_python(snippet(), tmp_path, {**ptrain.environ, **installed})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor([[")


def test_a_path_in_a_checkpoint_is_only_taken_when_the_user_repeats_it(ptrain, tmp_path):
    env = on_path(EXAMPLE / "src")
    path = "my_policies.modeling:MLPPolicy"
    text = ptrain("train", "--policy.type", path, "--steps", 2, "--output_dir", "run", env=env)
    assert f"ptrain resume run --policy.type {path} --steps 4" in text
    refused = ptrain("resume", "run", "--steps", 3, env=env, code=2)
    assert f"If you trust it, repeat it: --policy.type {path}." in refused
    other = ["--policy.type", "my_policies.configuration:MLPConfig"]
    assert "repeat it" in ptrain("resume", "run", "--steps", 3, *other, env=env, code=2)
    assert "(step 2)" in ptrain("resume", "run", "--steps", 3, "--policy.type", path, env=env)
    assert "repeat it" in ptrain("evaluate", "run", env=env, code=2)
    load = "from parallel_train.policies.loading import load_policy; load_policy('run'{})"
    environ = {**ptrain.environ, **env}
    assert "repeat it" in run_python(load.format(""), tmp_path, environ).stderr
    done = run_python(load.format(f", policy_type={path!r}"), tmp_path, environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not HAS_SIM, reason="needs the extra sim")
def test_it_is_evaluated_by_its_path(ptrain, tmp_path):
    env = on_path(EXAMPLE / "src")
    path = ["--policy.type", "my_policies.modeling:MLPPolicy"]
    ptrain("train", *path, "--steps", 1, "--output_dir", "run", env=env)
    said = ptrain("evaluate", "run", *path, "--episodes", 1, "--max_steps", 5, env=env)
    assert "kept in" in said
    assert (tmp_path / "run/evaluations/000001/reach-v3_failed.gif").is_file()


def test_flags_of_ones_own_are_checked_and_shown(ptrain):
    env = on_path(EXAMPLE / "src")
    flags = ["train", "--policy.type", "my_policies.configuration:MLPConfig"]
    assert "Residual blocks." in ptrain(*flags, "--help", env=env)
    wrong = ptrain(*flags, "--policy.width", 0, "--steps", 0, env=env, code=2)
    assert "policy.width = 0, but it must be at least 1." in wrong
    assert "steps = 0" in wrong
    assert "dim_model" in ptrain(*flags, "--policy.dim_model", 8, env=env, code=2)
