"""Rehearsals: the real controller and real members of a large case on one machine, without its weights."""
