"""A folder gives back the model that was saved, whatever wrapped or sharded it."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from parallel_ckpt import StateMismatch
from parallel_config import ConfigError
from parallel_publish import PreTrainedModel
from parallel_publish.model_on_meta import parameters_on_meta
from parallel_testing.ranks import run_ranks


class Regressor(PreTrainedModel):
    def __init__(self, width: int = 8, *, tie: bool = False, sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, width)
        if tie:
            self.head.weight = self.body[0].weight
        self.register_buffer("scale", torch.linspace(1, 2, width), persistent=False)
        self.register_buffer("seen", torch.tensor(3))
        self.temperature = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        return self.head(self.body(self.embed(x))) * self.scale * self.temperature


X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Labels:
    def save_pretrained(self, folder):
        (folder / "labels.json").write_text('["a"]')


class Rude:
    def save_pretrained(self, folder):
        (folder / "model.safetensors").write_bytes(b"mine")


def _same(first, second):
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert torch.equal(first(X), second(X))


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "300B"])
def test_a_saved_model_is_built_again_from_its_folder(tmp_path, meta, shard_size):
    torch.manual_seed(1)
    model = Regressor(6, tie=True, sizes=(1, 2))
    model.save_pretrained(tmp_path, processors=[Labels()], max_shard_size=shard_size)
    again = Regressor.from_pretrained(tmp_path, meta=meta)
    _same(model, again)
    assert again.head.weight is again.body[0].weight
    assert not again.training
    assert not again.temperature.requires_grad
    assert (tmp_path / "labels.json").exists()
    assert len(list(tmp_path.glob("model*.safetensors"))) == (1 if shard_size == "5GB" else 2)


def test_a_config_with_a_byte_order_mark_is_read(tmp_path):
    Regressor(6).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text, encoding="utf-8-sig")
    assert Regressor.from_pretrained(tmp_path).embed.out_features == 6


def test_saving_again_leaves_no_stale_shards(tmp_path):
    Regressor().save_pretrained(tmp_path, max_shard_size="300B")
    model = Regressor()
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    _same(model, Regressor.from_pretrained(tmp_path))


def test_a_failed_save_leaves_the_former_files(tmp_path):
    model = Regressor()
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(ConfigError, match="weights overwritten by a processor"):
        Regressor().save_pretrained(tmp_path / "out", processors=[Rude()])
    _same(model, Regressor.from_pretrained(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_weight_is_initialised_on_meta():
    with parameters_on_meta():
        model = Regressor(6, tie=True)
    assert all(param.is_meta for param in model.parameters())
    assert model.head.weight is model.body[0].weight
    assert model.scale.tolist() == torch.linspace(1, 2, 6).tolist()
    assert not Regressor(6).embed.weight.is_meta


@pytest.mark.parametrize("meta", [False, True])
def test_dtype_casts_the_floating_weights_and_leaves_integers(tmp_path, meta):
    model = Regressor()
    model.save_pretrained(tmp_path)
    again = Regressor.from_pretrained(tmp_path, dtype=torch.bfloat16, meta=meta)
    assert again.embed.weight.dtype == torch.bfloat16
    assert torch.equal(again.embed.weight, model.embed.weight.bfloat16())
    assert again.seen.dtype == torch.int64


def test_without_strict_missing_tensors_keep_the_values_of_the_constructor(tmp_path):
    class Longer(Regressor):
        def __init__(self, width: int = 8) -> None:
            super().__init__(width)
            self.extra = nn.Linear(2, 2)

    model = Regressor()
    model.save_pretrained(tmp_path)
    with pytest.raises(StateMismatch, match=r"extra\.bias is missing"):
        Longer.from_pretrained(tmp_path)
    again = Longer.from_pretrained(tmp_path, strict=False)
    assert torch.equal(again.embed.weight, model.embed.weight)
    with pytest.raises(StateMismatch, match=r"extra\.bias, extra\.weight, which would stay"):
        Longer.from_pretrained(tmp_path, strict=False, meta=True)
    with pytest.raises(StateMismatch, match=r"has shape \(9, 4\), but \(8, 4\) is stored"):
        Regressor.from_pretrained(tmp_path, width=9)


def test_arguments_that_json_cannot_hold_are_refused(tmp_path):
    class Wild(PreTrainedModel):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()

    with pytest.raises(ConfigError, match="cannot hold inner of Wild"):
        Wild(nn.Linear(1, 1)).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_folder_or_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a folder nor a repository"):
        Regressor.from_pretrained(tmp_path / "nowhere")
    Regressor().save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="does not exist, so the model cannot be built"):
        Regressor.from_pretrained(tmp_path)


def _save_wrapped(kind, folder):
    torch.manual_seed(1)
    model = Regressor(7)
    model.temperature = None  # FSDP2 shards no 0-dim parameter
    reference = {name: value.clone() for name, value in model.state_dict().items()}
    if kind == "ddp":
        DistributedDataParallel(model).module.save_pretrained(folder)
        return
    shape, names = ((2, 2), ("r", "s")) if kind == "hsdp" else ((4,), ("s",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model.embed.weight, DTensor)
    assert model.embed.weight.to_local().shape[0] < 7
    model.save_pretrained(folder)
    assert all(
        torch.equal(model.state_dict()[n].full_tensor(), v)
        for n, v in reference.items()
        if isinstance(model.state_dict()[n], DTensor)
    )


@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 2), ("fsdp", 4), ("hsdp", 4)])
def test_every_rank_calls_save_pretrained(tmp_path, kind, world_size):
    run_ranks(_save_wrapped, world_size, kind, tmp_path)
    torch.manual_seed(1)
    expected = Regressor(7)
    again = Regressor.from_pretrained(tmp_path, strict=False)
    _same(expected, again)
    assert json.loads((tmp_path / "config.json").read_text()) == {"arguments": {"width": 7}}


def _fail_on_one(folder):
    model = Regressor()
    if torch.distributed.get_rank() == 1:
        object.__setattr__(model, "_init_arguments", {"width": object()})
    with pytest.raises(ConfigError, match="cannot hold width"):
        model.save_pretrained(folder)


def test_an_error_of_one_rank_reaches_all(tmp_path):
    run_ranks(_fail_on_one, 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "holds weights only as pickles (pytorch_model.bin), which are never "
         "read here: a pickle can run any code. If you trust it, write model.safetensors from it"),
        ("policy.pt", "holds weights only as pickles (policy.pt)"),
        ("adapter_model.safetensors", "holds adapter_model.safetensors: an adapter, and not the "
         "model that it belongs to."),
        ("tf_model.h5", "does not hold weights as safetensors, but tf_model.h5."),
        ("notes.txt", "does not hold weights as safetensors. Name a folder or a branch with"),
    ],
)  # fmt: skip
def test_a_folder_without_readable_weights_is_refused_by_what_it_holds(tmp_path, name, message):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError) as caught:
        Regressor.from_pretrained(tmp_path)
    assert message in str(caught.value)
