"""A model that is dropped takes its parameters out of the reduction; the strategy goes on with the others."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.variables.record import Record


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def graphs(model: torch.nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward(create_graph=True)
    model.zero_grad()


@pytest.mark.distributed(workers=2, timeout=60)
@pytest.mark.parametrize("only_on_rank", [None, 1])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_training_goes_on(rank: int, only_on_rank: int | None, sparse: bool, devices: list[str]) -> None:
    with td.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            first = torch.nn.Embedding(4, 3, sparse=True) if sparse else torch.nn.Linear(3, 3)
            second = torch.nn.Linear(3, 2)
        models = [first, second]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        inputs = [torch.tensor([rank, 2]) if sparse else torch.ones(2, 3), torch.full((2, 3), rank + 1.0)]
        for model, optimizer, x in zip(models, optimizers, inputs, strict=True):
            strategy.run(step, args=(model, optimizer, x))
        before = second.weight.detach().clone()
        del first, model, optimizer
        if only_on_rank in (None, rank):
            del models[0], optimizers[0]
        gc.collect()
        strategy.run(step, args=(models[-1], optimizers[-1], inputs[-1]))
        # The gradient of a weight is the column sum of x: 2 on rank 0, 4 on rank 1, 3 in the mean.
        torch.testing.assert_close(second.weight.detach(), before - 0.3)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.distributed(workers=2, timeout=60)
@pytest.mark.parametrize(
    "kind",
    [
        td.MirroredStrategy,
        pytest.param(
            td.experimental.CentralStorageStrategy, marks=pytest.mark.cpu_only("under torchrun it computes on the CPU")
        ),
    ],
)
def test_the_garbage_collector_may_run_while_the_workers_talk(rank: int, kind: Any, monkeypatch: Any) -> None:
    """What a program has let go may wait for the collector, which comes on each worker at a time of its own."""

    class Cycle(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.itself = [self]

    def collecting(call: Any) -> Any:
        def collect_and_call(*args: Any) -> Any:
            gc.collect()
            return call(*args)

        return collect_and_call

    gc.disable()
    try:
        with kind(["cpu:0"]) as strategy:
            for name in ("gather_objects", "agree") if rank == 1 else ():
                monkeypatch.setattr(strategy.worker.group, name, collecting(getattr(strategy.worker.group, name)))
            for _ in range(3):
                with strategy.scope():
                    Cycle()  # made and let go before the workers compare what they made
                    model = Cycle()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                before = model.weight.detach().clone()
                strategy.run(step, args=(model, optimizer, torch.full((2, 3), rank + 1.0)))
                torch.testing.assert_close(model.weight.detach(), before - 0.3)
                strategy.sync_buffers()
                if kind is td.MirroredStrategy:
                    strategy.run(graphs, args=(model,))
                del model, optimizer
    finally:
        gc.enable()


@pytest.mark.distributed(workers=2, timeout=60)
def test_a_model_whose_backward_raised_may_be_dropped(rank: int) -> None:
    """The gradients of a pass that was broken off are those of parameters that are gone."""

    def broken(value: torch.Tensor) -> torch.Tensor:
        raise ValueError("a gradient that fails")

    def fail() -> None:
        with strategy.scope():
            first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
        hidden = first(torch.ones(2, 3))
        hidden.register_hook(broken)
        with pytest.raises(ValueError, match="a gradient that fails"):
            strategy.run(lambda: second(hidden).sum().backward())

    with td.MirroredStrategy(["cpu:0"]) as strategy:
        fail()
        gc.collect()
        with strategy.scope():
            model = torch.nn.Linear(3, 2)
        optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model.weight.detach().clone()
        strategy.run(step, args=(model, optimizer, torch.full((2, 3), rank + 1.0)))
        torch.testing.assert_close(model.weight.detach(), before - 0.3)


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_nothing_is_kept_of_models_and_variables_that_were_dropped(devices: list[str]) -> None:
    """Also where no ``backward()`` cleans up: with ``gradients`` of a ``train`` optimizer, and for variables."""
    with td.MirroredStrategy(devices) as strategy:

        def one() -> None:
            with strategy.scope():
                model = torch.nn.Linear(2, 2)
                variable = td.Variable(0.0, aggregation=td.VariableAggregation.MEAN)
                optimizer = td.train.GradientDescentOptimizer(0.1)

            def fn() -> None:
                loss, parameters = model(torch.ones(2)).sum(), list(model.parameters())
                pairs = zip(td.train.gradients(loss, parameters), parameters, strict=True)
                optimizer.apply_gradients(pairs)
                variable.assign_add(1.0)

            strategy.run(fn)

        def known() -> tuple[int, int]:
            gc.collect()
            things = gc.get_objects()
            dead = sum(type(thing) is weakref.ref and thing() is None for thing in things)
            return sum(type(thing) is Record for thing in things), dead

        for _ in range(10):
            one()
        records, references = known()
        for _ in range(40):  # three records each
            one()
        after = known()
        assert after[0] < records + 20
        assert after[1] < references + 30
