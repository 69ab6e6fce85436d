"""How the replicas' updates of one variable combine: ``VariableAggregation`` on a counter.

    python examples/variable_aggregation.py                  # one replica
    python examples/variable_aggregation.py --replicas 2     # two replicas in one process
    torchrun --standalone --nproc-per-node=2 examples/variable_aggregation.py

The printed values are those of TensorFlow.
"""

from __future__ import annotations

import argparse

import torch

import tfstyle_dist as tfd


def counter(strategy: tfd.Strategy) -> None:
    """The counter that every replica increases by one."""
    with strategy.scope():
        variable = tfd.Variable(initial_value=1.0, aggregation=tfd.VariableAggregation.SUM)

    def update_fn(delta: float | torch.Tensor) -> None:
        before = float(variable.value())
        variable.assign_add(delta)  # all replicas meet here: the sum of their deltas is added once
        if strategy.is_chief:
            print(f"  value before update: {before:g}, after: {float(variable.value()):g}")

    strategy.print(f"Variable(1.0, aggregation=SUM) on {strategy.num_replicas_in_sync} replica(s)")
    strategy.print(" assign_add(1.0)")
    try:
        strategy.run(update_fn, args=(1.0,))
    except ValueError as error:
        # Several replicas: as in TensorFlow a bare Python number is refused. It is one value for all
        # replicas, so it does not say whether 1 or n times 1 is to be added. A tensor is each replica's own.
        strategy.print(f"  ValueError: {error}")
        strategy.print(" assign_add(torch.tensor(1.0))")
        strategy.run(update_fn, args=(torch.tensor(1.0),))


def table(strategy: tfd.Strategy) -> None:
    """What is left of different values: replica r adds r + 1 to a variable that starts at 10."""

    def add() -> torch.Tensor:
        replica = tfd.get_replica_context().replica_id_in_sync_group
        variable.assign_add(torch.tensor(replica + 1.0))
        return tfd.get_replica_context().all_gather(variable.value().reshape(1), axis=0)

    strategy.print("replica r adds r + 1 to Variable(10.0); afterwards the copies on the replicas are")
    for aggregation in tfd.VariableAggregation:
        with strategy.scope():
            variable = tfd.Variable(10.0, aggregation=aggregation)
        copies = strategy.experimental_local_results(strategy.run(add))[0]
        strategy.print(f"  {aggregation.name:<19}{'  '.join(f'{value:g}' for value in copies.tolist())}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1, help="replicas in this process")
    devices = [f"cpu:{replica}" for replica in range(parser.parse_args().replicas)]
    with tfd.MirroredStrategy(devices) as strategy:
        counter(strategy)
        table(strategy)


if __name__ == "__main__":
    main()
