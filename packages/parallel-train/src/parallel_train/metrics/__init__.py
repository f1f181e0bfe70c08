"""The numbers of a run: where they go, and what they mean."""
