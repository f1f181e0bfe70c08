"""One optimizer update, in the order in which it happens. `Update.run` tells it:

accumulate  the micro-batches of a window, one after the other
forward     the loss function on a micro-batch
backward    gradients add up on this rank; the last micro-batch reduces them over the ranks
tell        what the host knows, in one exchange between the hosts: the order of wrap units,
            requests to stop, the last window, the counts of metrics
reduce      what the device knows, in one exchange between the devices: loss, weight, metrics and
            the squared norm of the gradients. The host waits for these numbers, and only here
clip        gradients become those of the mean, then are clipped by their global norm
check       a loss or a norm that is not finite raises, or leaves this update out
step        the optimizer
schedule    the learning rates of the next update
zero        gradients to None

The gradient is that of the sum of all losses over the sum of all weights, over the window and all
data-parallel ranks, so that an update does not depend on how its global batch is split.

Your own loop calls the parts instead of `run`: `micro_batch`, `backward`, `clip`, `apply`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel_config import AcceleratorConfig, Topology
from parallel_engine.entry_points import undeclared_calls_explained
from parallel_engine.errors import UnitOrderError
from parallel_engine.failures import Failures
from parallel_engine.gradients import (
    average_replicated,
    drop_gradients,
    global_norm,
    scale_and_clip,
    square_share,
    unused_parameters,
    without_sync,
)
from parallel_engine.loaders import Ending, on_device
from parallel_engine.loss import Answer, LossFn, forward
from parallel_engine.materialize import require_filled
from parallel_engine.metrics import MetricNames
from parallel_engine.nonfinite import NonFinite
from parallel_engine.types import Batch, Scheduler
from parallel_engine.unit_order import UnitOrder
from parallel_engine.wrapping import unwrap


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one update did; plain numbers, equal on every rank except `seconds`."""

    loss: float
    """Sum of totals over sum of weights, over the global batch."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate that the update used."""
    seconds: float
    """Wall time of the update on this rank."""
    skipped: bool = False
    """Whether the update was left out because a value was not finite."""
    stop: bool = False
    """Whether any rank was asked to stop, by the `stop` that was given to the step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By name: the mean over the micro-batches, of all ranks, that gave the metric."""


