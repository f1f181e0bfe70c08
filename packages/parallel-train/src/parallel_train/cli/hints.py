"""What a flag that does not exist was meant to be: a slip, or the name that another tool uses."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence

from parallel_config import Problem
from parallel_train.cli import flags as argv_flags

_SAME = {
    "accelerator.mixed_precision bf16": ("bf16", "precision", "dtype", "policy.dtype", "amp"),
    "accelerator.mixed_precision fp16": ("fp16", "policy.use_amp", "use_amp"),
    "accelerator.gradient_accumulation.steps": (
        "gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps",
        "training.gradient_accumulation_steps",
    ),
    "accelerator.activation_checkpointing.mode full": (
        "gradient_checkpointing", "activation_checkpointing", "activation_checkpoint.mode",
        "policy.gradient_checkpointing",
    ),
    "accelerator.compile.enable": (
        "compile", "torch_compile", "compile.enable", "training.compile", "policy.compile_model",
    ),
    "accelerator.tf32": ("tf32", "use_tf32"),
    "batch_size": (
        "per_device_train_batch_size", "train_batch_size", "local_batch_size", "micro_batch_size",
        "training.local_batch_size", "per_gpu_batch_size",
    ),
    "checkpoint.save_freq": (
        "save_freq", "save_steps", "save_every", "save_interval", "checkpoint.interval",
    ),
    "checkpoint.keep_last": ("save_total_limit", "checkpoint.keep_latest_k", "keep_last_n"),
    "config": ("config_path", "config_file", "cfg", "job.config_file"),
    "dataset.num_workers": ("num_workers", "dataloader_num_workers", "workers"),
    "dataset.root": ("data_dir", "data_path", "dataset_path", "dataset_dir", "root"),
    "eval.freq": ("eval_freq", "eval_steps", "eval_interval"),
    "log_freq": ("logging_steps", "log_interval", "log_every_n_steps", "metrics.log_freq"),
    "logging.wandb": ("wandb", "wandb.enable", "use_wandb", "report_to", "metrics.enable_wandb"),
    "logging.wandb_project": ("wandb.project", "wandb_project", "project"),
    "logging.wandb_entity": ("wandb.entity", "wandb_entity"),
    "logging.wandb_mode": ("wandb.mode", "wandb_mode"),
    "logging.tensorboard": ("tensorboard", "metrics.enable_tensorboard"),
    "nproc_per_node": ("num_processes", "nproc", "num_gpus", "gpus", "world_size"),
    "optimizer.lr": ("lr", "learning_rate", "max_lr", "peak_lr", "base_lr", "policy.optimizer_lr"),
    "optimizer.type": ("optimizer", "optim", "optimizer.name"),
    "optimizer.clip_norm": (
        "max_grad_norm", "max_norm", "grad_clip", "gradient_clip_val", "clip_grad_norm",
        "optimizer.grad_clip_norm", "training.max_norm",
    ),
    "output_dir": ("run_name", "job_name", "exp_name", "save_dir", "work_dir", "out_dir"),
    "parallelism.dp_shard": (
        "fsdp", "parallelism.data_parallel_shard_degree", "data_parallel_shard_degree",
    ),
    "parallelism.dp_replicate": (
        "ddp", "parallelism.data_parallel_replicate_degree", "data_parallel_replicate_degree",
    ),
    "policy.type": ("policy", "model", "policy_type", "model_name"),
    "publish.enable": ("push_to_hub", "policy.push_to_hub"),
    "publish.repo_id": ("policy.repo_id", "hub_model_id", "repo_id"),
    "scheduler.type": ("lr_scheduler", "lr_scheduler_type", "scheduler.name", "scheduler"),
    "scheduler.warmup_steps": (
        "warmup_steps", "num_warmup_steps", "lr_warmup_steps", "scheduler.num_warmup_steps",
        "lr_scheduler.warmup_steps", "warmup",
    ),
    "scheduler.decay_steps": ("scheduler.num_decay_steps", "lr_decay_steps", "decay_steps"),
    "steps": (
        "max_steps", "num_steps", "train_steps", "num_train_steps", "max_iters", "training.steps",
        "iterations",
    ),
}  # fmt: skip
_NAMES = {other: ours for ours, names in _SAME.items() for other in names}
_EXPLAINED = {
    "epochs": "A run counts optimizer updates: use --steps.",
    "num_train_epochs": "A run counts optimizer updates: use --steps.",
    "max_epochs": "A run counts optimizer updates: use --steps.",
    "resume_from_checkpoint": "Use `ptrain resume RUN`, or --resume auto.",
    "resume_from": "Use `ptrain resume RUN`, or --resume auto.",
    "device": "Set the variable PARALLEL_DEVICE=cpu, or leave it out.",
    "policy.device": "Set the variable PARALLEL_DEVICE=cpu, or leave it out.",
    "warmup_ratio": "Warm-up is a number of updates: use --scheduler.warmup_steps.",
}
_OWN_OF_TYRO = ("help", "tyro_print_completion", "tyro_write_completion")


def unknown_flags(argv: Sequence[str], flags: Mapping[str, int], command: str) -> Iterator[Problem]:
    """A problem for each flag of `argv` that `command` does not have, with what was meant."""
    seen = set()
    for token in argv:
        name = argv_flags.name_of(token)
        if name is None or name in flags or name in _OWN_OF_TYRO or name in seen:
            continue
        seen.add(name)
        yield Problem(f"--{name}", f"is not a flag of `ptrain {command}`.", _hint(name, flags))


def stray_words(argv: Sequence[str], flags: Mapping[str, int], allowed: int) -> Iterator[Problem]:
    """A problem for each word that belongs to no flag, after the `allowed` first ones."""
    words = argv_flags.positionals(argv, flags)[allowed:]
    for index, token in enumerate(argv):
        if token not in words:
            continue
        words.remove(token)
        before = argv_flags.name_of(argv[index - 1]) if index else None
        if before is not None and flags.get(before) in argv_flags.BOOLEANS:
            message = f"= {token!r}, but a boolean takes true, false or no value."
            yield Problem(f"--{before}", message, f"Use --{before} or --{before} false.")
        else:
            yield Problem(token, "does not belong to any flag.", "Names of flags begin with --.")


def _hint(name: str, flags: Collection[str]) -> str:
    if name in _EXPLAINED:
        return _EXPLAINED[name]
    ours = _NAMES.get(name, "")
    if ours.split(" ")[0] in flags:
        return f"Use --{ours}."
    leaf = name.rpartition(".")[2]
    same = sorted(flag for flag in flags if flag.rpartition(".")[2] == leaf)
    # A long section in common must not make two unlike names near.
    near = same or [
        flag
        for flag in difflib.get_close_matches(name, flags, n=3, cutoff=0.75)
        if _likeness(flag.rpartition(".")[2], leaf) >= 0.6
    ]
    if not near:  # a slip in the last part alone
        leaves = {flag.rpartition(".")[2]: flag for flag in flags}
        near = [leaves[found] for found in difflib.get_close_matches(leaf, leaves, 1, cutoff=0.8)]
    if not near:
        return "`--help` lists all flags."
    return "Did you mean " + " or ".join(f"--{flag}" for flag in near[:3]) + "?"


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
