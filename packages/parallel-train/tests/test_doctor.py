"""`ptrain doctor` in processes of its own, with and without something wrong."""

import json
import os
import socket

import pytest

from parallel_config.environment import without_launch
from parallel_testing.programs import run_program
from parallel_train.cli.doctor import meets, shared_memory


@pytest.fixture
def doctor(tmp_path):
    """Exit code and findings by name."""

    def look(*flags, **environ):
        env = {**without_launch(os.environ), **environ}
        done = run_program("parallel_train", ["doctor", "--json", *flags], cwd=tmp_path, env=env)
        assert not done.stderr, done.stderr
        return done.returncode, {found["name"]: found for found in json.loads(done.stdout)}

    return look


def test_a_healthy_machine_passes_every_check(doctor, tmp_path):
    code, found = doctor(OMP_NUM_THREADS="3")
    assert code == 0
    assert {finding["section"] for finding in found.values()} == {
        "installed", "devices", "ranks", "environment", "disk", "options",
    }  # fmt: skip
    for name in ("python", "torch", "accelerate", "pyarrow", "port", "gloo", "flush", "dataset"):
        assert found[name]["level"] == "ok", found[name]
    assert "OMP_NUM_THREADS 3" in found["cpu"]["text"]
    assert "two ranks met" in found["gloo"]["text"]
    assert list(tmp_path.iterdir()) == []  # what was tried is cleared


def test_everything_that_is_wrong_is_named_at_once(doctor, tmp_path):
    (tmp_path / "tyro-0.9.0.dist-info").mkdir()
    (tmp_path / "tyro-0.9.0.dist-info/METADATA").write_text("Name: tyro\nVersion: 0.9.0\n")
    (tmp_path / "file").write_text("")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code, found = doctor(
        "--output_dir", "file/run",
        PYTHONPATH=path, ACCELERATE_USE_DEEPSPEED="true", GLOO_SOCKET_IFNAME="none0",
    )  # fmt: skip
    assert code == 1
    failed = {name: f["text"] for name, f in found.items() if f["level"] == "fail"}
    assert set(failed) == {"tyro", "ACCELERATE_USE_DEEPSPEED", "gloo", "write"}
    assert failed["tyro"] == '0.9.0; pip install "tyro>=1.0.17"'
    assert "hands the model to DeepSpeed" in failed["ACCELERATE_USE_DEEPSPEED"]
    assert "GLOO_SOCKET_IFNAME" in failed["gloo"]
    assert "cannot be written: Not a directory. Use --output_dir." in failed["write"]


def test_notes_alone_do_not_fail_the_doctor(doctor):
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", 29500))
            server.listen()
        except OSError:
            pass  # somebody has it already: as good
        code, found = doctor(
            RANK="0", MASTER_PORT="29500", ACCELERATE_MIXED_PRECISION="no",
            PARALLEL_DEVICE="cpu", PARALLEL_ALLOW_ACCELERATE_ENV="1",
        )  # fmt: skip
    assert code == 0
    assert found["launch"]["level"] == "note"
    assert "MASTER_PORT = '29500', RANK = '0'" in found["launch"]["text"]
    assert "use --standalone" in found["torchrun"]["text"]
    assert "overrides the config" in found["accelerate"]["text"]
    assert "ACCELERATE_MIXED_PRECISION" in found["accelerate"]["text"]
    assert "PARALLEL_DEVICE = 'cpu'" in found["device"]["text"]


def test_little_shared_memory_is_a_note_that_names_loader_workers(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 64 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    (found,) = shared_memory(tmp_path)
    assert found.level == "note"
    assert "--shm-size" in found.text
    assert list(shared_memory(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("version", "rule", "fits"),
    [
        ("2.15.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("2.11", ">=2.11.0", True),
        ("2.0.0", "<2", False),
        ("1.99", "<2", True),
        ("2.0.0.dev20", "!=2.0", True),
    ],
)
def test_versions_are_compared_as_numbers(version, rule, fits):
    assert meets(version, rule) is fits
