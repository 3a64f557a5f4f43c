"""The Plan, and what is derived from it: proof, bound, memory, files, explanations."""
