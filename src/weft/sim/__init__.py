"""Predict an update before running it: the simulator, models of other systems, published runs, validation."""
