"""`ptrain` itself on every kind: loaders, evaluation, background saves, resume, convert."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from parallel_ckpt import StepFolder, read_manifest
from parallel_config import CheckpointConfig, CheckpointFormat, ParallelismConfig, SchedulerConfig
from parallel_config.environment import without_launch
from parallel_engine import from_main
from parallel_testing.programs import run_ptrain
from parallel_testing.ranks import run_ranks

VIDEO = Path(__file__).parents[1] / "packages/parallel-train/tests/data/lerobot_v3_video"
TOP = "observation.images.top"
KINDS = ("single", "ddp", "fsdp", "hsdp")
GLOBAL_BATCH, STEPS, RESUMED_AT = 8, 3, 2


def policies(device):
    """Each kind of policy, as small as it goes; without noise where it can be.

    `act` and `reward` see pictures through 11 million parameters. On the host that takes minutes
    here; there the launcher's run shows it.
    """
    from parallel_train.policies.act.configuration import ACTConfig
    from parallel_train.policies.reward.configuration import RewardConfig
    from parallel_train.policies.wam.configuration import WAMConfig

    cameras = (TOP,) if device == "cuda" else ()
    small = {"dim_model": 32, "dropout": 0.0, "cameras": cameras}
    return {
        "act": ACTConfig(dim_feedforward=64, chunk_size=4, use_vae=False, **small),
        "reward": RewardConfig(horizon_s=0.5, **small),
        "wam": WAMConfig(
            width=24, action_width=16, n_heads=2, head_dim=8, n_layers=2, chunk_size=4,
            image_size=16, patch_size=8, world_frames=2, world_stride=2, cameras=(TOP,),
        ),
    }  # fmt: skip


def config_of(policy, device, degrees, ranks, folder):
    from parallel_train.config import TrainConfig
    from parallel_train.data.config import DatasetConfig
    from parallel_train.data.split import EvalConfig

    return TrainConfig(
        policy=policy,
        dataset=DatasetConfig(root=str(VIDEO), num_workers=2 if device == "cuda" else 0),
        eval=EvalConfig(episodes=(2,), freq=RESUMED_AT, max_samples=GLOBAL_BATCH),
        output_dir=str(folder),
        steps=STEPS,
        batch_size=GLOBAL_BATCH // ranks,
        log_freq=1000,
        scheduler=SchedulerConfig(type="constant"),
        parallelism=ParallelismConfig(**degrees),
        checkpoint=CheckpointConfig(save_freq=RESUMED_AT, async_save=True),
        checkpoint_format=CheckpointFormat.SAFETENSORS_DCP,
    )


def rows(run):
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def as_it_was_at(step, run, copy):
    """A copy of the run as if it had ended with that step."""
    shutil.copytree(run, copy, symlinks=True)
    shutil.rmtree(copy / f"checkpoints/{STEPS:06d}")
    (copy / "checkpoints/last").unlink()
    (copy / "checkpoints/last").symlink_to(f"{step:06d}")


def train_and_resume(device, degrees, ranks, folder):
    """By policy: what the run's metrics say, and what they say after a resume half way."""
    from parallel_train.run.job import Job
    from parallel_train.run.signals import StopRequest
    from parallel_train.train import train

    found = {}
    for name, policy in policies(device).items():
        run, copy = folder / name, folder / f"{name}-resumed"
        config = config_of(policy, device, degrees, ranks, run)
        with StopRequest() as stop:
            train(Job(config=config), stop)
            from_main(lambda run=run, copy=copy: as_it_was_at(RESUMED_AT, run, copy))
            config = dataclasses.replace(config, output_dir=str(copy))
            train(Job(config=config, resume="must"), stop)
        found[name] = rows(run), rows(copy)
    return found


def chunks(run):
    """Into how many pieces the weights of the run's last checkpoint are cut at most."""
    folder = StepFolder(run / "checkpoints" / f"{STEPS:06d}")
    stored = FileSystemReader(folder.dcp).read_metadata().state_dict_metadata
    return max(len(tensor.chunks) for tensor in stored.values())


def require(kind, layouts, world_size):
    if kind == "single":
        return 1, {}
    if kind not in layouts:
        pytest.skip(f"{kind} cannot be shown on {world_size} rank(s)")
    return world_size, layouts[kind]


