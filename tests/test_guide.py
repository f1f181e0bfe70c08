"""Every command of the README and the guide runs, in the order of its page, on a small model.

A block whose first line is `# not run by the tests: WHY` is left out. Numbers that only make a run
long are divided by 100, and a run that names no policy trains a small one.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_testing.hub_fixture import local_hub  # noqa: F401
from parallel_testing.programs import clean_environment, ranks_of, run_program
from parallel_testing.wheels import install

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_RUN = "# not run by the tests: "
SMALL = "--policy.dim_model 32 --policy.dim_feedforward 64 --policy.n_vae_layers 1"
LONG = ("--steps", "--checkpoint.save_freq", "--eval.freq", "--episodes")
PAGES = ["README.md", "packages/parallel-train/README.md"]
PAGES += sorted(
    f"docs/{page.name}"
    for page in (ROOT / "docs").glob("*.md")
    if page.name not in ("own-policy.md", "reference.md")  # has a test of its own; no commands
)

LONG_FORM = bool(os.environ.get("PARALLEL_LONG"))
AS_TYPED = PAGES if LONG_FORM else ["README.md", "docs/launching.md"]
"""The pages whose commands start an interpreter each, as a person's do: all in `nox -s long`."""


def commands(page):
    """Lines of bash blocks that run something of ours."""
    for block in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        if block.startswith(NOT_RUN):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(ptrain|torchrun|python examples/|hf) ?", line):
                yield line


def small(words):
    """The same command, of a size for a test."""
    changed = [
        str(max(1, int(word) // 100)) if before in LONG and word.isdigit() else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    if "train" in words and "--config" not in words and "--policy.type" not in words:
        changed += SMALL.split()
        changed += [] if "--steps" in words else ["--steps", "4"]
        changed += [] if "--dataset.root" in words else ["--dataset.episodes", "0", "1"]
    return [word.replace("000400", "000004") for word in changed]


def executable(words):
    """`ptrain` and its neighbours as modules of this interpreter."""
    modules = {"ptrain": "parallel_train", "torchrun": "torch.distributed.run"}
    if words[0] in modules:
        return [sys.executable, "-m", modules[words[0]], *words[1:]]
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def run(words, folder, environ, forked):
    """The command's end. Forked, it and its ranks do not wait until torch is imported."""
    if forked and words[0] == "ptrain":
        ranks, words = ranks_of(words[1:])
        return run_program("parallel_train", words, cwd=folder, env=environ, ranks=ranks)
    return subprocess.run(
        executable(words), cwd=folder, env=environ, capture_output=True, text=True, timeout=240
    )


def in_shell(line):
    """What comes before and after a redirection."""
    command, _, target = line.partition(">")
    return shlex.split(command, comments=True), target.split("#")[0].strip()


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))])
def test_the_commands_of(page, tmp_path, ptrain, hub):
    environ = {**ptrain.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = list(commands(page))
    makes = [
        line for line in lines if re.match(r"ptrain train .*outputs/first(?!.*--resume)", line)
    ]
    if "outputs/first" in " ".join(lines) and not makes:  # the first page made it
        ptrain(*small(["train", "--output_dir", "outputs/first"]))
    for line in lines:
        words, target = in_shell(line)
        done = run(small(words), tmp_path, environ, forked=page not in AS_TYPED)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        if target:
            (tmp_path / target).write_text(done.stdout)


def in_order():
    """The guide's pages as its index lists them, the README first."""
    listed = re.findall(
        r"^- \[.*?\]\((.*?\.md)\)", (ROOT / "docs/index.md").read_text(), re.MULTILINE
    )
    return ["README.md", *(f"docs/{name}" for name in listed if f"docs/{name}" in PAGES)]


def test_the_index_lists_every_page():
    elsewhere = {"docs/index.md", "packages/parallel-train/README.md"}
    assert sorted(in_order()) == sorted(set(PAGES) - elsewhere)


@pytest.mark.skipif(not LONG_FORM, reason="takes minutes: nox -s long")
def test_the_guide_from_top_to_bottom_in_an_environment_of_its_own(tmp_path, hub):
    """As a reader has it: the wheels, one folder, one page after another."""
    extras = ["plot", "sim", "tensorboard", "vision"]
    python = install("parallel-train", tmp_path, root=ROOT, extras=extras)
    environ = {**clean_environment(), "PATH": f"{python.parent}:{os.environ['PATH']}"}
    environ.pop("PYTHONPATH", None)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for page in in_order():
        for line in commands(page):
            words, target = in_shell(line)
            done = subprocess.run(
                small(words), cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240
            )
            assert done.returncode == 0, f"{page}: {line}\n{done.stdout}\n{done.stderr}"
            if target:
                (tmp_path / target).write_text(done.stdout)


def test_every_page_has_commands_that_run():
    found = {page: list(commands(page)) for page in PAGES}
    assert len(found["README.md"]) >= 5
    assert sum(len(lines) for lines in found.values()) >= 25
