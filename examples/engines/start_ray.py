"""Ray Train: the workers are Ray's; what they print appears here, on the driver."""

from __future__ import annotations

import os
from pathlib import Path

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

from tfstyle_dist.integrations.ray import TfdConfig

HERE = Path(__file__).resolve().parent


def train() -> None:
    import runpy

    runpy.run_path(str(HERE / "train.py"), run_name="__main__")


if __name__ == "__main__":
    workers = int(os.environ.get("WORKERS", "2"))
    if "RAY_ADDRESS" not in os.environ:  # a Ray of this machine alone
        ray.init(num_cpus=workers, include_dashboard=False)
    trainer = TorchTrainer(train, torch_config=TfdConfig(), scaling_config=ScalingConfig(num_workers=workers))
    trainer.fit()
