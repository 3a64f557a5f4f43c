"""Models as planning sees them: from a `config.json` to the exact tensors of a checkpoint."""
