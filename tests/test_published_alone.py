"""What a sharded run published, loaded where next to nothing is installed."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from parallel_testing.hub_fixture import CLIENT_WARNING, local_hub  # noqa: F401
from parallel_testing.wheels import install, installed_names, ours, run

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.filterwarnings(CLIENT_WARNING)
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]


@pytest.fixture(scope="module")
def only_publish(tmp_path_factory):
    """Where parallel-publish is installed alone."""
    return install("parallel-publish", tmp_path_factory.mktemp("only_publish"), root=ROOT)


@pytest.fixture(scope="module")
def only_train(tmp_path_factory):
    """Where parallel-train is installed without extras."""
    return install("parallel-train", tmp_path_factory.mktemp("only_train"), root=ROOT)


SCRIPT = """
import json, os, sys
import torch
from torch import nn
from parallel_publish import PreTrainedModel, PublishConfig, preflight_publish
from parallel_publish import publish_trained_model

class Regressor(PreTrainedModel):
    def __init__(self, width=4, *, scale=1.0):
        super().__init__()
        self.scale = scale
        self.embed = nn.Linear(3, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 1)
        self.register_buffer("grid", torch.linspace(0, 1, width), persistent=False)

    def forward(self, x):
        x = self.embed(x) + self.grid
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x) * self.scale

X = torch.linspace(-1, 1, 12).reshape(4, 3)

def train_and_publish(folder):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Regressor(6, scale=0.5)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    assert isinstance(model.head.weight, DTensor)
    assert model.embed.weight.to_local().shape[0] == 3
    config = PublishConfig(enable=True, repo_id="user/regressor", license="mit")
    preflight_publish(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(5):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    done = publish_trained_model(model, config, staging=os.path.join(folder, "bundle"))
    answer = model(X).tolist()
    assert (done is None) == (dist.get_rank() == 1)
    if done is not None:
        assert done.ok, done.render()
        print(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()

if sys.argv[1] == "train":
    train_and_publish(sys.argv[2])
else:
    for meta in (False, True):
        model = Regressor.from_pretrained("user/regressor", meta=meta)
        print(json.dumps(model(X).tolist()))
"""


def test_a_class_in_a_script_with_nothing_but_parallel_publish(hub, only_publish, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    trained = json.loads(run(sys.executable, *RANKS, script, "train", tmp_path, cwd=tmp_path))
    files = hub.files("user/regressor")
    assert set(files) == {"README.md", "config.json", "model.safetensors"}
    assert json.loads(files["config.json"]) == {"arguments": {"width": 6, "scale": 0.5}}

    found = ours(installed_names(only_publish, tmp_path))
    assert found == {"parallel-ckpt", "parallel-config", "parallel-publish"}
    for line in run(only_publish, script, "load", cwd=tmp_path).splitlines():
        loaded = json.loads(line)
        assert [x[0] for x in loaded] == pytest.approx([x[0] for x in trained], rel=1e-6)

    code = files["README.md"].decode().split("```python\n")[1].split("```")[0]
    names = run(only_publish, "-c", f"{code}\nprint(sorted(weights))", cwd=tmp_path)
    (tmp_path / "plain.safetensors").write_bytes(files["model.safetensors"])
    assert names.strip() == str(sorted(load_file(tmp_path / "plain.safetensors")))


ACT = """
import json, sys
import torch
from parallel_train.policies.act.modeling import ACTPolicy
from parallel_train.policies.loading import load_policy

source = sys.argv[1]
policy = load_policy(source)
batch = {name: value + 0.5 for name, value in policy.example_batch().items()}
batch["task_index"] = torch.zeros(1, dtype=torch.long)
print(json.dumps(policy.select_action(batch)[0].tolist()))
if len(sys.argv) > 2:
    import importlib.util
    assert not [n for n in ("torchvision", "av", "metaworld") if importlib.util.find_spec(n)]
    model = ACTPolicy.from_pretrained(source, meta=True)
    normal = policy.preprocessor(batch)
    action = policy.preprocessor.postprocessor()(model.select_action(normal))
    print(json.dumps(action[0].tolist()))
"""


def test_act_of_a_sharded_run_with_parallel_train_without_extras(hub, only_train, tmp_path):
    run(
        sys.executable, "-m", "parallel_train", "train", "--steps", 2, "--batch_size", 4,
        "--dataset.episodes", 0, "--policy.dim_model", 32, "--policy.dim_feedforward", 64,
        "--output_dir", "run", "--nproc_per_node", 2, "--parallelism.dp_shard", 2,
        "--checkpoint_format", "dcp", "--publish.enable", "--publish.repo_id", "user/act",
        cwd=tmp_path,
    )  # fmt: skip
    assert [name for name in hub.files("user/act") if "distcp" in name] == []
    here = json.loads(run(sys.executable, "-c", ACT, "run", cwd=tmp_path))
    for line in run(only_train, "-c", ACT, "user/act", "alone", cwd=tmp_path).splitlines():
        assert json.loads(line) == here
