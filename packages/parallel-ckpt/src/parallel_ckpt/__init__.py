"""Save, verify, reshard, convert and inspect distributed checkpoints of any torch model."""
