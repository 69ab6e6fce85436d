"""Kubeflow Trainer: its local process backend here; the same with KubernetesBackendConfig() on a cluster.

The local backend makes an environment in a temporary folder, installs into it what PACKAGES names, and runs torchrun.
"""

from __future__ import annotations

import os
from pathlib import Path

from kubeflow.trainer import CustomTrainer, LocalProcessBackendConfig, TrainerClient

HERE = Path(__file__).resolve().parent
PACKAGES = os.environ.get("PACKAGES", f"torch tfstyle_dist@file://{HERE.parents[1]}").split()


def train(parameters: dict[str, str]) -> None:  # Kubeflow copies the source of this function
    import runpy

    runpy.run_path(parameters["script"], run_name="__main__")


if __name__ == "__main__":
    client = TrainerClient(backend_config=LocalProcessBackendConfig())
    job = client.train(
        runtime="torch-distributed",
        trainer=CustomTrainer(
            func=train,
            func_args={"script": str(HERE / "train.py")},
            packages_to_install=[] if PACKAGES == ["none"] else PACKAGES,
            # PET_...: torchrun's --nproc-per-node. Without the rest of the environment the job would have no PATH.
            env={**os.environ, "PET_NPROC_PER_NODE": os.environ.get("WORKERS", "2")},
        ),
    )
    ended = client.wait_for_job_status(job, status={"Complete", "Failed"})
    print("\n".join(client.get_job_logs(job)))
    if ended.status != "Complete":
        raise SystemExit(f"the job {job} has failed")