@pytest.fixture(scope="module")
def trained(device, layouts, world_size, tmp_path_factory):
    """Trains each kind once: (metrics by policy, folder, shards)."""
    done = {}

    def get(kind):
        if kind not in done:
            ranks, degrees = require(kind, layouts, world_size)
            folder = tmp_path_factory.mktemp(kind)
            found = run_ranks(
                train_and_resume, ranks, device, degrees, ranks, folder,
                init=False, device=device, timeout_s=300,
            )  # fmt: skip
            shards = {"fsdp": ranks, "hsdp": ranks // 2}.get(kind, 1)
            done[kind] = found[0], folder, shards
        return done[kind]

    return get


def numbers(row, *names):
    return [row[name] for name in (*names, "loss", "grad_norm")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_policy_trains_evaluates_and_resumes(kind, device, trained):
    found, folder, shards = trained(kind)
    for name, (whole, resumed) in found.items():
        manifest = read_manifest(StepFolder(folder / name / f"checkpoints/{STEPS:06d}"))
        assert manifest.topology.kind.value == kind
        assert chunks(folder / name) == shards
        assert [row["step"] for row in whole] == [row["step"] for row in resumed] == [1, 2, 3]
        # DDP orders its buckets anew after the first update, and with them the sums over ranks; a
        # GPU adds up convolutions in an order that varies from run to run.
        rel = 1e-3 if device == "cuda" else 1e-5 if kind == "ddp" else 0.0
        wanted = numbers(whole[-1], "eval_loss")
        assert numbers(resumed[-1], "eval_loss") == pytest.approx(wanted, rel=rel), name


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_kind_changes_no_number_of_a_run(kind, device, trained):
    """Those of `wam` do change: the noise of its training is each rank's own."""
    alone, found = trained("single")[0], trained(kind)[0]
    rel = 1e-2 if device == "cuda" else 1e-4
    for name in ("act", "reward"):
        for mine, wanted in zip(found[name][0], alone[name][0], strict=True):
            assert numbers(mine) == pytest.approx(numbers(wanted), rel=rel), name
        last = found[name][0][-1], alone[name][0][-1]
        assert last[0]["eval_loss"] == pytest.approx(last[1]["eval_loss"], rel=rel), name


def environ(device):
    hidden = {"PARALLEL_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {**without_launch(os.environ), "OMP_NUM_THREADS": "1", **hidden}


def ptrain(device, folder, *words, timeout_s=240):
    """On a GPU with our launcher; on the CPU its ranks are forked, as four imports take long."""
    if device == "cpu":
        return run_ptrain(*words, cwd=folder, timeout_s=timeout_s)
    command = [sys.executable, "-m", "parallel_train", *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, env=environ(device), capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def launched(world_size, *more):
    """Flags of a small run with a camera on all ranks, sharded where there are several."""
    return [
        "train", "--nproc_per_node", world_size, "--parallelism.dp_shard", -1,
        "--policy.cameras", TOP, "--policy.dim_model", 32, "--policy.dim_feedforward", 64,
        "--policy.chunk_size", 4, "--dataset.root", VIDEO, "--dataset.num_workers", 1,
        "--batch_size", 2, "--log_freq", 1000, "--checkpoint.async_save",
        "--output_dir", "run", *more,
    ]  # fmt: skip


def test_the_launcher_trains_resumes_verifies_and_converts(device, world_size, tmp_path):
    flags = ["--eval.episodes", 2, "--eval.max_samples", 8, "--checkpoint_format", "dcp"]
    ptrain(device, tmp_path, *launched(world_size, *flags, "--steps", 2))
    text = ptrain(device, tmp_path, "resume", "run", "--nproc_per_node", world_size, "--steps", 3)
    assert "(step 2)" in text
    assert chunks(tmp_path / "run") == world_size
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    ptrain(device, tmp_path, "verify", "run")
    ptrain(device, tmp_path, "convert", "run", "--output", "converted")
    weights = load_file(next((tmp_path / "converted").rglob("model.safetensors")))
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def ranks_of(launcher):
    """Process ids of the launcher's ranks, which have a session of their own each."""
    found = []
    for task in Path(f"/proc/{launcher}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def test_a_killed_rank_ends_the_launch(cuda, world_size, tmp_path):
    """Its peers wait in a collective that never ends; whether they notice or not, they end."""
    if world_size < 2:
        pytest.skip("a rank alone does not have peers")
    words = launched(world_size, "--steps", 100000, "--checkpoint.save_freq", 0)
    command = [sys.executable, "-m", "parallel_train", *map(str, words)]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environ(cuda), stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 180
            metrics = tmp_path / "run/metrics.jsonl"
            while not (metrics.exists() and metrics.read_text()):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
            ranks = ranks_of(process.pid)
            assert len(ranks) == world_size
            os.kill(ranks[-1], signal.SIGKILL)
            assert process.wait(120) == 1
        finally:
            process.kill()
            process.wait()
    text = (tmp_path / "log").read_text()
    assert f"rank {world_size - 1} (process {ranks[-1]}) was ended by SIGKILL" in text
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def pinned(device):
    """Of what a run's own loader gives: by tensor, whether it lies in pinned memory."""
    from parallel_train.data.config import DatasetConfig
    from parallel_train.data.lerobot import LeRobotDataset
    from parallel_train.data.loader import build_loader
    from parallel_train.data.order import GlobalBatchSampler

    torch.cuda.set_device(0)
    dataset = LeRobotDataset.from_config(DatasetConfig(root=str(VIDEO)), policies("cuda")["act"])
    sampler = GlobalBatchSampler(len(dataset), 2, 1, 0, 1, seed=0)
    loader = build_loader(dataset, sampler, num_workers=2, pin_memory=True)
    batch = next(iter(loader))
    return {name: value.is_pinned() for name, value in batch.items() if torch.is_tensor(value)}


def test_the_loader_pins_what_it_gives_to_a_gpu(cuda):
    (found,) = run_ranks(pinned, 1, cuda, init=False, device=cuda)
    assert found[TOP]
    assert all(found.values()), found
