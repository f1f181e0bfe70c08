"""A forked program is like a new interpreter: arguments, folder, environment, outputs, exit."""

import subprocess

import pytest

from parallel_testing.programs import clean_environment, ranks_of, run_program

PROGRAM = """
import atexit, os, sys, threading, time

atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
print(sys.argv[1:], os.getcwd(), os.environ["MINE"], __name__, os.environ.get("RANK"))
print("an error", file=sys.stderr)
rank = int(os.environ.get("RANK", "0"))
if sys.argv[1] == "hang":
    time.sleep(60)
if sys.argv[1] == "raise":
    raise ValueError("of the program")
sys.exit({"message": "in words", "rank": 7 * rank}.get(sys.argv[1]))
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    env = clean_environment({"MINE": "1"})
    return lambda *words, **how: run_program("program", words, cwd=tmp_path, env=env, **how)


def test_it_has_its_arguments_folder_environment_and_end(run, tmp_path):
    done = run("well", 3)
    assert done.returncode == 0
    first, *rest = done.stdout.splitlines()
    assert first == f"['well', '3'] {tmp_path} 1 __main__ None"
    assert rest == ["a thread", "at exit"]
    assert done.stderr == "an error\n"


def test_an_exit_is_the_exit_of_an_interpreter(run):
    raised = run("raise")
    assert raised.returncode == 1
    assert raised.stderr.endswith("ValueError: of the program\n")
    said = run("message")
    assert (said.returncode, said.stderr) == (1, "an error\nin words\n")


def test_ranks_have_a_launch_and_the_first_failure_counts(run):
    done = run("rank", ranks=2)
    assert done.returncode == 7
    assert [line.split()[-1] for line in done.stdout.splitlines() if "__main__" in line] == [
        "0",
        "1",
    ]


def test_what_hangs_is_ended_and_shows_what_it_said(run):
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run("hang", timeout_s=1)
    assert "['hang']" in caught.value.stdout


def test_the_number_of_ranks_is_taken_out_of_the_words():
    assert ranks_of(["train", "--nproc_per_node", 2, "--steps", 3]) == (
        2,
        ["train", "--steps", "3"],
    )
    assert ranks_of(["inspect", "run"]) == (1, ["inspect", "run"])
