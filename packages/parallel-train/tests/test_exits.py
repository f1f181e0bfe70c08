"""How an error becomes an exit code."""

import pytest

from parallel_ckpt.errors import CheckpointNotFound, DamagedCheckpoint, RankLost, StateMismatch
from parallel_config import ConfigError, ReportedError
from parallel_train.cli.exits import FAILED, WRONG_INPUT, code_of


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (RankLost, FAILED),
        (ConfigError, WRONG_INPUT),
        (CheckpointNotFound, WRONG_INPUT),
        (DamagedCheckpoint, WRONG_INPUT),
        (StateMismatch, WRONG_INPUT),
        (ReportedError, WRONG_INPUT),
    ],
)
def test_only_a_lost_rank_is_not_wrong_input(kind, code):
    assert code_of(kind.of("where", "what", "remedy")) == code
