"""Trains a small transformer in parts: every replica is held by two processes, and two replicas share the batch.

    torchrun --standalone --nproc-per-node=4 examples/model_parallel.py
    torchrun --standalone --nproc-per-node=4 examples/model_parallel.py --parts 4      # one replica of four parts
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/model_parallel.py --strategy tpu # one program, XLA divides it

It learns to continue sequences that count in steps of one to three. The exit code is 1 when the last loss is not
small, or differs from that of the same model in one piece by more than 1e-4.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import tfstyle_dist as tfd
from tfstyle_dist.model_parallel import full_state_dict, load_full_state_dict, num_local_elements

WORDS, WIDTH, HEADS, HIDDEN, LENGTH, BATCH, STEPS = 16, 32, 4, 64, 8, 32, 80

# Column-wise layers give each process its part of the features, row-wise ones put the whole together again.
PLAN = {
    "embedding": "row",
    "*.query": "column",
    "*.key": "column",
    "*.value": "column",
    "*.out": "row",
    "*.up": "column",
    "*.down": "row",
    "head": "output",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        # -1: as many heads as this process has.
        query, key, value = (
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(words) + self.place)))


def sequences(count: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    start, step = torch.randint(WORDS, (count, 1), generator=generator), torch.arange(count).unsqueeze(1) % 3 + 1
    words = (start + step * torch.arange(LENGTH + 1)) % WORDS
    return torch.utils.data.TensorDataset(words[:, :-1], words[:, 1:])


def train(strategy: tfd.Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    def step(words: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = strategy.experimental_distribute_dataset(sequences(BATCH * STEPS), global_batch_size=BATCH)
    for batch in batches:
        losses = strategy.run(step, args=batch)
    return float(strategy.reduce("MEAN", losses, axis=None))


def make_strategy(name: str, parts: int) -> Any:
    if name == "tpu":
        import torch_xla.runtime

        replicas = torch_xla.runtime.global_runtime_device_count() // parts
        assignment = tfd.tpu.experimental.DeviceAssignment(replicas, parts)
        return tfd.TPUStrategy(experimental_device_assignment=assignment, use_spmd=True)
    return tfd.MirroredStrategy(logical_devices_per_replica=parts)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["mirrored", "tpu"], default="mirrored")
    parser.add_argument("--parts", type=int, default=2, help="processes, or XLA devices, that hold one replica")
    options = parser.parse_args()
    with make_strategy(options.strategy, options.parts) as strategy:
        torch.manual_seed(0)
        with strategy.scope(), strategy.worker.torch_device(0):
            model = Transformer()
            elements = num_local_elements(model.parameters())
            strategy.experimental_partition(model, PLAN)
            optimizer = make_optimizer(model)  # the divided parameters are new: the optimizer comes last
        start = full_state_dict(model)  # on all processes
        loss = train(strategy, model, optimizer)
        held = num_local_elements(model.parameters())
        chief, name = strategy.is_chief, repr(strategy)
    with tfd.OneDeviceStrategy("cpu") as one:
        plain = Transformer()
        load_full_state_dict(plain, start)
        expected = train(one, plain, make_optimizer(plain))
    if chief:
        divided = f"each holds {held} of {elements} elements" if options.strategy == "mirrored" else "XLA lays them out"
        print(f"{name}, {options.parts} parts: {divided}")
        print(f"last loss {loss:.4f}, in one piece {expected:.4f}, difference {abs(loss - expected):.1e}")
    return 0 if loss < 0.5 and abs(loss - expected) <= 1e-4 else 1


if __name__ == "__main__":
    raise SystemExit(main())
