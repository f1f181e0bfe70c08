"""A success classifier: how likely a task is solved, from one observation."""
