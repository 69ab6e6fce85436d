"""What programs do to modules outside the training step: save, copy, convert, freeze, write in place."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.utils import parametrizations
from two_replicas import (
    assert_all_close,
    both_process_models,
    built,
    examples,
    flat_gradients,
    flat_weights,
    gradients,
    half,
    mse,
    on_all,
    plain,
    small,
    weights,
)

import tfstyle_dist as td


def _trains(strategy: td.Strategy, model: nn.Module, reference: nn.Module) -> None:
    """One step moves both the same way, from wherever the reference is."""
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))

    def step() -> None:
        optimizer.zero_grad()
        mse(model, half()).backward()
        optimizer.step()

    strategy.run(step)
    expected.zero_grad()
    mse(reference, examples()).backward()
    expected.step()
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_state_dict_goes_both_ways(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small, seed=5)
    state = model.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    reference.load_state_dict(state)
    torch.testing.assert_close(flat_weights(reference), flat_weights(model), rtol=0.0, atol=0.0)
    other = plain(small, seed=9)
    model.load_state_dict(other.state_dict())
    _trains(strategy, model, other)


@both_process_models
def test_state_dict_saved_by_ddp(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small, seed=5)
    state = {f"module.{name}": value.clone() for name, value in reference.state_dict().items()}
    consume_prefix_in_state_dict_if_present(state, "module.")
    model.load_state_dict(state)
    _trains(strategy, model, reference)


@both_process_models
def test_load_state_dict_inside_the_scope(strategy: td.Strategy, process_model: str) -> None:
    reference = plain(small, seed=5)
    with strategy.scope():
        model = plain(small)
        model.load_state_dict(reference.state_dict())
    _trains(strategy, model, reference)


@both_process_models
def test_load_state_dict_between_steps(strategy: td.Strategy, process_model: str) -> None:
    model, reference, other = built(strategy, small), plain(small), plain(small, seed=5)
    _trains(strategy, model, reference)
    model.load_state_dict(other.state_dict())
    assert_all_close(weights(strategy, model), flat_weights(other))
    _trains(strategy, model, other)


@both_process_models
def test_assigned_parameters_are_adopted(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small, seed=5)
    state = {name: nn.Parameter(value.clone()) for name, value in reference.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert all(strategy.parameter_store.owns(p) for p in model.parameters())
    _trains(strategy, model, reference)


@both_process_models
def test_deepcopy_belongs_to_no_strategy(strategy: td.Strategy, process_model: str) -> None:
    model = built(strategy, small)
    twin = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    before = flat_weights(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert torch.equal(flat_weights(model), before)
    mse(twin, examples()).backward()
    assert torch.isnan(gradients(strategy, model)).all()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="none of its parameters"):
        strategy.run(lambda: optimizer.step())


@both_process_models
def test_pickle_and_torch_save_of_a_module(strategy: td.Strategy, process_model: str) -> None:
    model = built(strategy, lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    model[0].bias.requires_grad_(False)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert all(type(p) is nn.Parameter for p in twin.parameters())
        assert all(type(b) is torch.Tensor for b in twin.buffers())
        assert [p.requires_grad for p in twin.parameters()] == [True, False, True, True]
        torch.testing.assert_close(twin.state_dict(), model.state_dict(), rtol=0.0, atol=0.0)
        twin(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    torch.testing.assert_close(dict(state), dict(model.state_dict()), rtol=0.0, atol=0.0)


@both_process_models
def test_conversion_keeps_training_and_buffers(strategy: td.Strategy, process_model: str) -> None:
    def normalised() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4))

    model = built(strategy, normalised).float()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.double()
    strategy.run(lambda: model(half()[0]).sum().backward())
    own = on_all(strategy, lambda: model[1].running_mean)
    assert not torch.equal(own[0], own[1]), "each replica has statistics of its own batches"
    strategy.sync_buffers()
    assert_all_close(on_all(strategy, lambda: model[1].running_mean), own.mean(0))
    assert on_all(strategy, lambda: model[1].num_batches_tracked).tolist() == [1, 1]


@both_process_models
@pytest.mark.parametrize("where", ["in the scope", "outside"])
def test_buffers_that_go_over_to_another_module(strategy: td.Strategy, process_model: str, where: str) -> None:
    def converted(model: nn.Module) -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)

    def normalised() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    model = built(strategy, (lambda: converted(normalised())) if where == "in the scope" else normalised)
    model = converted(model) if where == "outside" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        mse(model, half()).backward()
        optimizer.step()

    strategy.run(step)
    own = on_all(strategy, lambda: model[1].running_mean)
    strategy.sync_buffers()
    assert_all_close(on_all(strategy, lambda: model[1].running_mean), own.mean(0))
    strategy.run(step)
    assert on_all(strategy, lambda: model[1].num_batches_tracked).tolist() == [2, 2]


@both_process_models
def test_conversion_keeps_what_each_replica_had(strategy: td.Strategy, process_model: str) -> None:
    model = built(strategy, lambda: nn.BatchNorm1d(10))
    strategy.run(lambda: model(half()[0]))
    before = on_all(strategy, lambda: model.running_mean)
    assert not torch.equal(before[0], before[1])
    model.float()
    after = on_all(strategy, lambda: model.running_mean)
    assert torch.equal(after, before.float())


@both_process_models
def test_requires_grad_toggles_every_copy(strategy: td.Strategy, process_model: str) -> None:
    model = built(strategy, small)
    model[0].weight.requires_grad = False
    model[0].bias.requires_grad_(False)
    strategy.run(lambda: mse(model, half()).backward())
    found = gradients(strategy, model)
    assert torch.isnan(found[:, :44]).all()
    assert not torch.isnan(found[:, 44:]).any()


@both_process_models
@pytest.mark.parametrize("way", ["data", "no_grad", "detach"])
def test_write_in_place_inside_run_counts_once(strategy: td.Strategy, process_model: str, way: str) -> None:
    model, reference = built(strategy, small), plain(small)

    def shrink() -> None:
        for parameter in model.parameters():
            if way == "data":
                parameter.data.mul_(0.5)
            elif way == "detach":
                parameter.detach().mul_(0.5)
            else:
                with torch.no_grad():
                    parameter.mul_(0.5)

    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.125)
    for _ in range(3):
        strategy.run(shrink)
    assert_all_close(weights(strategy, model), flat_weights(reference))
    _trains(strategy, model, reference)


@both_process_models
def test_write_in_place_outside_run_reaches_every_replica(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)
    for module in (model, reference):
        nn.init.constant_(module[0].weight, 0.25)
        module[2].weight.data = torch.full((1, 4), 0.5, dtype=torch.float64)
        with torch.no_grad():
            module[0].bias += 1.0
    assert_all_close(weights(strategy, model), flat_weights(reference))
    _trains(strategy, model, reference)


@both_process_models
def test_data_set_to_memory_that_the_parameter_had_reaches_every_replica(
    strategy: td.Strategy, process_model: str
) -> None:
    """As ``model.float().double()`` does, where the second gets the memory that the first gave back."""
    model, reference = built(strategy, small), plain(small)
    kept = model[0].weight.data.clone()
    model[0].weight.data = kept
    _trains(strategy, model, reference)
    reference[0].weight.data.mul_(0.5)
    kept.mul_(0.5)
    model[0].weight.data = kept
    _trains(strategy, model, reference)
    assert_all_close(weights(strategy, model), flat_weights(reference))


@both_process_models
def test_gradients_set_and_cleared_by_hand(strategy: td.Strategy, process_model: str) -> None:
    model, reference = built(strategy, small), plain(small)

    def step() -> None:
        mse(model, half()).backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 2.0

    strategy.run(step)
    (2.0 * mse(reference, examples())).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))
    for parameter in model.parameters():
        parameter.grad = None
    assert torch.isnan(gradients(strategy, model)).all()


@both_process_models
def test_weight_norm_and_spectral_norm_are_adopted(strategy: td.Strategy, process_model: str) -> None:
    def normalised() -> nn.Module:
        first = parametrizations.spectral_norm(nn.Linear(10, 4))
        return nn.Sequential(first, parametrizations.weight_norm(nn.Linear(4, 1)))

    model, reference = built(strategy, normalised), plain(normalised)
    for parameter in model.parameters():
        assert strategy.parameter_store.owns(parameter)
    for _ in range(3):
        _trains(strategy, model, reference)
    buffer = on_all(strategy, lambda: model[0].parametrizations.weight[0]._u)
    assert_all_close(buffer, reference[0].parametrizations.weight[0]._u)


@both_process_models
def test_gradient_of_an_old_model_does_not_matter(strategy: td.Strategy, process_model: str) -> None:
    """A second model in the same strategy, after the first one is gone on some workers only."""
    model, reference = built(strategy, small), plain(small)
    _trains(strategy, model, reference)
    kept = model if process_model == "ranks" and strategy.worker.group.rank == 0 else None
    del model
    model, reference = built(strategy, small, seed=1), plain(small, seed=1)
    _trains(strategy, model, reference)
    del kept


@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("has_one", [False, True])
def test_a_parametrization_that_a_step_registers_is_refused(central: bool, has_one: bool) -> None:
    kind = td.experimental.CentralStorageStrategy if central else td.MirroredStrategy
    with kind(["cpu:0", "cpu:1"]) as strategy:
        model = built(strategy, lambda: nn.Linear(10, 1))
        if has_one:
            parametrizations.weight_norm(model)

        def step() -> torch.Tensor:
            nn.utils.parametrize.register_parametrization(model, "bias", nn.Tanh())
            return mse(model, half())

        what = "'bias'" if has_one else "a Linear"
        with pytest.raises(RuntimeError, match=f"of {what} inside strategy.run: .*Call it before strategy.run"):
            strategy.run(step)

        def own() -> torch.Tensor:
            return parametrizations.weight_norm(nn.Linear(10, 1).double())(half()[0]).sum()

        strategy.run(own)  # of a module that a replica has for itself
