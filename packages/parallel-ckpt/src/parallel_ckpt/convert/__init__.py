"""DCP shards to a distributable `model.safetensors`: offline, in one process, without torch."""

from parallel_ckpt.convert.conversion import convert as convert
from parallel_ckpt.convert.result import ConvertResult as ConvertResult
