"""A world-action model: flow matching over future observations and actions together."""
