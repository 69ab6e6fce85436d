"""A model in parts over workers trains as the same model in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer
from torch import nn

import tfstyle_dist as tfd
from tfstyle_dist.model_parallel import full_state_dict, load_full_state_dict, num_local_elements

PLAN = {**transformer.PLAN, "embedding": "row", "head": "output"}


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def train(strategy: tfd.Strategy, model: nn.Module, optimizer: Any, steps: list[Any]) -> list[float]:
    def step(words: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = transformer.loss_of(model, words, following)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    for batch in strategy.experimental_distribute_dataset(steps):
        losses.append(float(strategy.reduce("MEAN", strategy.run(step, args=batch), axis=None)))
    return losses


def partitioned(strategy: tfd.MirroredStrategy, hidden: int = 16, plan: Any = None) -> tuple[nn.Module, Any]:
    torch.manual_seed(strategy.worker.group.world.rank)  # every worker starts from something else
    with strategy.scope():
        model = transformer.Transformer(hidden)
        strategy.experimental_partition(model, transformer.PLAN if plan is None else plan)
        return model, transformer.make_optimizer(model)


@pytest.mark.distributed(workers=4, timeout=120, deadline=40)
@pytest.mark.parametrize("hidden", [16, 13], ids=["even", "uneven"])
def test_two_replicas_of_two_parts_train_as_one_model(hidden: int, rank: int) -> None:
    with tfd.MirroredStrategy(logical_devices_per_replica=2) as strategy:
        assert strategy.num_replicas_in_sync == 2
        assert strategy.num_logical_devices_per_replica == 2
        assert strategy.is_chief == (rank == 0)
        assert strategy.run(lambda: tfd.get_replica_context().replica_id_in_sync_group) == rank // 2
        model, optimizer = partitioned(strategy, hidden)
        start = full_state_dict(model)
        steps = transformer.batches(4)
        losses = train(strategy, model, optimizer, steps)
        expected, plain, plain_optimizer = transformer.plain_training(start, steps, hidden)
        close(losses, expected)
        close(full_state_dict(model), plain.state_dict())
        # Gradients and the optimizer's state are in parts as well.
        up = model.blocks[0].up.weight
        part = up.to_local()
        assert part.shape[0] == (8 if hidden == 16 else 7 - rank % 2)
        assert up.grad.to_local().shape == part.shape
        assert optimizer.state[up]["exp_avg"].to_local().shape == part.shape
        found, wanted = full_state_dict(optimizer)["state"], plain_optimizer.state_dict()["state"]
        by_name = dict(zip([n for n, _ in model.named_parameters()], found.values(), strict=True))
        names = [n for n, _ in plain.named_parameters()]
        close({n: by_name[n]["exp_avg"] for n in names}, {n: wanted[i]["exp_avg"] for i, n in enumerate(names)})


@pytest.mark.distributed(workers=4, timeout=120, deadline=40)
def test_state_of_two_parts_goes_on_in_four_and_in_one(rank: int) -> None:
    steps = transformer.batches(4)
    with tfd.MirroredStrategy(logical_devices_per_replica=2) as strategy:
        model, optimizer = partitioned(strategy, plan=PLAN)
        assert model.embedding.weight.to_local().shape == (6, 8)
        start = full_state_dict(model)
        train(strategy, model, optimizer, steps[:2])
        saved, saved_optimizer = full_state_dict(model), full_state_dict(optimizer)
    _, plain, _ = transformer.plain_training(start, steps)
    with tfd.MirroredStrategy(logical_devices_per_replica=4) as strategy:
        assert strategy.num_replicas_in_sync == 1
        layers = {"*.up": "column", "*.down": "row", "embedding": "row", "head": "output"}
        model, optimizer = partitioned(strategy, plan=layers)
        assert model.embedding.weight.to_local().shape == (3, 8)
        load_full_state_dict(model, saved)
        load_full_state_dict(optimizer, saved_optimizer)
        train(strategy, model, optimizer, steps[2:])
        close(full_state_dict(model), plain.state_dict())
    one = transformer.Transformer()
    optimizer = transformer.make_optimizer(one)
    one.load_state_dict(saved)
    optimizer.load_state_dict(saved_optimizer)
    with tfd.OneDeviceStrategy("cpu") as strategy:
        train(strategy, one, optimizer, steps[2:])
    close(one.state_dict(), plain.state_dict())


@pytest.mark.distributed(workers=4, timeout=120, deadline=40)
@pytest.mark.parametrize("block", [True, False], ids=["now", "later"])
def test_a_checkpoint_of_two_parts_is_restored_in_four_and_in_one(
    block: bool, shared_tmp_path: Path, rank: int
) -> None:
    steps = transformer.batches(4)
    with tfd.MirroredStrategy(logical_devices_per_replica=2) as strategy:
        model, optimizer = partitioned(strategy, plan=PLAN)
        start = full_state_dict(model)
        train(strategy, model, optimizer, steps[:2])
        saved, saved_optimizer = full_state_dict(model), full_state_dict(optimizer)
        checkpoint = tfd.train.Checkpoint(model=model, optimizer=optimizer, steps=2)
        path = checkpoint.save(str(shared_tmp_path / "parts"), block=block)
        checkpoint.sync()
        # Back into the same parts, after they have moved on.
        train(strategy, model, optimizer, steps[2:])
        checkpoint.restore(path).assert_consumed()
        close(full_state_dict(model), saved)
        close(full_state_dict(optimizer)["state"], saved_optimizer["state"])
    reader = tfd.train.load_checkpoint(path)
    shapes = reader.get_variable_to_shape_map()
    assert list(shapes["model/blocks.0.up.weight"]) == list(start["blocks.0.up.weight"].shape), "full tensors"
    _, plain, _ = transformer.plain_training(start, steps)
    layers = {"*.up": "column", "*.down": "row", "embedding": "row", "head": "output"}
    for parts in (4, 1):
        with tfd.MirroredStrategy(logical_devices_per_replica=parts) as strategy:
            if parts == 4:
                model, optimizer = partitioned(strategy, plan=layers)
                assert model.embedding.weight.to_local().shape == (3, 8)
            else:
                with strategy.scope():
                    model = transformer.Transformer()
                    optimizer = transformer.make_optimizer(model)
            restored = tfd.train.Checkpoint(model=model, optimizer=optimizer, steps=0)
            with strategy.scope():  # one replica in four parts: nothing else says whose the model is
                restored.restore(path).assert_consumed()
            assert restored.steps == 2
            train(strategy, model, optimizer, steps[2:])
            close(full_state_dict(model), dict(plain.state_dict()))


@pytest.mark.distributed(workers=2, timeout=60, deadline=30)
def test_a_model_over_a_workers_budget_trains_only_in_parts(rank: int) -> None:
    budget = 1800  # elements of parameters, gradients and Adam's state that a worker may hold

    def needed(model: nn.Module) -> int:
        return 4 * num_local_elements(model.parameters())

    with tfd.MirroredStrategy(logical_devices_per_replica=2) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(8, 40), nn.GELU(), nn.Linear(40, 8))
            assert needed(model) > budget
            strategy.experimental_partition(model, {"0": "column", "2": "row"})
            optimizer = torch.optim.Adam(model.parameters())
        assert needed(model) <= budget

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        first, *_, last = (float(strategy.run(step, args=(torch.ones(4, 8),))) for _ in range(5))
        assert last < first
        held = num_local_elements(model.parameters()) + num_local_elements(p.grad for p in model.parameters())
        states = [t for entry in optimizer.state.values() for t in entry.values() if t.dim()]
        assert held + num_local_elements(states) <= budget


@pytest.mark.distributed(workers=4, timeout=60, deadline=30)
def test_single_tensors_in_parts(rank: int) -> None:
    with tfd.MirroredStrategy(logical_devices_per_replica=2) as strategy:
        x, y = torch.arange(12.0).view(4, 3), torch.arange(20.0).view(4, 5)
        layer = nn.Linear(3, 5)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(15.0).view(5, 3) / 10)
            layer.bias.zero_()
        plain = nn.Linear(3, 5)
        plain.load_state_dict(layer.state_dict())
        with strategy.scope():
            layer.weight = tfd.tpu.experimental.tensor_split(layer.weight, 2, axis=0)
            layer.bias = strategy.experimental_replicate_to_logical_devices(layer.bias)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        assert layer.weight.to_local().shape == (3 - rank % 2, 3)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = ((layer(x) - y) ** 2).sum() / y.numel()  # the mean of uneven parts is wrong in torch 2.9
            loss.backward()
            optimizer.step()
            return loss.detach()

        (batch,) = strategy.experimental_distribute_dataset([(x, y)])
        loss = strategy.reduce("MEAN", strategy.run(step, args=batch), axis=None)
        other = torch.optim.SGD(plain.parameters(), lr=0.01)
        expected = ((plain(x) - y) ** 2).mean()
        expected.backward()
        other.step()
        close(loss, expected.detach())
        close(full_state_dict(layer), plain.state_dict())
        mine = torch.tensor([float(rank)])
        assert strategy.experimental_assign_to_logical_device(mine, 1).to_local().item() == rank // 2 * 2 + 1


@pytest.mark.distributed(workers=2, timeout=60, deadline=30)
def test_what_cannot_be_divided(rank: int) -> None:
    with pytest.raises(ValueError, match="logical_devices_per_replica=3 does not divide the 2 worker"):
        tfd.MirroredStrategy(logical_devices_per_replica=3)
    with tfd.MirroredStrategy(logical_devices_per_replica=2) as strategy:
        matrix = torch.zeros(4, 4)
        with pytest.raises(ValueError, match="has 1 entries for a tensor of shape"):
            strategy.experimental_split_to_logical_devices(matrix, [2])
        with pytest.raises(ValueError, match=r"makes 4 parts, but a replica has 2"):
            strategy.experimental_split_to_logical_devices(matrix, [2, 2])
        with pytest.raises(ValueError, match="logical_device_id=2"):
            strategy.experimental_assign_to_logical_device(matrix, 2)
        model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
        with pytest.raises(ValueError, match=r"'up', but the module's layers are \['0'\]"):
            strategy.experimental_partition(model, {"up": "column"})
        with pytest.raises(ValueError, match="which is a GELU"):
            strategy.experimental_partition(model, {"1": "column"})
        with pytest.raises(ValueError, match="write 'column', 'row' or 'output'"):
            strategy.experimental_partition(model, {"0": "diagonal"})
        with pytest.raises(ValueError, match=r"names a Linear twice, by '0' and by '0\*'"):
            strategy.experimental_partition(model, {"0": "column", "0*": "column"})
        strategy.experimental_partition(model, {"0": "column"})
        with pytest.raises(ValueError, match="divided already"):
            strategy.experimental_partition(model, {"0": "row"})
        with pytest.raises(ValueError, match=r"max_norm=0\.5"):
            strategy.experimental_partition(nn.Sequential(nn.Embedding(4, 2, max_norm=0.5)), {"0": "row"})
        for number in ("0", 1.0, True, None):
            with pytest.raises(TypeError, match=r"logical_device_id must be a whole number, got"):
                strategy.experimental_assign_to_logical_device(matrix, number)
        for dimensions in (2, [2.0, 1]):
            with pytest.raises(TypeError, match="partition_dimensions must be a"):
                strategy.experimental_split_to_logical_devices(matrix, dimensions)


@pytest.mark.parametrize("number", ["2", 2.0, None, True])
def test_the_number_of_logical_devices_is_a_whole_number(number: Any) -> None:
    with pytest.raises(TypeError, match="logical_devices_per_replica must be a whole number, got"):
        tfd.MirroredStrategy(["cpu:0"], logical_devices_per_replica=number)
    with pytest.raises(ValueError, match="logical_devices_per_replica=0: a replica is on one device or more"):
        tfd.MirroredStrategy(["cpu:0"], logical_devices_per_replica=0)


class Counting(nn.Linear):
    """A layer with an extra state."""

    seen: Any = 0

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("seen", [{"batches": 3}, torch.ones(2)], ids=["dict", "tensor"])
def test_a_full_state_has_what_the_module_has(seen: Any) -> None:
    module, other = Counting(2, 2), Counting(2, 2)
    module.seen = seen
    state = full_state_dict(module)
    load_full_state_dict(other, state)
    close(other.seen, seen)
    close(other.weight, module.weight)
    with pytest.raises(tfd.errors.NotFoundError, match=r"has no \['bias'\], and the module no \['more'\]"):
        load_full_state_dict(module, {"more": 1, **{name: state[name] for name in state if name != "bias"}})


def test_one_process_has_one_logical_device() -> None:
    with pytest.raises(ValueError, match="needs one device in each process"):
        tfd.MirroredStrategy(["cpu:0", "cpu:1"], logical_devices_per_replica=2)
    weight = torch.zeros(2, 2)
    with tfd.MirroredStrategy(["cpu:0"]) as strategy, strategy.scope():
        assert tfd.tpu.experimental.tensor_split(weight, 1) is weight
        with pytest.raises(ValueError, match="makes 2 parts"):
            tfd.tpu.experimental.tensor_split(weight, 2)
    with pytest.raises(ValueError, match="has one logical device"):
        tfd.tpu.experimental.tensor_split(weight, 2)
