"""Train, be killed, resume; on one rank and on several; from the command line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_train.run.folder import default_output_dir


def wait_for(condition, process, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_resumes_to_the_last_bit(ptrain, small, same_numbers, workers):
    """Dropout and the VAE's noise are on; 20 updates of 8 samples pass the end of an epoch."""
    flags = [*small, "--steps", 20, "--checkpoint.save_freq", 10, "--dataset.episodes", 0]
    ptrain("train", *flags, "--output_dir", "whole")
    process = ptrain.start(
        "train", *flags, "--output_dir", "killed", "--dataset.num_workers", workers
    )
    last = ptrain.folder / "killed/checkpoints/last"
    wait_for(lambda: os.path.lexists(last), process)
    process.kill()
    process.communicate()
    assert ptrain.rows("killed")[-1]["step"] < 20
    text = ptrain("resume", "killed")
    assert "(step 10)" in text
    rows = ptrain.rows("whole")
    assert rows[-1]["samples_seen"] > 100  # frames of the one episode: more than an epoch
    same_numbers(ptrain.rows("killed"), rows)
    for name in ("model.safetensors", "config.json"):
        paths = [ptrain.folder / run / "checkpoints/000020/pretrained_model" / name
                 for run in ("whole", "killed")]  # fmt: skip
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_finished_run_says_so_and_goes_on_with_more_steps(ptrain, small):
    flags = [*small, "--steps", 10, "--checkpoint.save_freq", 4]
    flags += ["--accelerator.gradient_accumulation.steps", 3]
    ptrain("train", *flags, "--output_dir", "run")
    kept = sorted(p.name for p in (ptrain.folder / "run/checkpoints").iterdir())
    assert kept == ["000004", "000008", "000010", "last"]
    assert "finished: step 10 of 10" in ptrain("resume", "run")
    text = ptrain("resume", "run", "--steps", 12, "--optimizer.lr", "5e-4")
    assert "changed steps: 10 -> 12" in text
    assert "changed optimizer.lr: 0.001 -> 0.0005" in text
    rows = ptrain.rows("run")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["samples_seen"] == 12 * 8 * 3
    assert rows[10]["lr"] < 5e-4


def test_every_way_to_name_a_checkpoint(ptrain, small, monkeypatch):
    ptrain("train", *small, "--steps", 2, "--output_dir", "runs/a b")
    base = "runs/a b"
    for steps, path in enumerate(
        [
            base,
            base + "/",
            base + "/checkpoints",
            base + "/checkpoints/last",
            base + "/checkpoints/last/",
            base + "/checkpoints/last/pretrained_model",
            base + "/checkpoints/last/pretrained_model/train_config.json",
            ptrain.folder / base / "checkpoints/last",
        ],
        start=3,
    ):
        text = ptrain("resume", path, "--steps", steps)
        # The real step folder is recorded, since the link moves on.
        assert f"checkpoints/{steps - 1:06d} (step {steps - 1})" in text
    moved = ptrain.folder / "moved"
    shutil.move(ptrain.folder / base, moved)
    (moved / "checkpoints/last").unlink()
    assert "(step 10)" in ptrain("resume", "moved", "--steps", 11)
    assert ptrain.rows("moved")[-1]["step"] == 11


def test_resume_auto_starts_continues_and_skips_what_is_damaged(ptrain, small):
    flags = [*small, "--output_dir", "run", "--resume", "auto", "--checkpoint.save_freq", 2]
    ptrain("train", *flags, "--steps", 4)
    weights = ptrain.folder / "run/checkpoints/000004/pretrained_model/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert "model.safetensors has checksum" in ptrain("verify", "run", code=1)
    text = ptrain("train", *flags, "--steps", 6)
    assert "(step 2)" in text
    assert "skipped" in text
    assert "model.safetensors has checksum" in text
    assert [row["step"] for row in ptrain.rows("run")] == [1, 2, 3, 4, 5, 6]
    assert "intact" in ptrain("verify", "run")
    # A damaged checkpoint that is named outright is refused.
    data = bytearray(weights.parents[2].joinpath("000006/manifest.json").read_bytes())
    weights.parents[2].joinpath("000006/manifest.json").write_bytes(data[:-40])
    assert "000006" in ptrain("resume", "run/checkpoints/000006", "--steps", 8, code=2)


