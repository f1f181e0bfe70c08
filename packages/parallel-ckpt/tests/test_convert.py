"""Converted weights equal the saved ones bit for bit; nothing is lost on any way out."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from parallel_ckpt import CheckpointError, CheckpointSaver, load_weights
from parallel_ckpt.convert import ConvertResult, convert
from parallel_ckpt.store.workspace import temporary_folder
from parallel_ckpt.verify import verify
from parallel_config import CheckpointFormat, ConfigError, Topology
from parallel_testing.ranks import run_ranks

ODD = {
    "matrix": torch.randn(5, 7),
    "scalar": torch.tensor(1.5),
    "transposed": torch.randn(4, 6).t(),
    "view": torch.randn(9, 9)[2:5, 1:3],
    "half": torch.randn(3, 4).half(),
    "bfloat": torch.randn(3, 4).bfloat16(),
    "double": torch.randn(3, dtype=torch.float64),
    "edges": torch.tensor([0.0, -0.0, float("inf"), 3e38, 1e-45, 65519.0, 65520.0, 1.00390625]),
    "eight": torch.randn(4).to(torch.float8_e4m3fn),
    "whole": torch.arange(5),
    "short": torch.ones(3, dtype=torch.uint16),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
    "ünïcode.weight": torch.ones(2),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("count", torch.tensor(3))


def _save_on_ranks(root: str) -> None:
    """Ours as HSDP 2x2, accelerate's layout as FSDP over 4, and a tensor cut along dim 1."""
    folder, rank = Path(root), dist.get_rank()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = fully_shard(Net(), mesh=mesh)
    assert isinstance(model.up.weight, DTensor)
    assert model.up.weight.to_local().shape[0] in (2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    topology = Topology(dp_replicate=2, dp_shard=2)
    saver = CheckpointSaver(
        folder / "run", topology=topology, checkpoint_format=CheckpointFormat.DCP
    )
    with saver:
        saver.save(step=1, samples_seen=1, model=model, optimizer=optimizer)
        saver.save(step=2, samples_seen=2, model=model, optimizer=optimizer)
    _keep(folder / "run.safetensors", model.state_dict(), rank)

    flat = init_device_mesh("cpu", (4,))
    theirs = fully_shard(Net(), mesh=flat)
    assert theirs.down.weight.to_local().shape[0] <= 1
    states = {f"module.{name}": value for name, value in theirs.state_dict().items()}
    dcp.save({"model": states}, checkpoint_id=folder / "accelerate" / "pytorch_model_fsdp_0")
    moments = {name: torch.ones(2) for name in states}
    dcp.save({"optimizer": {"state": moments}}, checkpoint_id=folder / "accelerate" / "optimizer_0")
    _keep(folder / "accelerate.safetensors", theirs.state_dict(), rank)

    columns = {"columns": distribute_tensor(torch.randn(6, 10), flat, [Shard(1)])}
    assert columns["columns"].to_local().shape[1] in (1, 3)
    dcp.save(columns, checkpoint_id=folder / "columns")
    _keep(folder / "columns.safetensors", columns, rank)


def _save_alone(state: dict[str, object], folder: Path) -> None:
    """As one process without a group does; torch warns that it is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def _keep(path: Path, tensors: dict[str, torch.Tensor], rank: int) -> None:
    whole = {k: (v.full_tensor() if isinstance(v, DTensor) else v) for k, v in tensors.items()}
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in whole.items()}, path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(_save_on_ranks, 4, str(folder), timeout_s=120)
    plain = folder / "plain"
    _save_alone({"model": ODD, "optimizer": {"m": torch.ones(3)}, "step": 3}, plain)
    save_file({name: tensor.contiguous() for name, tensor in ODD.items()}, f"{plain}.safetensors")
    return folder


@pytest.fixture
def fresh(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "saved", symlinks=True)
    return tmp_path / "saved"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, through the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return load_file(folder / "model.safetensors")
    loaded: dict[str, torch.Tensor] = {}
    for name, file in json.loads(index.read_bytes())["weight_map"].items():
        loaded[name] = load_file(folder / file)[name]
    return loaded


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype
        and left[k].shape == right[k].shape
        and (not left[k].numel() or torch.equal(raw(left[k]), raw(right[k])))
        for k in left
    )


@pytest.mark.parametrize("kind", ["run", "accelerate", "columns", "plain"])
def test_equals_a_direct_save_bit_for_bit(saved: Path, tmp_path: Path, kind: str) -> None:
    seen: list[tuple[int, int]] = []
    result = convert(saved / kind, tmp_path / "out", progress=lambda *at: seen.append(at))
    assert same(weights(result.path), load_file(f"{saved / kind}.safetensors"))
    assert seen[-1][0] == seen[-1][1] > 0
    assert sorted(seen) == seen


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_casts_as_torch_does(
    saved: Path, tmp_path: Path, dtype: str, torch_dtype: torch.dtype
) -> None:
    for kind in ("plain", "columns", "run"):
        result = convert(saved / kind, tmp_path / kind, dtype=dtype, max_shard_size=200)
        expected = {
            name: tensor.to(torch_dtype)
            if tensor.is_floating_point() and tensor.itemsize > 1
            else tensor
            for name, tensor in load_file(f"{saved / kind}.safetensors").items()
        }
        assert same(weights(result.path), expected)
    assert len(convert(saved / "plain", tmp_path / "split", max_shard_size=200).files) > 2
    again = convert(tmp_path / "split", tmp_path / "one")
    assert same(weights(again.path), load_file(saved / "plain.safetensors"))


@pytest.mark.parametrize(
    "below",
    ["", "checkpoints", "checkpoints/last", "checkpoints/000002", "checkpoints/000002/"]
    + [f"checkpoints/000002/pretrained_model{end}" for end in ("", "/dcp", "/dcp/.metadata")],
)
def test_every_way_to_name_a_checkpoint(saved: Path, tmp_path: Path, below: str) -> None:
    odd = tmp_path / "optimizer_sweep" / "pytorch_model_fsdp_test [1]" / "-läuft 1."
    result = convert(f"{saved / 'run'}/{below}", odd)
    assert same(weights(odd), load_file(saved / "run.safetensors"))
    assert result.path == odd


def test_beside_the_shards_the_checkpoint_stays_whole(fresh: Path) -> None:
    step = fresh / "run" / "checkpoints" / "000002"
    for delete in (False, True):
        target = step if not delete else fresh / "run" / "checkpoints" / "000001"
        result = convert(target, delete_dcp=delete)
        report = verify(target)
        assert report.ok
        assert report.unlisted == ()
        assert report.manifest.checkpoint_format.has_dcp is not delete
        assert report.manifest.checkpoint_format.has_safetensors
        assert (target / "pretrained_model" / "dcp").exists() is not delete
        assert bool(result.deleted) is delete
        model = Net()
        load_weights(model, target)
        assert same(model.state_dict(), load_file(fresh / "run.safetensors"))


def test_the_second_copy_of_weights_can_be_deleted(fresh: Path) -> None:
    """As `safetensors_dcp` saves them. The safetensors are read whole before the shards go."""
    step = fresh / "run" / "checkpoints" / "000002"
    convert(step)
    (file,) = (step / "pretrained_model").glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        convert(step, delete_dcp=True)
    assert verify(step).manifest.checkpoint_format.has_dcp
    file.write_bytes(whole)
    for named in (step, step / "pretrained_model" / "dcp"):
        copy = fresh / named.name
        shutil.copytree(step, copy)
        result = convert(copy / named.relative_to(step), delete_dcp=True)
        assert result.deleted
        assert not (copy / "pretrained_model" / "dcp").exists()
        assert verify(copy).ok
        assert verify(copy).manifest.checkpoint_format is CheckpointFormat.SAFETENSORS
        assert same(weights(result.path), load_file(fresh / "run.safetensors"))
        with pytest.raises(ConfigError, match="delete_dcp has nothing to remove"):
            convert(copy, delete_dcp=True)


def test_config_and_processors_come_along(fresh: Path, tmp_path: Path) -> None:
    source = fresh / "accelerate" / "pytorch_model_fsdp_0"
    (fresh / "accelerate" / "config.json").write_text('{"dtype": "float32", "size": 3}')
    result = convert(source, tmp_path / "out", dtype="bf16")
    config = json.loads((result.path / "config.json").read_text())
    assert config == {"dtype": "bfloat16", "size": 3}


REFUSED = {
    "optimizer": ("run/checkpoints/000002/training_state/optimizer", "holds the training state"),
    "theirs": ("accelerate/optimizer_0", "holds optimizer state, not weights"),
    "nothing": ("nowhere", "does not exist"),
    "level": ("", r"does not hold weights.*Give one of: .*(columns|plain)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_paths_are_told_the_right_one(saved: Path, tmp_path: Path, case: str) -> None:
    path, words = REFUSED[case]
    with pytest.raises(CheckpointError, match=words):
        convert(saved / path, tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []


def _flip(path: Path) -> None:
    """One bit of a value in a shard (zip archives have padding), or in the middle of the rest."""
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    if path.suffix == ".distcp":
        root = next(p for p in path.parents if (p / "run.safetensors").is_file())
        kept = root / ("accelerate" if "accelerate" in str(path) else "run")
        at = data.index(bytes(load_file(f"{kept}.safetensors")["up.weight"][0].view(torch.uint8)))
    data[at] ^= 4
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [_flip, _cut, Path.unlink])
@pytest.mark.parametrize(
    "victim",
    [
        "run/checkpoints/000002/pretrained_model/dcp/__0_0.distcp",
        "run/checkpoints/000002/pretrained_model/dcp/.metadata",
        "accelerate/pytorch_model_fsdp_0/__0_0.distcp",
        "accelerate/pytorch_model_fsdp_0/.metadata",
    ],
)
def test_damage_leaves_no_output(fresh: Path, tmp_path: Path, damage: object, victim: str) -> None:
    assert callable(damage)
    if damage is _flip and victim.startswith("accelerate") and victim.endswith(".metadata"):
        pytest.skip("nothing recorded tells a flipped bit in another writer's .metadata")
    damage(fresh / victim)
    with pytest.raises(CheckpointError, match=r"\.metadata|__0_0\.distcp"):
        convert((fresh / victim).parent, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_what_would_lose_data_is_refused(fresh: Path, tmp_path: Path) -> None:
    run = fresh / "run"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    step = run / "checkpoints" / "000002"
    for arguments, words in (
        ({"dtype": "bf16"}, "a resume needs the weights in the dtype they have"),
        ({"dtype": "bf16", "delete_dcp": True}, "would lose the original values"),
        ({"output": tmp_path / "new", "delete_dcp": True}, "without files that its manifest lists"),
        ({"output": tmp_path / "full"}, "exists and is not empty"),
        ({"output": step / "pretrained_model" / "x"}, "lies in the checkpoint itself"),
        ({"max_shard_size": 100}, "Several files cannot be added"),
        ({"max_shard_size": "5 parsecs"}, "is not a size"),
        ({"dtype": "int4"}, "is not one of"),
    ):
        with pytest.raises(ConfigError, match=words):
            convert(run, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"would also remove what is not weights: .* and 1 more"):
        convert(fresh / "plain", tmp_path / "new", delete_dcp=True)
    assert verify(run).ok
    assert not (tmp_path / "new").exists()
    convert(run)
    with pytest.raises(ConfigError, match="holds safetensors already"):
        convert(run)


def test_a_full_disk_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(CheckpointError, match="stopped the conversion: File too large"):
            convert(saved / "plain", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import os, signal, sys
from parallel_ckpt.convert import convert

source, target, delete, left = sys.argv[1], sys.argv[2] or None, sys.argv[3] == "True", sys.argv[4]
left = int(left)

def hook(event, arguments):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

print("begins", flush=True)
sys.addaudithook(hook)
convert(source, target, delete_dcp=delete)
"""
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}


