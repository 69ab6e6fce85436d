"""``AggregationMethod``: the same sum of the replicas' gradients, added in different orders.

    python examples/aggregation_methods.py                   # four replicas in one process
    python examples/aggregation_methods.py --replicas 2
    torchrun --standalone --nproc-per-node=2 examples/aggregation_methods.py --replicas 1

Linear regression on the diabetes data of scikit-learn (442 patients; nothing is downloaded). First come three
optimizers with one method each; then each optimizer with every method: the losses must agree within 1e-6.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from sklearn.datasets import load_diabetes

import tfstyle_dist as tfd
from tfstyle_dist import AggregationMethod

METHODS = {
    "ADD_N": AggregationMethod.ADD_N,
    "DEFAULT": AggregationMethod.DEFAULT,
    "TREE": AggregationMethod.TREE,
}
# Longer, and RMSProp jumps back and forth over the minimum: its steps do not shrink with the gradient, so that
# rounding differences grow from step to step. Double precision for the same reason.
STEPS = 60


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    features, target = load_diabetes(return_X_y=True)
    x, y = torch.tensor(features, dtype=torch.float64), torch.tensor(target, dtype=torch.float64)
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def losses_of(strategy: tfd.Strategy, make_optimizer: Callable[[], tfd.train.TFOptimizer], method: int) -> list[float]:
    """The loss of every step; a step uses all patients, replica r of n those numbered r, r + n, ..."""
    x, y = load_data()
    with strategy.scope():
        weights = tfd.Variable(torch.zeros(x.shape[1], dtype=x.dtype))
        optimizer = make_optimizer()

    def step() -> torch.Tensor:
        context = tfd.get_replica_context()
        share = slice(context.replica_id_in_sync_group, None, context.num_replicas_in_sync)
        errors = (x[share] @ weights - y[share]) ** 2
        # These optimizers SUM the gradients over the replicas, so the loss is divided by the size of the
        # GLOBAL batch. Then uneven shares are right too.
        loss = tfd.nn.compute_average_loss(errors, global_batch_size=len(y))
        grads_and_vars = optimizer.compute_gradients(loss)  # of this replica, for the variables that loss depends on
        optimizer.apply_gradients(grads_and_vars, aggregation_method=method)
        return loss.detach()

    # The shares' losses add up to the mean loss of the whole batch.
    return [float(strategy.reduce("SUM", strategy.run(step), axis=None)) for _ in range(STEPS)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=4, help="replicas in this process")
    devices = [f"cpu:{replica}" for replica in range(parser.parse_args().replicas)]
    optimizers = {
        "GradientDescent": (lambda: tfd.train.GradientDescentOptimizer(learning_rate=0.01), "ADD_N"),
        "Adam": (lambda: tfd.train.AdamOptimizer(learning_rate=0.001), "DEFAULT"),
        "RMSProp": (lambda: tfd.train.RMSPropOptimizer(learning_rate=0.01), "TREE"),
    }
    with tfd.MirroredStrategy(devices) as strategy:
        strategy.print(f"{strategy.num_replicas_in_sync} replica(s), {STEPS} steps")
        for name, (make_optimizer, method) in optimizers.items():
            losses = losses_of(strategy, make_optimizer, METHODS[method])
            strategy.print(f"  {name:<16}{method:<8} loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        for name, (make_optimizer, _) in optimizers.items():
            runs = [losses_of(strategy, make_optimizer, method) for method in METHODS.values()]
            spread = max(max(losses) - min(losses) for losses in zip(*runs, strict=True))
            strategy.print(f"  {name:<16}{', '.join(METHODS)}: largest difference of a loss {spread:.1e}")
            if spread > 1e-6:
                raise SystemExit(f"The methods disagree by {spread:.1e}.")


if __name__ == "__main__":
    main()
