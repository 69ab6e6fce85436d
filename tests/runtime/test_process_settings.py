"""A setting of the process that a step changes for a while is each replica's own, and is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

import tfstyle_dist as tfd
from tfstyle_dist.core import torch_internals

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    return setting(torch.get_default_dtype, torch.set_default_dtype, dtype)


def deterministic() -> contextlib.AbstractContextManager[None]:
    return setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


def blocks_that_keep() -> int:
    """In how many blocks of ``parametrize.cached`` the program is."""
    count: int = getattr(parametrize, torch_internals.PARAMETRIZED[1])
    return count


SETTINGS: dict[str, tuple[Context, Callable[[], Any]]] = {
    "dtype": (lambda: default_dtype(torch.float64), torch.get_default_dtype),
    "anomalies": (torch.autograd.detect_anomaly, torch.is_anomaly_enabled),
    "anomalies but not NaN": (
        lambda: torch.autograd.detect_anomaly(check_nan=False),
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    ),
    "deterministic": (deterministic, torch.are_deterministic_algorithms_enabled),
    "attention": (lambda: sdpa_kernel(SDPBackend.MATH), torch.backends.cuda.flash_sdp_enabled),
    "parametrized": (parametrize.cached, blocks_that_keep),
}


@pytest.fixture(params=[tfd.MirroredStrategy, tfd.experimental.CentralStorageStrategy])
def three(request: pytest.FixtureRequest) -> Iterator[Any]:
    with request.param(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        yield strategy


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_a_block_is_in_force_in_it_alone(three: Any, name: str, backwards: int) -> None:
    block, get = SETTINGS[name]
    with block():
        inside = get()
    outside = get()
    with three.scope():
        model = torch.nn.Linear(2, 1)

    def step() -> list[Any]:
        seen = [get()]
        with block():
            seen.append(get())
            for _ in range(backwards):
                model(torch.ones(3, 2, dtype=torch.float32)).sum().backward()
                seen.append(get())
        return [*seen, get()]

    for _ in range(2):
        for seen in three.experimental_local_results(three.run(step)):
            assert seen == [outside, *[inside] * (backwards + 1), outside]
        assert get() == outside


def test_a_setting_of_a_step_that_raises_on_one_replica(three: Any) -> None:
    with three.scope():
        model = torch.nn.Linear(2, 1)

    def step(fails: bool) -> torch.dtype:
        with default_dtype(torch.float64), parametrize.cached():
            model(torch.ones(3, 2, dtype=torch.float32)).sum().backward()
            if fails and tfd.get_replica_context().replica_id_in_sync_group == 1:
                raise ValueError("no more data")
            model(torch.ones(3, 2, dtype=torch.float32)).sum().backward()
        return torch.get_default_dtype()

    for fails in (True, False):
        with pytest.raises(ValueError, match="no more data") if fails else contextlib.nullcontext():
            assert three.experimental_local_results(three.run(step, args=(fails,))) == (torch.float32,)  # one for all
        assert (torch.get_default_dtype(), blocks_that_keep()) == (torch.float32, 0)


def test_a_run_inside_of_a_run_begins_with_the_first_replicas(three: Any) -> None:
    seen: list[torch.dtype] = []

    def step() -> torch.dtype:
        context = tfd.get_replica_context()
        with default_dtype([torch.float64, torch.bfloat16, torch.float16][context.replica_id_in_sync_group]):
            context.merge_call(lambda strategy: strategy.run(lambda: seen.append(torch.get_default_dtype())))
            return torch.get_default_dtype()

    assert three.experimental_local_results(three.run(step)) == (torch.float64, torch.bfloat16, torch.float16)
    assert seen == [torch.float64] * 3


def test_what_is_set_in_merge_call_is_for_all(three: Any) -> None:
    def step() -> list[torch.dtype]:
        context, seen = tfd.get_replica_context(), []
        with default_dtype(torch.bfloat16):
            context.merge_call(lambda strategy: torch.set_default_dtype(torch.float64))
            seen.append(torch.get_default_dtype())
            context.all_reduce("SUM", torch.ones(()))
        return [*seen, torch.get_default_dtype()]

    for seen in three.experimental_local_results(three.run(step)):
        assert seen == [torch.float64, torch.float32]


class Symmetric(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def trained(strategy: Any, in_step: bool, around: bool) -> list[torch.Tensor]:
    """Trains a model with a parametrized layer, whose weights are computed once in each block."""
    torch.manual_seed(0)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        parametrize.register_parametrization(model[0], "weight", Symmetric())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 6, 3)

    def step(batch: torch.Tensor) -> None:
        shard = batch
        if strategy is not None:
            shard = batch.chunk(3)[tfd.get_replica_context().replica_id_in_sync_group]
        optimizer.zero_grad()
        with parametrize.cached() if in_step else contextlib.nullcontext():
            middle = model(shard)
            if strategy is not None:
                tfd.get_replica_context().all_reduce("SUM", torch.ones(()))
            (middle + model(shard)).square().mean().backward()
        optimizer.step()

    for batch in inputs:
        with parametrize.cached() if around else contextlib.nullcontext():
            step(batch) if strategy is None else strategy.run(step, args=(batch,))
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(("in_step", "around"), [(True, False), (False, True), (True, True)])
def test_parametrized_weights_that_are_kept_are_each_replicas_own(
    three: Any, in_step: bool, around: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.testing.assert_close(trained(three, in_step, around), trained(None, in_step, around))
    assert "without a gradient" not in caplog.text  # all replicas computed them of their own parameters
