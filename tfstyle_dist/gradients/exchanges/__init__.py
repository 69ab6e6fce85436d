"""How gradients come together, one file for each way: between replicas, in host memory, overlapped, central, XLA."""
