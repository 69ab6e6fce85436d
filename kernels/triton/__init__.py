"""Sums and updates for CUDA tensors, in Triton."""
