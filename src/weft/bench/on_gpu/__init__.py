"""Transfers on one GPU: tensors each in memory of their own, engines with fused and stacked tensors."""
