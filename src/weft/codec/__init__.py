"""What happens to weights in transit: patches between versions, FP8."""