def test_an_occupied_folder_is_not_touched(ptrain, small):
    ptrain("train", *small, "--steps", 2, "--output_dir", "run")
    before = (ptrain.folder / "run/metrics.jsonl").read_bytes()
    text = ptrain("train", *small, "--steps", 2, "--output_dir", "run", code=2)
    assert "output_dir = 'run' already holds a run." in text
    assert "ptrain resume run" in text
    assert (ptrain.folder / "run/metrics.jsonl").read_bytes() == before
    assert "does not hold an intact checkpoint" in ptrain(
        "train", *small, "--output_dir", "other", "--resume", "must", code=2
    )


def test_runs_that_start_in_the_same_second_get_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [default_output_dir("my.module:Policy") for _ in range(5)]
    assert len({*names}) == 5
    assert all(Path(name).is_dir() and "_Policy" in name for name in names)


def test_a_refused_run_leaves_no_folder(ptrain):
    ptrain("train", "--dataset.root", "nowhere", code=2)
    assert list(ptrain.folder.iterdir()) == []


def test_what_inspect_says(ptrain, small):
    ptrain("train", *small, "--steps", 2, "--output_dir", "run", "--checkpoint_format", "dcp")
    info = json.loads(ptrain("inspect", "run/checkpoints/last", "--json"))
    assert (info["step"], info["samples_seen"], info["kind"]) == (2, 16, "single")
    assert info["checkpoint_format"] == "dcp"
    assert info["problems"] == []
    assert "health" in ptrain("inspect", "run")


PARITY = ["--policy.dropout", 0, "--policy.no-use_vae", "--steps", 20, "--checkpoint.save_freq", 0]


def test_every_kind_gives_the_numbers_of_one_process(ptrain, small, same_numbers):
    flags = [*small, *PARITY]
    ptrain("train", *flags, "--output_dir", "one")
    rows = ptrain.rows("one")
    for name, ranks, more in [
        ("ddp", 2, ["--batch_size", 4]),
        ("fsdp", 2, ["--batch_size", 4, "--parallelism.dp_shard", -1]),
        (
            "hsdp",
            4,
            ["--batch_size", 1, "--accelerator.gradient_accumulation.steps", 2,
             "--parallelism.dp_replicate", 2, "--parallelism.dp_shard", 2],
        ),
    ]:  # fmt: skip
        ptrain("train", *flags, *more, "--output_dir", name, "--nproc_per_node", ranks)
        same_numbers(ptrain.rows(name), rows, rel=1e-5)
        info = json.loads(ptrain("inspect", f"{name}/checkpoints/last", "--json"))
        assert info["kind"] == name


def test_a_run_goes_on_with_another_number_of_ranks(ptrain, small, same_numbers):
    flags = [*small, *PARITY]
    ptrain("train", *flags, "--output_dir", "whole")
    ptrain(
        "train", *flags, "--batch_size", 4, "--steps", 10, "--scheduler.decay_steps", 20,
        "--parallelism.dp_shard", 2, "--nproc_per_node", 2, "--output_dir", "part",
    )  # fmt: skip
    text = ptrain("resume", "part", "--steps", 20)
    assert "fsdp, dp_replicate=1 x dp_shard=2 = 2 ranks -> single" in text
    assert "keeps the global batch of 8 samples" in text
    same_numbers(ptrain.rows("part"), ptrain.rows("whole"), rel=1e-5)


def test_a_stop_signal_saves_once_and_leaves_with_75(ptrain, small):
    flags = [*small, "--steps", 10**6, "--checkpoint.save_freq", 0, "--output_dir", "run"]
    process = ptrain.start("train", *flags, "--nproc_per_node", 2)
    metrics = ptrain.folder / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 500, process)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 75, text
    rows = ptrain.rows("run")
    step = rows[-1]["step"]
    info = json.loads(ptrain("inspect", "run/checkpoints/last", "--json"))
    assert info["step"] == step
    assert info["samples_seen"] == rows[-1]["samples_seen"] == step * 16
    assert f"(step {step})" in ptrain("resume", "run", "--steps", step + 2, "--nproc_per_node", 2)


def test_degrees_that_do_not_fit_end_with_two_on_every_rank(ptrain, small):
    text = ptrain(
        "train", *small, "--output_dir", "run", "--parallelism.dp_shard", 3,
        "--nproc_per_node", 2, code=2,
    )  # fmt: skip
    assert text.count("makes 3, but this launch has 2 ranks") == 1
    assert not (ptrain.folder / "run").exists()


