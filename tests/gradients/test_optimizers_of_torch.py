"""Plain ``torch.optim`` optimizers, closures and schedulers under a strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from two_replicas import (
    assert_all_close,
    both_process_models,
    built,
    examples,
    flat_weights,
    half,
    mse,
    on_all,
    plain,
    small,
    weights,
)

import tfstyle_dist as td


@both_process_models
def test_step_with_a_closure(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected = torch.optim.Adam(reference.parameters(), lr=0.01)

    def run_closure(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], keyword: bool) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        return optimizer.step(closure=closure) if keyword else optimizer.step(closure)

    for k, keyword in enumerate([False, True]):
        losses = on_all(
            strategy,
            lambda k=k, keyword=keyword: run_closure(optimizer, lambda: mse(model, half(k)), keyword).detach(),
        )
        total = run_closure(expected, lambda k=k: mse(reference, examples(k)), keyword)
        torch.testing.assert_close(losses.mean(), total.detach(), rtol=1e-11, atol=0.0)
        assert losses[0] != losses[1], "each replica has its own loss"
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_scheduler_outside_run(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (optimizer, expected)]

    def step(k: int) -> None:
        optimizer.zero_grad()
        mse(model, half(k)).backward()
        optimizer.step()

    for k in range(3):
        strategy.run(step, args=(k,))
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()
        for schedule in schedules:
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.0125
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_scheduler_inside_run(strategy: td.Strategy, process_model: str) -> None:
    model = built(strategy, small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def step() -> None:
        mse(model, half()).backward()
        optimizer.step()
        schedule.step()

    for expected in (0.05, 0.025):  # each replica has the content of a scheduler of its own
        strategy.run(step)
        assert optimizer.param_groups[0]["lr"] == expected
        assert (
            strategy.experimental_local_results(strategy.run(lambda: optimizer.param_groups[0]["lr"] + 0))
            == (expected,) * strategy.worker.num_local_replicas
        )


@both_process_models
def test_parameter_groups(strategy: td.Strategy, process_model: str) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": model[0].parameters(), "lr": 0.01},
            {"params": model[2].parameters(), "weight_decay": 0.1},
        ]
        return torch.optim.AdamW(groups, lr=0.1)

    model, reference = built(strategy, small), plain(small)
    optimizer, expected = optimizer_of(model), optimizer_of(reference)

    def step(k: int) -> None:
        optimizer.zero_grad()
        mse(model, half(k)).backward()
        optimizer.step()

    for k in range(3):
        strategy.run(step, args=(k,))
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
@pytest.mark.parametrize("form", ["foreach", "fused", "for_loop"])
def test_forms_of_an_optimizer(strategy: td.Strategy, process_model: str, form: str) -> None:
    options = {"foreach": form == "foreach", "fused": form == "fused"}
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **options)
    expected = torch.optim.Adam(reference.parameters(), lr=0.01, **options)

    def step(k: int) -> None:
        optimizer.zero_grad()
        mse(model, half(k)).backward()
        optimizer.step()

    for k in range(3):
        strategy.run(step, args=(k,))
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_two_optimizers_and_an_early_skip(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)

    def both_of(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            torch.optim.Adam(model[2].parameters(), lr=0.01),
        ]

    optimizers, expected = both_of(model), both_of(reference)

    def is_small(model: nn.Module) -> bool:
        return bool(model[0].weight.grad.abs().max() < 0.6)

    def step(k: int) -> None:
        model.zero_grad()
        mse(model, half(k)).backward()
        if is_small(model):  # the same decision everywhere: gradients are equal
            return
        for optimizer in optimizers[: 1 + k % 2]:
            optimizer.step()

    skipped = []
    for k in range(4):
        strategy.run(step, args=(k,))
        reference.zero_grad()
        mse(reference, examples(k)).backward()
        skipped.append(is_small(reference))
        for optimizer in [] if skipped[-1] else expected[: 1 + k % 2]:
            optimizer.step()
    assert set(skipped) == {False, True}
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_mixing_owned_and_foreign_parameters_raises(strategy: td.Strategy, process_model: str) -> None:
    model, foreign = built(strategy, small), plain(small)
    optimizer = torch.optim.SGD([*model.parameters(), *foreign.parameters()], lr=0.1)
    with pytest.raises(RuntimeError, match="mixes parameters"):
        strategy.run(lambda: optimizer.step())


@both_process_models
def test_only_foreign_parameters_inside_run_raises(strategy: td.Strategy, process_model: str) -> None:
    foreign = plain(small)
    optimizer = torch.optim.SGD(foreign.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="none of its parameters"):
        strategy.run(lambda: optimizer.step())
    mse(foreign, examples()).backward()
    optimizer.step()


@both_process_models
def test_what_each_replica_changes_on_its_own(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)

    def gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(model(x).pow(2).sum(), x)[0]

    def attack(how: str) -> tuple[torch.Tensor, torch.Tensor]:
        example = half()[0].requires_grad_()
        if how == "adopted":
            strategy.experimental_adopt(example)
        if how == "with an optimizer":
            torch.optim.SGD([example], lr=1.0).step()
        return gradient(model, example), gradient(reference, example)

    with pytest.raises(RuntimeError, match=r"none of its parameters.*such as the examples of an attack"):
        strategy.run(attack, args=("with an optimizer",))
    with pytest.raises(RuntimeError, match=r"to be trained must be called in cross-replica.*examples of an attack"):
        strategy.run(attack, args=("adopted",))
    found, expected = (strategy.experimental_local_results(v) for v in strategy.run(attack, args=("by hand",)))
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)


@both_process_models
def test_adopting_cures_both(strategy: td.Strategy, process_model: str) -> None:
    model, reference = plain(small), plain(small)
    assert strategy.experimental_adopt(model) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)

    def step() -> None:
        mse(model, half()).backward()
        optimizer.step()

    strategy.run(step)
    mse(reference, examples()).backward()
    expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_lbfgs_is_refused(strategy: td.Strategy, process_model: str) -> None:
    model = built(strategy, small)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(RuntimeError, match="LBFGS"):
        strategy.run(lambda: optimizer.step(lambda: mse(model, half())))


@both_process_models
def test_optimizer_state_interchanges_with_a_plain_optimizer(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected = torch.optim.Adam(reference.parameters(), lr=0.01)

    def step(k: int) -> None:
        optimizer.zero_grad()
        mse(model, half(k)).backward()
        optimizer.step()

    def plain_step(k: int) -> None:
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()

    plain_step(0)
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
    for k in (1, 2):
        strategy.run(step, args=(k,))
        plain_step(k)
    assert_all_close(weights(strategy, model), flat_weights(reference))
    saved, wanted = optimizer.state_dict(), expected.state_dict()
    assert saved["state"].keys() == wanted["state"].keys()
    for key, entry in wanted["state"].items():
        for name, value in entry.items():
            assert type(saved["state"][key][name]) is type(value)
            torch.testing.assert_close(saved["state"][key][name], value, rtol=1e-11, atol=1e-12)
    reference.load_state_dict(model.state_dict())
    expected.load_state_dict(copy.deepcopy(saved))
    strategy.run(step, args=(3,))
    plain_step(3)
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_optimizer_step_outside_run(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for k in range(2):
        optimizer.zero_grad()
        strategy.run(lambda k=k: mse(model, half(k)).backward())
        optimizer.step()
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


@pytest.mark.distributed(workers=2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_in_ranks(strategy: td.Strategy, backend: Any) -> None:
    model, reference = built(strategy, small), plain(small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=backend)

    def step(k: int) -> None:
        optimizer.zero_grad()
        mse(compiled, half(k)).backward()
        optimizer.step()

    for k in range(3):
        strategy.run(step, args=(k,))
        expected.zero_grad()
        mse(reference, examples(k)).backward()
        expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


class _Patient(torch.optim.SGD):
    """Torch hooks this step and, once an SGD was made, that of its base too."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("not today")
        return super().step(closure)


@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_a_step_that_calls_the_step_of_its_base_counts_once(kind: str) -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # its class is hooked from here on
    made = td.MirroredStrategy if kind == "mirrored" else td.experimental.CentralStorageStrategy
    with made(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.ones_(model.weight)
            optimizer = _Patient(model.parameters(), lr=0.25)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()

        strategy.run(step)
        assert model.weight.item() == 0.75
        _Patient.fails = True
        with pytest.raises(ValueError, match="not today"):
            strategy.run(step)
        _Patient.fails = False
        strategy.run(step)  # what the failed step left behind does not hide this one
        assert model.weight.item() == 0.5
