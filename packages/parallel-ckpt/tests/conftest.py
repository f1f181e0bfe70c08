"""Shared by the suite: what the ranks' forkserver imports once instead of every rank anew."""

from parallel_testing import ranks
from parallel_testing.leaks import no_leaks  # noqa: F401

ranks._PRELOAD.extend(
    name
    for name in (
        "torch._dynamo",
        "torch.distributed.fsdp",
        "parallel_ckpt.save.saver",
        "parallel_ckpt.load.resume",
    )
    if name not in ranks._PRELOAD
)
