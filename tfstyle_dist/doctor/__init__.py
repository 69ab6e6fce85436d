"""Layer 6: ``python -m tfstyle_dist.doctor`` says what would keep a job from running here, and what to do."""
