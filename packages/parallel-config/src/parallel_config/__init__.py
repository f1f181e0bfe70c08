"""Plain dataclasses that own a parallel training run: topology, precision, accumulation, checkpoints, environment guards."""
