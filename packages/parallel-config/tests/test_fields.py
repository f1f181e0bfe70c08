"""What each dataclass refuses in itself, and the pure arithmetic that lives in it."""

import pytest

from parallel_config import (
    AcceleratorConfig,
    ActivationCheckpointingConfig,
    CheckpointConfig,
    CheckpointFormat,
    ConfigError,
    DDPConfig,
    EMAConfig,
    FSDPConfig,
    GradientAccumulationConfig,
    OptimizerConfig,
    SchedulerConfig,
    clean_fqn,
)
from parallel_config.checkpoint import parse_size


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (
            lambda: GradientAccumulationConfig(steps=0),
            "accelerator.gradient_accumulation.steps = 0",
        ),
        (lambda: FSDPConfig(wrap_modules=[]), "accelerator.fsdp.wrap_modules = []"),
        (lambda: FSDPConfig(wrap_modules=["A,B"]), "--accelerator.fsdp.wrap_modules A B"),
        (lambda: FSDPConfig(wrap_modules=["A"], min_num_params=1), "exclude each other"),
        (lambda: FSDPConfig(min_num_params=0), "accelerator.fsdp.min_num_params = 0"),
        (lambda: DDPConfig(bucket_cap_mb=0), "accelerator.ddp.bucket_cap_mb = 0"),
        (lambda: ActivationCheckpointingConfig(every=0), "activation_checkpointing.every = 0"),
        (lambda: AcceleratorConfig(deterministic=True, cudnn_benchmark=True), "contradicts"),
        (lambda: OptimizerConfig(lr=0.0), "optimizer.lr = 0.0"),
        (lambda: OptimizerConfig(lr=float("nan")), "optimizer.lr = nan"),
        (lambda: OptimizerConfig(betas=(0.9, 1.0)), "optimizer.betas"),
        (lambda: OptimizerConfig(weight_decay=-1.0), "optimizer.weight_decay = -1.0"),
        (lambda: OptimizerConfig(clip_norm=0.0), "optimizer.clip_norm = 0.0"),
        (lambda: EMAConfig(decay=1.0), "ema.decay = 1.0"),
        (lambda: SchedulerConfig(warmup_steps=-1), "scheduler.warmup_steps = -1"),
        (lambda: SchedulerConfig(warmup_steps=5, decay_steps=5), "scheduler.decay_steps = 5"),
        (lambda: SchedulerConfig(min_lr_ratio=1.5), "scheduler.min_lr_ratio = 1.5"),
        (lambda: CheckpointConfig(save_freq=-1), "checkpoint.save_freq = -1"),
        (lambda: CheckpointConfig(keep_last=0), "checkpoint.keep_last = 0"),
        (lambda: CheckpointConfig(keep_every=0), "checkpoint.keep_every = 0"),
        (lambda: CheckpointConfig(max_shard_size="5 apples"), "checkpoint.max_shard_size"),
    ],
)
def test_a_field_out_of_range_is_refused_with_its_path(build, path):
    with pytest.raises(ConfigError) as caught:
        build()
    assert path in str(caught.value)


def test_keep_every_alone_is_read_as_older_runs_saved_it():
    assert CheckpointConfig(keep_every=5).keep_last is None


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("5GB", 5 * 10**9), ("512MiB", 512 * 2**20), ("1.5 kb", 1500), ("7", 7), (7, 7)],
)
def test_a_size_is_a_number_with_or_without_a_unit(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5XB", "nanGB", "infGB", 0, -1, 1.5e400])
def test_a_text_that_is_not_a_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_formats_say_which_artifacts_they_hold():
    holds = {f.value: (f.has_safetensors, f.has_dcp) for f in CheckpointFormat}
    assert holds == {
        "safetensors": (True, False),
        "dcp": (False, True),
        "safetensors_dcp": (True, True),
    }


def test_the_schedule_is_a_function_of_updates():
    config = SchedulerConfig(type="cosine", warmup_steps=4, min_lr_ratio=0.1)
    curve = [config.factor(n, total_steps=20) for n in range(21)]
    assert curve[:4] == [0.2, 0.4, 0.6, 0.8]
    assert curve[4] == 1.0
    assert curve[12] == pytest.approx(0.55)
    assert curve[20] == pytest.approx(0.1)
    assert curve[4:] == sorted(curve[4:], reverse=True)
    assert config.factor(99, total_steps=20) == curve[20]


def test_linear_and_constant_schedules():
    linear = SchedulerConfig(type="linear", decay_steps=10)
    assert [linear.factor(n, total_steps=99) for n in (0, 5, 10, 50)] == [1.0, 0.5, 0.0, 0.0]
    assert SchedulerConfig(type="constant").factor(10**6, total_steps=1) == 1.0


@pytest.mark.parametrize(
    ("name", "under_ddp", "clean"),
    [
        ("module.blocks.0.weight", True, "blocks.0.weight"),
        ("module.blocks.0.weight", False, "module.blocks.0.weight"),
        ("module.module.weight", True, "module.weight"),
        ("_orig_mod.module.weight", True, "weight"),
        ("blocks._checkpoint_wrapped_module._orig_mod.weight", False, "blocks.weight"),
        ("module", True, "module"),
    ],
)
def test_names_are_the_users_own(name, under_ddp, clean):
    assert clean_fqn(name, under_ddp=under_ddp) == clean


@pytest.mark.parametrize(
    ("config", "on_cuda", "tf32", "benchmark"),
    [
        (AcceleratorConfig(), True, True, True),
        (AcceleratorConfig(), False, False, False),
        (AcceleratorConfig(deterministic=True), True, False, False),
        (AcceleratorConfig(deterministic=True, tf32=True), True, True, False),
        (AcceleratorConfig(tf32=False, cudnn_benchmark=False), True, False, False),
        (AcceleratorConfig(cudnn_benchmark=True), False, False, True),
    ],
)
def test_switches_that_are_left_open_are_on_where_they_speed_up_a_run(
    config, on_cuda, tf32, benchmark
):
    decided = config.decided(on_cuda=on_cuda)
    assert (decided.tf32, decided.cudnn_benchmark) == (tf32, benchmark)
