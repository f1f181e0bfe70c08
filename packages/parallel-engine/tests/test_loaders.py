"""Which loaders the engine cuts over the ranks, which it only moves, which it refuses."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from parallel_config import (
    AcceleratorConfig,
    ConfigError,
    GradientAccumulationConfig,
    ParallelismConfig,
)
from parallel_engine import Engine
from parallel_engine.loaders import prepare_loader, to_device
from parallel_testing.ranks import run_ranks

CPU = torch.device("cpu")
ROWS = list(range(8))


class Own(BatchSampler):
    """A third party's sampler that cuts for itself."""

    num_replicas, rank = 2, 0


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(8)


def cut_loaders():
    """One for each way to have cut a loader already."""
    sampler = DistributedSampler(ROWS, num_replicas=2, rank=0)
    return {
        "sampler": DataLoader(ROWS, 2, sampler=sampler),
        "batch_sampler": DataLoader(ROWS, batch_sampler=BatchSampler(sampler, 2, False)),
        "third_party": DataLoader(ROWS, batch_sampler=Own(SequentialSampler(ROWS), 2, False)),
        "accelerate": Accelerator(cpu=True).prepare(DataLoader(ROWS, 2)),
        "dispatcher": Accelerator(cpu=True).prepare_data_loader(DataLoader(Stream(), 2)),
        "stream": DataLoader(IterableDatasetShard(Stream(), 2, num_processes=2), 2),
    }


def refusals():
    found = {}
    for name, loader in cut_loaders().items():
        with pytest.raises(ConfigError) as caught:
            prepare_loader(loader, Accelerator(cpu=True), CPU)
        found[name] = str(caught.value)
    return found


def test_a_loader_that_is_cut_already_is_refused_by_what_cut_it():
    (found,) = run_ranks(refusals, 1, init=False)
    for name, by in [
        ("sampler", "DistributedSampler"),
        ("batch_sampler", "DistributedSampler"),
        ("third_party", "Own"),
        ("accelerate", "DataLoaderShard"),
        ("dispatcher", "DataLoaderDispatcher"),
        ("stream", "IterableDatasetShard"),
    ]:
        assert f"is already split over the ranks by a {by}:" in found[name]


def rows_read(degrees):
    """The rows of four windows of two micro-batches, from a map-style loader and from a stream."""
    config = AcceleratorConfig(gradient_accumulation=GradientAccumulationConfig(steps=2))
    engine = Engine(parallelism=ParallelismConfig(**degrees), accelerator=config, device="cpu")
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model._fsdp_wrap_modules = ("Linear",)
    optimizer = torch.optim.SGD(model.parameters())
    data = torch.arange(20)
    _, _, _, loader = engine.prepare(model, optimizer, None, DataLoader(data, 2))
    windows = engine.accumulate(loader, epochs=None)
    stream = prepare_loader(DataLoader(Stream(), 2), engine.accelerator, CPU)
    whole = [[b.tolist() for b in next(windows)] for _ in range(4)]
    return whole, [b.tolist() for b in stream]


@pytest.mark.parametrize(
    ("world_size", "degrees"),
    [(1, {}), (2, {}), (4, {"dp_replicate": 2, "dp_shard": 2})],
    ids=["one", "ddp", "hsdp"],
)
def test_a_plain_loader_gives_every_row_to_one_rank(world_size, degrees):
    """Windows run on over the end of an epoch: 10 batches, and 4 windows read 8 per rank."""
    results = run_ranks(rows_read, world_size, degrees, init=False)
    for rank, (windows, stream) in enumerate(results):
        assert [len(window) for window in windows] == [2, 2, 2, 2]
        batches = [batch for window in windows for batch in window]
        if world_size == 2:  # 5 batches of its own make an epoch; the 6th begins anew
            own = [[2 * i, 2 * i + 1] for i in range(rank, 10, 2)]
            assert batches == (own + own)[:8]
        assert batches[0] == [2 * rank, 2 * rank + 1]
        assert stream[0] == [2 * rank, 2 * rank + 1]
    assert sorted(row for _, stream in results for b in stream for row in b) == ROWS


def test_any_other_iterable_is_this_ranks_own():
    assert list(prepare_loader([{"x": torch.ones(1)}], None, CPU)) == [{"x": torch.ones(1)}]
    assert prepare_loader(None, None, CPU) is None


def test_only_copies_towards_a_device_go_on_behind_our_back(monkeypatch):
    """A copy from a GPU to the host that is not waited for is read before it has arrived."""
    asked = []

    def to(tensor, device, *, non_blocking):
        asked.append((device.type, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    for device in (CPU, torch.device("meta")):
        to_device({"x": [torch.ones(2)]}, device)
    assert asked == [("cpu", False), ("meta", True)]
