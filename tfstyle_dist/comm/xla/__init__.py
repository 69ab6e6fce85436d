"""The group of XLA devices; the only part that imports torch_xla."""
