"""Boxes and planes as columns of numbers: what shards, recipes and streams are computed with."""
