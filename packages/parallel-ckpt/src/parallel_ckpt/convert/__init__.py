"""DCP shards to a distributable `model.safetensors`: offline, in one process, without torch."""

from parallel_ckpt.convert.conversion import ConvertResult as ConvertResult
from parallel_ckpt.convert.conversion import convert as convert
