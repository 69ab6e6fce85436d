"""A setting of the process that a step changes for a while is each replica's own, and is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

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


@pytest.mark.parametrize("left_there", [False, True])
def test_hooks_of_all_modules_and_optimizers_are_those_that_a_replica_has_registered(
    three: Any, left_there: bool
) -> None:
    """Left there: some that the program has registered for good."""
    seen: list[str] = []
    with three.scope():
        model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    register = {
        "forward before": torch_module.register_module_forward_pre_hook,
        "forward": torch_module.register_module_forward_hook,
        "backward before": torch_module.register_module_full_backward_pre_hook,
        "backward": torch_module.register_module_full_backward_hook,
        "step before": register_optimizer_step_pre_hook,
        "step": register_optimizer_step_post_hook,
    }

    def step() -> None:
        number = tfd.get_replica_context().replica_id_in_sync_group
        x = torch.ones(3, 2, requires_grad=True)
        handles = [hooks(lambda *_, of=f"{name} {number}": seen.append(of)) for name, hooks in register.items()]
        model(x).sum().backward()
        optimizer.step()
        for handle in handles:
            handle.remove()
        model(x).sum().backward()
        optimizer.step()

    kept = [hooks(lambda *_, of=f"{name} kept": seen.append(of)) for name, hooks in register.items() if left_there]
    try:
        for _ in range(2):
            seen.clear()
            three.run(step)
            assert {name: seen.count(name) for name in seen if "kept" not in name} == {
                f"{name} {replica}": 1 for name in register for replica in range(3)
            }
            assert all(seen.count(f"{name} kept") == (6 if left_there else 0) for name in register)
    finally:
        for handle in kept:
            handle.remove()
    assert not any(getattr(*place) for place in torch_internals.HOOKS_OF_MODULES)


class Symmetric(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def trained(strategy: Any, in_step: bool, around: bool, ends_early: bool = False) -> list[torch.Tensor]:
    """Trains a model with a parametrized layer, whose weights are computed once in each block.

    Ends early: before the backward pass, and the first call that all replicas make is made after it.
    """
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
            if strategy is not None and not ends_early:
                tfd.get_replica_context().all_reduce("SUM", torch.ones(()))
            loss = (middle + model(shard)).square().mean()
            if not ends_early:
                loss.backward()
        if ends_early:
            loss.backward()
        optimizer.step()

    for batch in inputs:
        with parametrize.cached() if around else contextlib.nullcontext():
            step(batch) if strategy is None else strategy.run(step, args=(batch,))
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("in_step", "around", "ends_early"),
    [(True, False, False), (False, True, False), (True, True, False), (True, False, True), (True, True, True)],
)
def test_parametrized_weights_that_are_kept_are_each_replicas_own(
    three: Any, in_step: bool, around: bool, ends_early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.testing.assert_close(trained(three, in_step, around, ends_early), trained(None, in_step, around, ends_early))
    assert "without a gradient" not in caplog.text  # all replicas computed them of their own parameters
