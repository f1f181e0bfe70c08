"""Plain dataclasses that own a parallel training run.

Nothing here imports torch or accelerate: a config is read, checked and resolved to a `Topology`
on any machine, in milliseconds. `parallel_engine` turns it into running objects.
"""

from parallel_config.accelerator import AcceleratorConfig as AcceleratorConfig
from parallel_config.accelerator import (
    ActivationCheckpointingConfig as ActivationCheckpointingConfig,
)
from parallel_config.accelerator import CompileConfig as CompileConfig
from parallel_config.accelerator import DDPConfig as DDPConfig
from parallel_config.accelerator import FSDPConfig as FSDPConfig
from parallel_config.accelerator import GradientAccumulationConfig as GradientAccumulationConfig
from parallel_config.checkpoint import CheckpointConfig as CheckpointConfig
from parallel_config.checkpoint import CheckpointFormat as CheckpointFormat
from parallel_config.errors import ConfigError as ConfigError
from parallel_config.errors import Problem as Problem
from parallel_config.errors import ReportedError as ReportedError
from parallel_config.errors import agreed as agreed
from parallel_config.errors import is_agreed as is_agreed
from parallel_config.names import clean_fqn as clean_fqn
from parallel_config.optim import EMAConfig as EMAConfig
from parallel_config.optim import OptimizerConfig as OptimizerConfig
from parallel_config.optim import SchedulerConfig as SchedulerConfig
from parallel_config.overrides import with_environment as with_environment
from parallel_config.parallelism import ContextParallelConfig as ContextParallelConfig
from parallel_config.parallelism import ParallelismConfig as ParallelismConfig
from parallel_config.topology import Kind as Kind
from parallel_config.topology import Topology as Topology
