"""The data plane: one-sided writes into another member's memory, over one small contract (`base`)."""
