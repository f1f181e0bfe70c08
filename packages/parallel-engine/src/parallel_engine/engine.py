"""Engine: a model, an optimizer and a loader made ready for any topology, and the update.

engine = Engine(parallelism=ParallelismConfig(dp_shard=-1), accelerator=AcceleratorConfig())
model, optimizer, scheduler, loader = engine.prepare(model, optimizer, scheduler, loader)
for micro_batches in engine.accumulate(loader):
    report = engine.step(model, optimizer, scheduler, micro_batches, loss_fn, clip_norm=1.0)
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel_config import (
    AcceleratorConfig,
    ConfigError,
    ParallelismConfig,
    Topology,
    with_environment,
)
from parallel_config.environment import LaunchFacts, check_environment
from parallel_engine import preflight
from parallel_engine import process as _ranks
from parallel_engine import step as _step
from parallel_engine.accelerate_build import (
    DTYPES,
    build_accelerator,
    require_as_configured,
    without_mesh_warnings,
)
from parallel_engine.determinism import apply_determinism, fix_buckets
from parallel_engine.entry_points import prepare_entry_points, undeclared_calls_explained
from parallel_engine.failures import Failures
from parallel_engine.loaders import prepare_loader, windows
from parallel_engine.materialize import (
    Fill,
    allocate,
    is_on_meta,
    move_whole,
    replicas_alike,
    require_filled,
    shard_alone,
)
from parallel_engine.metrics import MetricNames
from parallel_engine.nonfinite import NonFinite, OnNonFinite
from parallel_engine.optimizers import OptimizerFactory, build, order_of_building, require
from parallel_engine.plan import ShardPlan, plan
from parallel_engine.same_on_ranks import begin_alike, require_same_config
from parallel_engine.step import LossFn, StepReport
from parallel_engine.unit_order import UnitOrder, UnitOrderError
from parallel_engine.unit_transforms import checkpoint_units, compile_units
from parallel_engine.wrapping import (
    drop_gradients,
    forward_methods,
    log_units,
    only_with_size,
    resolve_wrap_policy,
    units_without_shards,
    unwrap,
    without_sync,
    wrap_units,
)

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
        timeout: datetime.timedelta = _ranks.TIMEOUT,
    ) -> None:
        check_environment()
        self.facts: LaunchFacts = _ranks.connect(device, timeout=timeout)
        self._parallelism = parallelism or ParallelismConfig()
        given = accelerator or AcceleratorConfig()
        self.config, self.overridden = _ranks.together(lambda: with_environment(given))
        """What accelerate's variables changed in the config, where they are allowed to."""
        self.topology: Topology = _ranks.together(
            lambda: self._parallelism.resolve(self.facts.world_size)
        )
        for line in self.overridden if self.is_main else ():
            log.warning("the environment wins: %s", line)
        self.device = _ranks.choose_device(device, self.facts)
        self._nonfinite = NonFinite(on_nonfinite)
        self.metric_names = MetricNames()
        """Of every metric that any rank has given."""
        apply_determinism(self.config)
        name = _ranks.from_main(lambda: uuid.uuid4().hex)
        self._failures = Failures(self.rank, self.topology.world_size, name)
        self._order: UnitOrder | None = None
        self._is_torn = False
        """Whether a backward pass broke off between collectives, which nothing can mend."""
        self._is_clipped = False
        """Whether `clip` has seen the gradients of the coming update."""
        self._accelerator: Accelerator | None = None
        self._model: nn.Module | None = None
        self._values_missing = False
        self._has_updated = False

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

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerFactory,
        scheduler: Any,
        loader: Any,
        *,
        fill: Fill | None = None,
    ) -> Any:
        """Collective: every rank. Returns (model, optimizer, scheduler, loader), ready.

        `scheduler` and `loader` may be None. The optimizer is built before, on the whole model, or
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
        names = _ranks.together(lambda: self._check(model, optimizer, scheduler))
        require_same_config(self.config, self.topology, self.device)
        with self._failures.told():
            prepared = self._prepare(model, optimizer, scheduler, loader, fill, names)
            _ranks.agree(None)  # who failed behind the last collective is missed here
        return prepared

    def _prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerFactory,
        scheduler: Any,
        loader: Any,
        fill: Fill | None,
        names: Sequence[str],
    ) -> Any:
        """Collective: every rank. As `prepare`, for a model with these entry points that fits.

        Whoever fails between collectives tells the others: no agreement is to be had there.
        """
        sharded, on_meta = self.topology.is_sharded, is_on_meta(model)
        built_late = sharded and not isinstance(optimizer, Optimizer)
        if not sharded:
            self._materialize(model, on_meta, fill)
        if not built_late:
            optimizer, scheduler = _ranks.together(lambda: build(model, optimizer, scheduler))
        policy = resolve_wrap_policy(model, self.config.fsdp) if sharded else None
        units = wrap_units(model, policy) if policy else units_without_shards(model, self.config)
        ignored = preflight.ignored_modules(model, self.config) if sharded else []
        replicated = preflight.names_within(model, ignored)
        accelerator = self._before_wrapping(model, units, ignored)
        with only_with_size(model, units.values() if sharded else None), without_mesh_warnings():
            if built_late:
                wrapped = shard_alone(model, accelerator)
            else:
                wrapped, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if sharded:
            self._materialize(wrapped, on_meta, fill)
        if built_late:
            optimizer, scheduler = build(wrapped, optimizer, scheduler)
            optimizer = accelerator.prepare_optimizer(optimizer)
            scheduler = scheduler and accelerator.prepare_scheduler(scheduler)
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
            assert isinstance(optimizer, Optimizer)
            preflight.verify_sharded(wrapped, optimizer, units, replicated)
            self._order = UnitOrder(wrapped, self.topology.world_size)
            self._failures.order = self._order
            if self.is_main:
                log_units(wrapped, policy.source)
        self._model = wrapped
        return wrapped, optimizer, scheduler, prepare_loader(loader, accelerator, self.device)

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
            ConfigError: the degrees do not fit, or nobody names wrap units.
            RuntimeError: this process is one of several ranks.
        """
        ranks = self.topology.world_size if world_size is None else world_size
        return plan(model_factory, self._parallelism, self.config, ranks, batch_size=batch_size)

    def accumulate(self, loader: Iterable[Any], *, first_epoch: int = 0) -> Iterator[Sequence[Any]]:
        """Windows of micro-batches, one per update, for as long as the caller asks.

        The loader is started again at its end, with `set_epoch` of itself and its samplers where
        there is one, counted from `first_epoch`; a window runs on over that end. Each batch must
        be one of its own, not the former one refilled: a window holds several. A micro-batch
        moves to the device when it is taken out of its window. What the loader raises is told to
        the other ranks.

        Raises:
            ConfigError: the loader yields nothing, or nothing any more.
        """
        steps = self.config.gradient_accumulation.steps
        return windows(loader, steps, self.device, self._failures.told, first_epoch)

    def step(
        self,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any,
        micro_batches: Sequence[Any],
        loss_fn: LossFn,
        *,
        clip_norm: float | None = None,
    ) -> StepReport:
        """Collective: every rank. One optimizer update over the window.

        `loss_fn(model, batch)` returns a 0-dim mean or a `Loss`, alone or with a dict of metrics,
        whose names may differ between batches and ranks. After an error no gradients are left, so
        that a window may be tried again; not so where it broke off a backward pass of several
        ranks.

        Raises:
            NonFiniteError: on every rank, before the update, with `on_nonfinite="error"`.
            UnitOrderError: on every rank, before the update: ranks ran different wrap units.
            PeerError: another rank failed; its error is quoted.
        """
        started = time.perf_counter()
        lr = float(optimizer.param_groups[0]["lr"])
        with self._forgotten_on_error(model):
            window = _step.run_window(self, model, micro_batches, loss_fn)
            with self._failures.told():
                ddp = self.config.ddp
                allowed = ddp.find_unused_parameters or ddp.static_graph
                _step.require_all_used(model, allowed=allowed)
                sums = _step.reduce_window(window, self.metric_names)
                weight = sums.weight if sums.weight > 0 else 1.0
                scale = self.topology.dp_world_size / weight
                norm = self.clip(model, scale=scale, clip_norm=clip_norm)
            loss = sums.total / weight
            scaled = self.accelerator.scaler is not None
            skipped = self._nonfinite.must_skip(loss, norm, scaled=scaled)
        self.update(optimizer, scheduler, skip=skipped)
        return StepReport(
            loss=loss,
            grad_norm=norm,
            lr=lr,
            seconds=time.perf_counter() - started,
            skipped=skipped,
            metrics=sums.metrics,
        )

    @contextlib.contextmanager
    def micro_batch(self, model: nn.Module, index: int, count: int) -> Iterator[None]:
        """Around forward and backward of a micro-batch: only the last of a window syncs.

        With `gradient_accumulation.sync_each_batch` every one does. An error inside is told to
        the other ranks. After the last one they compare the order of their wrap units.

        Raises:
            UnitOrderError: on every rank: they ran different wrap units.
            RuntimeError: a backward pass broke off before.
            ConfigError: on every rank, the first time: the model was built on the meta device and
                nothing has given it values since.
        """
        if self._is_torn:
            raise RuntimeError(
                "a backward pass broke off: some ranks have reduced gradients that others have "
                "not. Build model and Engine anew, or resume from a checkpoint"
            )
        if self._values_missing:
            require_filled(unwrap(model))
            self._values_missing = False
        last = index == count - 1
        syncs_now = last or self.config.gradient_accumulation.sync_each_batch
        # DDP learns a static graph from its first backward passes, which must therefore reduce.
        learning = self.config.ddp.static_graph and not self._has_updated
        syncs = contextlib.nullcontext() if syncs_now or learning else without_sync(model)
        with self._forgotten_on_error(model):
            with self._failures.told(), undeclared_calls_explained(model), syncs:
                yield
            if last:
                self._require_same_order()

    def backward(self, loss: Tensor) -> None:
        """Collective: every rank. Backward of one micro-batch; fp16 goes through its scaler."""
        scaler = self.accelerator.scaler
        try:
            (scaler.scale(loss) if scaler is not None else loss).backward()
        except BaseException:
            self._is_torn = self.topology.world_size > 1
            raise

    def clip(self, model: nn.Module, *, scale: float = 1.0, clip_norm: float | None) -> float:
        """Collective: every rank. Scale the gradients, clip them by their true global norm.

        Returns the norm before clipping, the same on every rank.
        """
        try:
            self.accelerator.unscale_gradients()
        except RuntimeError as error:  # a loop of one's own may have clipped by accelerate before
            if "already been called" not in str(error):
                raise
        self._is_clipped = True
        if self.topology.is_sharded:
            _step.average_replicated(model, self.topology.dp_world_size)
        return _step.scale_and_clip(list(model.parameters()), scale=scale, max_norm=clip_norm)

    def update(self, optimizer: Any, scheduler: Any, *, skip: bool = False) -> None:
        """Collective: every rank. Optimizer and scheduler once, gradients to None.

        A skipped update moves neither. Gradients that `clip` has not seen are reduced here, as they
        are.
        """
        if not self._is_clipped:
            assert self._model is not None, "engine.update comes after engine.prepare"
            self.clip(self._model, clip_norm=None)
        self._is_clipped = False
        self._has_updated = True
        scaler = self.accelerator.scaler
        # accelerate's wrapper looks for an optional package in every call; only a scaler needs it.
        inner = getattr(optimizer, "optimizer", optimizer) if scaler is None else optimizer
        if not skip:
            inner.step()
        elif scaler is not None:
            scaler.update()
        if scheduler is not None and not (skip or optimizer.step_was_skipped):
            scheduler.step()
        inner.zero_grad(set_to_none=True)

    def any(self, flag: bool) -> bool:
        """Collective: every rank. Whether the flag is set on any rank.

        Raises:
            PeerError: another rank failed or is gone.
        """
        with self._failures.told():
            return _ranks.any_rank(flag)

    def telling_peers(self) -> contextlib.AbstractContextManager[None]:
        """Around work of your own between updates: a rank that fails there is named to the others.

        Raises:
            PeerError: a collective inside broke because another rank failed or is gone.
        """
        return self._failures.told()

    def _check(self, model: nn.Module, optimizer: Any, scheduler: Any) -> tuple[str, ...]:
        require("model", model, nn.Module)
        built = isinstance(optimizer, Optimizer)
        if not built and not callable(optimizer):
            require("optimizer", optimizer, Optimizer)
        problems = list(order_of_building(optimizer if built else None, scheduler))
        if problems:
            raise ConfigError(problems)
        preflight.check(
            model, optimizer if built else None, self.config, self.topology, self.device
        )
        return forward_methods(model)

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
        _ranks.together(
            lambda: require_as_configured(accelerator, self.config, self.topology, self.device)
        )
        self._accelerator = accelerator
        move_whole(model, self.device, ignored)
        return accelerator

    def _materialize(self, model: nn.Module, on_meta: bool, fill: Fill | None) -> None:
        """Collective: every rank. Memory for what has none, then values.

        `fill` may have collectives of its own, so it is under no agreement.
        """
        if on_meta:
            _ranks.together(lambda: self._allocate(model))
        if fill is not None:
            with torch.no_grad():
                fill(model)
            if on_meta:
                require_filled(model)
            if self.topology.is_sharded:
                replicas_alike(model)
        self._values_missing = on_meta and fill is None

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
        except BaseException:
            drop_gradients(model)
            if self._is_clipped and self.accelerator.scaler is not None:
                self.accelerator.scaler.update()  # or it would not unscale the next gradients
            self._is_clipped = False
            if self._order is not None:
                self._order.forget()
            raise

    def _allocate(self, model: nn.Module) -> None:
        shards = torch.device("cpu") if self.config.fsdp.cpu_offload else self.device
        allocate(model, self.device, shards=shards)
        move_whole(model, self.device, ())
