"""Train your own module on any number of ranks.

    python examples/01_train_engine.py
    torchrun --nproc-per-node 2 examples/01_train_engine.py                 # DDP
    torchrun --nproc-per-node 2 examples/01_train_engine.py --dp_shard 2    # FSDP2
    torchrun --nproc-per-node 4 examples/01_train_engine.py --dp_replicate 2 --dp_shard 2

`01_train_torch.py` does the same in one process with plain torch and prints the same losses. The
global batch is 32 in both files, for any number of ranks.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from parallel_config import AcceleratorConfig, FSDPConfig, ParallelismConfig
from parallel_engine import Engine, leave


class Block(nn.Module):
    """A residual layer: (batch, 32) to the same shape."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """(batch, 4) to (batch, 1)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean_square(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def batches(size):
    x = torch.randn(256, 4)
    data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    return DataLoader(data, size, shuffle=True, generator=torch.Generator().manual_seed(0))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp_replicate", type=int, default=1)
    parser.add_argument("--dp_shard", type=int, default=1)
    degrees = parser.parse_args()
    engine = Engine(
        parallelism=ParallelismConfig(**vars(degrees)),
        accelerator=AcceleratorConfig(fsdp=FSDPConfig(wrap_modules=("Block",))),
    )
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=24)
    loader = batches(32 // engine.topology.dp_world_size)  # the ranks share the global batch of 32
    model, optimizer, scheduler, loader = engine.prepare(model, optimizer, scheduler, loader)
    if engine.is_main:
        print(f"on {engine.topology.describe()}")
    for step, window in enumerate(engine.accumulate(loader, epochs=3), 1):
        report = engine.step(model, optimizer, scheduler, window, mean_square, clip_norm=1.0)
        if engine.is_main:
            print(f"step {step:2d}  loss {report.loss:.6f}")


if __name__ == "__main__":
    main()
    leave(0)
