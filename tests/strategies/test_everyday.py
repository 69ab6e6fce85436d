"""What one does with a strategy every day, and that nothing of it stays behind."""

from __future__ import annotations

import copy
import enum
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from until import wait_until

import tfstyle_dist as td
from tfstyle_dist.values import PerReplica
from tfstyle_dist.variables.known_tensors import find_record

TWO = ["cpu:0", "cpu:1"]


def installed_hooks() -> int:
    """How many process-wide hooks of torch are in place."""
    return sum(
        len(hooks)
        for hooks in (
            torch_module._global_parameter_registration_hooks,
            torch_module._global_buffer_registration_hooks,
            torch_module._global_module_registration_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
    )


def replica() -> Any:
    found = td.get_replica_context()
    assert found is not None
    return found


# ---- life --------------------------------------------------------------------------------------------------


def test_close_and_run_again(two: Any) -> None:
    two.close()
    two.close()
    with pytest.raises(RuntimeError, match=r"MirroredStrategy on .* was closed; make a new strategy to run again"):
        two.run(lambda: None)


def test_one_replica_refuses_to_run_after_close_too() -> None:
    strategy = td.OneDeviceStrategy("cpu:0")
    strategy.close()
    with pytest.raises(RuntimeError, match="was closed"):
        strategy.run(lambda: None)


def test_context_manager_closes_and_does_not_enter_the_scope() -> None:
    with td.MirroredStrategy(TWO) as strategy:
        assert not td.has_strategy()
        strategy.run(lambda: None)
    with pytest.raises(RuntimeError, match="closed"):
        strategy.run(lambda: None)


def test_values_can_be_read_after_close() -> None:
    with td.MirroredStrategy(TWO) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(2, 1)
        strategy.run(lambda: model(torch.ones(1, 2)))
    assert model.state_dict()["weight"].shape == (1, 2)


@pytest.mark.cpu_only("only one replica on the CPU needs no hooks")
def test_default_mirrored_strategy_leaves_torch_alone() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has more than the CPU")
    before = installed_hooks()
    with td.MirroredStrategy() as strategy:
        assert strategy.num_replicas_in_sync == 1
        assert strategy.extended.worker_devices == ("cpu:0",)
        with strategy.scope():
            assert installed_hooks() == before
            model = torch.nn.Linear(2, 1)
        assert type(model.weight) is torch.nn.Parameter
        assert find_record(model.weight) is None
        assert isinstance(strategy.run(lambda: model(torch.ones(1, 2))), torch.Tensor)


def test_hooks_go_with_the_last_strategy() -> None:
    gc.collect()  # of strategies that other tests have forgotten
    step = torch.optim.lr_scheduler.LRScheduler.step
    before = installed_hooks()
    first, second = td.MirroredStrategy(TWO), td.MirroredStrategy(TWO)
    one = installed_hooks()
    assert one > before
    with first.scope():
        assert installed_hooks() == one
    first.close()
    assert installed_hooks() == one
    second.close()
    assert installed_hooks() == before
    assert torch.optim.lr_scheduler.LRScheduler.step is step


def test_a_forgotten_strategy_takes_its_hooks_and_threads_along() -> None:
    gc.collect()
    before, threads = installed_hooks(), set(threading.enumerate())
    strategy = td.MirroredStrategy(TWO)
    strategy.run(lambda: None)
    gone = weakref.ref(strategy)
    own = set(threading.enumerate()) - threads
    del strategy
    wait_until(lambda: gc.collect() >= 0 and gone() is None)  # a thread holds what it ran last for a moment
    assert installed_hooks() == before
    for thread in own:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("devices", [TWO, None], ids=["in-process", "one-replica"])
def test_nothing_survives(devices: list[str] | None) -> None:
    strategy = td.MirroredStrategy(devices)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        variable = td.Variable(1.0, aggregation=td.VariableAggregation.MEAN)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
        variable.assign_add(torch.tensor(1.0))

    strategy.run(step)
    watched = [
        model,
        optimizer,
        variable,
        strategy,
        strategy.parameter_store,
        *model.parameters(),
        *model.buffers(),
    ]
    for parameter in model.parameters():
        record = find_record(parameter)
        if record is not None:
            watched += [record, *record.components]
    strategy.close()
    references = [weakref.ref(thing) for thing in watched]
    watched.clear()
    model = optimizer = variable = strategy = step = parameter = record = None  # type: ignore[assignment]
    # On a busy machine the thread of a replica may hold what it ran last longer than close() waits for it.
    wait_until(lambda: gc.collect() >= 0 and not [r for r in references if r() is not None])


def test_a_dropped_model_is_freed_while_its_strategy_lives(two: Any) -> None:
    def train() -> list[Any]:
        with two.scope():
            model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        two.run(step)
        record = find_record(model.weight)
        assert record is not None
        return [weakref.ref(model.weight), *(weakref.ref(c) for c in record.components)]

    references = train()
    train()  # the store tidies up when it next grows
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


# ---- saying who one is -------------------------------------------------------------------------------------


def test_chief_prints_once(two: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert two.is_chief
    assert sorted(map(bool, two.experimental_local_results(two.run(lambda: two.is_chief)))) == [False, True]
    two.run(lambda: two.print("loss", 0.5, sep="="))
    assert capsys.readouterr().out == "loss=0.5\n"


@pytest.mark.cpu_only("it names devices of the CPU in what it expects")
@pytest.mark.distributed(workers=2)
def test_chief_of_ranks(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        assert strategy.is_chief == (rank == 0)
        assert strategy.run(lambda: strategy.is_chief) == (rank == 0)
        assert repr(strategy) == f"<MirroredStrategy on [cpu:0], worker {rank} of 2>"


@pytest.mark.cpu_only("it names devices of the CPU in what it expects")
def test_reprs(two: Any) -> None:
    assert repr(two) == "<MirroredStrategy on [cpu:0, cpu:1]>"
    assert repr(td.get_strategy()) == "<default strategy>"
    assert [repr(c) for c in two.run(replica).values][1] == "<ReplicaContext replica 1 of 2 on cpu:1>"
    assert copy.deepcopy(two) is two
    with two.scope():
        model = torch.nn.Linear(1, 1)
        variable = td.Variable(2.0, name="v")
    assert repr(model.weight).startswith("Parameter containing:")
    assert "2." in repr(variable)


@pytest.mark.cpu_only("it names devices of the CPU in what it expects")
def test_printing_a_per_replica(two: Any) -> None:
    value = two.run(lambda: replica().replica_id_in_sync_group)
    assert str(value) == "PerReplica:{\n  0: 0,\n  1: 1\n}"
    assert "tensor(3.)" in f"{PerReplica((torch.tensor(3.0), None))}"


# ---- modules -----------------------------------------------------------------------------------------------


def test_adopting_an_existing_module(two: Any) -> None:
    model = torch.nn.Linear(2, 1)
    weight, before = model.weight, model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert two.experimental_adopt(model) is model
    assert model.weight is weight
    two.experimental_adopt(model)  # again changes nothing

    def step() -> None:
        model(torch.full((1, 2), 1.0 + replica().replica_id_in_sync_group)).sum().backward()
        optimizer.step()

    two.run(step)
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * 1.5)


def batch_norm(strategy: Any) -> torch.nn.Module:
    with strategy.scope():
        return torch.nn.BatchNorm1d(1, momentum=1.0)


def feed(model: torch.nn.Module) -> None:
    """Replica r sees the mean r."""
    model(torch.tensor([[-1.0], [1.0]]) + replica().replica_id_in_sync_group)


def test_buffers_are_averaged_when_asked(two: Any) -> None:
    model = batch_norm(two)
    two.run(feed, args=(model,))
    assert [v.item() for v in two.run(lambda: model.running_mean.clone()).values] == [0.0, 1.0]
    state = model.state_dict()  # this process's first replica, without any communication
    assert state["running_mean"].item() == 0.0
    two.sync_buffers()
    assert [v.item() for v in two.run(lambda: model.running_mean.clone()).values] == [0.5, 0.5]
    assert model.state_dict()["running_mean"].item() == 0.5
    assert model.state_dict()["num_batches_tracked"].item() == 1


@pytest.mark.distributed(workers=2)
def test_buffers_of_ranks(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        model = batch_norm(strategy)
        strategy.run(feed, args=(model,))
        assert model.running_mean.item() == float(rank)
        strategy.sync_buffers()
        assert model.running_mean.item() == 0.5
        assert model.num_batches_tracked.item() == 1


def test_state_dict_goes_to_a_plain_model_and_back(two: Any) -> None:
    with two.scope():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    two.run(lambda: model(torch.randn(4, 2)))
    two.sync_buffers()
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    plain.load_state_dict(model.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0)
        assert type(plain.state_dict()[name]) is torch.Tensor
    with torch.no_grad():
        plain[0].weight.fill_(2.0)
        plain[1].running_mean.fill_(3.0)
    model.load_state_dict(plain.state_dict())
    assert [w.tolist() for w in two.run(lambda: model[0].weight.clone()).values] == [[[2.0, 2.0]] * 2] * 2
    assert [m.tolist() for m in two.run(lambda: model[1].running_mean.clone()).values] == [[3.0, 3.0]] * 2


# ---- variables ---------------------------------------------------------------------------------------------


def test_variables_created_in_run(two: Any) -> None:
    def fn() -> Any:
        return td.Variable(float(replica().replica_id_in_sync_group + 5))

    variable = two.run(fn)
    assert isinstance(variable, td.Variable)
    assert [v.item() for v in variable.values] == [5.0, 5.0]
    assert two.extended.variable_created_in_scope(variable)


@pytest.mark.distributed(workers=2)
def test_first_replica_of_ranks_is_the_global_one(rank: int) -> None:
    only_first = td.VariableAggregation.ONLY_FIRST_REPLICA
    with td.MirroredStrategy() as strategy:
        with strategy.scope():
            written = td.Variable(0.0, aggregation=only_first)
            read = td.Variable(0.0, synchronization=td.VariableSynchronization.ON_READ, aggregation=only_first)

        def fn() -> None:
            written.assign(torch.tensor(10.0 + rank))
            read.assign(torch.tensor(20.0 + rank))

        strategy.run(fn)
        assert written.value().item() == 10.0
        assert read.value().item() == 20.0


def test_first_replica_in_process(two: Any) -> None:
    with two.scope():
        variable = td.Variable(0.0, aggregation=td.VariableAggregation.ONLY_FIRST_REPLICA)
    two.run(lambda: variable.assign(torch.tensor(10.0 + replica().replica_id_in_sync_group)))
    assert [v.item() for v in variable.values] == [10.0, 10.0]


class Kind(enum.IntEnum):
    """Of which no weak reference can be made, as of all numbers."""

    FIRST = 1


class Named(enum.Enum):
    FIRST = "first"


class Meters(float):
    """A number with attributes."""


class Slotted:
    __slots__ = ("__dict__",)


@pytest.mark.parametrize("value", [Kind.FIRST, Named.FIRST, Meters(2.0), type("Bytes", (bytes,), {})(b"a"), Slotted()])
def test_modules_and_optimizers_hold_numbers_and_members_of_enumerations(value: Any) -> None:
    class Layer(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.kind is value
            assert optimizer.kind is optimizer.kinds[0] is value
            return super().forward(x)

    with td.MirroredStrategy(TWO) as strategy:
        with strategy.scope():
            layer = Layer(2, 2)
            layer.kind = value
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        optimizer.kind, optimizer.kinds = value, [value]

        def step() -> torch.Tensor:
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            return layer.weight.detach().clone()

        first, second = strategy.experimental_local_results(strategy.run(step))
        assert torch.equal(first.cpu(), second.cpu())
        if not isinstance(value, (Meters, enum.Enum)):
            with pytest.raises(TypeError, match="referred to weakly, got"):
                strategy.experimental_adopt(value)
