"""Trains one model for each strategy and method, step by step in turn."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from tfstyle_dist.compare_aggregation.workload import Batch, Workload
from tfstyle_dist.core import launch_env
from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.nn import compute_average_loss
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.central_storage import CentralStorageStrategy
from tfstyle_dist.strategies.contexts import get_replica_context
from tfstyle_dist.strategies.mirrored import MirroredStrategy
from tfstyle_dist.strategies.one_device import OneDeviceStrategy
from tfstyle_dist.train import AdamOptimizer, GradientDescentOptimizer, TFOptimizer

METHODS: Final[dict[str, int | None]] = {
    "DEFAULT": None,
    "ADD_N": AggregationMethod.ADD_N,
    "EXPERIMENTAL_TREE": AggregationMethod.EXPERIMENTAL_TREE,
    "EXPERIMENTAL_ACCUMULATE_N": AggregationMethod.EXPERIMENTAL_ACCUMULATE_N,
}
OPTIMIZERS: Final[dict[str, Callable[[float], TFOptimizer]]] = {
    "sgd": GradientDescentOptimizer,
    "adam": AdamOptimizer,
}


@dataclass
class Run:
    """One model trained with one method under one strategy.

    Attributes:
        strategy_name: As it is printed.
        method: The name of the method; ``"-"`` where there is one replica and nothing to sum.
        replicas: The number of replicas in sync.
        seconds: Of each step.
        losses: The loss of each step over the global batch.
        num_tensors: How many parameters the model has.
        nbytes: Their bytes.
    """

    strategy_name: str
    method: str
    replicas: int
    num_tensors: int
    nbytes: int
    step: Callable[[Batch], Tensor] = field(repr=False)
    batches: Sequence[Batch] = field(repr=False)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Strategy and method."""
        return self.strategy_name if self.method == "-" else f"{self.strategy_name}, {self.method}"


def strategies_at_hand(replicas: int) -> dict[str, Strategy]:
    """The strategies that this process can train with.

    Args:
        replicas: How many logical replicas strategies on one CPU get.

    Raises:
        ValueError: ``replicas`` is below 2.
    """
    if replicas < 2:
        raise ValueError(f"--replicas {replicas}: give at least 2, as one replica has nothing to sum")
    launch = launch_env.launch()
    if launch is not None and launch.world_size > 1:
        return {f"MirroredStrategy, {launch.world_size} workers": MirroredStrategy()}
    cpus = [f"cpu:{index}" for index in range(replicas)]
    found: dict[str, Strategy] = {
        "OneDeviceStrategy": OneDeviceStrategy("cpu:0"),
        f"MirroredStrategy, {replicas} on the CPU": MirroredStrategy(cpus),
        f"CentralStorageStrategy, {replicas} on the CPU": CentralStorageStrategy(cpus),
    }
    if torch.cuda.device_count() > 1:
        gpus = MirroredStrategy()
        found[f"MirroredStrategy, {gpus.num_replicas_in_sync} GPUs"] = gpus
    return found


def prepare(strategies: dict[str, Strategy], methods: Sequence[str], build: Callable[[], Workload],
            make_optimizer: Callable[[], TFOptimizer]) -> list[Run]:  # fmt: skip
    """A model and an optimizer for every combination; with one replica for one method only."""
    runs = []
    for strategy_name, strategy in strategies.items():
        alone = strategy.num_replicas_in_sync == 1
        for method in ("-",) if alone else methods:
            torch.manual_seed(0)
            with strategy.scope():
                workload = build()
                optimizer = make_optimizer()
            parameters = list(workload.model.parameters())
            runs.append(
                Run(
                    strategy_name,
                    method,
                    strategy.num_replicas_in_sync,
                    len(parameters),
                    sum(p.numel() * p.element_size() for p in parameters),
                    _stepper(strategy, workload, optimizer, METHODS.get(method)),
                    workload.batches,
                )
            )
    return runs


def train(runs: Sequence[Run], steps: int) -> None:
    """Trains all for some steps, in turns, so that they share what else the machine does; one step warms up.

    The order differs from step to step, equally on all workers: what ran before is felt by who comes next.

    Raises:
        FloatingPointError: A loss is not finite.
    """
    shuffled = random.Random(0)
    for step in range(steps + 1):
        for run in shuffled.sample(runs, len(runs)):
            batch = run.batches[step % len(run.batches)]
            begin = time.perf_counter()
            loss = float(run.step(batch))
            seconds = time.perf_counter() - begin
            if loss != loss or abs(loss) == float("inf"):
                raise FloatingPointError(f"{run.name}: the loss is {loss} after {step} steps; try a smaller --lr")
            run.losses.append(loss)
            if step > 0:
                run.seconds.append(seconds)


def _stepper(
    strategy: Strategy, workload: Workload, optimizer: TFOptimizer, method: int | None
) -> Callable[[Batch], Tensor]:
    def of_replica(batch: Batch) -> Tensor:
        context = get_replica_context()
        assert context is not None
        share = [t[context.replica_id_in_sync_group :: context.num_replicas_in_sync] for t in batch]
        losses = workload.loss(workload.model, *share)
        # These optimizers sum over the replicas, so each loss is divided by the size of the global batch.
        loss = compute_average_loss(losses, global_batch_size=len(batch[0]))
        optimizer.minimize(loss, aggregation_method=method)
        return loss.detach()

    def step(batch: Batch) -> Tensor:
        total: Tensor = strategy.reduce("SUM", strategy.run(of_replica, args=(batch,)), axis=None)
        return total

    return step
