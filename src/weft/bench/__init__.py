"""Measurements that users can repeat: real processes, verified bytes, compared with the machine's limits."""
