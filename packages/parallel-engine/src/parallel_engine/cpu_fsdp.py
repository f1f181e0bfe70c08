"""The one place that makes accelerate shard on CPU.

accelerate 1.15 runs FSDP2 on accelerator devices only: on CPU it drops the plugin, or refuses the
parallelism config. Its `prepare` works on gloo all the same once its shared state says FSDP, so the
state is set by hand after construction. `tests/test_canaries.py` fails with a clear message when a
release of accelerate changes what this leans on.
"""

from __future__ import annotations

from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def shard_on_cpu(
    accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin, parallelism: ParallelismConfig
) -> None:
    """Make a CPU accelerator's `prepare` shard: `plugin` and `parallelism` are accelerate's own."""
    state = accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    state.parallelism_config = parallelism
    state.device_mesh = parallelism.get_device_mesh("cpu")
    if not accelerator.is_fsdp2:
        raise RuntimeError(
            "accelerate did not take over the FSDP2 state on CPU: this release keeps it elsewhere "
            "than 1.15 does; see parallel_engine/cpu_fsdp.py"
        )
