"""A run's checkpoints on disk: what exists, who may write, what is kept. No torch."""
