"""A recommender whose tables live on parameter servers: workers pull and push only the rows that they use.

    python -m tfstyle_dist.launch --workers 2 --ps 2 examples/embedding_recommender.py
    python -m tfstyle_dist.launch --workers 4 --ps 2 examples/embedding_recommender.py --users 2000000 --items 500000

The data is generated: user u and item i have hidden vectors a_u and b_i of 4 numbers drawn from N(0, 1/2), and
    rating = 3 + a_u . b_i + noise,    noise from N(0, 0.1)
for users and items drawn at random, the popular ones more often (number n with a probability falling with n). The
hidden vectors are never stored: each is computed from its number, so every worker makes the ratings it needs. The model
is a factorisation: two tables of vectors and two of biases, trained by row-wise Adagrad on the servers. A perfect model
has a test error of 0.1 (the noise), one that always says 3 an error of about 0.5. The exit code is 1 above 0.3.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn
from tqdm import tqdm

import tfstyle_dist as tfd

HIDDEN, NOISE, MEAN = 4, 0.1, 3.0


def hidden_vectors(numbers: torch.Tensor, salt: int) -> torch.Tensor:
    """The hidden vector of each user (salt 0) or item (salt 1): N(0, 1/2), from a hash of its number."""
    keys = numbers[:, None] * 64 + torch.arange(2 * HIDDEN) * 2 + salt
    keys = (keys ^ (keys >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    keys = (keys ^ (keys >> 12)) * 0x297A2D39 & 0xFFFFFFFF
    uniform = ((keys ^ (keys >> 15)) + 1).double() / (1 << 32)
    first, second = uniform[:, :HIDDEN].clamp(max=1.0), uniform[:, HIDDEN:]
    return ((-first.log()).sqrt() * (2 * math.pi * second).cos()).float()  # Box-Muller, variance 1/2


def ratings(
    count: int, users: int, items: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """So many ratings: users, items, values."""
    user = (users * torch.rand(count, generator=generator) ** 2).long()
    item = (items * torch.rand(count, generator=generator) ** 2).long()
    value = MEAN + (hidden_vectors(user, 0) * hidden_vectors(item, 1)).sum(1)
    return user, item, value + NOISE * torch.randn(count, generator=generator)


class Factorisation(nn.Module):
    """rating = mean + bias of the user + bias of the item + product of their vectors."""

    def __init__(self, strategy: tfd.ParameterServerStrategy, users: int, items: int, width: int) -> None:
        super().__init__()
        start = ("normal", 0.0, 0.3)
        self.user = strategy.embedding(users, width, initializer=start, seed=1)
        self.item = strategy.embedding(items, width, initializer=start, seed=2)
        self.user_bias, self.item_bias = strategy.embedding(users, 1), strategy.embedding(items, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        product = (self.user(user) * self.item(item)).sum(1)
        return MEAN + product + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1)


def train(resolver: tfd.cluster_resolver.ClusterResolver, options: argparse.Namespace) -> float:
    users, items, size = options.users, options.items, options.batch_size
    cut = tfd.experimental.partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=options.shards)
    strategy = tfd.ParameterServerStrategy(resolver, variable_partitioner=cut)
    coordinator = tfd.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = Factorisation(strategy, users, items, 2 * HIDDEN)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=options.rate)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        worker = tfd.coordinator.experimental_get_current_worker_index()
        generator = torch.Generator().manual_seed(100 + worker)
        while True:
            yield ratings(size, users, items, generator)

    def step(iterator: Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> float:
        user, item, value = next(iterator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(user, item), value, reduction="sum")
        loss.backward()
        optimizer.step()  # sends the rows' gradients
        return loss.item() / size

    def test_error() -> float:  # runs on a worker too: it pulls the rows of the test ratings only
        user, item, value = ratings(20_000, users, items, torch.Generator().manual_seed(1))
        with torch.no_grad():
            return float((model(user, item) - value).square().mean().sqrt())

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    error = math.inf
    with tqdm(total=options.steps, unit="step") as bar:
        for done in range(0, options.steps, 100):
            count = min(100, options.steps - done)
            for _ in range(count):
                coordinator.schedule(step, args=(iterator,))
            coordinator.join()
            error = coordinator.schedule(test_error).fetch()
            bar.update(count)
            bar.set_postfix(test_error=f"{error:.3f}", staleness=f"{coordinator.statistics().staleness:.1f}")
    strategy.close()
    return float(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--shards", type=int, default=2, help="into so many parts large tables are cut")
    options = parser.parse_args()
    resolver = tfd.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        tfd.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return 0
    if resolver.task_type is None:
        parser.error("start it with python -m tfstyle_dist.launch --workers 2 --ps 2 " + __file__)
    start = time.perf_counter()
    error = train(resolver, options)
    seconds = time.perf_counter() - start
    print(f"test error {error:.3f} after {options.steps} steps of {options.batch_size} ratings, {seconds:.1f} s")
    return 0 if error <= 0.3 else 1


if __name__ == "__main__":
    sys.exit(main())
