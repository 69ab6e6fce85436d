"""A setting of the process that a step changes for a while is each replica's own, and is put back."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

import tfstyle_dist as tfd

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


SETTINGS: dict[str, tuple[Context, Callable[[], Any]]] = {
    "dtype": (lambda: default_dtype(torch.float64), torch.get_default_dtype),
    "anomalies": (torch.autograd.detect_anomaly, torch.is_anomaly_enabled),
    "anomalies but not NaN": (
        lambda: torch.autograd.detect_anomaly(check_nan=False),
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    ),
    "deterministic": (deterministic, torch.are_deterministic_algorithms_enabled),
    "attention": (lambda: sdpa_kernel(SDPBackend.MATH), torch.backends.cuda.flash_sdp_enabled),
    "filters": (lambda: warnings.catch_warnings(action="error"), lambda: [f[0] for f in warnings.filters][:1]),
    "standard output": (lambda: contextlib.redirect_stdout(io.StringIO()), lambda: type(sys.stdout)),
    "parametrized": (parametrize.cached, lambda: parametrize._cache_enabled),
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
        assert (torch.get_default_dtype(), parametrize._cache_enabled) == (torch.float32, 0)


def test_what_each_replica_prints_into_its_own_file(three: Any) -> None:
    def step() -> str:
        context = tfd.get_replica_context()
        with contextlib.redirect_stdout(io.StringIO()) as file:
            for _ in range(3):
                print("replica", context.replica_id_in_sync_group)
                context.all_reduce("SUM", torch.ones(()))
        return file.getvalue()

    assert three.experimental_local_results(three.run(step)) == tuple(f"replica {r}\n" * 3 for r in range(3))


def test_a_run_inside_of_a_run_begins_with_the_first_replicas(three: Any) -> None:
    def step() -> str:
        context = tfd.get_replica_context()
        with contextlib.redirect_stdout(io.StringIO()) as file:
            context.merge_call(lambda strategy: strategy.run(lambda: print("inside")))
            print("replica", context.replica_id_in_sync_group)
        return file.getvalue()

    printed = three.experimental_local_results(three.run(step))
    assert printed == ("inside\n" * 3 + "replica 0\n", "replica 1\n", "replica 2\n")


def test_warnings_are_recorded_for_each_replica(three: Any) -> None:
    def step() -> list[str]:
        context = tfd.get_replica_context()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                context.all_reduce("SUM", torch.ones(()))
                warnings.warn(f"of replica {context.replica_id_in_sync_group}", stacklevel=1)
        return [str(warning.message) for warning in caught]

    assert three.experimental_local_results(three.run(step)) == tuple([f"of replica {r}"] * 3 for r in range(3))


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