def _start(
    source: Path, target: Path | str, delete: bool = False, changes: int = 1000
) -> Popen[bytes]:
    """A process that converts; it dies before its change number `changes` to the folders."""
    command = [sys.executable, "-c", PROGRAM, source, target, str(delete), str(changes)]
    process = Popen(command, env={**os.environ, **LAUNCHED}, stdout=PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"begins\n"
    return process


def test_launcher_variables_are_not_looked_at_and_torch_is_not_imported(
    saved: Path, tmp_path: Path
) -> None:
    assert _start(saved / "run", tmp_path / "out").wait(timeout=60) == 0
    check = (
        "import sys, parallel_ckpt.convert, parallel_ckpt.verify, parallel_ckpt.inspect;"
        "assert not {'torch', 'numpy', 'safetensors'} & sys.modules.keys(), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_the_next_conversion_removes_what_a_killed_one_left_and_says_so(
    saved: Path, tmp_path: Path
) -> None:
    assert _start(saved / "run", tmp_path / "out", changes=2).wait(timeout=60) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with temporary_folder(tmp_path, ".out.converting-") as live:
        result = convert(saved / "run", tmp_path / "out")
        assert live.is_dir()
    assert result.cleared == (left,)
    assert f"removed {left}, which a conversion left" in result.render()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("delete", [False, True])
def test_killed_at_random_moments(tmp_path: Path, delete: bool) -> None:
    """SIGKILL: the source is whole or the result is; the next conversion cleans up and succeeds."""
    big = {f"layer.{i}": torch.full((600_000,), float(i)) for i in range(20)}
    _save_alone({"model": big}, tmp_path / "origin")
    draw = random.Random(5)
    begin = time.monotonic()
    assert _start(tmp_path / "origin", tmp_path / "whole").wait(timeout=60) == 0
    duration_s, kills = time.monotonic() - begin, 0
    for trial in range(60):
        if kills == 8:
            break
        source, target = tmp_path / f"source{trial}", tmp_path / f"target{trial}"
        shutil.copytree(tmp_path / "origin", source)
        process = _start(source, target, delete)
        begin = time.monotonic()
        try:
            assert process.wait(timeout=draw.uniform(0.0, duration_s)) == 0
            duration_s = time.monotonic() - begin  # the machine is faster than it was
        except subprocess.TimeoutExpired:
            process.kill()
            kills += process.wait(timeout=60) == -signal.SIGKILL
        if not target.exists():
            assert (source / ".metadata").exists()
            convert(source, target)
        assert same(weights(target), big)
        assert not list(tmp_path.glob(f".{target.name}.*"))
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(target)
    assert kills == 8


def test_killed_at_every_change_beside_the_shards(fresh: Path) -> None:
    """Whatever is left loads the same values, and verifies; a further conversion succeeds."""
    for moment in range(40):
        run = fresh / f"run{moment}"
        shutil.copytree(fresh / "run", run, symlinks=True)
        status = _start(run, "", delete=True, changes=moment).wait(timeout=60)
        assert verify(run).ok
        model = Net()
        load_weights(model, run)
        assert same(model.state_dict(), load_file(fresh / "run.safetensors"))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        result = convert(run, delete_dcp=True)
        assert result.deleted
        assert verify(run).ok
        assert verify(run).unlisted == ()
        assert not (result.path / "dcp").exists()
        assert same(weights(result.path), load_file(fresh / "run.safetensors"))
    assert moment > 5
    assert status == 0


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    big = {f"layer.{i}": torch.ones(8_000_000) for i in range(8)}
    _save_alone({"model": big}, tmp_path / "big")
    program = (
        "import sys; status = lambda: open('/proc/self/status').read();"
        "peak = lambda: int(status().split('VmHWM:')[1].split()[0]); before = peak();"
        "from parallel_ckpt.convert import convert;"
        "convert(*sys.argv[1:3], dtype=sys.argv[3]); print(peak() - before)"
    )
    for dtype in ("keep", "bf16"):
        command = [sys.executable, "-c", program, tmp_path / "big", tmp_path / dtype, dtype]
        used = int(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
        assert 1_000 < used < 64_000, f"{used} kB for {dtype}"


def test_what_people_read(saved: Path, tmp_path: Path) -> None:
    result: ConvertResult = convert(saved / "plain", tmp_path / "out")
    first, second = result.render().splitlines()
    assert first.startswith(f"{tmp_path / 'out'}: 14 tensors (1 x BF16, 1 x BOOL, ")
    assert first.endswith(" in 1 file, read back and compared")
    assert second == "  left out, because they are not weights: optimizer.m, step"
