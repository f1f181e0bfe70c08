"""What an update or a start does once: moving a batch, reading an answer, reading the launch."""

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from parallel_config import AcceleratorConfig, GradientAccumulationConfig
from parallel_config.environment import LaunchFacts
from parallel_engine import Answer, Engine, Loss, connect
from parallel_testing.ranks import run_ranks


class Counted(Mapping):
    """Metrics that count how often they are read."""

    def __init__(self, reads):
        self.reads, self.values_ = reads, {"error": torch.tensor(2.0)}

    def __getitem__(self, name):
        self.reads[name] += 1
        return self.values_[name]

    def __iter__(self):
        return iter(self.values_)

    def __len__(self):
        return len(self.values_)


class Rows:
    """A batch that moves itself, as a TensorDict does, and counts its moves."""

    def __init__(self, moves, name):
        self.moves, self.name, self.rows = moves, name, torch.ones(2, 4)

    def to(self, device):
        self.moves[self.name] += 1
        return self


def prepared(steps=1, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AcceleratorConfig(gradient_accumulation=GradientAccumulationConfig(steps=steps))
    engine = Engine(accelerator=config, device="cpu", **options)
    model, optimizer, _, _ = engine.prepare(model, optimizer, None, None)
    return engine, model, optimizer


def mean(model, batch):
    return model(batch.rows).mean()


@pytest.mark.parametrize("windowed", [True, False], ids=["a window", "a list"])
def test_a_micro_batch_moves_to_the_device_once(windowed):
    moves = Counter()
    engine, model, optimizer = prepared(steps=3)
    batches = [Rows(moves, name) for name in "abc"]
    window = next(engine.accumulate(batches)) if windowed else batches
    assert not moves
    engine.step(model, optimizer, None, window, mean)
    assert moves == {"a": 1, "b": 1, "c": 1}


def test_metrics_of_an_answer_are_read_once():
    reads = Counter()
    engine, model, optimizer = prepared()

    def loss_fn(m, batch):
        return mean(m, batch), Counted(reads)

    report = engine.step(model, optimizer, None, [Rows(Counter(), "a")], loss_fn)
    assert report.metrics == {"error": 2.0}
    assert reads == {"error": 1}


def test_an_answer_that_was_read_already_is_taken_as_it_is():
    """The weight is that of the answer: nothing looks into the batch, which has no rows."""
    engine, model, optimizer = prepared()

    def loss_fn(m, batch):
        loss = m(torch.ones(2, 4)).sum()
        return Answer(Loss(loss, torch.tensor(2.0)), {"error": torch.tensor(3.0)})

    wanted = float(model(torch.ones(2, 4)).detach().mean())
    report = engine.step(model, optimizer, None, [torch.ones(0, 4)], loss_fn)
    assert (report.loss, report.metrics) == (pytest.approx(wanted), {"error": 3.0})


def reads_of_the_launch(is_connected):
    """How often this rank reads the launch until it has trained."""
    found, read = [], LaunchFacts.read

    def counted(*args):
        found.append(args)
        return read(*args)

    LaunchFacts.read = counted
    facts = connect("cpu") if is_connected else None
    engine, model, optimizer = prepared(facts=facts)
    engine.step(model, optimizer, None, [Rows(Counter(), "a")], mean)
    return len(found), engine.topology.world_size


@pytest.mark.parametrize("is_connected", [True, False], ids=["connected before", "by itself"])
def test_the_launch_is_read_once(is_connected):
    assert run_ranks(reads_of_the_launch, 2, is_connected, init=False) == [(1, 2)] * 2


def test_an_engine_without_determinism_imports_no_inductor_and_leaves_the_switch():
    script = (
        "import sys, torch; from parallel_config import AcceleratorConfig\n"
        "from parallel_engine.determinism import apply_determinism\n"
        "for wanted, on in ((False, False), (True, True), (False, True)):\n"
        "    apply_determinism(AcceleratorConfig(deterministic=wanted))\n"
        "    assert torch.are_deterministic_algorithms_enabled() == on\n"
        "    print('torch._inductor.config' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
