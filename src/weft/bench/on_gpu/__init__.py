"""Transfers on one GPU: each tensor in its own memory, engines with fused and stacked tensors."""
