"""Measurements users can repeat: real processes, verified bytes, the machine's limits beside them."""
