"""Save a training run and resume it: any torch model, without the engine and the Hub.

    python examples/04_save_and_resume.py runs/demo

Run it twice. The second time, it continues from step 3.
"""

import sys

import torch

from parallel_ckpt import CheckpointSaver, newest_intact, read_start, restore
from parallel_config import Topology

if len(sys.argv) != 2:
    sys.exit(__doc__)
run_dir = sys.argv[1]
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
step = 0

with CheckpointSaver(run_dir, topology=Topology()) as saver:
    checkpoint, skipped = newest_intact(run_dir)
    if checkpoint is not None:
        start = read_start(checkpoint, topology=Topology())
        restore(checkpoint, model, optimizer)
        start.restore_rng()  # last, because the lines above may draw random numbers
        step = start.step
    print(f"begins at step {step}")
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    path = saver.save(step=step, samples_seen=8 * step, model=model, optimizer=optimizer)
    print(f"saved {path}")
