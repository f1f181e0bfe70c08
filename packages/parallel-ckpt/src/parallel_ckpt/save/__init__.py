"""From the state of all ranks to a committed checkpoint."""
