"""Layer 6: ``python -m tfstyle_dist.launch`` starts a ``TF_CONFIG`` cluster on this machine, for development."""
