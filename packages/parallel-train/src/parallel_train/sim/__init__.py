"""Trained policies in simulation: rollouts, and pictures of them."""
