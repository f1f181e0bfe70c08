"""Shared by the suite: what the ranks' forkserver imports once instead of every rank anew."""

from parallel_testing import ranks

ranks._PRELOAD.extend(
    name
    for name in ("torch._dynamo", "torch.distributed.fsdp", "parallel_engine")
    if name not in ranks._PRELOAD
)
