"""Which episodes are held out: by share or by number, the same in every run."""

import numpy as np
import pytest

from parallel_config import ConfigError
from parallel_train.config import TrainConfig
from parallel_train.data.config import EMBEDDED_ROOT, DatasetConfig
from parallel_train.data.lerobot import LeRobotDataset
from parallel_train.data.split import EvalConfig, split_episodes
from parallel_train.run.task import build_datasets


@pytest.mark.parametrize(
    ("fraction", "held_out"),
    [(0.0, ()), (0.01, (5,)), (0.2, (2, 7)), (0.5, (1, 3, 5, 7, 9))],
)
def test_a_share_is_spread_over_the_episodes(fraction, held_out):
    split = split_episodes(range(10), DatasetConfig(), EvalConfig(fraction=fraction))
    assert split.held_out == held_out
    assert sorted(split.trained + split.held_out) == list(range(10))


def test_named_episodes_leave_the_others():
    split = split_episodes(range(5), DatasetConfig(), EvalConfig(episodes=(4, 1, 4)))
    assert split == split_episodes(range(5), DatasetConfig(episodes=(0, 2, 3)),
                                   EvalConfig(episodes=(1, 4)))  # fmt: skip
    assert split.held_out == (1, 4)


def test_a_share_is_of_the_chosen_episodes():
    chosen = DatasetConfig(episodes=(3, 8))
    assert split_episodes(range(10), chosen, EvalConfig(fraction=0.5)).trained == (3,)


def test_held_out_frames_are_others_and_are_normalized_alike():
    config = TrainConfig(
        dataset=DatasetConfig(episodes=(0, 1, 2, 3), stats="data"), eval=EvalConfig(fraction=0.25)
    )
    trained, held_out = build_datasets(config)
    seen = {int(trained[i]["episode_index"]) for i in range(len(trained))}
    kept = {int(held_out[i]["episode_index"]) for i in range(len(held_out))}
    assert seen == {0, 1, 3}
    assert kept == {2}
    assert held_out.stats is trained.stats


def test_only_statistics_of_the_data_leave_what_is_held_out_aside():
    """As the help of both says: the file's are of all episodes."""
    alone = LeRobotDataset(EMBEDDED_ROOT, episodes=(0, 1, 3), stats="data").stats["action"].mean
    for stats, is_without in (("data", True), ("file", False)):
        config = TrainConfig(
            dataset=DatasetConfig(episodes=(0, 1, 2, 3), stats=stats),
            eval=EvalConfig(fraction=0.25),
        )
        found = build_datasets(config)[0].stats["action"].mean
        assert np.allclose(found, alone, rtol=1e-6) is is_without


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="exclude each other"):
        EvalConfig(fraction=0.1, episodes=(1,))
