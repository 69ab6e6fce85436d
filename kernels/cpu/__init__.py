"""Sums compiled for the CPU with llvmlite: of lists of tensors, and between the processes of a host."""
