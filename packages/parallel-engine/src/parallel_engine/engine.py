"""Engine: a model, an optimizer and a loader made ready for any topology, and the update.

engine = Engine(parallelism=ParallelismConfig(dp_shard=-1), accelerator=AcceleratorConfig())
model, optimizer, scheduler, loader = engine.prepare(model, optimizer, scheduler, loader)
for epoch in range(3):
    for micro_batches in engine.accumulate(loader):  # ends with the loader, on all ranks alike
        report = engine.step(model, optimizer, scheduler, micro_batches, loss_fn, clip_norm=1.0)
"""

from __future__ import annotations

import datetime
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar, cast, overload

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel_config import (
    AcceleratorConfig,
    ConfigError,
    ParallelismConfig,
    Problem,
    Topology,
    with_environment,
)
from parallel_config.environment import LaunchFacts, check_environment
from parallel_engine import preflight
from parallel_engine.accelerate_build import (
    DTYPES,
    build_accelerator,
    require_as_configured,
    without_mesh_warnings,
)
from parallel_engine.agreement import agree, any_rank, from_main, together
from parallel_engine.determinism import apply_determinism, fix_buckets
from parallel_engine.entry_points import prepare_entry_points
from parallel_engine.failures import Failures
from parallel_engine.loaders import prepare_loader
from parallel_engine.loss import LossFn
from parallel_engine.materialize import (
    Fill,
    is_on_meta,
    materialize,
    move_whole,
    shard_alone,
)
from parallel_engine.metrics import MetricNames
from parallel_engine.nonfinite import NonFinite, OnNonFinite
from parallel_engine.optimizers import build, check_given, step_mixed_groups_one_by_one
from parallel_engine.plan import ShardPlan, plan
from parallel_engine.process import (
    TIMEOUT,
    choose_device,
    connect,
    process_groups,
    with_timeout_of_world,
)
from parallel_engine.same_on_ranks import begin_alike, require_same_config
from parallel_engine.types import Batch, OptimizerFactory, Scheduler, SchedulerFactory
from parallel_engine.unit_order import UnitOrder
from parallel_engine.unit_transforms import checkpoint_units, compile_units
from parallel_engine.update import StepReport, Update
from parallel_engine.windows import Passes, Windows, require_count
from parallel_engine.wrapping import (
    log_units,
    only_with_size,
    resolve_wrap_policy,
    units_without_shards,
    wrap_units,
)

Loader = TypeVar("Loader")
log = logging.getLogger("parallel_engine")