def test_a_foreign_backend_in_the_environment_is_refused_by_name(ptrain, small):
    env = {"ACCELERATE_USE_DEEPSPEED": "true"}
    text = ptrain("train", *small, "--output_dir", "run", env=env, code=2)
    assert "ACCELERATE_USE_DEEPSPEED = 'true'" in text


def test_an_output_folder_that_cannot_be_written(ptrain, small):
    (ptrain.folder / "file").write_text("")
    text = ptrain("train", *small, "--output_dir", "file/run", code=2)
    assert "output_dir = 'file/run' cannot be written: Not a directory" in text


def test_a_step_that_was_being_replaced_is_put_back(ptrain, small):
    """Killed between the two renames of a re-save: the former step lies aside, whole."""
    ptrain("train", *small, "--steps", 4, "--checkpoint.save_freq", 2, "--output_dir", "run")
    folder = ptrain.folder / "run/checkpoints"
    (folder / "000004").rename(folder / ".000004.old-abc123")
    assert "(step 4)" in ptrain("resume", "run", "--steps", 5)
    assert (folder / "000004/manifest.json").is_file()


def test_a_full_disk_is_told_in_one_line_and_costs_no_checkpoint(ptrain, small):
    """A file size limit stands in for the full disk: the same error path, without a mount."""
    ptrain("train", *small, "--steps", 2, "--output_dir", "run")
    script = (
        "import resource, signal, sys; from parallel_train.cli.app import run; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        "sys.exit(run(['resume', 'run', '--steps', '4']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ptrain.folder, env=ptrain.environ, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode != 0
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert "intact" in ptrain("verify", "run")
    assert "(step 2)" in ptrain("resume", "run", "--steps", 4)


def test_from_shards_to_a_model_that_can_be_shared(ptrain, small):
    flags = [*small, "--batch_size", 4, "--steps", 2, "--checkpoint_format", "dcp"]
    ptrain(
        "train", *flags, "--output_dir", "run", "--parallelism.dp_shard", 2, "--nproc_per_node", 2
    )
    # A launcher's variables do not make the converter wait for peers.
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert "read back and compared" in ptrain("convert", "run", "--output", "model", env=env)
    assert (ptrain.folder / "model/model.safetensors").is_file()
    text = ptrain("publish", "run", "--repo_id", "user/name", "--dry_run")
    assert "would publish" in text
    assert "model.safetensors" in text
    assert "repo_id" in ptrain("publish", "run", "--repo_id", "bad//name", "--dry_run", code=2)


def test_a_plan_needs_no_ranks(ptrain):
    plan = json.loads(
        ptrain(
            "plan", "--policy.type", "wam", "--policy.preset", "6b", "--world_size", 64,
            "--parallelism.dp_replicate", 8, "--parallelism.dp_shard", 8, "--json",
        )
    )  # fmt: skip
    assert (plan["kind"], plan["world_size"]) == ("hsdp", 64)
    assert plan["num_params"] > 5.5e9
    assert plan["param_bytes"] < 4 * plan["num_params"] / 8 * 1.1
    assert "makes 2, but this launch has 3 ranks" in ptrain(
        "plan", "--world_size", 3, "--parallelism.dp_shard", 2, code=2
    )


def test_what_a_resume_cannot_do_is_refused(ptrain, small):
    ptrain("train", *small, "--steps", 2, "--output_dir", "run")
    text = ptrain("resume", "run", "--steps", 3, "--output_dir", "elsewhere", code=2)
    assert "output_dir = 'elsewhere', but a run continues in its own folder" in text
    text = ptrain("resume", "run", "--steps", 3, "--optimizer.type", "sgd", code=2)
    assert "optimizer.type = 'sgd', but the checkpoint holds the state of 'adamw'" in text
    assert "(step 2)" in ptrain("resume", "run", "--steps", 3, "--output_dir", "run")


def test_a_run_that_diverges_says_so_in_one_line(ptrain, small):
    text = ptrain("train", *small, "--steps", 9, "--optimizer.lr", "1e30", code=1)
    assert "not finite, before the update. Look at the data, or use a lower learning" in text
    assert "Traceback" not in text
