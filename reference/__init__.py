"""What checks a model against the published one: oracles, tiny checkpoints, traces and their comparison."""
