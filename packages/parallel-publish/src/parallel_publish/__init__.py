"""Publish trained models and resumable checkpoints to the Hugging Face Hub.

Names are imported when first used, so that `PublishConfig` can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel_publish.card import CardInfo as CardInfo
    from parallel_publish.config import PublishConfig as PublishConfig
    from parallel_publish.errors import PublishError as PublishError
    from parallel_publish.fetching import fetch_checkpoint as fetch_checkpoint
    from parallel_publish.fetching import fetch_on_main as fetch_on_main
    from parallel_publish.fetching import newest_on_hub as newest_on_hub
    from parallel_publish.pretrained import PreTrainedModel as PreTrainedModel
    from parallel_publish.pretrained import save_pretrained as save_pretrained
    from parallel_publish.processors import Processor as Processor
    from parallel_publish.publication import Publication as Publication
    from parallel_publish.publication import Staged as Staged
    from parallel_publish.publishing import preflight_publish as preflight_publish
    from parallel_publish.publishing import publish_checkpoint as publish_checkpoint
    from parallel_publish.publishing import publish_trained_model as publish_trained_model
    from parallel_publish.publishing import stage_trained_model as stage_trained_model
    from parallel_publish.pushing import CheckpointPusher as CheckpointPusher
    from parallel_publish.pushing import Push as Push
    from parallel_publish.pushing import push_checkpoint_to_hub as push_checkpoint_to_hub
    from parallel_publish.retry import RetryPolicy as RetryPolicy
    from parallel_publish.sharing import shareable as shareable
    from parallel_publish.target import Target as Target

_HOMES = {
    "card": ("CardInfo",),
    "config": ("PublishConfig",),
    "errors": ("PublishError",),
    "fetching": ("fetch_checkpoint", "fetch_on_main", "newest_on_hub"),
    "pretrained": ("PreTrainedModel", "save_pretrained"),
    "processors": ("Processor",),
    "publishing": (
        "preflight_publish",
        "publish_checkpoint",
        "publish_trained_model",
        "stage_trained_model",
    ),
    "publication": ("Publication", "Staged"),
    "pushing": ("CheckpointPusher", "Push", "push_checkpoint_to_hub"),
    "retry": ("RetryPolicy",),
    "sharing": ("shareable",),
    "target": ("Target",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
