"""One training script for every engine: it says nothing of torchrun, Ray, Kubeflow, SLURM or TF_CONFIG.

Start it with one of the files beside it, which have no training code:

    bash examples/engines/start_torchrun.sh
    bash examples/engines/start_tf_config.sh
    bash examples/engines/start_launch.sh
    python examples/engines/start_ray.py            # pip install -e '.[ray]'
    python examples/engines/start_kubeflow.py       # pip install kubeflow

Each starts 2 workers on this machine. Gradients are added in a fixed order, whoever starts the processes: all
were seen to print the same SHA-256 of the trained weights.
"""

from __future__ import annotations

import hashlib

import torch
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as tfd


def make_data() -> DataLoader[tuple[torch.Tensor, ...]]:
    inputs = torch.randn(1600, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.square().sum(1, keepdim=True)), batch_size=16)


def main() -> None:
    torch.set_num_threads(1)  # one thread adds in one order on every machine
    torch.manual_seed(0)
    strategy = tfd.MultiWorkerMirroredStrategy()  # who the workers are comes from the engine
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for batch in strategy.experimental_distribute_dataset(make_data()):  # 16 examples over all workers
        losses = strategy.run(step, args=batch)
    loss = float(strategy.reduce("MEAN", losses, axis=None))
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    if strategy.is_chief:
        print(f"{strategy.num_replicas_in_sync} replicas, loss {loss:.4f}")
        print(f"sha256 {hashlib.sha256(weights).hexdigest()}", flush=True)
    strategy.close()


if __name__ == "__main__":
    main()
