"""MFU: counted on the meta device, over a peak that is given or looked up."""

import pytest
import torch
from torch import nn

from parallel_train.config import LoggingConfig, TrainConfig
from parallel_train.data.config import DatasetConfig
from parallel_train.metrics.mfu import flops_per_sample, samples_per_s_at_peak
from parallel_train.policies.act.configuration import ACTConfig
from parallel_train.policies.act.modeling import ACTPolicy
from parallel_train.policies.factory import build_policy
from parallel_train.policies.registry import POLICIES
from parallel_train.policies.reward.modeling import RewardModel
from parallel_train.policies.wam.modeling import WAMPolicy
from parallel_train.run.task import build_datasets, mean_over_padding, never_trained

DATASET = DatasetConfig(episodes=(0,))


def act(**options):
    return TrainConfig(
        policy=ACTConfig(dim_model=32, dim_feedforward=64, use_vae=False), dataset=DATASET,
        **options,
    )  # fmt: skip


def test_the_count_is_near_six_times_the_weights_per_token():
    config = act()
    dataset, _ = build_datasets(config)
    model = build_policy(config.policy, dataset.spec)
    decoder = sum(p.numel() for n, p in model.named_parameters() if "decoder" in n and p.ndim == 2)
    found = flops_per_sample(config, dataset)
    # The decoder's weights meet every action of the chunk, the encoder's a few tokens.
    assert found == pytest.approx(6 * decoder * config.policy.chunk_size, rel=0.5)


def test_mfu_is_left_out_where_the_peak_is_not_known():
    config = act()
    dataset, _ = build_datasets(config)
    cpu = torch.device("cpu")
    assert samples_per_s_at_peak(config, dataset, cpu, 2) == (None, None)
    config = act(logging=LoggingConfig(peak_flops=1e12))
    peak, why = samples_per_s_at_peak(config, dataset, cpu, 2)
    assert peak == pytest.approx(2e12 / flops_per_sample(config, dataset))
    assert why is None


@pytest.mark.parametrize("name", sorted(POLICIES.builtin))
def test_mfu_is_known_for_every_policy_here(name):
    policy = POLICIES.resolve(name, trusted=False)()
    config = TrainConfig(policy=policy, dataset=DATASET, logging=LoggingConfig(peak_flops=1e12))
    dataset, _ = build_datasets(config)
    peak, why = samples_per_s_at_peak(config, dataset, torch.device("cpu"), 1)
    assert why is None
    # Every weight meets at least one number of a sample, forward and twice backward.
    weights = [p for p in build_policy(policy, dataset.spec).parameters() if p.ndim == 2]
    assert 0.5 * sum(p.numel() for p in weights) < 1e12 / peak < 1e12


def test_mfu_of_a_policy_that_needs_values_is_left_out_with_a_reason(monkeypatch):
    config = act(logging=LoggingConfig(peak_flops=1e12))
    dataset, _ = build_datasets(config)
    monkeypatch.setattr(
        "parallel_train.policies.act.modeling.ACTPolicy.forward",
        lambda self, batch: (next(iter(batch.values())).sum().item(), {}),
    )
    peak, why = samples_per_s_at_peak(config, dataset, torch.device("cpu"), 1)
    assert peak is None
    assert "does not run on the meta device" in why


def test_actions_beyond_every_episode_are_reported():
    longest = max(e.end - e.first for e in build_datasets(act())[0].metadata.episodes)
    for chunk_size in (longest, longest + 1, 5000):
        config = TrainConfig(policy=ACTConfig(chunk_size=chunk_size), dataset=DATASET)
        said = never_trained(config, build_datasets(config)[0])
        if chunk_size == longest:
            assert said is None
        else:
            assert said == (
                f"the policy predicts {chunk_size:,} actions, but the longest episode has "
                f"{longest} frames: what comes after {longest} is computed, but never trained"
            )


def test_a_policy_that_does_not_weigh_padding_is_named():
    config = TrainConfig(policy=ACTConfig(chunk_size=3), dataset=DATASET)
    dataset, _ = build_datasets(config)
    plain = nn.Linear(1, 1)
    said = mean_over_padding(config, plain, dataset)
    assert said.startswith("Linear does not have loss_weight(batch), so every sample counts alike")
    assert "the entries that action_is_pad leaves" in said
    assert "parallel_engine.Loss" in said
    plain.loss_weight = len
    assert mean_over_padding(config, plain, dataset) is None


def test_a_policy_that_reads_only_the_frame_itself_has_no_padding():
    config = TrainConfig(policy=ACTConfig(chunk_size=1), dataset=DATASET)
    assert mean_over_padding(config, nn.Linear(1, 1), build_datasets(config)[0]) is None


@pytest.mark.parametrize("kind", [ACTPolicy, WAMPolicy, RewardModel])
def test_our_policies_weigh_their_losses(kind):
    assert callable(kind.loss_weight)
