"""The Plan, and what is asked of one: proof, bound, memory, files, explanations."""
