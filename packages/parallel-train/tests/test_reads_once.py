"""What a run reads, it reads once: on a network file system each file takes its time."""

import json
import subprocess
import sys
from collections import Counter

SMALL = (
    "--policy.dim_model 32 --policy.dim_feedforward 64 --policy.n_vae_layers 1 --batch_size 4 "
    "--dataset.episodes 0 1 --eval.fraction 0.5 --log_freq 1000"
)
# An audit hook sees every `open` of Python and cannot be taken off again: so a process of its own.
SCRIPT = """
import json, sys
from parallel_train.cli.app import run

opened = []
def hear(event, facts):
    if event == "open" and isinstance(facts[0], str):
        frame, parsed = sys._getframe(1), False
        while frame is not None and not parsed:  # checksums read the same file, but do not parse it
            parsed = frame.f_code.co_name == "read_config_text"
            frame = frame.f_back
        opened.append(facts[0] + (" parsed" if parsed else ""))
sys.addaudithook(hear)
found = []
for words in json.loads(sys.argv[1]):
    assert run(words) == 0
    found.append(opened[:])
    opened.clear()
print(json.dumps(found), file=sys.stderr)
"""


def opened(*commands):
    """Of each command, how often it opened each file."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Counter(paths) for paths in json.loads(done.stderr.splitlines()[-1])]


def test_the_datasets_metadata_and_a_checkpoints_config_are_read_once(tmp_path):
    run = str(tmp_path / "run")
    train = ["train", *SMALL.split(), "--steps", "1", "--output_dir", run]
    trained, resumed = opened(train, ["resume", run, "--steps", "2"])
    for counts in (trained, resumed):
        assert [n for path, n in counts.items() if path.endswith("meta/info.json")] == [1]
        assert [n for path, n in counts.items() if path.endswith("meta/stats.json")] == [1]
    config = "000001/pretrained_model/train_config.json parsed"
    assert [n for path, n in resumed.items() if path.endswith(config)] == [1]


# Replaced before any other module imports the function by its name.
LAUNCH_SCRIPT = """
import json, sys
from collections import Counter
from parallel_config import environment

counts = Counter()
def counted(name, function):
    def call(*args):
        counts[name] += 1
        return function(*args)
    return call
environment.check_environment = counted("environment", environment.check_environment)
environment.LaunchFacts.read = counted("launch", environment.LaunchFacts.read)

from parallel_train.cli.app import run
assert run(json.loads(sys.argv[1])) == 0
print(json.dumps(counts), file=sys.stderr)
"""


def test_a_run_checks_its_environment_once_and_reads_its_launch_where_it_connects(tmp_path):
    """The second time is before torch is there: is this process a rank of a launch?"""
    words = ["train", *SMALL.split(), "--steps", "1", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH_SCRIPT, json.dumps(words)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.splitlines()[-1]) == {"environment": 1, "launch": 2}