class Update:
    """The updates of one prepared model, and what each leaves behind for the next.

    Args:
        model: as `engine.prepare` returns it.
        order: of the wrap units; None where nothing is sharded.
        values_missing: whether the model was allocated without values, which must be there before
            the first micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        *,
        config: AcceleratorConfig,
        topology: Topology,
        device: torch.device,
        failures: Failures,
        nonfinite: NonFinite,
        metric_names: MetricNames,
        order: UnitOrder | None,
        values_missing: bool,
    ) -> None:
        self._model, self._accelerator = model, accelerator
        self._config, self._topology, self._device = config, topology, device
        self._failures, self._nonfinite = failures, nonfinite
        self._metric_names, self._order = metric_names, order
        self._values_missing = values_missing
        self._is_torn = False
        """Whether a backward pass broke off between collectives, which nothing can repair."""
        self._is_clipped = False
        """Whether `clip` has seen the gradients of the coming update."""
        self._has_updated = False

    def run(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Scheduler | None,
        micro_batches: Sequence[Batch],
        loss_fn: LossFn[Batch],
        *,
        clip_norm: float | None,
        stop: Callable[[], bool] | None,
    ) -> StepReport:
        """Collective: every rank. One update over the window; as `Engine.step`."""
        started = time.perf_counter()
        lr = float(optimizer.param_groups[0]["lr"])  # before the schedule changes it
        with self._forgotten_on_error(model):
            window = self._accumulate(model, micro_batches, loss_fn)
            # Before the host waits for the device, whose collectives never end where ranks ran
            # other units.
            told = self._tell(model, window, getattr(micro_batches, "ending", None), stop)
            with self._failures.told():
                self._ready_gradients(model)
                # Not sooner: while FSDP2 has a unit gathered, its parameters are others.
                parameters = list(model.parameters())
                sums = self._reduce(window, told, square_share(parameters, self._device))
                # Backward has averaged sums over the ranks: back to sums, then over all weights.
                scale = self._topology.dp_world_size / sums.weight
                norm = sums.norm * scale
                scale_and_clip(parameters, norm=norm, scale=scale, max_norm=clip_norm)
            # Outside of `told`: all ranks see the same numbers, so all of them raise.
            skip = self._nonfinite.must_skip(sums.loss, norm, scaled=self._is_scaled)
        self.apply(optimizer, scheduler, skip=skip)
        return StepReport(
            loss=sums.loss,
            grad_norm=norm,
            lr=lr,
            seconds=time.perf_counter() - started,
            skipped=skip,
            stop=told.stop,
            metrics=sums.metrics,
        )

    def _accumulate(
        self, model: nn.Module, micro_batches: Sequence[Batch], loss_fn: LossFn[Batch]
    ) -> _Window:
        """Collective: every rank. Forward and backward of each micro-batch."""
        window, batches = _Window(self._device), on_device(micro_batches, self._device)
        for index in range(len(batches)):
            with self._around(model, index, len(batches)):
                # Taken in here, where an error while the batch is moved is told to the peers.
                answer = forward(loss_fn, model, batches[index])
                self.backward(answer.loss.total)
            window.add(answer)
        return window

    def _tell(
        self,
        model: nn.Module,
        window: _Window,
        ending: Ending | None,
        stop: Callable[[], bool] | None,
    ) -> _Told:
        """Collective: every rank. One small all-reduce of what no device has to be asked for."""
        ddp = self._config.ddp
        # DDP notes unused parameters of a static graph by itself.
        allowed = ddp.find_unused_parameters or ddp.static_graph
        with self._failures.told():
            # Not exchanged first: DDP of the other ranks may still wait for gradients of this one,
            # on the host in the same group, and would take the exchange for them.
            if unused := unused_parameters(model, allowed=allowed):
                raise unused
            order = self._order.numbers() if self._order is not None else [0.0, 0.0]
            flags = [stop is not None and stop(), ending and ending.is_mine]
            numbers = [*order, *map(float, map(bool, flags)), window.host_weight]
            sums, metrics = self._metric_names.sums(numbers, window.host_metrics())
            total, squares, stops, endings, weight = sums
            difference = self._order and self._order.settle(total, squares)
        if difference:
            raise UnitOrderError(difference)
        if ending is not None:
            ending.is_over = bool(endings)
        return _Told(weight, metrics, bool(stops))

    @contextlib.contextmanager
    def micro_batch(self, model: nn.Module, index: int, count: int) -> Iterator[None]:
        """Collective: every rank. Around forward and backward; as `Engine.micro_batch`."""
        with self._forgotten_on_error(model):
            with self._around(model, index, count):
                yield
            if index == count - 1:
                self._require_same_order()

    @contextlib.contextmanager
    def _around(self, model: nn.Module, index: int, count: int) -> Iterator[None]:
        """Collective: every rank. Around forward and backward, without comparing units."""
        self._require_usable()
        is_last = index == count - 1
        syncs_now = is_last or self._config.gradient_accumulation.sync_each_batch
        # DDP learns a static graph from its first backward passes, which must therefore reduce.
        is_learning = self._config.ddp.static_graph and not self._has_updated
        syncs = contextlib.nullcontext() if syncs_now or is_learning else without_sync(model)
        with self._failures.told(), undeclared_calls_explained(model), syncs:
            yield

    def backward(self, loss: Tensor) -> None:
        """Collective: every rank. Backward of one micro-batch; fp16 goes through its scaler."""
        scaler = self._accelerator.scaler
        try:
            (scaler.scale(loss) if scaler is not None else loss).backward()
        except BaseException:
            # Other ranks may have reduced buckets that this one has not. One process has no peers.
            self._is_torn = self._topology.world_size > 1
            raise

    def _reduce(self, window: _Window, told: _Told, square: Tensor) -> _Sums:
        """Collective: every rank. One small all-reduce on the device; the host waits for it."""
        zero = window.zero
        metrics = [window.metrics.get(name, zero) for name in told.metrics]
        vector = torch.stack([window.total, window.weight, square, *metrics])
        if self._topology.world_size > 1:
            dist.all_reduce(vector)
        total, weight, square_sum, *found = vector.tolist()
        weight += told.weight
        means = {
            name: (value + on_host) / count
            for value, (name, (on_host, count)) in zip(found, told.metrics.items(), strict=True)
            if count > 0
        }
        # Where nothing counts on any rank, the gradients are zero and stay so.
        weight = weight if weight > 0 else 1.0
        norm = math.sqrt(square_sum)
        return _Sums(total / weight, weight, norm, dict(sorted(means.items())))

    def clip(self, model: nn.Module, *, scale: float = 1.0, clip_norm: float | None) -> float:
        """Collective: every rank. Scale and clip the gradients; as `Engine.clip`."""
        with self._failures.told():
            self._ready_gradients(model)
            parameters = list(model.parameters())
            norm = global_norm(parameters) * scale
            scale_and_clip(parameters, norm=norm, scale=scale, max_norm=clip_norm)
        return norm

    def _ready_gradients(self, model: nn.Module) -> None:
        """Collective: every rank. Gradients without fp16's scale, averaged where FSDP2 does not."""
        try:
            self._accelerator.unscale_gradients()  # fp16's scale must not count in the norm
        except RuntimeError as error:  # the caller's loop may have clipped through accelerate
            if "already been called" not in str(error):
                raise
        self._is_clipped = True
        if self._topology.is_sharded:
            average_replicated(model, self._topology.dp_world_size)

    def apply(self, optimizer: Optimizer, scheduler: Scheduler | None, *, skip: bool) -> None:
        """Collective: every rank. Step, schedule, zero; as `Engine.update`."""
        if not self._is_clipped:
            # Averages what FSDP2 does not reduce. Without it replicated parameters would drift.
            self.clip(self._model, clip_norm=None)
        self._is_clipped = False
        self._has_updated = True
        # An optimizer may have collectives of its own, and its state may not fit into memory.
        with self._failures.told():
            self._apply(optimizer, scheduler, skip=skip)

    def _apply(self, optimizer: Optimizer, scheduler: Scheduler | None, *, skip: bool) -> None:
        scaler = self._accelerator.scaler
        # accelerate's wrapper looks for an optional package in every call; only a scaler needs it.
        inner = getattr(optimizer, "optimizer", optimizer) if scaler is None else optimizer
        if not skip:
            inner.step()
        elif scaler is not None:
            scaler.update()  # it has unscaled: without this its next `unscale_` would raise
        # fp16's scaler leaves the step out by itself when gradients overflow.
        was_made = not (skip or getattr(optimizer, "step_was_skipped", False))
        if scheduler is not None and was_made:
            scheduler.step()
        inner.zero_grad(set_to_none=True)

    @property
    def _is_scaled(self) -> bool:
        return self._accelerator.scaler is not None

    def _require_usable(self) -> None:
        """Collective: every rank, the first time, of a model that had no values."""
        if self._is_torn:
            raise RuntimeError(
                "a backward pass broke off: some ranks have reduced gradients that other ranks do "
                "not have. Build model and Engine anew, or resume from a checkpoint"
            )
        if self._values_missing:
            require_filled(unwrap(self._model))
            self._values_missing = False

    def _require_same_order(self) -> None:
        """Collective: every rank. Wrap units ran in the same order everywhere."""
        if self._order is None:
            return
        with self._failures.told():
            difference = self._order.difference()
        if difference:
            raise UnitOrderError(difference)

    @contextlib.contextmanager
    def _forgotten_on_error(self, model: nn.Module) -> Iterator[None]:
        """An error leaves no gradients behind, which the next window would be added to."""
        try:
            yield
        except BaseException as error:
            try:
                drop_gradients(model)
            except Exception as second:  # a group that is broken; the first error says why
                self._is_torn = True
                error.add_note(f"the gradients could not be dropped: {second}")
            if self._is_clipped and self._is_scaled:
                self._accelerator.scaler.update()  # or it would not unscale the next gradients
            self._is_clipped = False
            if self._order is not None:
                self._order.forget()
            raise


