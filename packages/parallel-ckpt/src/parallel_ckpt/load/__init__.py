"""From a committed checkpoint to the state of all ranks."""
