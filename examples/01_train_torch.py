"""Train your own module with plain torch, in one process.

    python examples/01_train_torch.py

`01_train_engine.py` does the same on any number of ranks. Compare the two files: the difference is
all that you have to change.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=24)
    loader = batches(32)
    step = 0
    for _ in range(3):
        for batch in loader:
            loss = mean_square(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            print(f"step {step:2d}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
