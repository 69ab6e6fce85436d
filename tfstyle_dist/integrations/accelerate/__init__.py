"""Strategies under Hugging Face accelerate and ``transformers.Trainer``; needs the extra ``accelerate``."""

from tfstyle_dist.integrations.accelerate.accelerator import StrategyAccelerator, attach, from_accelerator
from tfstyle_dist.integrations.accelerate.trainer import StrategyTrainerMixin

__all__ = ["StrategyAccelerator", "StrategyTrainerMixin", "attach", "from_accelerator"]
