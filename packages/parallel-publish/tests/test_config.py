"""The publish section of a config: checked at once, and read without torch or the client."""

import subprocess
import sys

import pytest

from parallel_config import ConfigError
from parallel_publish import PublishConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"enable": True}, "publish.repo_id is missing. Use --publish.repo_id"),
        ({"push_checkpoints": True}, "publish.repo_id is missing"),
        ({"repo_id": "name"}, "is not a name on the Hub"),
        ({"repo_id": "user/na me"}, "is not a name on the Hub"),
        ({"repo_id": "user/a--b"}, "is not a name on the Hub"),
        ({"license": "apache"}, "Did you mean"),
        ({"base_model": "/data/model"}, "so readers cannot find it"),
        ({"tags": ("",)}, "which is not a tag"),
        (
            {"revision": ""},
            "publish.revision = '' is not the name of a branch that can be written to. Use",
        ),
        ({"revision": "a b"}, "is not the name of a branch"),
        ({"revision": "f" * 40}, "is not the name of a branch"),  # but of a commit
        ({"revision": "../x"}, "is not the name of a branch"),
        ({"revision": "-x"}, "is not the name of a branch"),
        ({"revision": "x/"}, "is not the name of a branch"),
        ({"revision": "x.lock"}, "is not the name of a branch"),
    ],
)
def test_a_wrong_field_is_refused_with_its_name_and_the_rule(fields, message):
    with pytest.raises(ConfigError, match=message):
        PublishConfig(**fields)


def test_valid_repositories_and_branches_are_accepted():
    config = PublishConfig(enable=True, repo_id="user/my_model-1.0", license="apache-2.0")
    assert config.wants_hub
    assert not PublishConfig().wants_hub
    for revision in ("main", "v1.0", "refs/pr/1", "f" * 39, "größer", "a--b", "a@b"):
        assert PublishConfig(revision=revision).revision == revision


def test_reading_the_config_imports_neither_torch_nor_the_client():
    code = (
        "import sys; from parallel_publish import PublishConfig; PublishConfig(); "
        "print([m for m in ('torch', 'huggingface_hub', 'parallel_ckpt') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
