"""Demonstrations: LeRobotDataset v3.0 folders, the deterministic order of samples, loaders."""
