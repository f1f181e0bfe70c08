"""Every command's flags and defaults, as the help shows them: a change of these is seen.

The snapshot beside this file is written anew by `python tests/test_command_line.py`.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SNAPSHOT = Path(__file__).with_name("command_line.json")
TRAINING = [f"train --policy.type {name}" for name in ("act", "wam", "reward")]
OTHERS = ["resume", "plan", "inspect", "verify", "convert", "publish", "evaluate", "report"]
COMMANDS = [*TRAINING, *OTHERS, "doctor"]


def flags_of(help_text):
    """Flags by their spelling, with the default that the help gives; without the prose.

    In a box a flag stands one column in, its help text beside it or further in.
    """
    found, current = {}, None
    for line in help_text.splitlines():
        row = line.strip("│").rstrip()
        flag, _, beside = re.sub(r"  +", "\0", row.strip()).partition("\0")
        if re.match(r" (-|[A-Z_{}|]+(  |$))", row):
            current, found[flag] = flag, beside
        elif row.startswith("    ") and current is not None:
            found[current] = f"{found[current]} {row.strip()}".strip()
    return {flag: _default(text) for flag, text in found.items()}


def _default(text):
    shown = re.search(r"\(((?:default:|required|optional|repeatable|sets).*)\)$", text)
    return shown[1] if shown else ""


def command_line():
    """Flags and defaults of every command, read in processes as a person's terminal would."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(COMMANDS, pool.map(_flags, COMMANDS), strict=True))


def _flags(command):
    done = subprocess.run(
        [sys.executable, "-m", "parallel_train", *command.split(), "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
    )
    return flags_of(done.stdout)


def test_every_flag_and_default_is_as_recorded():
    assert command_line() == json.loads(SNAPSHOT.read_text())


def test_the_snapshot_holds_flags_of_every_section():
    recorded = json.loads(SNAPSHOT.read_text())
    assert set(recorded) == set(COMMANDS)
    act = recorded["train --policy.type act"]
    sections = {flag.split(".")[0] for flag in act if "." in flag}
    assert {"--policy", "--dataset", "--optimizer", "--parallelism", "--accelerator"} <= sections
    assert act["--steps INT"] == "default: 400"


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(command_line(), indent=1, ensure_ascii=False) + "\n")
