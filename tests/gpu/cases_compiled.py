"""What only a real GPU shows: ``torch.compile`` in its modes, and a step in a CUDA graph. Run by ``check.py``."""

from __future__ import annotations

import pytest
import torch
from device_kind import KIND
from torch import nn

import tfstyle_dist as td

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(KIND != "cuda", reason="needs a CUDA device"),
    # What Inductor advises, and what its first graph of each device says.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32 matrix multiplication available"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]


def weights(devices: list[str], mode: str | None) -> list[torch.Tensor]:
    """After four steps of a model that is compiled in a mode, or as it is."""
    with td.MirroredStrategy(devices) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
        forward = torch.compile(model, mode=mode) if mode else model

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            forward(x).square().mean().backward()
            optimizer.step()

        for number in range(4):
            data = torch.randn(8, 8, generator=torch.Generator().manual_seed(number)).cuda()
            strategy.run(step, args=(data,))
        return [p.detach().cpu() for p in model.parameters()]


ONE, TWO = ["cuda:0"], ["cuda:0#0", "cuda:0#1"]


@pytest.mark.parametrize(
    ("devices", "mode"), [(ONE, "default"), (ONE, "reduce-overhead"), (TWO, "default")], ids=lambda value: str(value)
)
def test_compiled_steps_equal_plain_ones(devices: list[str], mode: str) -> None:
    torch.testing.assert_close(weights(devices, mode), weights(devices, None), rtol=1e-3, atol=1e-4)


def test_graphs_that_replicas_would_share_are_refused() -> None:
    """The second replica's run of a graph writes to the memory of the first one's gradients, and torch says so."""
    with pytest.raises(RuntimeError, match="overwritten by a subsequent run"):
        weights(TWO, "reduce-overhead")


def test_sums_of_the_package_are_left_out_of_graphs() -> None:
    from tfstyle_dist.ops import aggregate

    def total(parts: list[torch.Tensor]) -> torch.Tensor:
        return aggregate(parts, td.AggregationMethod.ADD_N) * 2

    compiled = torch.compile(total, mode="reduce-overhead")
    for seed in range(4):
        torch.manual_seed(seed)
        parts = [torch.randn(1 << 16, device="cuda") for _ in range(4)]
        torch.testing.assert_close(compiled(parts), total(parts))


def test_compiled_functions_read_and_write_variables() -> None:
    def outcome(compiled: bool) -> list[torch.Tensor]:
        with td.MirroredStrategy(["cuda:0#0", "cuda:0#1"]) as strategy:
            with strategy.scope():
                variable = td.Variable(
                    torch.ones(3),
                    trainable=False,
                    synchronization=td.VariableSynchronization.ON_READ,
                    aggregation=td.VariableAggregation.MEAN,
                )

            def function(x: torch.Tensor) -> torch.Tensor:
                variable.assign_add(x)
                return (x * variable).sum()

            called = torch.compile(function) if compiled else function

            def step() -> torch.Tensor:
                replica = td.get_replica_context().replica_id_in_sync_group
                return called(torch.full((3,), 1.0 + replica, device="cuda"))

            found = [value for _ in range(3) for value in strategy.experimental_local_results(strategy.run(step))]
            return [value.detach().cpu() for value in [*found, *strategy.experimental_local_results(variable)]]

    torch.testing.assert_close(outcome(True), outcome(False))
