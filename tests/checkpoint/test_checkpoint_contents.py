"""What a checkpoint holds comes back as it was, for any number of replicas."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.checkpoint import codec
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.train import Checkpoint, RandomState

READ = td.VariableSynchronization.ON_READ
SUM, MEAN = td.VariableAggregation.SUM, td.VariableAggregation.MEAN


def mirrored(replicas: int) -> Any:
    return td.MirroredStrategy([f"cpu:{r}" for r in range(replicas)])


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def job(replicas: int) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
    strategy = mirrored(replicas)
    with strategy.scope():
        model = network()
    return strategy, model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(strategy: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    batch = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed))
    for x in strategy.experimental_distribute_dataset([batch]):
        strategy.run(step, args=(x,))


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_model_and_optimizer_go_on_as_if_nothing_had_happened(tmp_path: Path, replicas: int) -> None:
    with job(2)[0]:
        pass
    strategy, model, optimizer = job(2)
    with strategy:
        train(strategy, model, optimizer, 0)
        path = Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "ckpt")
        strategy.sync_buffers()  # a checkpoint has the mean of the replicas' statistics
        saved = values(model)
    plain = network()
    plain_optimizer = torch.optim.Adam(plain.parameters())
    Checkpoint(model=plain, optimizer=plain_optimizer).restore(path).expect_partial()
    strategy, model, optimizer = job(replicas)
    with strategy:
        Checkpoint(model=model, optimizer=optimizer).restore(path).assert_consumed()
        torch.testing.assert_close(values(model), saved, rtol=0, atol=0)
        torch.testing.assert_close(values(plain), saved, rtol=0, atol=0)
        mine, others = optimizer.state_dict(), plain_optimizer.state_dict()
        assert mine["param_groups"] == others["param_groups"]
        assert mine["param_groups"][0]["lr"] == 0.01
        torch.testing.assert_close(mine["state"], others["state"], rtol=0, atol=0)
        assert len(mine["state"]) == 6
        model.eval()
        plain.eval()
        for one, other in ((model, optimizer), (plain, plain_optimizer)):
            one(torch.ones(1, 3)).sum().backward()
            other.step()
        torch.testing.assert_close(values(model), values(plain), rtol=0, atol=0)


def test_optimizer_state_goes_by_name_not_by_number(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    path = Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "ckpt")
    again = network()
    backwards = torch.optim.Adam(list(again.parameters())[::-1])
    Checkpoint(model=again, optimizer=backwards).restore(path).assert_consumed()
    for name, parameter in again.named_parameters():
        expected = optimizer.state[model.get_parameter(name)]["exp_avg"]
        assert torch.equal(backwards.state[parameter]["exp_avg"], expected), name


def test_another_number_of_parameter_groups_is_refused(tmp_path: Path) -> None:
    model = network()
    path = Checkpoint(model=model, optimizer=torch.optim.SGD(model.parameters())).save(tmp_path / "ckpt")
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    with pytest.raises(InvalidArgumentError, match=r"optimizer has 6 parameter group\(s\), saved were 1"):
        Checkpoint(model=model, optimizer=torch.optim.SGD(groups)).restore(path)


@pytest.mark.parametrize("wrap", [td.train.AdamOptimizer, None])
def test_tf_style_optimizers(tmp_path: Path, wrap: Any) -> None:
    def build() -> Any:
        model = torch.nn.Linear(2, 1)
        made = wrap(0.1) if wrap else td.train.Optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
        return model, made, Checkpoint(model=model, optimizer=made)

    def step(model: torch.nn.Module, optimizer: Any) -> torch.Tensor:
        optimizer.minimize(model(torch.ones(1, 2)).square().sum(), var_list=list(model.parameters()))
        return model.weight.detach().clone()

    model, optimizer, checkpoint = build()
    step(model, optimizer)
    path = checkpoint.save(tmp_path / "ckpt")
    expected = step(model, optimizer)
    model, optimizer, checkpoint = build()
    checkpoint.restore(path).assert_consumed()
    assert torch.equal(step(model, optimizer), expected)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_variables(tmp_path: Path, replicas: int) -> None:
    def build(number: int) -> Any:
        strategy = mirrored(number)
        with strategy.scope():
            made = {
                "plain": td.Variable([1.0, 2.0]),
                "summed": td.Variable(0.0, synchronization=READ, aggregation=SUM),
                "mean": td.Variable(0.0, synchronization=READ, aggregation=MEAN),
                "count": td.Variable(5, dtype=torch.int64),
            }
        return strategy, made

    strategy, variables = build(2)
    with strategy:
        strategy.run(lambda: variables["summed"].assign(torch.tensor(4.0)))
        strategy.run(lambda: variables["mean"].assign(torch.tensor(float(td.get_replica_context().replica_id))))
        path = Checkpoint(**variables).save(tmp_path / "ckpt")
    strategy, variables = build(replicas)
    with strategy:
        for variable in variables.values():
            variable.assign(torch.zeros_like(variable.value()))
        Checkpoint(variables=variables).restore(path).expect_partial()
        assert float(variables["summed"].value()) == 0.0  # under other names
        Checkpoint(**variables).restore(path).assert_consumed()
        assert variables["plain"].value().tolist() == [1.0, 2.0]
        assert variables["count"].value().item() == 5
        assert float(variables["summed"].value()) == pytest.approx(8.0)
        local = [float(part) for part in strategy.experimental_local_results(variables["summed"])]
        assert local == pytest.approx([8.0 / replicas] * replicas)
        assert [float(p) for p in strategy.experimental_local_results(variables["mean"])] == [0.5] * replicas


def test_on_read_without_aggregation_cannot_be_saved(tmp_path: Path) -> None:
    with mirrored(2) as strategy:
        with strategy.scope():
            variable = td.Variable(0.0, synchronization=READ)
        with pytest.raises(ValueError, match="aggregation NONE"):
            Checkpoint(v=variable).save(tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []


def test_plain_values_schedulers_and_containers(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
    optimizer.step()
    scheduler.step()
    checkpoint = Checkpoint(
        parts={"a": model, "b": [other, optimizer]},
        scheduler=scheduler,
        nested=Checkpoint(inner=torch.arange(3), word="x"),
        history=[0.5, float("inf")],
        epoch=3,
    )
    path = checkpoint.save(tmp_path / "ckpt")
    rate, weight = scheduler.get_last_lr(), model.weight.detach().clone()
    checkpoint.epoch, checkpoint.history, checkpoint.nested.word = 9, [], "y"
    checkpoint.nested.inner.zero_()
    torch.nn.init.zeros_(model.weight)
    optimizer.step()
    scheduler.step()
    checkpoint.restore(path).assert_consumed()
    assert (checkpoint.epoch, checkpoint.history, checkpoint.nested.word) == (3, [0.5, float("inf")], "x")
    assert checkpoint.nested.inner.tolist() == [0, 1, 2]
    assert torch.equal(model.weight.detach(), weight)
    assert scheduler.get_last_lr() == rate


def test_position_of_an_iterator(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(24))

    def iterator(strategy: Any) -> Any:
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        return iter(strategy.experimental_distribute_dataset(loader))

    def rest(strategy: Any, batches: Any) -> list[int]:
        found = [torch.cat([p[0] for p in strategy.experimental_local_results(b)]) for b in batches]
        return torch.cat(found).tolist()

    with mirrored(2) as strategy:
        batches = iterator(strategy)
        next(batches)
        path = Checkpoint(batches=batches).save(tmp_path / "ckpt")
        expected = rest(strategy, batches)
    with mirrored(3) as strategy:
        batches = iterator(strategy)
        Checkpoint(batches=batches).restore(path).assert_consumed()
        assert rest(strategy, batches) == expected
        assert len(expected) == 20


def test_random_numbers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw() -> list[float]:
        return [
            random.random(),
            float(torch.rand(())),
            np.random.rand(),
            float(torch.rand((), device="cpu", generator=generator)),
        ]

    before = random.getstate(), np.random.get_state()
    try:
        checkpoint = Checkpoint(random=RandomState(), generator=generator)
        path = checkpoint.save(tmp_path / "ckpt")
        expected = draw()
        assert draw() != expected
        checkpoint.restore(path).assert_consumed()
        assert draw() == expected
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def test_what_is_read_is_on_the_cpu_whatever_the_default_device(tmp_path: Path) -> None:
    """As after ``torch.set_default_device("cuda")``; of a tensor on the device ``meta`` nothing could be read."""
    state = np.random.get_state()
    checkpoint = Checkpoint(random=RandomState(), tensor=torch.ones(3), array={"of": np.arange(2.0)})
    path = checkpoint.save(tmp_path / "ckpt")
    expected = torch.rand(2, device="cpu")
    checkpoint.tensor.zero_()
    checkpoint.array = {"of": None}
    with torch.device("meta"):
        checkpoint.restore(path).assert_consumed()
        assert td.train.load_variable(path, "tensor").tolist() == [1.0] * 3
    assert checkpoint.tensor.tolist() == [1.0] * 3
    assert checkpoint.array["of"].tolist() == [0.0, 1.0]
    assert torch.equal(torch.rand(2, device="cpu"), expected)
    assert np.array_equal(np.random.get_state()[1], state[1])


def test_tied_parameters_are_saved_once(tmp_path: Path) -> None:
    with mirrored(2) as strategy:
        with strategy.scope():
            model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
            model["b"].weight = model["a"].weight
        path = Checkpoint(model=model).save(tmp_path / "ckpt")
        assert [name for name, _ in td.train.list_variables(path)] == ["model/a.bias", "model/a.weight", "model/b.bias"]
        Checkpoint(model=model).restore(path).assert_consumed()
        assert model["b"].weight is model["a"].weight


class WithExtraState(torch.nn.Linear):
    extra: Any = "fresh"

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_of_a_module(tmp_path: Path) -> None:
    model = torch.nn.Sequential(WithExtraState(1, 1))
    model[0].extra = {"seen": (1, torch.ones(2))}
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    model[0].extra = "changed"
    Checkpoint(model=model).restore(path).assert_consumed()
    assert model[0].extra["seen"][0] == 1
    assert torch.equal(model[0].extra["seen"][1], torch.ones(2))


def test_values_of_all_kinds_survive_the_index_file() -> None:
    kept: dict[str, torch.Tensor] = {}

    def put(name: str, tensor: torch.Tensor) -> str:
        kept[name] = tensor
        return name

    value = {
        "a": [1, 2.5, None, True, "ü", float("-inf"), 10**30],
        3: (1, (2,)),
        "$b": {1, 2},
        "c": OrderedDict(x=1),
        "d": Counter("aab"),
        "e": deque([1, 2]),
        "f": frozenset([1]),
        "g": b"\0\xff",
        "h": 1 + 2j,
        "i": torch.bfloat16,
        "j": torch.device("cpu"),
        "k": np.float32(0.5),
        "l": {"$tuple": [1]},
    }
    back = codec.decode(json.loads(json.dumps(codec.encode({**value, "t": torch.ones(2)}, "v", put))), kept.get)
    assert torch.equal(back.pop("t"), torch.ones(2))
    assert back == value
    assert {key: type(entry) for key, entry in back.items() if key != "k"} == {
        key: type(entry) for key, entry in value.items() if key != "k"
    }
    array = codec.decode(codec.encode(np.arange(4), "n", put), kept.get)
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [0, 1, 2, 3]


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"settings/hook is a builtins\.function, which a checkpoint cannot hold"):
        Checkpoint(settings={"hook": lambda: None}).save(tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []


def test_names_that_the_class_needs_are_refused() -> None:
    for name in ("save", "save_counter", "_x"):
        with pytest.raises(ValueError, match="choose another name"):
            Checkpoint(**{name: 1})
    with pytest.raises(AttributeError, match=r"no 'modle'; it tracks \['model'\]"):
        _ = Checkpoint(model=1).modle
