"""The codec on a GPU: Triton kernels with tables that are made once for a plan, and what queues them."""
