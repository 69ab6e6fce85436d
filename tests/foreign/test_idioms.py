"""Steps that were written without this package train as on one device, in both process models."""

from __future__ import annotations

from typing import Any

import idioms
import idioms_of_graphs  # noqa: F401  # its cases join those of idioms
import idioms_of_libraries  # noqa: F401
import pytest
import torch

import tfstyle_dist as tfd

STEPS = 5
FORMS = pytest.mark.parametrize(
    "process_model", ["in_process", pytest.param("ranks", marks=pytest.mark.distributed(workers=2))]
)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    shapes = ((8, 6), (8, 3))
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, y


def trained(name: str, strategy: Any) -> list[torch.Tensor]:
    """The values of the model after some steps, buffers too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        if strategy is None:
            model, step = idioms.CASES[name]()
        else:
            with strategy.scope():
                model, step = idioms.CASES[name]()
        for number in range(STEPS):
            x, y = batch(number)
            if strategy is None:
                step(x, y)
                continue
            shares = [
                strategy.experimental_distribute_values_from_function(
                    lambda context, whole=whole: whole.chunk(2)[context.replica_id_in_sync_group]
                )
                for whole in (x, y)
            ]
            shares = [strategy.experimental_local_results(s) for s in shares]
            if strategy.worker.num_local_replicas == 1:
                strategy.run(step, args=[s[0] for s in shares])
            else:
                strategy.run(step, args=[tfd.values.PerReplica(s) for s in shares])
        return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    finally:
        torch.set_default_dtype(before)


@FORMS
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("name", idioms.CASES)
def test_a_step_trains_as_on_one_device(strategy: tfd.Strategy, process_model: str, name: str) -> None:
    expected, found = trained(name, None), trained(name, strategy)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