class Engine:
    """Collective: every rank. One per process and run.

    Args:
        parallelism: degrees; resolved against the launch's world size.
        accelerator: precision, accumulation and the knobs of each kind.
        device: where to run; None takes `PARALLEL_DEVICE`, else this rank's CUDA device, else CPU.
        on_nonfinite: what to do when a loss or gradient is not finite: raise, or leave the update
            out and count it.
        timeout: how long ranks wait for one another, at the start and in each collective; as in
            `init_process_group`. A group that is running keeps its own.
        facts: what `connect` returned, where the caller has called `check_environment` and
            `connect` already. None does both here.

    Raises:
        ConfigError: the degrees do not fit the launch, or the environment asks for something else.
    """

    def __init__(
        self,
        *,
        parallelism: ParallelismConfig | None = None,
        accelerator: AcceleratorConfig | None = None,
        device: torch.device | str | None = None,
        on_nonfinite: OnNonFinite = "error",
        timeout: datetime.timedelta = TIMEOUT,
        facts: LaunchFacts | None = None,
    ) -> None:
        if facts is None:
            check_environment()
            facts = connect(device, timeout=timeout)
        self.facts: LaunchFacts = facts
        self._parallelism = parallelism or ParallelismConfig()
        given = accelerator or AcceleratorConfig()
        self.config, self.overridden = together(lambda: with_environment(given))
        """What accelerate's variables changed in the config, where they are allowed to."""
        self.topology: Topology = together(lambda: self._parallelism.resolve(self.facts.world_size))
        for line in self.overridden if self.is_main else ():
            log.warning("the environment wins: %s", line)
        self.device = choose_device(device, self.facts)
        self._nonfinite = NonFinite(on_nonfinite)
        self.metric_names = MetricNames()
        """Of every metric that any rank has given."""
        self._passes = Passes()
        apply_determinism(self.config)
        # A name that was never used before: what an earlier engine's ranks wrote is not read.
        name = from_main(lambda: uuid.uuid4().hex)
        self._failures = Failures(self.rank, self.topology.world_size, name)
        self._accelerator: Accelerator | None = None
        self._updates: Update | None = None
        self._trains = True

    @property
    def rank(self) -> int:
        """Number of this process among all of the launch."""
        return self.facts.rank

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes what is written once."""
        return self.facts.is_main

    @property
    def num_skipped(self) -> int:
        """Updates left out because a value was not finite."""
        return self._nonfinite.num_skipped

    @property
    def accelerator(self) -> Accelerator:
        """Accelerate's object, there after `prepare`."""
        if self._accelerator is None:
            raise RuntimeError("engine.accelerator is there after engine.prepare(...)")
        return self._accelerator

    @overload
    def prepare(
        self,
        model: nn.Module,
        optimizer: None,
        scheduler: None,
        loader: Loader,
        *,
        fill: Fill | None = None,
    ) -> tuple[nn.Module, None, None, Loader]: ...
    @overload
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerFactory,
        scheduler: Scheduler | SchedulerFactory | None,
        loader: Loader,
        *,
        fill: Fill | None = None,
    ) -> tuple[nn.Module, Optimizer, Scheduler | None, Loader]: ...
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerFactory | None,
        scheduler: Scheduler | SchedulerFactory | None,
        loader: Loader,
        *,
        fill: Fill | None = None,
    ) -> tuple[nn.Module, Optimizer | None, Scheduler | None, Loader]:
        """Collective: every rank. Returns (model, optimizer, scheduler, loader), ready.

        `scheduler` and `loader` may be None. Without an optimizer the model is for evaluation and
        inference alone: it is sharded where the degrees say so, and it is not wrapped in DDP.

        The optimizer is built before, on the whole model, or
        given as a function `model -> optimizer`, which then sees the sharded one: needed where it
        makes its state at once, as Adagrad does. The scheduler is then `optimizer -> scheduler`.

        A model may be on the meta device, see `parallel_engine.parameters_on_meta`: it is sharded
        first, then each rank's shards get memory, `fill(model)` writes the values into them
        (`parallel_ckpt.load_weights`, `parallel_engine.initialize`, or a function of yours that
        every rank calls), and the functions that build optimizer and scheduler see the result.
        Without a `fill` the values must be there before the first micro-batch.

        Raises:
            ConfigError: model, optimizer or loader do not fit the config, all problems at once; or
                `fill` left parameters or buffers without values.
            PeerError: another rank failed on the way, as in its `fill`; its error is quoted.
        """
        if self._accelerator is not None:
            raise RuntimeError("an Engine prepares one model and one optimizer; make another one")
        names = together(
            lambda: check_given(
                model, optimizer, scheduler, self.config, self.topology, self.device
            )
        )
        require_same_config(self.config, self.topology, self.device)
        # A rank that fails between collectives tells the others: no agreement is possible there.
        with self._failures.told():
            prepared = self._prepare(model, optimizer, scheduler, loader, fill, names)
            agree(None)  # an error behind the last collective is noticed here, by a missing rank
        return prepared

    def _prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerFactory | None,
        scheduler: Scheduler | SchedulerFactory | None,
        loader: Loader,
        fill: Fill | None,
        names: Sequence[str],
    ) -> tuple[nn.Module, Optimizer | None, Scheduler | None, Loader]:
        """Collective: every rank. As `prepare`, for a model with these entry points that fits."""
        groups_before = process_groups() if self.topology.world_size > 1 else []
        sharded, on_meta = self.topology.is_sharded, is_on_meta(model)
        built_late = sharded and not isinstance(optimizer, Optimizer)
        # Values come before DDP wraps, which sends those of rank 0; a sharded model gets its
        # memory after it is cut, so that no rank ever holds the whole.
        if not sharded:
            materialize(model, on_meta, fill, self.config, self.topology, self.device)
        if optimizer is not None and not built_late:
            given = optimizer
            optimizer, scheduler = together(lambda: build(model, given, scheduler))
        policy = resolve_wrap_policy(model, self.config.fsdp) if sharded else None
        units = wrap_units(model, policy) if policy else units_without_shards(model, self.config)
        ignored = preflight.ignored_modules(model, self.config) if sharded else []
        replicated = preflight.names_within(model, ignored)
        accelerator = self._before_wrapping(model, units, ignored)
        with only_with_size(model, units.values() if sharded else None), without_mesh_warnings():
            if built_late:
                wrapped = shard_alone(model, accelerator)
            elif optimizer is None:
                wrapped = accelerator.prepare_model(model, evaluation_mode=True)
            else:
                wrapped, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if sharded:
            materialize(wrapped, on_meta, fill, self.config, self.topology, self.device)
        if built_late and optimizer is not None:
            optimizer, scheduler = build(wrapped, optimizer, scheduler)
            optimizer = accelerator.prepare_optimizer(optimizer)
            scheduler = scheduler and accelerator.prepare_scheduler(scheduler)
        # Built above, one way or the other; accelerate's wrappers are an Optimizer and a Scheduler.
        ready, schedule = cast("Optimizer | None", optimizer), cast("Scheduler | None", scheduler)
        prepare_entry_points(
            wrapped,
            model,
            names,
            device_type=self.device.type,
            autocast_dtype=DTYPES[self.config.mixed_precision],
        )
        if self.config.deterministic:
            fix_buckets(wrapped)
        if policy:
            preflight.verify_sharded(wrapped, ready, units, replicated)
            if ready is not None:
                step_mixed_groups_one_by_one(ready)
            self._failures.order = UnitOrder(wrapped, self.topology.world_size)
            if self.is_main:
                log_units(wrapped, policy.source)
        self._updates = self._update_of(
            wrapped, accelerator, values_missing=on_meta and fill is None
        )
        self._trains = ready is not None
        with_timeout_of_world(groups_before)
        return wrapped, ready, schedule, prepare_loader(loader, accelerator, self.device)

    def _update_of(
        self, model: nn.Module, accelerator: Accelerator, *, values_missing: bool
    ) -> Update:
        return Update(
            model,
            accelerator,
            config=self.config,
            topology=self.topology,
            device=self.device,
            failures=self._failures,
            nonfinite=self._nonfinite,
            metric_names=self.metric_names,
            order=self._failures.order,
            values_missing=values_missing,
        )

    def plan(
        self,
        model_factory: Callable[[], nn.Module],
        world_size: int | None = None,
        *,
        batch_size: int = 1,
    ) -> ShardPlan:
        """What this config would do on `world_size` ranks, by default those of this launch.

        The degrees are those that were given, resolved anew: `dp_shard=-1` fills any number. As
        `parallel_engine.plan`, which needs no engine and so no degrees that fit this launch.

        Raises:
            ConfigError: the degrees do not fit, or no wrap units are named.
            RuntimeError: this process is one of several ranks.
        """
        ranks = self.topology.world_size if world_size is None else world_size
        return plan(model_factory, self._parallelism, self.config, ranks, batch_size=batch_size)

    def accumulate(
        self,
        loader: Iterable[Batch],
        *,
        epochs: int | None = 1,
        first_epoch: int | None = None,
    ) -> Iterator[Sequence[Batch]]:
        """Collective: every rank. Windows of micro-batches, one for each update.

        Ends with the loader, on all ranks at the same window: that of the rank whose loader ends
        first. Micro-batches that are left and do not fill a window are left out, which is said
        once. With `epochs` the loader is started again that often, and a window runs on over the
        ends in between; None continues without end.

        Each pass has a number, which `set_epoch` of the loader and its samplers is told, where
        there is one. None counts on from the last pass over this loader, beginning at 0.

        The loader must yield a new batch each time, not the former one refilled: a window holds
        several. A micro-batch moves to the device when it is taken out of its window. What the
        loader raises is told to the other ranks. A loader without a length is read one window
        ahead where there are several ranks and an end.

        Raises:
            ConfigError: a rank's loader yields nothing, or less than one window, or nothing any
                more; or less than its length says. `epochs` or `first_epoch` is not such a number.
        """
        require_count("epochs", epochs, least=1, none="None continues without end.")
        require_count("first_epoch", first_epoch, least=0, none="None counts on.")
        windows = Windows(
            loader,
            self.config.gradient_accumulation.steps,
            self.device,
            self._failures.told,
            self._passes,
            epochs,
            first_epoch,
            self.topology.world_size,
        )
        return iter(windows)

    def step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Scheduler | None,
        micro_batches: Sequence[Batch],
        loss_fn: LossFn[Batch],
        *,
        clip_norm: float | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> StepReport:
        """Collective: every rank. One optimizer update over the window, see `update.py`.

        `loss_fn(model, batch)` returns a 0-dim mean or a `Loss`, alone or with a dict of metrics,
        whose names may differ between batches and ranks; or an `Answer`. `stop` is asked once,
        after the last backward, and `report.stop` says whether any rank did. After an error no
        gradients are left, so that a window may be tried again; not so where it broke off a
        backward pass of several ranks.

        Raises:
            NonFiniteError: on every rank, before the update, with `on_nonfinite="error"`.
            UnitOrderError: on every rank, before the update: ranks ran different wrap units.
            PeerError: another rank failed; its error is quoted.
            ConfigError: the window holds no micro-batch.
        """
        if not self._trains:
            raise RuntimeError(
                "engine.step updates a model that was prepared with an optimizer; this one was "
                "prepared for evaluation alone: engine.prepare(model, None, ...)"
            )
        if not len(micro_batches):  # the schedule would move on without an update
            empty = Problem("micro_batches", "is empty, but an update takes at least one.")
            with self.telling_peers():
                raise ConfigError(empty)
        return self._prepared.run(
            model, optimizer, scheduler, micro_batches, loss_fn, clip_norm=clip_norm, stop=stop
        )

    def micro_batch(self, model: nn.Module, index: int, count: int) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch: only the last of a window syncs.

        With `gradient_accumulation.sync_each_batch` every one does. An error inside is told to
        the other ranks. After the last one they compare the order of their wrap units.

        Raises:
            UnitOrderError: on every rank: they ran different wrap units.
            RuntimeError: a backward pass broke off before.
            ConfigError: on every rank, the first time: the model was built on the meta device and
                nothing has given it values since.
        """
        return self._prepared.micro_batch(model, index, count)

    def backward(self, loss: Tensor) -> None:
        """Collective: every rank. Backward of one micro-batch; fp16 goes through its scaler."""
        self._prepared.backward(loss)

    def clip(self, model: nn.Module, *, scale: float = 1.0, clip_norm: float | None) -> float:
        """Collective: every rank. Scale the gradients, clip them by their true global norm.

        Returns the norm before clipping, the same on every rank.
        """
        return self._prepared.clip(model, scale=scale, clip_norm=clip_norm)

    def update(
        self, optimizer: Optimizer, scheduler: Scheduler | None, *, skip: bool = False
    ) -> None:
        """Collective: every rank. Optimizer and scheduler once, gradients to None.

        A skipped update moves neither. Gradients that `clip` has not seen are reduced here, as they
        are.
        """
        self._prepared.apply(optimizer, scheduler, skip=skip)

    @property
    def _prepared(self) -> Update:
        if self._updates is None:
            raise RuntimeError("the engine updates a model after engine.prepare(...)")
        return self._updates

    def any(self, flag: bool) -> bool:
        """Collective: every rank. Whether the flag is set on any rank.

        Raises:
            PeerError: another rank failed or is gone.
        """
        with self._failures.told():
            return any_rank(flag)

    def telling_peers(self) -> AbstractContextManager[None]:
        """Around work of your own between updates: a rank that fails there is named to the others.

        Raises:
            PeerError: a collective inside broke because another rank failed or is gone.
        """
        return self._failures.told()

    def _before_wrapping(
        self, model: nn.Module, units: Mapping[str, nn.Module], ignored: Sequence[nn.Module]
    ) -> Accelerator:
        """Collective: every rank. What comes before sharding, in this order."""
        preflight.make_contiguous(model, sharded=self.topology.is_sharded)
        preflight.widen_masters(model, self.config)
        begin_alike(model, self.device)
        checkpoint_units(model, units, self.config.activation_checkpointing)
        compile_units(units, self.config.compile)
        accelerator = build_accelerator(
            self.config,
            self.topology,
            self.device,
            ignored=ignored,
            facts=self.facts,
        )
        together(
            lambda: require_as_configured(accelerator, self.config, self.topology, self.device)
        )
        self._accelerator = accelerator
        move_whole(model, self.device, ignored)
        return accelerator