class _Window:
    """What the micro-batches of one update add up to on this rank.

    What is on the device stays there, as float64 sums: to read one would make the host wait for
    every backward. What is on the host stays there too: to send it would make the host wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.zero = torch.zeros((), dtype=torch.float64, device=device)
        self.total = self.weight = self.zero
        self.host_weight = 0.0
        self.metrics: dict[str, Tensor] = {}
        self._host_metrics: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def add(self, answer: Answer) -> None:
        """Count a micro-batch in."""
        self.total = self.total + answer.loss.total.detach().to(self.zero)
        if self._is_on_host(answer.loss.weight):
            self.host_weight += float(answer.loss.weight)
        else:
            self.weight = self.weight + answer.loss.weight.detach().to(self.zero)
        for name, value in answer.metrics.items():
            self._counts[name] += 1
            if self._is_on_host(value):
                self._host_metrics[name] = self._host_metrics.get(name, 0.0) + float(value)
            else:
                self.metrics[name] = self.metrics.get(name, self.zero) + value.detach().to(
                    self.zero
                )

    def host_metrics(self) -> dict[str, tuple[float, float]]:
        """By name: the sum of what is on the host, and the micro-batches that gave the metric."""
        return {name: (self._host_metrics.get(name, 0.0), n) for name, n in self._counts.items()}

    def _is_on_host(self, value: Tensor) -> bool:
        return value.device.type == "cpu" and self.zero.device.type != "cpu"


@dataclass(frozen=True)
class _Told:
    """What the hosts of all ranks know; plain numbers, equal on every rank."""

    weight: float
    metrics: dict[str, tuple[float, float]]
    """Of every name that any rank has given: the sum of what is on hosts, and the count."""
    stop: bool


@dataclass(frozen=True)
class _Sums:
    """The window over all data-parallel ranks; plain numbers, equal on every rank."""

    loss: float
    weight: float
    norm: float
    """Of the gradients as backward has left them."""
    metrics: dict[str, float]
