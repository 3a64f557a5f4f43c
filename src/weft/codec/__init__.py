"""What happens to weights on their way: patches between versions, FP8."""
